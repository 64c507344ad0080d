"""Counts the instructions of a step of the control plane with valgrind, here and in another commit, without a clock.

The script builds both with this checkout's ``benches/examples/step_loop.rs``, each in its own folder. The instructions
of a step are the difference of a long and a short run, divided by the steps between them, so they are the same on a
busy machine.

    python benches/python/step_instructions.py --other OTHER
"""

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench_report import new_report, publish

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = Path("benches/examples/step_loop.rs")
CASES = ((64, 0), (256, 0), (1024, 0), (64, 2048), (256, 0, 16, 1), (256, 0, 16, 0))
"""Running decodes, and the tokens of a prompt that comes with each step; then the most drafts to look for in each
decode, and whether some are found."""
SHORT, LONG = 50, 450
"""Steps of the short and of the long run."""


def build(checkout: Path) -> Path:
    """Build this checkout's example in another checkout; returns the program."""
    if checkout != REPOSITORY:
        shutil.copy(REPOSITORY / EXAMPLE, checkout / EXAMPLE)
    target = checkout / "target" / "instructions"
    # Under valgrind a program lacks the auxiliary vector that rustix would read itself.
    env = os.environ | {"CARGO_TARGET_DIR": str(target), "RUSTFLAGS": "--cfg=rustix_use_libc"}
    command = ["cargo", "build", "--release", "--quiet", "-p", "rustvllm-benches", "--example", "step_loop"]
    subprocess.run(command, cwd=checkout, env=env, check=True)
    return target / "release" / "examples" / "step_loop"


def instructions(program: Path, *numbers: int) -> int:
    """The number of instructions that a run executes."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", str(program)]
    done = subprocess.run([*command, *map(str, numbers)], capture_output=True, text=True, check=True)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if found is None:
        raise RuntimeError(f"valgrind counted nothing: {done.stderr}")
    return int(found[1].replace(",", ""))


def of_a_step(program: Path, num_running: int, prefill_tokens: int, *drafts: int) -> int:
    """The instructions of schedule, update, and the loop around them."""
    short, long = (instructions(program, num_running, prefill_tokens, steps, *drafts) for steps in (SHORT, LONG))
    return round((long - short) / (LONG - SHORT))


def main() -> None:
    """Build both, count, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--other", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--output-json", type=Path, help="write the report there as well")
    args = parser.parse_args()
    own, other = build(REPOSITORY), build(args.other.resolve())
    rows: list[dict[str, Any]] = []
    for case in CASES:
        mine, its = of_a_step(own, *case), of_a_step(other, *case)
        names = ("num_running", "prefill_tokens", "num_drafts", "are_found")
        row: dict[str, Any] = dict(zip(names, case, strict=False))
        rows.append(row | {"own": mine, "other": its, "ratio": round(mine / its, 4)})
    publish(new_report() | {"instructions_per_step": rows}, args.output_json)


if __name__ == "__main__":
    main()
