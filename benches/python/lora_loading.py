"""Measures how long an adapter takes to load while streams run, and how long these meanwhile wait for a token.

    python benches/python/lora_loading.py [--streams 16] [--loads 10] [--rank 16] [--output-json FILE]

The model is a Llama of 160 million parameters with random weights in an engine process. An adapter for all dense layers
in its blocks is loaded and removed repeatedly while the streams go on. "load_ms" is the time from the call to its
answer, "read_ms" that of reading the file again, and "gap" the time between two tokens of a stream. There are three
kinds of gaps: before the first load, when all streams run; during a load; and between loads ("elsewhere"), which shows
what the machine does by itself. "gap_steps" is the longest gap during a load over the median gap before the first load,
which is a step; "elsewhere_steps" is the same for the longest gap between loads.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from decode_cost import LLAMA_160M

from rustvllm import AsyncLLM, SamplingParams
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.lora.request import LoRARequest
from rustvllm.sampling_params import RequestOutputKind

NAMES = {
    "self_attn.q_proj": ("hidden_size", "hidden_size"),
    "self_attn.k_proj": ("hidden_size", "hidden_size"),
    "self_attn.v_proj": ("hidden_size", "hidden_size"),
    "self_attn.o_proj": ("hidden_size", "hidden_size"),
    "mlp.gate_proj": ("intermediate_size", "hidden_size"),
    "mlp.up_proj": ("intermediate_size", "hidden_size"),
    "mlp.down_proj": ("hidden_size", "intermediate_size"),
}
"""Outputs and inputs of each dense layer of a block; the shape has as many key heads as query heads."""
MAX_MODEL_LEN = 2048
QUIET_SECONDS = 4.0
SETTLED_SECONDS = 3.0
"""The last part of the quiet time, which counts: in the first part, prompts of late streams are computed."""
PAUSE_SECONDS = 0.5


def write_adapter(folder: Path, rank: int) -> Path:
    """Write an adapter for all dense layers in the blocks, as peft saves it."""
    import numpy as np
    from safetensors.numpy import save_file

    generator = np.random.default_rng(0)
    tensors = {}
    for block in range(int(LLAMA_160M["num_hidden_layers"])):
        for name, sizes in NAMES.items():
            outputs, inputs = (int(LLAMA_160M[size]) for size in sizes)
            for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                matrix = generator.standard_normal(shape, dtype=np.float32) * np.float32(0.1 * shape[1] ** -0.5)
                tensors[f"base_model.model.model.layers.{block}.{name}.lora_{kind}.weight"] = matrix
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


async def stream(engine: AsyncLLM, index: int, times: list[float]) -> None:
    """Record when each token of a stream comes."""
    prompt = {"prompt_token_ids": [(7 * index + 3 * position) % 4000 + 5 for position in range(32)]}
    params = SamplingParams(
        max_tokens=MAX_MODEL_LEN - 64, ignore_eos=True, temperature=0.0, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(prompt, params, f"stream-{index}"):
        if output.outputs[0].token_ids:
            times.append(time.perf_counter())  # noqa: PERF401 -- the list is read meanwhile


async def measure(engine: AsyncLLM, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Load and remove the adapter while streams run."""
    times: list[list[float]] = [[] for _ in range(args.streams)]
    tasks = [asyncio.create_task(stream(engine, index, each)) for index, each in enumerate(times)]
    while not all(times):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)
    await asyncio.sleep(QUIET_SECONDS)
    loads, reads = [], []
    for number in range(1, args.loads + 1):
        begin = time.perf_counter()
        await engine.add_lora(LoRARequest(f"adapter-{number}", number, str(folder)))
        loads.append((begin, time.perf_counter()))
        begin = time.perf_counter()
        await asyncio.to_thread((folder / "adapter_model.safetensors").read_bytes)
        reads.append(time.perf_counter() - begin)
        await engine.remove_lora(number)
        await asyncio.sleep(PAUSE_SECONDS)
    running = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [pair for each in times for pair in pairwise(each)]
    first, last = loads[0][0], loads[-1][1]
    quiet = [end - begin for begin, end in gaps if begin > first - SETTLED_SECONDS and end < first]
    at_loads = [any(begin < done and end > start for start, done in loads) for begin, end in gaps]
    during = [end - begin for (begin, end), is_at in zip(gaps, at_loads, strict=True) if is_at]
    elsewhere = [
        end - begin
        for (begin, end), is_at in zip(gaps, at_loads, strict=True)
        if not is_at and begin > first and end < last
    ]
    step = statistics.median(quiet)
    report = {
        "streams_at_the_end": running,
        "load_ms": sorted((end - begin) * 1e3 for begin, end in loads),
        "read_ms": statistics.median(reads) * 1e3,
        "step_ms": step * 1e3,
        "longest_gap_before_ms": max(quiet) * 1e3,
        "gap_ms_median": statistics.median(during) * 1e3,
        "longest_gap_ms": max(during) * 1e3,
        "gap_steps": max(during) / step,
        "gap_steps_median": statistics.median(during) / step,
        "gap_steps_p90": statistics.quantiles(during, n=10)[-1] / step,
        "elsewhere_steps": max(elsewhere) / step,
    }
    return {name: _rounded(value) for name, value in report.items()}


def _rounded(value: Any) -> Any:
    return [round(each, 2) for each in value] if isinstance(value, list) else round(value, 2)


def main() -> None:
    """Measure, and publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--loads", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    report = new_report()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as adapter:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_160M), encoding="utf-8")
        blocks = 1 + args.streams * -(-MAX_MODEL_LEN // 16)
        engine_args = AsyncEngineArgs(
            model=folder, load_format="dummy", device="cpu", dtype="float32", skip_tokenizer_init=True,
            max_num_seqs=args.streams, max_model_len=MAX_MODEL_LEN, num_gpu_blocks_override=blocks, enable_lora=True,
            max_lora_rank=args.rank,
        )  # fmt: skip

        async def run() -> dict[str, Any]:
            config = engine_args.create_engine_config()
            engine = await asyncio.to_thread(AsyncLLM, config, multiprocess=True)
            try:
                return await measure(engine, write_adapter(Path(adapter), args.rank), args)
            finally:
                engine.shutdown()

        report |= asyncio.run(run())
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
