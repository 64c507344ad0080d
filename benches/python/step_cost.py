"""Measures what a step of the engine costs on the host: ``EngineCore.step`` over a model with next to no computation.

    python benches/python/step_cost.py [--batch-sizes 1 16 64 256] [--sampling greedy random] [--shape tiny gpt2-small]
        [--attention-backend auto torch cpu] [--profile]

A Llama with one layer, 64 wide, with random weights decodes N sequences at once. The report has percentiles of the
processor time of a step, including schedule and update (torch computes with one thread, which is the measured one). The
fastest tenth depends mostly on the program, the rest on other work of the machine. ``--profile`` shows instead where
the time of each batch goes. ``gpt2-small`` is a model of that shape, in which attention and products of the weights
count; set OMP_NUM_THREADS=1 for it, because only one thread is measured.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path

from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.core import EngineCore

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "vocab_size": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2_SMALL = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 4096, "vocab_size": 50257,
}  # fmt: skip
SHAPES = {"tiny": MODEL, "gpt2-small": GPT2_SMALL}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
}
NUM_WARMUPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=["greedy", "random"])
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--attention-backend", choices=["auto", "torch", "cpu"], default="auto")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    max_model_len = args.prompt_len + args.num_steps + 64
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]), encoding="utf-8")
        engine_args = EngineArgs(
            model=folder, load_format="dummy", device="cpu", attention_backend=args.attention_backend,
            skip_tokenizer_init=True, max_num_seqs=max(args.batch_sizes), max_model_len=max_model_len,
            num_gpu_blocks_override=1 + max(args.batch_sizes) * -(-max_model_len // 16),
        )  # fmt: skip
        core = EngineCore(engine_args.create_engine_config("llm_class"))
    for sampling in args.sampling:
        for batch_size in args.batch_sizes:
            times, prefill = run(core, batch_size, args.prompt_len, args.num_steps, SAMPLING[sampling], args.profile)
            fast, slow = times[len(times) // 10], times[int(len(times) * 0.99)]
            print(
                f"{sampling:7} {batch_size:4} rows: p10 {fast:6.0f}, median {statistics.median(times):6.0f}, "
                f"p99 {slow:6.0f} µs; "
                f"{batch_size * 1e6 / statistics.median(times):8.0f} tokens/s; prefill {prefill:.0f} µs"
            )
    core.shutdown()


def run(
    core: EngineCore, batch_size: int, prompt_len: int, num_steps: int, params: dict[str, float], profile: bool
) -> tuple[list[float], float]:
    """Sorted µs of the decode steps, and µs of the step that computes the prompts."""
    handle = core.handle
    for index in range(batch_size):
        prompt = [(7 * index + 3 * position) % 4000 + 5 for position in range(prompt_len)]
        handle.add_request(
            handle.new_key(), f"r{index}", prompt, max_tokens=num_steps + NUM_WARMUPS, seed=index, **params
        )
    begin = time.thread_time()
    core.step()
    prefill = (time.thread_time() - begin) * 1e6
    times = []
    profiler = cProfile.Profile()
    while core.has_unfinished_requests():
        if profile and len(times) == NUM_WARMUPS:
            profiler.enable()
        begin = time.thread_time()
        core.step()
        times.append((time.thread_time() - begin) * 1e6)
        core.scheduler.take_outputs()
    profiler.disable()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return sorted(times[NUM_WARMUPS:]), prefill


if __name__ == "__main__":
    main()
