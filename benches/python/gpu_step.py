"""Measures decode steps on a GPU: the time of a step, of reading what it must read, and of the device's pauses.

    python benches/python/gpu_step.py [--shapes gpt2-small llama-3-8b] [--batch-sizes 1 8 32 64] [--context 1024]
        [--modes eager graphs async] --output-json gpu_step.json

Each shape is a model with random weights. N requests of the same length decode. Figures are medians over the steps in
which all of them decode, from CUDA events on the compute stream: ``step_ms`` is the time from the end of one step to
the end of the next; ``gap_ms`` from the end of one until the inputs of the next are there and its first kernel may run;
``device_ms`` from then to its end, including pauses between the kernels of a step. ``read_ms`` is the time of a sum
over as many bytes as the step's weights and cache have (an embedding that is not also the head does not count),
measured after each batch; ``times_reading`` is the step's time divided by it. ``eager`` launches every kernel,
``graphs`` replays decode graphs, and ``async`` also plans and launches the next step meanwhile. Prefix caching is off,
sampling is greedy.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rustvllm import __version__
from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.core import EngineCore

GPT2_SMALL = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 8192, "vocab_size": 50257,
}  # fmt: skip
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = {"gpt2-small": GPT2_SMALL, "llama-3-8b": LLAMA_3_8B}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"async_scheduling": False},
    "async": {"async_scheduling": True},
}
NUM_WARMUPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request when decoding begins")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"gpu_step.py measures a CUDA device, and torch {torch.__version__} finds none here")
    longest = args.context + args.num_steps + NUM_WARMUPS + 16
    if longest > 8192:
        sys.exit(f"--context {args.context} and --num-steps {args.num_steps} need {longest} tokens; at most 8192 fit")
    report: dict[str, Any] = {
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "context": args.context,
        "steps": [],
    }
    for shape in args.shapes:
        for mode in args.modes:
            with engine(shape, mode, args.batch_sizes, longest) as core:
                for batch_size in args.batch_sizes:
                    figures = {"shape": shape, "mode": mode, "batch_size": batch_size}
                    figures |= measure(core, batch_size, args.context, args.num_steps)
                    report["steps"].append(figures)
                    print(
                        f"{shape:10} {mode:6} {batch_size:4} requests: step {figures['step_ms']:.3f} ms, "
                        f"{figures['times_reading']:.2f} x reading, gap {100 * figures['gap_share']:.1f} %"
                    )
    if args.output_json:
        args.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


@contextmanager
def engine(shape: str, mode: str, batch_sizes: list[int], longest: int) -> Iterator[EngineCore]:
    """An engine of one shape in one mode, with room for the largest batch."""
    largest = max(batch_sizes)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
        args = EngineArgs(
            model=folder, load_format="dummy", device="cuda", dtype="bfloat16", skip_tokenizer_init=True,
            enable_prefix_caching=False, max_num_seqs=largest, max_model_len=longest,
            max_num_batched_tokens=max(8192, largest), num_gpu_blocks_override=1 + largest * -(-longest // 16),
            **({} if mode == "eager" else {"cudagraph_capture_sizes": batch_sizes}), **MODES[mode],
        )  # fmt: skip
        core = EngineCore(args.create_engine_config("llm_class"))
    try:
        yield core
    finally:
        core.shutdown()


def measure(core: EngineCore, batch_size: int, context: int, num_steps: int) -> dict[str, float]:
    """Medians over the decode steps of one batch, in milliseconds."""
    runner = core.executor._runner  # noqa: SLF001 -- to time its launches
    batch = runner.input_batch
    steps: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = []
    execute, sample, begin_computing = runner.execute_model, runner.sample_tokens, batch.write_block_table

    def timed_execute(output: Any) -> None:
        is_whole = output.num_reqs == batch_size and output.max_num_scheduled_tokens == 1
        steps.append((is_whole, *(torch.cuda.Event(enable_timing=True) for _ in range(2))))
        execute(output)

    def timed_beginning() -> None:  # the first call of a step after its inputs have arrived
        steps[-1][1].record()
        begin_computing()

    def timed_sample(grammar_output: Any = None) -> Any:
        sampled = sample(grammar_output)
        steps[-1][2].record()
        return sampled

    runner.execute_model, runner.sample_tokens, batch.write_block_table = timed_execute, timed_sample, timed_beginning
    try:
        handle = core.handle
        for index in range(batch_size):
            prompt = [(7 * index + 3 * position) % 40000 + 5 for position in range(context)]
            handle.add_request(
                handle.new_key(), f"r{index}", prompt, max_tokens=num_steps + NUM_WARMUPS, temperature=0.0
            )
        while core.has_unfinished_requests():
            core.step()
            core.scheduler.take_outputs()
        torch.cuda.synchronize()
    finally:
        del runner.execute_model, runner.sample_tokens, batch.write_block_table
    pairs = [(one, two) for one, two in itertools.pairwise(steps) if one[0] and two[0]][NUM_WARMUPS:]
    if not pairs:
        sys.exit(f"no two steps in a row decoded all {batch_size} requests: raise --num-steps ({num_steps})")
    step = statistics.median(one[2].elapsed_time(two[2]) for one, two in pairs)
    gap = statistics.median(max(0.0, one[2].elapsed_time(two[1])) for one, two in pairs)
    device = statistics.median(two[1].elapsed_time(two[2]) for _, two in pairs)
    model = runner.model
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if model.lm_head is not None:
        weights -= model.embed_tokens.weight.nbytes
    spec = model.kv_cache_spec
    per_token = spec.bytes_per_block(1, runner.kv_caches[0].dtype)
    cache = batch_size * (context + NUM_WARMUPS + num_steps // 2) * per_token
    read = read_ms(weights + cache)
    return {
        "step_ms": step,
        "device_ms": device,
        "gap_ms": gap,
        "gap_share": gap / step,
        "weights_bytes": weights,
        "cache_bytes": cache,
        "read_ms": read,
        "times_reading": step / read,
    }


def read_ms(num_bytes: int, turns: int = 20) -> float:
    """The time of reading ``num_bytes`` bytes of device memory once, in milliseconds."""
    num_bytes = min(num_bytes, torch.cuda.mem_get_info()[0] // 2)
    buffer = torch.zeros(num_bytes // 4, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(turns):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        buffer.sum()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    main()
