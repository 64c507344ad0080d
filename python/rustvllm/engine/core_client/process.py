""":class:`ProcessClient`: an engine in a process of its own, which this one starts, watches and ends.

The front end's process never computes and never imports torch; a step of the model never waits for its interpreter.
"""

import shutil
import signal
import threading
import weakref
from collections.abc import Callable

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.engine.core_client.interface import SHUT_DOWN
from rustvllm.exceptions import EngineDeadError
from rustvllm.logger import init_logger
from rustvllm.process.address import EngineAddress, read_secret
from rustvllm.process.config_json import load_config
from rustvllm.process.engine_child import EngineProcess
from rustvllm.process.health import EngineHealth, health_of
from rustvllm.process.run_directory import SOCKET_NAME, choose_run_directory

logger = init_logger(__name__)

CONNECT_TIMEOUT = 10.0
"""Seconds for a handshake with an engine that has said it is ready."""
STOP_TIMEOUT = 2.0
"""Seconds for an engine to end its step after it was asked to stop; then it is killed."""


class ProcessClient:
    """Starts an engine process; it serves after :meth:`wait_until_ready`.

    ``on_death``, a bound method, is called from a thread of its own, once, when the engine has ended without a
    shutdown, if its object still lives.

    Raises:
        ConfigError: No directory can hold its socket.
        OSError: The process cannot be started.
    """

    handle: _core.EngineClient
    num_blocks: int

    def __init__(self, config: EngineConfig, on_death: Callable[[], None]) -> None:
        self._on_death = weakref.WeakMethod(on_death)
        self._stopping = threading.Event()
        self._death: str | None = None
        self._directory = choose_run_directory()
        self._address = EngineAddress(path=self._directory / SOCKET_NAME.format(rank=0))
        self._process = EngineProcess(self._directory, "auto" if config.sim is None else "sim")
        secret = read_secret(None) if config.parallel.nnodes > 1 else None  # for other nodes of the model
        self._process.load(config, self._address, secret)

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            RustVLLMError: What kept the engine from starting, as it was raised there.
            EngineDeadError: It ended without a word.
        """
        try:
            self._process.wait_until_ready()
            self.handle = _core.EngineClient.connect(str(self._address.path), CONNECT_TIMEOUT)
            self.num_blocks = self.handle.num_blocks
        except BaseException:
            self._end()
            self._process.close()
            raise
        threading.Thread(target=self._watch, name="rustvllm-engine-watch", daemon=True).start()

    @property
    def max_model_len(self) -> int:
        """What the engine settled on."""
        return load_config(self.handle.info).model.max_model_len

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    @property
    def last_step_error(self) -> str | None:
        """What the last step raised that failed for a request of this client's."""
        return self.handle.last_step_error

    @property
    def errored(self) -> bool:
        """True when the engine ended without a shutdown."""
        return self._death is not None or (self.handle.death is not None and not self._stopping.is_set())

    def check_alive(self) -> None:
        """Raise EngineDeadError when the engine has ended or is about to."""
        death = self._death or self.handle.death
        if death is not None:
            raise EngineDeadError(death)
        if self._stopping.is_set():
            raise EngineDeadError(SHUT_DOWN)

    def health(self) -> list[EngineHealth]:
        """How the engine is."""
        return health_of(self.handle)

    def query(self, rank: int, kind: str, payload: bytes, timeout: float) -> bytes:
        """Ask the engine's thread; see :meth:`AsyncLLM.query`."""
        return self.handle.query(rank, kind, payload, timeout)

    def _watch(self) -> None:
        self._process.wait_for_end()
        self._clean()
        self._process.close()
        if self._stopping.is_set():
            return
        self._death = self.handle.death or self._process.why_ended
        logger.critical("%s", self._death)
        if (on_death := self._on_death()) is not None:
            on_death()

    def stop(self) -> None:
        """Tell the engine to end after its present step; waits for nothing."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._process.signal(signal.SIGTERM)

    def join(self, timeout: float) -> None:
        """Wait so many seconds for the engine to end after ``shutdown``; then kill it."""
        if not self._process.wait(timeout):
            logger.warning("the engine is still in a step after %g s; killing it", timeout)
        self._end()

    def shutdown(self) -> None:
        """Stop the engine after its present step; idempotent. One that takes longer than two seconds is killed."""
        if self._stopping.is_set():
            return
        self.stop()
        self.join(STOP_TIMEOUT)

    def _end(self) -> None:
        """Stop the process and remove what it had."""
        self._stopping.set()
        self._process.kill()
        self._clean()

    def _clean(self) -> None:
        """Remove what the process had. Idempotent; called by the watcher and by shutdown."""
        shutil.rmtree(self._directory, ignore_errors=True)
