""":class:`ProcessClient`: an engine in a process of its own, which this one starts, watches and ends.

The front end's process never computes and never imports torch; a step of the model never waits for its interpreter.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rustvllm import _core, exceptions
from rustvllm.config import EngineConfig
from rustvllm.engine.config_json import dump_config
from rustvllm.exceptions import EngineDeadError, RustVLLMError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

CONNECT_TIMEOUT = 10.0
"""Seconds for a handshake with an engine that has said it is ready."""
STOP_TIMEOUT = 2.0
"""Seconds for an engine to end its step after it was told to stop; then it is killed."""


class ProcessClient:
    """Starts an engine process and waits until it is ready.

    ``on_death``, a bound method, is called from a thread of its own, once, when the engine has ended without being told
    to, if its object still lives.

    Raises:
        RustVLLMError: What kept the engine from starting, as it was raised there.
        EngineDeadError: It ended without a word.
    """

    def __init__(self, config: EngineConfig, on_death: Callable[[], None]) -> None:
        self._on_death = weakref.WeakMethod(on_death)
        self._stopping = threading.Event()
        self._death: str | None = None
        self._cleaning = threading.Lock()
        self._directory = Path(tempfile.mkdtemp(prefix="rustvllm-"))  # 0700
        socket = self._directory / "engine.sock"
        alive_for_child, self._alive_fd = os.pipe()
        status_fd, status_for_child = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- our own module in our own interpreter
                [
                    sys.executable,
                    *("-m", "rustvllm.engine.process", "--socket", str(socket)),
                    *("--alive-fd", str(alive_for_child), "--status-fd", str(status_for_child)),
                ],
                stdin=subprocess.PIPE,
                pass_fds=(alive_for_child, status_for_child),
                process_group=0,  # a Ctrl-C of the terminal is for the front end
            )
        except BaseException:
            os.close(self._alive_fd)
            os.close(status_fd)
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        finally:
            os.close(alive_for_child)
            os.close(status_for_child)
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(dump_config(config).encode())
            with os.fdopen(status_fd, encoding="utf-8") as status:
                ready = self._read_status(status.readline())
            self.num_blocks: int = ready["num_blocks"]
            self.handle = _core.EngineClient.connect(str(socket), CONNECT_TIMEOUT)
        except BaseException:
            self._end()
            raise
        threading.Thread(target=self._watch, name="rustvllm-engine-watch", daemon=True).start()

    def _read_status(self, line: str) -> dict[str, Any]:
        if not line:
            code = self._process.wait()
            raise EngineDeadError(f"the engine process ended while it was starting, {_how(code)}")
        status: dict[str, Any] = json.loads(line)
        if (error := status.get("error")) is not None:
            kind = getattr(exceptions, error["type"], None)
            if isinstance(kind, type) and issubclass(kind, RustVLLMError):
                raise kind(error["message"])
            raise EngineDeadError(f"the engine could not start: {error['type']}: {error['message']}")
        ready: dict[str, Any] = status["ready"]
        return ready

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    @property
    def last_step_error(self) -> str | None:
        """What the last failed step raised: the engine's own log has it."""
        return None

    @property
    def errored(self) -> bool:
        """True when the engine ended without being told to."""
        return self._death is not None or (self.handle.death is not None and not self._stopping.is_set())

    def check_alive(self) -> None:
        """Raise EngineDeadError when the engine has ended or is about to."""
        death = self._death or self.handle.death
        if death is not None:
            raise EngineDeadError(death)
        if self._stopping.is_set():
            raise EngineDeadError("this engine was shut down; make a new one")

    def _watch(self) -> None:
        code = self._process.wait()
        self._clean()
        if self._stopping.is_set():
            return
        reason = self.handle.death
        self._death = reason or f"the engine process ended, {_how(code)}"
        logger.critical("%s", self._death)
        if (on_death := self._on_death()) is not None:
            on_death()

    def stop(self) -> None:
        """Tell the engine to end after its present step; waits for nothing."""
        if not self._stopping.is_set():
            self._stopping.set()
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def join(self, timeout: float) -> None:
        """Wait so many seconds for an engine that was told to end; one that does not is killed."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("the engine is still in a step after %g s and is killed", timeout)
        self._end()

    def shutdown(self) -> None:
        """Stop the engine after its present step; idempotent. One that takes longer than two seconds is killed."""
        if self._stopping.is_set():
            return
        self.stop()
        self.join(STOP_TIMEOUT)

    def _end(self) -> None:
        """Leave nothing behind."""
        self._stopping.set()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._clean()

    def _clean(self) -> None:
        """Give back what the process had: called by whoever first sees it gone."""
        with self._cleaning:
            if self._alive_fd >= 0:
                os.close(self._alive_fd)
                self._alive_fd = -1
            shutil.rmtree(self._directory, ignore_errors=True)


def _how(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"with exit code {code}"
