""":class:`ThreadClient`: an engine in a thread of its own in this process."""

import atexit
import gc
import threading
import weakref
from collections.abc import Callable

from rustvllm.config import EngineConfig
from rustvllm.engine import run_loop
from rustvllm.engine.core import EngineCore
from rustvllm.engine.core_client.inproc import begin_model
from rustvllm.engine.core_client.interface import SHUT_DOWN
from rustvllm.exceptions import EngineDeadError
from rustvllm.logger import init_logger
from rustvllm.observe.inspect.queries import QueryQueue
from rustvllm.observe.trace.tracer import Tracer
from rustvllm.process.health import EngineHealth, StepWatch
from rustvllm.process.patient_join import patient_join

logger = init_logger(__name__)

SHUTDOWN_TIMEOUT = 2.0
"""Seconds to wait for the engine thread to finish its step."""
EXIT_TIMEOUT = 60.0
"""The same when the interpreter exits, where a thread that still runs would take the process down with SIGABRT."""


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
            raise EngineDeadError(SHUT_DOWN)

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
