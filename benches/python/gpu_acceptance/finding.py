"""Keeps a section's results in a file, written after every check, so that a section that is ended early loses none."""

import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DRY = "--dry-run" in sys.argv
"""Whether to use tiny shapes on the CPU, with kernels in Triton's interpreter."""
DEVICE = torch.device("cpu") if DRY else torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[3]
for _folder in ("tests/kernels", "tests/models", "tests/unit/worker", "tests"):  # ragged batches, small checkpoints
    sys.path.append(str(ROOT / _folder))


class Finding:
    """See the module.

    Args:
        file: The file for the results.
        seconds: The time until the section is ended.
    """

    def __init__(self, file: Path, seconds: float) -> None:
        self._file = file
        self._end = time.monotonic() + seconds
        self.facts: dict[str, Any] = {"checks": {}}

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return self._end - time.monotonic()

    def put(self, **facts: Any) -> None:
        """Add facts."""
        self.facts |= facts
        self._save()

    def add(self, table: str, row: dict[str, Any]) -> None:
        """Add a row to a table."""
        self.facts.setdefault(table, []).append(rounded(row))
        self._save()

    def check(self, name: str, ok: bool, **facts: Any) -> None:
        """Add the result of a check."""
        self.facts["checks"][name] = {"ok": bool(ok)} | rounded(facts)
        self._save()

    def attempt(self, name: str, run: Callable[..., Any], *args: Any) -> Any:
        """Run a part; an error becomes a failed check, and the next part still runs."""
        if self.left < 5:
            self.check(name, False, error="no time was left")
            return None
        try:
            return run(self, *args)
        except Exception as error:  # noqa: BLE001 -- any error is a result
            places = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-3:]]
            self.check(name, False, error=f"{type(error).__name__}: {error}"[:300], at=places)
            return None

    def _save(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.facts, default=str), encoding="utf-8")
        new.replace(self._file)


def rounded(facts: Any) -> Any:
    """The facts with each number rounded to four digits."""
    if isinstance(facts, dict):
        return {key: rounded(value) for key, value in facts.items()}
    if isinstance(facts, float) and math.isfinite(facts):
        return float(f"{facts:.4g}")
    return facts


def synchronize() -> None:
    """Wait for the device."""
    if not DRY:
        torch.cuda.synchronize()


def replayed(run: Callable[[], Any]) -> Callable[[], Any]:
    """Turn a function, warmed up, into the replay of a CUDA graph, which costs the host next to nothing."""
    run()
    synchronize()
    if DRY:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def device_seconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of a warm run on the device, which is kept busy until the host has launched all of it."""
    seconds = []
    for _ in range(2 if DRY else repeats):
        if DRY:
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)  # noqa: SLF001 -- there is no public function
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def rulers() -> dict[str, float]:
    """The device's rates: GB/s of copying (both ways counted) and of reading, TFLOP/s of a large product."""
    numbers = torch.randn(1 << (14 if DRY else 29), device=DEVICE)
    target = torch.empty_like(numbers)
    side = 64 if DRY else 8192
    left, right = torch.randn(2, side, side, device=DEVICE).to(torch.float32 if DRY else torch.bfloat16)
    for run in (lambda: target.copy_(numbers), numbers.sum, lambda: left @ right):
        run()
    return rounded(
        {
            "copy_gigabytes_per_s": 2 * numbers.nbytes / device_seconds(lambda: target.copy_(numbers)) / 1e9,
            "read_gigabytes_per_s": numbers.nbytes / device_seconds(numbers.sum) / 1e9,
            "product_teraflops": 2 * side**3 / device_seconds(lambda: left @ right) / 1e12,
        }
    )
