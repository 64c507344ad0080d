"""Measures many registered adapters of which a few may run at once: their cost, and the waits for rare ones.

    python benches/python/lora_many.py [--registered 100] [--max-loras 8] [--rows 32] [--outstanding 64]
        [--max-times-passed N] [--exponent 1.0] [--seconds 20] [--output-json FILE]

Two engines with the same random weights take turns: one has as many adapters as may run at once, the other many more.
Each always has the same number of requests outstanding: when one ends, a new one follows, whose adapter is drawn by
Zipf's law, the first one most often. "share" is the tokens per second (including prompts) of the engine with many
adapters over those of the one with few. A wait is the time from a request's arrival to its admission, for requests
admitted after the first turn; "rarest" covers the adapters of the last tenth, and "longest" is the longest of all.
"""

import argparse
import os
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from lora_cost import KEEPS, load_adapters, make_core

from rustvllm.engine.core import EngineCore

PROMPT_LEN = 16
OUTPUT_LEN = 16
NUM_TURNS = 4


class ClosedLoop:
    """An engine in which a new request follows each one that ends.

    Args:
        core: The engine, with adapters 1 to ``num_adapters``.
        num_adapters: The adapters from which requests draw.
        args: The command line's arguments.
    """

    def __init__(self, core: EngineCore, num_adapters: int, args: argparse.Namespace) -> None:
        self.core = core
        self._random = random.Random(0)
        self._adapters = range(1, num_adapters + 1)
        self._weights = [number**-args.exponent for number in self._adapters]
        self._unadmitted: dict[str, tuple[int, float]] = {}
        self._live: set[str] = set()
        self.num_tokens, self.seconds, self.num_steps = 0, 0.0, 0
        self.waits: dict[int, list[float]] = defaultdict(list)
        self._outstanding = args.outstanding

    def run(self, seconds: float) -> None:
        """Run steps for some time, which does not include the loop's own counting."""
        end = self.seconds + seconds
        while self.seconds < end:
            while len(self._live) < self._outstanding:
                self._add()
            began = time.perf_counter()
            self.num_tokens += self.core.step()
            self.seconds += time.perf_counter() - began
            self.num_steps += 1
            self.core.scheduler.take_outputs()
            running = {request.request_id: request for request in self.core.scheduler.running}
            for request_id in running.keys() & self._unadmitted.keys():
                adapter, arrival = self._unadmitted.pop(request_id)
                self.waits[adapter].append(self.seconds - arrival)
            waiting = {request.request_id for request in self.core.scheduler.waiting}
            self._live &= running.keys() | waiting

    def _add(self) -> None:
        handle = self.core.handle
        key, [adapter] = handle.new_key(), self._random.choices(self._adapters, self._weights)
        prompt = [(7 * key + 3 * position) % 4000 + 5 for position in range(PROMPT_LEN)]
        handle.add_request(key, f"r{key}", prompt, max_tokens=OUTPUT_LEN, temperature=0.0, adapter=adapter)
        self._live.add(f"r{key}")
        self._unadmitted[f"r{key}"] = adapter, self.seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both engines in alternating turns."""
    loops = {}
    for count in (args.max_loras, args.registered):
        core = make_core(
            args.variant, args, enable_lora=True, max_loras=args.max_loras, max_times_passed=args.max_times_passed
        )
        load_adapters(core, args.rank, bfloat16=False, count=count)
        loops[count] = ClosedLoop(core, count, args)
    few, many = loops.values()
    shares = []
    for turn in range(NUM_TURNS):
        rates = []
        if turn == 1:  # leaves out the first turn, whose requests all came at once
            many.waits.clear()
        for loop in (few, many):
            tokens, seconds = loop.num_tokens, loop.seconds
            loop.run(args.seconds / NUM_TURNS)
            rates.append((loop.num_tokens - tokens) / (loop.seconds - seconds))
        shares.append(rates[1] / rates[0])
    waits = [wait for of_one in many.waits.values() for wait in of_one]
    rare = [wait for adapter, of_one in many.waits.items() if adapter > 0.9 * args.registered for wait in of_one]
    report = {
        "share": statistics.median(shares[1:]),
        "tokens_per_second_few": few.num_tokens / few.seconds,
        "tokens_per_second_many": many.num_tokens / many.seconds,
        "wait_ms": 1e3 * statistics.mean(waits),
        "rarest_wait_ms": 1e3 * statistics.mean(rare) if rare else None,
        "rarest_over_mean": statistics.mean(rare) / statistics.mean(waits) if rare else None,
        "longest_wait_ms": 1e3 * max(waits),
        "num_admitted": len(waits),
        "num_admitted_rarest": len(rare),
        "num_steps": many.num_steps,
    }
    for loop in loops.values():
        loop.core.shutdown()
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in report.items()}


def main() -> None:
    """Measure, and publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-160m")
    parser.add_argument("--variant", choices=KEEPS, default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--registered", type=int, default=100)
    parser.add_argument("--max-loras", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="requests that run at once")
    parser.add_argument("--outstanding", type=int, default=64, help="requests that run or wait")
    parser.add_argument("--max-times-passed", type=int, default=8)
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--seconds", type=float, default=20.0, help="of steps of each engine")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    settings = ("rank", "registered", "max_loras", "outstanding", "max_times_passed", "exponent", "rows")
    report = new_report() | {name: getattr(args, name) for name in settings}
    args.rows, args.prompt, args.num_steps = [args.rows], PROMPT_LEN, OUTPUT_LEN
    os.environ["RUSTVLLM_LINEAR_KERNEL"] = "core"
    report |= measure(args)
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
