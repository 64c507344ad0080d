"""Clients that drive an :class:`EngineCore`: from the caller's thread (:class:`InprocClient`), or from a thread of
their own (:class:`ThreadClient`).

Both show the same to a front end: ``handle`` to send requests and ``describe``/``stats`` to look inside.
"""

import atexit
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from rustvllm import _core, envs
from rustvllm.config import EngineConfig
from rustvllm.engine import run_loop
from rustvllm.engine.core import EngineCore
from rustvllm.exceptions import EngineDeadError
from rustvllm.logger import init_logger
from rustvllm.observe.inspect.queries import QueryQueue
from rustvllm.observe.trace.tracer import Tracer
from rustvllm.process.fork_guard import FORKS
from rustvllm.process.health import EngineHealth, StepWatch
from rustvllm.process.patient_join import patient_join

logger = init_logger(__name__)

SHUTDOWN_TIMEOUT = 2.0
"""Seconds to wait for the engine thread to finish its step."""
EXIT_TIMEOUT = 60.0
"""The same when the interpreter exits, where a thread that still runs would take the process down with SIGABRT."""


class EngineCoreClient(Protocol):
    """What a front end needs of an engine, wherever that runs."""

    num_blocks: int

    @property
    def max_model_len(self) -> int:
        """What the engine settled on, which may be less than it was asked for."""

    @property
    def handle(self) -> _core.EngineHandle | _core.EngineClient:
        """Takes requests and aborts, gives outputs and counters."""

    @property
    def last_step_error(self) -> str | None:
        """What the last failed step raised."""

    def check_alive(self) -> None:
        """Raise EngineDeadError when the engine has stopped."""

    def shutdown(self) -> None:
        """Stop the engine; calling it again does nothing."""


class AsyncEngineClient(EngineCoreClient, Protocol):
    """An engine that runs by itself: in a thread, in a child process, or in a process started elsewhere."""

    @property
    def errored(self) -> bool:
        """True when the engine ended without a shutdown."""

    def wait_until_ready(self) -> None:
        """Wait until it serves."""

    def health(self) -> list[EngineHealth]:
        """How it is, as far as is known without asking; one entry per engine."""

    def query(self, rank: int, kind: str, payload: bytes, timeout: float) -> bytes:
        """Ask the thread that steps one of its engines; blocks."""

    def stop(self) -> None:
        """Tell it to end, or leave it; waits for nothing."""


_GRAMMAR_WAIT: Final = 1.0
"""Seconds of a wait for a grammar to be compiled, before the caller is heard again."""


_SHUT_DOWN: Final = "this engine was shut down; make a new one"


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
        self._why_gone = _SHUT_DOWN
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


class ThreadClient:
    """An engine that runs in a thread of its own, parked in Rust while there is nothing to do.

    The thread is the scheduler's owner. It dies with the first error that is not one request's or one step's; then
    ``on_death``, a bound method, is called from it, once, if its object still lives: the thread keeps none alive.
    """

    def __init__(self, config: EngineConfig, on_death: Callable[[], None], tracer: Tracer | None = None) -> None:
        begin_model(config)
        self._core = EngineCore(config, tracer)
        self.handle = self._core.handle
        self.num_blocks = self._core.num_blocks
        self._on_death = weakref.WeakMethod(on_death)
        self._stopping = threading.Event()
        self._queries = QueryQueue(self.handle.wake)
        self._death: EngineDeadError | None = None
        self._step_watch = StepWatch()
        # What exists now lives as long as the engine: keep the collector from walking through it again and again.
        gc.collect()
        gc.freeze()
        self._thread = threading.Thread(target=self._run, name="rustvllm-engine", daemon=True)
        _running.add(self)
        # Exit hooks run last in, first out: this one has to come before those of the libraries that a step needs.
        atexit.unregister(_join_at_exit)
        atexit.register(_join_at_exit)
        self._thread.start()

    @property
    def last_step_error(self) -> str | None:
        """What the last failed step raised."""
        return self._core.last_step_error

    @property
    def max_model_len(self) -> int:
        """What the engine settled on."""
        return self._core.config.model.max_model_len

    @property
    def errored(self) -> bool:
        """True when the thread ended by an error."""
        return self._death is not None

    def check_alive(self) -> None:
        """Raise EngineDeadError when the thread has ended or is about to."""
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death
        if self._stopping.is_set():
            raise EngineDeadError(_SHUT_DOWN)

    def wait_until_ready(self) -> None:
        """Return at once: a client that was made is ready."""

    def health(self) -> list[EngineHealth]:
        """How the thread is; ``step_age`` is as exact as this is called often."""
        death = None if self._death is None else str(self._death)
        return [EngineHealth(0, death, 0.0, self._step_watch.step_age(self.handle.stats()))]

    def query(self, rank: int, kind: str, payload: bytes, timeout: float) -> bytes:
        """Ask the engine's thread; see :meth:`AsyncLLM.query`."""
        if rank != 0:
            raise IndexError(f"there is no engine of rank {rank}; the only engine has rank 0")
        self.check_alive()
        return self._queries.ask(kind, payload, timeout)

    def _run(self) -> None:
        self._death = run_loop.run(self._core, self._stopping.is_set, self._queries)
        self._queries.close("the engine was shut down" if self._death is None else str(self._death))
        if self._death is not None and (on_death := self._on_death()) is not None:
            on_death()
        if self._stopping.is_set():
            self._free()

    def _free(self) -> None:
        self._core.shutdown()
        gc.unfreeze()

    def stop(self) -> None:
        """Tell the thread to end after its present step and free the model then; waits for nothing."""
        self._stopping.set()
        self.handle.wake()

    def join(self, timeout: float) -> None:
        """Wait so many seconds for the thread to end after ``shutdown``; then abandon it with a warning."""
        if not patient_join(self._thread, timeout):
            logger.warning("the engine is still in a step after %g s; leaving its thread behind", timeout)
        else:
            self._free()  # again, unless the thread had died before the shutdown

    def shutdown(self) -> None:
        """Stop the thread after its present step and free the model; idempotent.

        When the step takes longer than two seconds the thread is abandoned, and frees the model when it is done.
        """
        if self._stopping.is_set():
            return
        self.stop()
        self.join(SHUTDOWN_TIMEOUT)


def make_client(
    config: EngineConfig, on_death: Callable[[], None], tracer: Tracer | None = None, *, multiprocess: bool | None
) -> AsyncEngineClient:
    """An engine in a process of its own, or in a thread of this one.

    Args:
        config: What engine.
        on_death: Called when the engine has ended without a shutdown.
        tracer: Takes records of the engine's steps, if it is in this process; another process makes its own.
        multiprocess: None leaves it to ``RUSTVLLM_ENABLE_MULTIPROCESSING``.
    """
    if not (envs.enable_multiprocessing() if multiprocess is None else multiprocess):
        return ThreadClient(config, on_death, tracer)
    from rustvllm.engine.process_client import ProcessClient

    return ProcessClient(config, on_death)


_running: weakref.WeakSet[ThreadClient] = weakref.WeakSet()


def _join_at_exit() -> None:
    """End every engine thread while there still is an interpreter for it.

    Later, the interpreter ends a daemon thread as soon as it comes back from native code, by unwinding the stack; Rust
    and C++ frames do not take that and abort the process.
    """
    clients = list(_running)
    for client in clients:
        client.stop()
    for client in clients:
        client.join(EXIT_TIMEOUT)
