"""Measures loading a checkpoint on the CPU: its time over that of reading its files, and its memory over their size.

    python benches/python/file_loading.py model-Q4_K_M.gguf awq-folder … [--turns 3] [--serve]

Each turn of each checkpoint is its own process. It imports torch and makes an ``LLM`` with a small KV cache. Just
before and just after it loads the weights, it reads the files into new memory, 16 MiB at a time with one thread, and
keeps that memory: on a virtual machine, memory that the host must provide first takes several times as long as memory
that another program has just returned, and this way loading and reading are treated alike. It reports the seconds of
reading (the mean of both times); of importing torch and what the engine imports with it; of loading the weights
(``load_model``, from the headers to the measured products); and of the whole ``LLM`` after the import, without the
reading. ``memory_mb`` is how much the anonymous memory of the process grew by loading, ``most_mb`` the peak of all its
pages meanwhile. The script reads the files once before, so they are in the page cache. With ``--serve`` it also reports
the seconds until ``rustvllm serve`` is ready, and those of a bare ``import torch`` just before.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from measured_server import rustvllm_server

PIECE = 16 << 20
KV_BYTES = 256 << 20
MAX_MODEL_LEN = 512


def files_of(model: Path) -> list[Path]:
    """The files with a checkpoint's weights."""
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def read(files: Sequence[Path]) -> tuple[float, float, mmap.mmap]:
    """Read files into new memory; returns seconds, the processor time in seconds, and that memory."""
    size = sum(file.stat().st_size for file in files)
    begin, processor, done = time.perf_counter(), time.process_time(), 0
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with memoryview(memory) as view:
        for file in files:
            descriptor, offset = os.open(file, os.O_RDONLY), 0
            while got := os.preadv(descriptor, [view[done : done + PIECE]], offset):
                done, offset = done + got, offset + got
            os.close(descriptor)
    return time.perf_counter() - begin, time.process_time() - processor, memory


def status(name: str) -> float:
    """A figure of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024 / 1e6


def turn(model: Path, dtype: str) -> dict[str, float]:
    """Measure in this process, and return the figures."""
    begin = time.perf_counter()
    import rustvllm.executor  # noqa: F401, I001 -- before anything loads torch: it sets how torch's threads wait
    import torch  # noqa: F401

    from rustvllm import LLM
    from rustvllm.worker import model_runner, worker  # noqa: F401

    imported = time.perf_counter()
    figures: dict[str, float] = {}
    load = worker.Worker.load_model

    def measured(self: worker.Worker) -> None:
        around = time.perf_counter()
        reads = [read(files_of(model))]
        before, anonymous = status("VmRSS"), status("RssAnon")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        started, processor = time.perf_counter(), time.process_time()
        load(self)
        figures["loading_seconds"] = time.perf_counter() - started
        figures["loading_processor_seconds"] = time.process_time() - processor
        figures["memory_mb"], figures["most_mb"] = status("RssAnon") - anonymous, status("VmHWM") - before
        reads.append(read(files_of(model)))
        figures["reading_seconds"] = statistics.mean(seconds for seconds, _, _ in reads)
        figures["reading_processor_seconds"] = statistics.mean(seconds for _, seconds, _ in reads)
        for _, _, memory in reads:
            memory.close()
        figures["around_seconds"] = time.perf_counter() - around - figures["loading_seconds"]

    worker.Worker.load_model = measured  # type: ignore[method-assign]
    LLM(
        str(model),
        dtype=dtype,
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_BYTES,
    )
    ready = time.perf_counter() - imported - figures.pop("around_seconds")
    return {"import_seconds": imported - begin, **figures, "ready_seconds": ready}


def serve(model: Path, dtype: str) -> dict[str, float]:
    """Seconds until a server is ready, and those of a bare import of torch just before."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch = time.perf_counter() - begin
    flags = ["--dtype", dtype, "--skip-tokenizer-init", "--max-model-len", str(MAX_MODEL_LEN)]
    with rustvllm_server([str(model), *flags, "--kv-cache-memory-bytes", str(KV_BYTES)]) as server:
        return {"import_torch_seconds": torch, "serve_ready_seconds": server.ready_after}


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All turns of one checkpoint, and the results."""
    size = sum(file.stat().st_size for file in files_of(model)) / 1e6
    read(files_of(model))[2].close()
    runs: list[dict[str, float]] = []
    for _ in range(args.turns):
        command = [sys.executable, __file__, "--dtype", args.dtype, "--one", str(model)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        run = json.loads(done.stdout.splitlines()[-1])
        runs.append(run | (serve(model, args.dtype) if args.serve else {}))
        print(model.name, {key: round(value, 3) for key, value in runs[-1].items()}, file=sys.stderr, flush=True)
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {
        "file_mb": round(size, 1),
        "median": median,
        "loading_over_reading": statistics.median(run["loading_seconds"] / run["reading_seconds"] for run in runs),
        "memory_over_file": median["memory_mb"] / size,
        "most_over_file": median["most_mb"] / size,
        "runs": runs,
    }


def main() -> None:
    """Measure all checkpoints, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files and folders of safetensors")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="start a server, too")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    if missing := [str(model) for model in args.models if not model.exists()]:
        parser.error(f"there is no {missing[0]}")
    if args.one:
        print(json.dumps(turn(args.models[0], args.dtype)), flush=True)
        return
    models = {str(model.name): measure(model, args) for model in args.models}
    publish({**new_report(), "dtype": args.dtype, "models": models}, args.output_json)


if __name__ == "__main__":
    main()
