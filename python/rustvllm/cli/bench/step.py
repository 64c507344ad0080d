"""``rustvllm bench step``: what one step of the scheduler costs, for N running decodes.

Prompts are staggered over one block of 16 tokens, so that one sixteenth of the requests takes a new block in every step
and one sixteenth fills one, which is then registered in the prefix index. The same steady state is measured twice: in
Rust alone, and from Python with the boundary.
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rustvllm import _core
from rustvllm.cli.bench.arguments import whole_number, whole_numbers
from rustvllm.cli.bench.report.machine import machine, require_release_build, versions
from rustvllm.cli.parser import FlexibleArgumentParser

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 512
MAX_MODEL_LEN = 8192
TOKEN_BUDGET, TOKENS_PER_DECODE = 8192, 8
MODES = {"sync": 1, "async": 2}
"""Steps in flight of each way to schedule."""
POLICIES = ("fcfs", "priority", "fair")
# The limits of the core's `bench_step`.
MAX_NUM_RUNNING, MAX_STEPS, MAX_PREFILL_TOKENS = 1 << 15, 1_000_000, 1 << 20

COLUMNS = (
    "mode",
    "num_running",
    "prefill_tokens",
    "num_blocks",
    "schedule_us",
    "update_us",
    "total_us",
    "rust_total_us",
)


def make_parser() -> FlexibleArgumentParser:
    """The parser of ``rustvllm bench step``."""
    parser = FlexibleArgumentParser(
        prog="rustvllm bench step",
        description="Measure what one step of the scheduler costs, in microseconds: medians of schedule, update and "
        "both, seen from Python, and of both in Rust alone.",
    )
    parser.add_argument(
        "--num-running",
        type=whole_numbers(1, MAX_NUM_RUNNING),
        default="1,64,256,1024",
        metavar="N,N,...",
        help="running decodes, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-tokens",
        type=whole_numbers(0, MAX_PREFILL_TOKENS),
        default="0",
        metavar="P,P,...",
        help="tokens of a prompt that each step admits in addition to the decodes, one row for each; 0 is none "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--scheduling-policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="who is admitted first; all requests are of one tenant and one priority (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1, MAX_STEPS),
        default="2000",
        metavar="N",
        help="steps measured for each row (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


class SteadyState:
    """N running decodes, driven from Python, and a prompt in each step if asked for."""

    def __init__(
        self, num_running: int, prefill_tokens: int, steps_in_flight: int, scheduling_policy: str = "fcfs"
    ) -> None:
        import numpy as np

        self.num_running = num_running
        self.prefill_tokens = prefill_tokens
        self.steps_in_flight = steps_in_flight
        # Prompts whose step is in flight, and those whose row waits for such a step.
        num_prompts = 2 * steps_in_flight - 1 if prefill_tokens else 0
        blocks = num_running * -(-(PROMPT_TOKENS + BLOCK_SIZE + OUTPUT_TOKENS) // BLOCK_SIZE)
        self.config = _core.SchedulerConfig(
            num_blocks=blocks + num_prompts * -(-(prefill_tokens + 1) // BLOCK_SIZE) + 1,
            max_model_len=max(MAX_MODEL_LEN, prefill_tokens + 1),
            block_size=BLOCK_SIZE,
            max_num_seqs=num_running + num_prompts,
            max_steps_in_flight=steps_in_flight,
            scheduling_policy=scheduling_policy,
            max_num_batched_tokens=max(TOKEN_BUDGET, TOKENS_PER_DECODE * num_running + prefill_tokens),
        )
        self._places = np.arange(max(PROMPT_TOKENS + BLOCK_SIZE, prefill_tokens), dtype=np.int32)
        self._sampled = np.full((self.config.max_num_seqs, 1), 7, np.int32)
        self._scheduler = _core.Scheduler(self.config)
        self._outputs = _core.OutputProcessor()
        self._in_flight: deque[_core.SchedulerOutput] = deque()
        self._num_added = 0
        self._refill()

    def measure(self, num_steps: int) -> tuple[list[float], list[float]]:
        """Microseconds of ``schedule`` and of ``update_from_output``, for so many steps of the steady state."""
        scheduler, in_flight = self._scheduler, self._in_flight
        schedule_us: list[float] = []
        update_us: list[float] = []
        while len(schedule_us) < num_steps:
            self._add_prompt()
            begin = time.perf_counter_ns()
            output = scheduler.schedule()
            scheduled = time.perf_counter_ns()
            if output is not None:
                in_flight.append(output)
            if output is None or not self._is_steady(output):
                # A decode whose last token is in flight is in no step: it ends when its step is updated.
                self._refill()
                continue
            oldest = in_flight.popleft()
            tokens = self._sampled[: oldest.num_sampled]
            update_begin = time.perf_counter_ns()
            scheduler.update_from_output(oldest, tokens)
            end = time.perf_counter_ns()
            schedule_us.append((scheduled - begin) / 1000)
            update_us.append((end - update_begin) / 1000)
            self._outputs.poll(scheduler.handle)
            if self._num_decodes() < self.num_running:
                self._refill()
        return schedule_us, update_us

    def _is_steady(self, output: _core.SchedulerOutput) -> bool:
        """Whether every decode is in the step, and the prompt if each step has one."""
        return output.total_num_scheduled_tokens == self.num_running + self.prefill_tokens and output.num_new_reqs == (
            1 if self.prefill_tokens else 0
        )

    def _num_decodes(self) -> int:
        """Unfinished requests, without the prompts of the steps in flight."""
        prompts = len(self._in_flight) if self.prefill_tokens else 0
        return self._scheduler.num_unfinished_requests() - prompts

    def _refill(self) -> None:
        """Update what is in flight, replace what has ended and run its prefill.

        Then schedule as many steps as are in flight at the beginning of a step.
        """
        self._update_all()
        while (missing := self.num_running - self._num_decodes()) > 0:
            for _ in range(missing):
                self._add(PROMPT_TOKENS + self._num_added % BLOCK_SIZE, OUTPUT_TOKENS)
            while self._scheduler.handle.stats()["num_queued"] > 0:
                self._schedule()
                self._update_all()
            self._schedule()  # the last one's prompt may have been cut by the budget
            self._update_all()
        while len(self._in_flight) + 1 < self.steps_in_flight:
            self._add_prompt()
            self._schedule()

    def _schedule(self) -> None:
        output = self._scheduler.schedule()
        if output is None:
            raise RuntimeError("the scheduler has nothing to run: this is a bug")
        self._in_flight.append(output)

    def _update_all(self) -> None:
        while self._in_flight:
            oldest = self._in_flight.popleft()
            self._scheduler.update_from_output(oldest, self._sampled[: oldest.num_sampled])
        self._outputs.poll(self._scheduler.handle)

    def _add_prompt(self) -> None:
        if self.prefill_tokens:
            self._add(self.prefill_tokens, 1)

    def _add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        handle = self._scheduler.handle
        self._num_added += 1
        prompt = self._places[:num_prompt_tokens] ^ (self._num_added << 8 & 0x7FFFFFFF)
        handle.add_request(handle.new_key(), str(self._num_added), prompt, max_tokens=max_tokens)


def measure_row(num_running: int, prefill_tokens: int, mode: str, policy: str, num_steps: int) -> dict[str, Any]:
    """One row of the results."""
    steps_in_flight = MODES[mode]
    state = SteadyState(num_running, prefill_tokens, steps_in_flight, policy)
    schedule_us, update_us = state.measure(num_steps)
    rust = _core.bench_step(
        num_running,
        num_steps,
        prefill_tokens=prefill_tokens,
        steps_in_flight=steps_in_flight,
        scheduling_policy=policy,
    )
    return {
        "num_running": num_running,
        "prefill_tokens": prefill_tokens,
        "mode": mode,
        "scheduling_policy": policy,
        "num_blocks": state.config.num_blocks,
        "block_size": BLOCK_SIZE,
        "steps": num_steps,
        "schedule_us": round(statistics.median(schedule_us), 3),
        "update_us": round(statistics.median(update_us), 3),
        "total_us": round(statistics.median(map(sum, zip(schedule_us, update_us, strict=True))), 3),
        "rust_schedule_us": rust["schedule_us"],
        "rust_update_us": rust["update_us"],
        "rust_total_us": rust["total_us"],
    }


def bench_step(argv: Sequence[str]) -> int:
    """Run ``rustvllm bench step``.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The core is a debug build.
    """
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    require_release_build()
    results = [
        measure_row(num_running, prefill_tokens, mode, args.scheduling_policy, args.steps)
        for mode in MODES
        for prefill_tokens in args.prefill_tokens
        for num_running in args.num_running
    ]
    import numpy as np

    report = {
        "machine": machine(),
        "versions": versions() | {"numpy": np.__version__},
        "build_profile": _core.build_profile,
        "results": results,
    }
    print(json.dumps(report, indent=2) if args.json else table(results))
    return 0


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results for people."""
    rows = [COLUMNS, *([str(row[column]) for column in COLUMNS] for row in results)]
    return "\n".join("  ".join(f"{cell:>{len(name)}}" for cell, name in zip(row, COLUMNS, strict=True)) for row in rows)
