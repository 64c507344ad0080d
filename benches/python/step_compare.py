"""Compares the cost of the scheduler's step with another commit: ``rustvllm bench step`` of both, in alternating turns.

Two consecutive runs find the machine in the same state, so their ratio says more than either number. The result is the
median of the ratios, with the quartiles.

    python benches/python/step_compare.py --other "OTHER/.venv/bin/python -m rustvllm.cli.main" --turns 20
"""

import argparse
import json
import shlex
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from measured_server import RUSTVLLM

NUMBERS = ("total_us", "rust_total_us")


def measure(command: Sequence[str], num_running: str, steps: int) -> dict[tuple[str, int, str], float]:
    """One run: microseconds of a step by mode, running decodes and number."""
    flags = ["bench", "step", "--json", "--num-running", num_running, "--steps", str(steps)]
    done = subprocess.run([*command, *flags], check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["results"]
    return {(row["mode"], row["num_running"], name): row[name] for row in rows for name in NUMBERS}


def summary(own: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Medians of both, and of the ratio of consecutive runs."""
    ratios = [mine / its for mine, its in zip(own, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "own_us": round(statistics.median(own), 3),
        "other_us": round(statistics.median(others), 3),
        "ratio": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
    }


def main() -> None:
    """Run both in alternating turns, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--other", type=shlex.split, required=True, help="the other rustvllm's command")
    parser.add_argument("--turns", type=int, default=20, help="runs of each, two at least")
    parser.add_argument("--num-running", default="256,1024", help="running decodes, separated by commas")
    parser.add_argument("--steps", type=int, default=2000, help="steps of a run")
    parser.add_argument("--output-json", type=Path, help="write the report there as well")
    args = parser.parse_args()
    series: dict[tuple[str, int, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for turn in range(args.turns):
        # The first run of a turn finds a cooler or a warmer machine, so both go first alternately.
        for which in (0, 1) if turn % 2 else (1, 0):
            for key, value in measure((RUSTVLLM, args.other)[which], args.num_running, args.steps).items():
                series[key][which].append(value)
    rows: list[dict[str, Any]] = [
        {"mode": mode, "num_running": num_running, "number": name, **summary(*both)}
        for (mode, num_running, name), both in series.items()
    ]
    publish({**new_report(), "turns": args.turns, "rows": rows}, args.output_json)


if __name__ == "__main__":
    main()
