"""Accepts a build on a GPU: checks correctness first, then speed; prints one JSON object, within ten minutes.

    python benches/python/gpu_accept.py --output-json gpu_accept.json [--budget 520] [--sections kernels greedy]
    python benches/python/gpu_accept.py --dry-run        # without a GPU: tiny shapes, Triton's interpreter

Run it in a clone whose core is built. It needs transformers and peft, but no network and no checkpoint. Each section is
its own process, so that an error from which a device cannot recover spoils no other section; if its time runs out, its
results so far are kept. Sections for correctness run in parallel, then each section for speed alone; in a dry run, as
many run at once as there are processors.

kernels    every Triton kernel against its reference: attention in twelve shapes, a captured plan over other lengths, a
           cache beyond 2^31 numbers, layers, what comes before attention, the sampler's at 151,936 ids
greedy     engines over three small checkpoints, judged by transformers' logits: eager, graphs, overlap, pieces of
           prompts, prefix cache, preemption both ways, late capture, bfloat16
sampling   every kind of parameter: twice, and with overlap and graphs compared with neither
features   drafts, adapters, a grammar, a quantized checkpoint, each in engines with graphs
capture_*  a model that waits for the device runs without graphs, and correctly; one that waits only in captures ends
           the start with an error that says what to do
toolchain  without a C compiler, torch's operations are used instead
perf       a 0.6B model: the start; decodes of 1 to 256 requests with overlap, without, and without graphs, compared
           with the time to read what they must read; random decodes; prompts; prompts next to decodes; kernels of a
           step
micro      sampler and attention alone, compared with torch's
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CORRECTNESS = {
    "kernels": 200, "greedy": 220, "sampling": 160, "features": 160, "capture_ahead": 100, "capture_late": 100,
    "capture_measured": 100, "capture_broken": 100, "toolchain": 100,
}  # fmt: skip
SPEED = {"perf": 220, "micro": 80}
"""The time limit of each section on a GPU, in seconds."""
CAPTURES: dict[str, dict[str, Any]] = {
    "capture_ahead": {"num_gpu_blocks_override": 400},
    "capture_late": {"num_gpu_blocks_override": 400, "cudagraph_capture_mode": "lazy"},
    "capture_measured": {"gpu_memory_utilization": 0.3},
    "capture_broken": {"num_gpu_blocks_override": 400},
}
START = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--budget", type=float, default=520, help="seconds in all")
    parser.add_argument("--sections", nargs="+", choices=[*CORRECTNESS, *SPEED], default=[*CORRECTNESS, *SPEED])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        return run_section(args.section, args.file, args.seconds)
    sections: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, found in run_sections(args.sections, Path(folder), args.budget, dry=args.dry_run):
            sections[name] = found
            print(f"{time.monotonic() - START:4.0f} s  {name}: {found['status']}", file=sys.stderr, flush=True)
    lines, ok = verdict(sections)
    from bench_report import new_report

    report = new_report() | {"dry_run": args.dry_run, "ok": ok, "verdict": lines, "sections": sections}
    if args.output_json:
        args.output_json.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1, default=str))
    print("\n".join(lines), file=sys.stderr)
    return 0 if ok else 1


def run_sections(names: list[str], folder: Path, budget: float, *, dry: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run sections and return their results; those for speed run alone, except in a dry run, which measures nothing."""

    def run(name: str) -> tuple[str, dict[str, Any]]:
        return end(start(name, folder, budget, dry=dry))

    if dry:
        with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as at_once:
            yield from at_once.map(run, names)
        return
    yield from map(end, [start(name, folder, budget, dry=False) for name in names if name in CORRECTNESS])
    yield from (run(name) for name in names if name in SPEED)


def end(section: Section | tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Wait for a section, if it was started."""
    return section if isinstance(section, tuple) else section.end()


class Section:
    """A running section."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], file: Path, log: Path, seconds: float) -> None:
        self._name, self._process, self._file, self._log, self._seconds = name, process, file, log, seconds
        self._began = time.monotonic()

    def end(self) -> tuple[str, dict[str, Any]]:
        """Wait for the section until its time is over, and return its results."""
        try:
            self._process.wait(max(1.0, self._seconds + 10 - (time.monotonic() - self._began)))
            status = "ran" if self._process.returncode == 0 else f"ended with {self._process.returncode}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = "ran out of time"
        found = json.loads(self._file.read_text(encoding="utf-8")) if self._file.is_file() else {}
        if status != "ran":
            found["end_of_log"] = self._log.read_text(errors="replace")[-1500:]
        return self._name, {"status": status, "seconds": round(time.monotonic() - self._began, 1)} | found


def start(name: str, folder: Path, budget: float, *, dry: bool) -> Section | tuple[str, dict[str, Any]]:
    """Start a section, unless no time is left for it."""
    left = budget - (time.monotonic() - START) - 5
    if left < 20:
        return name, {"status": "skipped, no time was left"}
    seconds = left if dry else min((CORRECTNESS | SPEED)[name], left)  # limits are for GPUs, not for processors
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    environment = dict(os.environ, PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    environment.setdefault("RUSTVLLM_LOGGING_LEVEL", "WARNING")
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--file", str(file)]
    command += ["--seconds", str(seconds), *(["--dry-run"] if dry else [])]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    return Section(name, process, file, log, seconds)


def verdict(sections: dict[str, Any]) -> tuple[list[str], bool]:
    """A line for each section, and whether all checks of correctness have passed."""
    lines, ok = [], bool(sections)
    for name, found in sections.items():
        checks = found.get("checks", {})
        failed = [key for key, check in checks.items() if not check["ok"]]
        ok = ok and found["status"] == "ran" and bool(checks) and not failed
        line = f"{name}: {found['status']}, {len(checks) - len(failed)} of {len(checks)} checks are right"
        lines.append(line + (f"; not {', '.join(failed[:8])}" if failed else ""))
    for row in sections.get("perf", {}).get("decode", []):
        overlap = row["overlap"]
        lines.append(
            f"decode {row['batch']} x {row['context']}: {overlap['step_ms']} ms, {row['times_reading']} x reading, gap "
            f"{overlap['gap_percent']} %, host {overlap['host_ms']} ms, without overlap "
            f"{row['no_overlap'].get('step_ms')} ms, without graphs {row['no_graphs'].get('step_ms')} ms"
        )
    return lines, ok


def run_section(name: str, file: Path, seconds: float) -> int:
    """Run a section in this process."""
    from gpu_acceptance.finding import DRY, Finding

    found = Finding(file, seconds)
    import torch

    torch.set_num_threads(1 if DRY else 4)
    found.put(facts={"torch": torch.__version__, "device": "cpu" if DRY else torch.cuda.get_device_name()})
    from gpu_acceptance import engines, features, kernels, speed

    with torch.inference_mode():
        if name in CAPTURES:
            found.attempt(name, lambda f: engines.capture(f, CAPTURES[name], waits_always=name != "capture_broken"))
        else:
            sections = {
                "kernels": kernels.kernels, "greedy": engines.greedy, "sampling": engines.sampling,
                "features": features.features, "toolchain": engines.toolchain, "perf": speed.perf, "micro": speed.micro,
            }  # fmt: skip
            found.attempt(name, sections[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
