"""``FORKS``: refuses the use of engines in forks of their process, where their threads do not exist."""

import os
import weakref
from typing import Final, Protocol

from rustvllm.exceptions import ConfigError


class Forked(Protocol):
    """An object that must not be used in a fork of the process that made it."""

    def leave_fork(self, why: str) -> None:
        """Refuse all use from now on, with ``why`` as the error's message."""


class ForkGuard:
    """Notices that this process is a fork of one with models, and disables the objects that own them."""

    def __init__(self) -> None:
        self._owned: weakref.WeakSet[Forked] = weakref.WeakSet()
        self._has_models = self._is_fork = False
        os.register_at_fork(after_in_child=self._tell)

    def own(self, made: Forked) -> None:
        """Call ``made.leave_fork`` in every fork of this process."""
        self._owned.add(made)

    def begin_model(self) -> None:
        """Note that this process loads a model.

        Raises:
            ConfigError: The process is a fork of one that has loaded a model.
        """
        if self._is_fork:
            raise ConfigError(
                f"process {os.getpid()} is a fork of one that has loaded a model, and a fork has no compute threads: "
                "start it with multiprocessing's method 'spawn', or do not load a model before the fork"
            )
        self._has_models = True

    def _tell(self) -> None:
        self._is_fork = self._has_models
        why = (
            f"this engine belongs to process {os.getppid()} and cannot be used in a fork of it: start the process with "
            "multiprocessing's method 'spawn' and make an engine there"
        )
        for made in list(self._owned):
            made.leave_fork(why)


FORKS: Final = ForkGuard()
"""The guard of this process."""
