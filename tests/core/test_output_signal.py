"""The eventfd that announces outputs is never silent while outputs wait, however its two sides interleave."""

import contextlib
import select
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rustvllm import _core

NUM_REQS = 4
SECONDS = 20.0
SILENCE_MS = 2000  # far longer than any step here


@contextlib.contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Threads take turns this often: the two sides meet at every place they can meet."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Stepper(threading.Thread):
    """Owns a scheduler and steps it as fast as it goes, with a model that always says 7."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.handle: _core.EngineHandle | None = None
        self.ready = threading.Event()
        self.stopping = threading.Event()

    def run(self) -> None:
        config = _core.SchedulerConfig(
            num_blocks=4096, max_model_len=32768, max_num_seqs=NUM_REQS, max_num_batched_tokens=64
        )
        spec = _core.step_buffer_spec(config)
        buffers = [{name: np.zeros(shape, dtype) for name, dtype, shape in spec} for _ in range(2)]
        scheduler = _core.Scheduler(config, buffers)
        self.handle = scheduler.handle
        self.ready.set()
        sampled = np.full((NUM_REQS, 1), 7, np.int32)
        while not self.stopping.is_set():
            output = scheduler.schedule()
            if output is None:
                scheduler.handle.wait_for_work(0.1)
                continue
            scheduler.update_from_output(output, sampled[: output.num_sampled])
            time.sleep(0)


@pytest.mark.slow
def test_no_output_waits_unannounced() -> None:
    stepper = Stepper()
    stepper.start()
    assert stepper.ready.wait(10)
    handle = stepper.handle
    assert handle is not None
    processor = _core.OutputProcessor(None)

    def add() -> None:
        key = handle.new_key()
        processor.add_request(key, [1, 2, 3])
        handle.add_request(key, str(key), [1, 2, 3], max_tokens=20_000)

    readable = select.poll()
    readable.register(handle.output_fd, select.POLLIN)
    for _ in range(NUM_REQS):
        add()
    deadline = time.monotonic() + SECONDS
    polls = 0
    try:
        with switch_interval(1e-6):
            while time.monotonic() < deadline:
                assert readable.poll(SILENCE_MS), f"silent after {polls} polls, while requests run"
                polls += 1
                for delta in processor.poll(handle)[1]:
                    if delta.finish_reason is not None:
                        add()
    finally:
        stepper.stopping.set()
        stepper.join(10)
    assert polls > 100
