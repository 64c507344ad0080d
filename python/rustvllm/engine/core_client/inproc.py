""":class:`InprocClient`: an engine that its caller steps, in the caller's thread."""

from typing import Final

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.engine.core import EngineCore
from rustvllm.engine.core_client.interface import SHUT_DOWN
from rustvllm.exceptions import EngineDeadError
from rustvllm.observe.trace.tracer import Tracer
from rustvllm.process.fork_guard import FORKS

_GRAMMAR_WAIT: Final = 1.0
"""Seconds of a wait for a grammar to be compiled, before the caller is heard again."""


def begin_model(config: EngineConfig) -> None:
    """Do nothing if an engine may be made in this process.

    Raises:
        ConfigError: The process is a fork of one that has loaded a model, and this engine would load one.
    """
    if config.sim is None:
        FORKS.begin_model()


class InprocClient:
    """An engine that runs when its caller calls :meth:`step`."""

    def __init__(self, config: EngineConfig, tracer: Tracer | None = None) -> None:
        begin_model(config)
        self._core: EngineCore | None = EngineCore(config, tracer)
        self._why_gone = SHUT_DOWN
        self._of_parent: EngineCore | None = None
        self.handle = self._core.handle
        self.num_blocks = self._core.num_blocks
        FORKS.own(self)

    def leave_fork(self, why: str) -> None:
        """Refuse all use in a fork. What was the engine is kept: freeing it would wait for its threads."""
        self._of_parent, self._core, self._why_gone = self._core, None, why

    @property
    def max_model_len(self) -> int:
        """What the engine settled on."""
        return self.core.config.model.max_model_len

    @property
    def core(self) -> EngineCore:
        """The engine, for tests and for people.

        Raises:
            EngineDeadError: It was shut down, or belongs to another process.
        """
        if self._core is None:
            raise EngineDeadError(self._why_gone)
        return self._core

    @property
    def scheduler(self) -> _core.Scheduler:
        """The live scheduler, to be studied: see ``docs/scheduler.md``.

        Raises:
            EngineDeadError: The engine was shut down.
        """
        return self.core.scheduler

    @property
    def last_step_error(self) -> str | None:
        """What the last failed step raised."""
        return self._core.last_step_error if self._core is not None else None

    def step(self) -> int:
        """Run one step; the number of tokens run, 0 when nothing can run."""
        num_tokens = self.core.step()
        if num_tokens == 0:
            self.core.watch.flush()
            if self.is_compiling():  # a thread of the core does it, and then wakes us
                self.handle.wait_for_work(_GRAMMAR_WAIT)
        return num_tokens

    def is_compiling(self) -> bool:
        """True while a request waits for its grammar; how much work that is, its fuel bounds."""
        return bool(self.handle.stats()["num_waiting_for_grammar"])

    def has_unfinished_requests(self) -> bool:
        """True while the scheduler holds a request, or a step runs."""
        return self.core.has_unfinished_requests()

    def check_alive(self) -> None:
        """Raise EngineDeadError after :meth:`shutdown`."""
        _ = self.core

    def shutdown(self) -> None:
        """Free the model and its KV cache; idempotent."""
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()
