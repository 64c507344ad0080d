"""Measures the gaps between tokens of streams while other requests have slow masks, with simulated steps.

    python benches/python/slow_masks.py --streams 8 --slow 1 --step-ms 10

In the first half of the time, the streams run alone. Then ``--slow`` clients send one request after the other, each
with its own schema of 2,000 optional properties, so that each has a slow first mask. The script writes the schemas
before the measurement, because a real client does this on another machine.
"""

import argparse
import asyncio
import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from bench_report import new_report, parse, publish
from neighbours import milliseconds

from rustvllm import AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputsParams

NUM_PROPERTIES = 2000
NUM_SCHEMAS = 200


def _schema_of(number: int) -> str:
    properties = {f"property_{number}_{index}": {"type": "integer"} for index in range(NUM_PROPERTIES)}
    return json.dumps({"type": "object", "properties": properties, "additionalProperties": False})


class Load:
    """Streams of one engine, and the gaps between their tokens."""

    def __init__(self, llm: AsyncLLM, streams: int) -> None:
        self.llm = llm
        self.gaps: list[list[float]] = [[] for _ in range(streams)]
        self.num_slow = 0
        self._numbers = count()
        self._schemas = [_schema_of(number) for number in range(NUM_SCHEMAS)]

    async def stream(self, index: int) -> None:
        """Run one long answer after another until cancelled; the time to each first token does not count."""
        while True:
            params = SamplingParams(max_tokens=400 + 7 * index, ignore_eos=True)  # so that they do not end together
            last: float | None = None
            async for _ in self.llm.generate("Once", params, f"free-{next(self._numbers)}"):
                now = time.perf_counter()
                if last is not None:
                    self.gaps[index].append(now - last)
                last = now

    async def slow(self) -> None:
        """Run one request with slow masks after another until cancelled."""
        while True:
            number = next(self._numbers)
            wanted = StructuredOutputsParams(json=self._schemas.pop(), disable_any_whitespace=True)
            params = SamplingParams(max_tokens=60, seed=number, structured_outputs=wanted)
            async for _ in self.llm.generate("Once", params, f"slow-{number}"):
                pass
            self.num_slow += 1


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the gaps without and with slow masks."""
    engine_args = AsyncEngineArgs(
        executor="sim", sim_step_time=args.step_ms, async_scheduling=args.async_scheduling, max_num_seqs=64
    )
    llm = AsyncLLM.from_engine_args(engine_args)
    load = Load(llm, args.streams)
    tasks = [asyncio.create_task(load.stream(index)) for index in range(args.streams)]
    found: dict[str, Any] = {}
    try:
        await asyncio.sleep(1.0)
        for name, num_slow in (("alone", 0), ("next_to_slow_masks", args.slow)):
            tasks += [asyncio.create_task(load.slow()) for _ in range(num_slow)]
            for gaps in load.gaps:
                gaps.clear()
            await asyncio.sleep(args.seconds / 2)
            found[name] = milliseconds(load.gaps)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        llm.shutdown()
    return {**found, "slow_requests_done": load.num_slow}


def main() -> None:
    """Measure, and publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8, help="free streams")
    parser.add_argument("--slow", type=int, default=1, help="clients with slow masks")
    parser.add_argument("--step-ms", type=float, default=10.0, help="milliseconds of a step")
    parser.add_argument("--seconds", type=float, default=40.0, help="of both halves together")
    parser.add_argument("--async-scheduling", action="store_true", help="overlap steps")
    parser.add_argument("--output-json", type=Path, help="write the report there as well")
    args = parse(parser)
    publish({**new_report(), **asyncio.run(measure(args))}, args.output_json)


if __name__ == "__main__":
    sys.exit(main())
