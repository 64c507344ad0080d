"""What one step of the control plane costs as seen from Python, boundary included: one JSON object on standard output.

    python benches/python/step.py --num-running 1,64,256,1024

For each number of running decodes: medians, in microseconds, of ``schedule``, ``update_from_output`` and both. Prompts
are staggered over one block of 16 tokens, so that one sixteenth of the requests takes a new block in every step and one
sixteenth fills one, which is then registered in the prefix index.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rustvllm import __version__, _core

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 512


def processor() -> str:
    """The processor's name as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def measure(num_running: int, num_steps: int) -> dict[str, float | int]:
    """Medians over ``num_steps`` steps of decodes alone."""
    blocks_per_request = -(-(PROMPT_TOKENS + BLOCK_SIZE + OUTPUT_TOKENS) // BLOCK_SIZE)
    config = _core.SchedulerConfig(
        num_blocks=num_running * blocks_per_request + 1,
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
    )
    buffers = [
        {name: np.zeros(shape, dtype) for name, dtype, shape in _core.step_buffer_spec(config)} for _ in range(2)
    ]
    scheduler = _core.Scheduler(config, buffers)
    handle, processor_ = scheduler.handle, _core.OutputProcessor()
    sampled = np.full((num_running, 1), 7, np.int32)
    num_added = 0
    schedule_us: list[float] = []
    update_us: list[float] = []
    while len(schedule_us) < num_steps:
        for _ in range(num_running - scheduler.num_unfinished_requests()):
            prompt = [token ^ num_added << 8 for token in range(PROMPT_TOKENS + num_added % BLOCK_SIZE)]
            handle.add_request(handle.new_key(), str(num_added), prompt, max_tokens=OUTPUT_TOKENS)
            num_added += 1
        begin = time.perf_counter_ns()
        output = scheduler.schedule()
        scheduled = time.perf_counter_ns()
        if output is None:
            raise RuntimeError("nothing to run")
        tokens = sampled[: output.num_sampled]
        update_begin = time.perf_counter_ns()
        scheduler.update_from_output(output, tokens)
        end = time.perf_counter_ns()
        if output.total_num_scheduled_tokens == num_running and output.num_new_reqs == 0:
            schedule_us.append((scheduled - begin) / 1000)
            update_us.append((end - update_begin) / 1000)
        processor_.poll(handle)
    return {
        "num_running": num_running,
        "num_blocks": config.num_blocks,
        "steps": num_steps,
        "schedule_us": round(statistics.median(schedule_us), 2),
        "update_us": round(statistics.median(update_us), 2),
        "total_us": round(statistics.median(map(sum, zip(schedule_us, update_us, strict=True))), 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-running", default="1,64,256,1024", help="running decodes, separated by commas")
    parser.add_argument("--steps", type=int, default=2000, help="steps measured for each")
    arguments = parser.parse_args()
    if _core.build_profile != "release":
        sys.exit("this is a debug build of the core, whose times mean nothing; build it with: make setup")
    report: dict[str, Any] = {
        "machine": {"processor": processor(), "system": platform.platform()},
        "versions": {"rustvllm": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "build_profile": _core.build_profile,
        "results": [measure(int(number), arguments.steps) for number in arguments.num_running.split(",")],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
