"""What a step of the engine costs on the host: ``EngineCore.step`` over a model so small that little else is left.

    python benches/python/step_cost.py [--batch-sizes 1 16 64 256] [--sampling greedy random] [--profile]

A llama of one layer, 64 wide, with random weights decodes N sequences at once; percentiles of the processor time of a
step, schedule and update included (torch computes with one thread here, the one that is measured). The fastest tenth
says most of the program, the rest of what else the machine does. ``--profile`` shows instead where the time of each
batch goes.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path

from rustvllm.engine.core import EngineCore
from rustvllm.engine_args import EngineArgs

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "vocab_size": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
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
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        engine_args = EngineArgs(
            model=folder, load_format="dummy", device="cpu", skip_tokenizer_init=True, max_num_seqs=256,
            num_gpu_blocks_override=256 * (args.prompt_len + args.num_steps + 64) // 16,
            max_model_len=args.prompt_len + args.num_steps + 64,
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
