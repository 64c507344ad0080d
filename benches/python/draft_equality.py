"""Compares thousands of requests with and without drafts, bit for bit, over parameters, precisions and ways to run.

    python benches/python/draft_equality.py --requests 10000 --output-json report.json
    python benches/python/draft_equality.py --world preempted --dtype bfloat16 --requests 1000

Every request runs under ``--batch-invariant`` in an engine without drafts and in one whose controller lets all drafts
run. Everything that a client can see must be equal, including log-probabilities. For each cell of parameters, at least
a fifth of the requests must have had both accepted and rejected drafts. Cells, worlds and comparisons are those of the
tests (``tests/draft_pairs.py``). The script ends with an error at the first difference.
"""

import argparse
import itertools
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench_report import new_report, publish

from rustvllm import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from draft_pairs import CELLS, EVERYTHING, ORDINARY, WORLDS, Pair, facts, pair_of

ALL_WORLDS = {"ordinary": ORDINARY, **WORLDS}
DTYPES = ("float32", "bfloat16")
LEAST_SHARE = 0.2
AT_ONCE = 64
"""Requests of one call, so that their events fit into the scheduler's list."""
LENGTH = 60


def main() -> None:
    """Run the grid, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--world", nargs="+", choices=ALL_WORLDS, default=list(ALL_WORLDS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    grid = list(itertools.product(args.world, args.dtype))
    num_each = -(-args.requests // (len(grid) * len(CELLS)))
    covered: dict[str, list[bool]] = defaultdict(list)
    counted: dict[str, int] = defaultdict(int)
    began = time.perf_counter()
    for number, (world, dtype) in enumerate(grid):
        # Steps do not overlap, because events must be taken in the thread that steps.
        pair = pair_of(EVERYTHING, dtype=dtype, **ALL_WORLDS[world])
        scheduler = pair.speculative.llm_engine.engine_core.core.scheduler
        scheduler.set_trace(True, with_tokens=True)
        asked = [ask(cell, number * num_each + index) for cell in CELLS for index in range(num_each)]
        random.Random(number).shuffle(asked)
        for start in range(0, len(asked), AT_ONCE):
            run(pair, asked[start : start + AT_ONCE], covered)
        stats = scheduler.stats()
        for name in (
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_preemptions",
            "num_swapped_out",
            "num_draft_pauses",
        ):
            counted[name] += stats[name]
        for llm in (pair.plain, pair.speculative):
            llm.shutdown()
        print(f"{world}, {dtype}: {len(asked)} equal, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    shares = {cell: sum(flags) / len(flags) for cell, flags in covered.items()}
    if too_few := {cell: share for cell, share in shares.items() if share < LEAST_SHARE}:
        raise SystemExit(f"too few requests had accepted and rejected drafts: {too_few}")
    results = {
        "requests": sum(map(len, covered.values())),
        "share_with_accepted_and_rejected_drafts": {cell: round(share, 3) for cell, share in shares.items()},
        **counted,
    }
    publish({**new_report(), "grid": grid, "results": results}, args.output_json)


def ask(cell: str, number: int) -> tuple[str, str, SamplingParams]:
    """The request with this number: a text that repeats itself, and the cell's parameters with its own seed."""
    source = random.Random(f"{cell} {number}")
    name, thing, colour = (
        source.choice(words)
        for words in (
            ("Tom", "Lily", "Sue", "Ben", "Max", "Mia"),
            ("ball", "hat", "dog", "cat", "car", "box"),
            ("red", "big", "blue", "little", "new"),
        )
    )
    shown = source.choice(
        (
            f"{name} had a {colour} {thing}. {name} had a {colour} {thing}. {name} had a",
            f"One day, {name} went to the park. One day, {name} went to the",
            f"the {colour} {thing} and the dog and the {colour} {thing} and the dog and the",
            f"{name} was happy. The {thing} was happy. {name} and the {thing} were happy. {name} was",
        )
    )
    params: dict[str, Any] = {"max_tokens": LENGTH, **CELLS[cell]}
    if params["temperature"] > 0:
        params["seed"] = number
    return cell, shown, SamplingParams(**params)


def run(pair: Pair, asked: list[tuple[str, str, SamplingParams]], covered: dict[str, list[bool]]) -> None:
    """Run some requests at once in both engines, and compare them."""
    prompts, params = [prompt for _, prompt, _ in asked], [params for _, _, params in asked]
    expected = pair.plain.generate(prompts, params, use_tqdm=False)
    got = pair.speculative.generate(prompts, params, use_tqdm=False)
    for (cell, prompt, _), one, other in zip(asked, expected, got, strict=True):
        if facts(one) != facts(other):
            raise SystemExit(f"{cell}: {prompt!r} was answered {facts(one)} without drafts and {facts(other)} with")
    events, num_dropped = pair.speculative.llm_engine.engine_core.core.scheduler.take_events()
    if num_dropped:
        raise SystemExit(f"{num_dropped} events were dropped: lower AT_ONCE")
    drafts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for event in events:
        if event["kind"] == "drafts":
            # The samples of a request are called 0_id, 1_id, …
            of_request = drafts[event["request_id"].rpartition("_")[2]]
            of_request[0] += event["num_accepted_tokens"]
            of_request[1] += event["num_draft_tokens"] - event["num_accepted_tokens"]
    for (cell, _, _), output in zip(asked, got, strict=True):
        covered[cell].append(min(drafts[output.request_id]) > 0)


if __name__ == "__main__":
    main()
