"""An engine without a model: a scheduler stepped in a thread, whose model says 7, behind an ``EngineServer``.

Run as a program (``python engine_process.py PATH``) it is an engine process: it serves on PATH until its standard input
ends. Lines of standard input are orders: ``fail MESSAGE`` ends it as a broken engine ends.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rustvllm import _core


class StepThread(threading.Thread):
    """Owns a scheduler and steps it while there is something to do. A step fails when ``on_step`` says why."""

    def __init__(self, **numbers: Any) -> None:
        super().__init__(daemon=True)
        self._numbers = {"num_blocks": 4096, "max_model_len": 16384, "max_num_seqs": 64} | numbers
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._scheduler: _core.Scheduler | None = None
        self.paused = threading.Event()
        self.on_step: Callable[[], str | None] = lambda: None
        self.start()
        assert self._ready.wait(30)

    @property
    def handle(self) -> _core.EngineHandle:
        """The shared side of the scheduler."""
        assert self._scheduler is not None
        return self._scheduler.handle

    def run(self) -> None:
        """Step until told to stop."""
        config = _core.SchedulerConfig(**self._numbers)
        spec = _core.step_buffer_spec(config)
        buffers = [{name: np.zeros(shape, dtype) for name, dtype, shape in spec} for _ in range(2)]
        scheduler = self._scheduler = _core.Scheduler(config, buffers)
        sampled = np.full((config.max_num_seqs, 1), 7, np.int32)
        self._ready.set()
        while not self._stopping.is_set():
            output = None if self.paused.is_set() else scheduler.schedule()
            if output is None:
                scheduler.handle.wait_for_work(0.05)
            elif self.on_step() is not None:
                scheduler.fail_step(output)
            else:
                scheduler.update_from_output(output, sampled[: output.num_sampled])
        scheduler.check_invariants()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self.handle.wake()
        self.join(30)


def serve(path: Path) -> None:
    """Be an engine process."""
    engine = StepThread()
    server = _core.EngineServer(engine.handle, path, info=b"an engine without a model")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.startswith("fail "):
            server.fail(line.removeprefix("fail ").strip())
    server.stop()
    engine.stop()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
