"""Measures how long ``rustvllm serve`` takes until it is ready, with the embedded model and one of GPT-2 small's size.

The script writes the second checkpoint just before (124 million random weights, float32), so its pages are in memory.

    python benches/python/startup.py --num-iters 5 --output-json report.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_report import add_common_flags, new_report, parse, publish
from measured_server import RUSTVLLM, mode_flags
from tiny_checkpoint import write_gpt2_small
from tokenizer_folder import tokenizer_folder

TOKENIZER = tokenizer_folder("gpt2-tokenizer")


def startup(num_iters: int, mode: str, *serve: str) -> dict[str, Any]:
    """The report of ``rustvllm bench startup``."""
    command = [*RUSTVLLM, "bench", "startup", "--num-iters", str(num_iters), "--json", "--", *serve]
    command += mode_flags(mode)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> None:
    """Measure both and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-iters", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    add_common_flags(parser)
    args = parse(parser)
    report: dict[str, Any] = {
        **new_report(),
        "mode": args.mode,
        "embedded": startup(args.num_iters, args.mode, *args.serve),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = write_gpt2_small(Path(folder) / "gpt2-small", args.tokenizer)
        report["gpt2_small"] = startup(args.num_iters, args.mode, str(model), *args.serve)
    publish(report, args.output_json)
    for name in ("embedded", "gpt2_small"):
        print(name, {phase: round(s, 2) for phase, s in report[name]["median_s"].items()}, file=sys.stderr)


if __name__ == "__main__":
    main()
