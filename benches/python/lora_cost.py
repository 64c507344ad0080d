"""Measures what adapters cost on the CPU: steps with none, one and eight, compared with an engine without adapters.

    python benches/python/lora_cost.py [--shape llama-160m] [--variants float32 int8] [--rank 16] [--bfloat16]
        [--num-steps 40] [--output-json FILE]

The model has random weights, and adapters have random matrices for all dense layers of the blocks. For each variant two
engines run in this process, one with ``enable_lora`` and one without, and alternate, a step each. In "flag", requests
use the model itself in the engine with adapters; in "one", all rows use one adapter; in "eight", neighbouring rows use
different ones. A share is the time of a step without adapters over that of a step with them, as the median of all pairs
of consecutive steps; times are medians in milliseconds. The core computes all products in both engines, because each
engine would otherwise choose by its own measurements.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from decode_cost import BY_MODULES, SHAPES, VARIANTS, Clock

from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.core import EngineCore
from rustvllm.lora.modules import adaptable_parts, full_names

NUM_ADAPTERS = 8
NUM_WARMUPS = 4
PROMPT_LEN = 32
MODES = {"flag": 0, "one": 1, "eight": NUM_ADAPTERS}
KEEPS = [name for name in VARIANTS if not name.endswith(BY_MODULES)]


def main() -> None:
    """Measure each variant, and publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-160m")
    parser.add_argument("--variants", nargs="+", choices=KEEPS, default=["float32", "int8"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--bfloat16", action="store_true", help="adapters of numbers that 16 bits hold")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt that is computed in one step")
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    report = new_report()
    report |= {"rank": args.rank, "shape": args.shape, "adapters": "bfloat16" if args.bfloat16 else "float32"}
    os.environ["RUSTVLLM_LINEAR_KERNEL"] = "core"
    clock = Clock()
    report["variants"] = {variant: measure(variant, args, clock) for variant in args.variants}
    publish(report, args.output_json)


def measure(variant: str, args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Measure steps of some rows, and of a prompt, with and without adapters."""
    plain, adapted = (make_core(variant, args, enable_lora=flag) for flag in (False, True))
    load_adapters(adapted, args.rank, bfloat16=args.bfloat16)
    found: dict[str, Any] = {}
    for mode, count in MODES.items():
        for rows in args.rows:
            if count <= rows:
                found[f"{rows} rows, {mode}"] = decode((plain, adapted), clock, rows, count, args.num_steps)
        if count <= 1:
            found[f"prompt of {args.prompt}, {mode}"] = prompts((plain, adapted), clock, args.prompt, count)
    for core in (plain, adapted):
        core.shutdown()
    return found


def make_core(variant: str, args: argparse.Namespace, *, enable_lora: bool, **more: Any) -> EngineCore:
    """An engine for the shape with random weights; ``more`` are further arguments for adapters."""
    longest = max(args.num_steps + NUM_WARMUPS + PROMPT_LEN + 16, args.prompt + 16)
    most_rows = max([1, *args.rows])
    settings = {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": args.rank} | more
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]), encoding="utf-8")
        engine_args = EngineArgs(
            model=folder, load_format="dummy", device="cpu", skip_tokenizer_init=True, max_num_seqs=most_rows,
            max_num_batched_tokens=max(PROMPT_LEN * most_rows, args.prompt), max_model_len=longest,
            num_gpu_blocks_override=1 + most_rows * -(-longest // 16), enable_prefix_caching=False,
            **VARIANTS[variant], **(settings if enable_lora else {}),
        )  # fmt: skip
        return EngineCore(engine_args.create_engine_config("llm_class"))


def load_adapters(core: EngineCore, rank: int, *, bfloat16: bool, count: int = NUM_ADAPTERS) -> None:
    """Load adapters for all dense layers in the blocks, in the form in which peft saves them."""
    # This loads torch, which must come after the executor, because that sets how torch's threads wait.
    import torch
    from safetensors.torch import save_file

    executor: Any = core.executor
    model = executor._runner.model  # noqa: SLF001 -- a measurement needs internals
    parts = adaptable_parts(model)
    generator = torch.Generator().manual_seed(0)
    for number in range(1, count + 1):
        tensors = {}
        for full, name in full_names(model, parts).items():
            num_outputs, num_inputs = parts[name].stored_shape
            for kind, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                matrix = torch.randn(shape, generator=generator) * 0.1 * shape[1] ** -0.5
                matrix = matrix.to(torch.bfloat16) if bfloat16 else matrix
                tensors[f"base_model.model.{full}.lora_{kind}.weight"] = matrix
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            save_file(tensors, Path(folder) / "adapter_model.safetensors")
            executor.add_adapter(number, f"adapter-{number}", folder)


def decode(
    cores: tuple[EngineCore, EngineCore], clock: Clock, rows: int, num_adapters: int, num_steps: int
) -> dict[str, float]:
    """Alternate steps that decode ``rows`` rows."""
    for index, core in enumerate(cores):
        add_requests(core, rows, PROMPT_LEN, num_steps + NUM_WARMUPS + 1, num_adapters if index else 0)
        core.step()  # computes all prompts
        core.scheduler.take_outputs()
    pairs = [tuple(timed(core, clock) for core in turn(cores, index)) for index in range(num_steps + NUM_WARMUPS)]
    for core in cores:
        while core.has_unfinished_requests():
            core.step()
            core.scheduler.take_outputs()
    return summary(pairs[NUM_WARMUPS:], NUM_WARMUPS)


def prompts(
    cores: tuple[EngineCore, EngineCore], clock: Clock, num_tokens: int, num_adapters: int, count: int = 11
) -> dict[str, float]:
    """Alternate steps that compute one prompt and its first token."""
    pairs = []
    for index in range(count):
        for each, core in enumerate(cores):
            add_requests(core, 1, num_tokens, 1, num_adapters if each else 0)
        pairs.append(tuple(timed(core, clock) for core in turn(cores, index)))
    return summary(pairs[1:], 1)


def turn(cores: tuple[EngineCore, EngineCore], index: int) -> tuple[EngineCore, EngineCore]:
    """The order of the engines in a turn; it alternates, so that the contents of the caches favour neither."""
    return cores if index % 2 == 0 else (cores[1], cores[0])


def timed(core: EngineCore, clock: Clock) -> tuple[float, float]:
    """Seconds of a step, and of its products."""
    clock.take()
    begin = time.perf_counter()
    core.step()
    seconds = time.perf_counter() - begin
    core.scheduler.take_outputs()
    return seconds, clock.take()[0]


def add_requests(core: EngineCore, rows: int, prompt_len: int, max_tokens: int, num_adapters: int) -> None:
    """Add greedy requests with different prompts; neighbours have different adapters, if there are any."""
    handle = core.handle
    for index in range(rows):
        prompt = [(7 * index + 3 * position) % 4000 + 5 for position in range(prompt_len)]
        key = handle.new_key()
        adapter = 1 + index % num_adapters if num_adapters else 0
        handle.add_request(key, f"r{key}", prompt, max_tokens=max_tokens, temperature=0.0, adapter=adapter)


def summary(pairs: list[tuple[tuple[float, float], ...]], offset: int) -> dict[str, float]:
    """Medians of both in milliseconds, and the median share; pair ``i`` began with engine ``(i + offset) % 2``."""
    ordered = [pair if (index + offset) % 2 == 0 else pair[::-1] for index, pair in enumerate(pairs)]
    without, with_adapters = zip(*ordered, strict=True)
    shares = [first[0] / second[0] for first, second in ordered]
    lower, middle, upper = statistics.quantiles(shares, n=4, method="inclusive")
    found = {
        "share": middle,
        "share_lower_quartile": lower,
        "share_upper_quartile": upper,
        "step_without": statistics.median(step for step, _ in without) * 1e3,
        "step_with": statistics.median(step for step, _ in with_adapters) * 1e3,
        "products_without": statistics.median(products for _, products in without) * 1e3,
        "products_with": statistics.median(products for _, products in with_adapters) * 1e3,
    }
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
