"""``FORKS``: keeps engines out of forks of their process, where a model would wait for threads that are gone."""

import os
import weakref
from typing import Final, Protocol

from rustvllm.exceptions import ConfigError


class Forked(Protocol):
    """What must not be used in a fork of the process that made it."""

    def leave_fork(self, why: str) -> None:
        """Refuse all use from now on, with these words."""


class ForkGuard:
    """Knows whether this process is a fork of one whose models have threads, and tells their owners."""

    def __init__(self) -> None:
        self._owned: weakref.WeakSet[Forked] = weakref.WeakSet()
        self._has_models = self._is_fork = False
        os.register_at_fork(after_in_child=self._tell)

    def own(self, made: Forked) -> None:
        """Call ``made.leave_fork`` in every fork of this process."""
        self._owned.add(made)

    def begin_model(self) -> None:
        """Do nothing if a model may be loaded in this process.

        Raises:
            ConfigError: The process is a fork of one that has loaded a model.
        """
        if self._is_fork:
            raise ConfigError(
                f"process {os.getpid()} is a fork of one that has loaded a model, and the threads that compute did not "
                "come along: start it with multiprocessing's method 'spawn', or load the model here alone"
            )
        self._has_models = True

    def _tell(self) -> None:
        self._is_fork = self._has_models
        why = (
            f"this engine belongs to process {os.getppid()} and cannot be used in a fork of it: make one in a process "
            "that multiprocessing's method 'spawn' starts"
        )
        for made in list(self._owned):
            made.leave_fork(why)


FORKS: Final = ForkGuard()
"""The one of this process."""
