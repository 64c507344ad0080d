"""Measures how much of a GPU's memory bandwidth decode attention reaches, compared with a copy on the device; JSON.

    python benches/python/kernel_bandwidth.py [--batch-sizes 1 32 256] [--contexts 512 2048 8192] [--kv-cache-dtype fp8]

A layer has ``--num-heads`` query heads over ``--num-kv-heads`` KV heads; the defaults are those of Llama 3 8B. The
bytes are the keys and values that a step must read once. So many layers run in turn that none finds its keys in the
GPU's own cache. Each case is captured in a CUDA graph and replayed, so that launches cost nothing; the median of
``--num-repeats`` replays counts. Without a GPU the script says so and ends with exit code 1.
"""

import argparse
import json
import statistics
import sys

import torch

MIN_BYTES = 1 << 30
"""The fewest bytes that one replay reads over all its layers: many times a GPU's own cache."""
BLOCK_SIZE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--num-repeats", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device, and there is nothing to measure", file=sys.stderr
        )
        return 1
    device = torch.device("cuda", 0)
    copy = copy_bandwidth(device, args.num_repeats)
    cases = []
    for batch_size in args.batch_sizes:
        for context in args.contexts:
            case = {"batch_size": batch_size, "context": context}
            try:
                case |= decode_bandwidth(args, batch_size, context, device)
            except torch.OutOfMemoryError:
                case["skipped"] = "its KV cache is larger than the free memory"
                torch.cuda.empty_cache()
            else:
                case["share_of_copy"] = round(case["gigabytes_per_s"] / copy, 3)
            cases.append(case)
    report = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "options": vars(args),
        "copy_gigabytes_per_s": round(copy, 1),
        "decode": cases,
    }
    print(json.dumps(report, indent=2))
    return 0


def copy_bandwidth(device: torch.device, num_repeats: int) -> float:
    """GB/s that a copy within the device's memory reads and writes."""
    source = torch.zeros(MIN_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * MIN_BYTES / 1e9 / seconds(lambda: target.copy_(source), num_repeats)


def decode_bandwidth(args: argparse.Namespace, batch_size: int, context: int, device: torch.device) -> dict[str, float]:
    """The time of one layer's decode, and the GB/s of keys and values that it reads."""
    from rustvllm.attention.metadata import KVCacheSpec
    from rustvllm.attention.static_batch import StaticDecodeBatch
    from rustvllm.attention.triton_backend import TritonAttentionBackend

    dtype = getattr(torch, args.dtype)
    spec = KVCacheSpec(1, args.num_kv_heads, args.head_dim)
    blocks_per_row = -(-context // BLOCK_SIZE)
    num_blocks = 1 + batch_size * blocks_per_row
    cache_dtype = torch.uint8 if args.kv_cache_dtype == "fp8" else dtype
    layer_bytes = 2 * batch_size * context * args.num_kv_heads * args.head_dim * cache_dtype.itemsize
    num_layers = max(1, -(-MIN_BYTES // layer_bytes))
    caches = [filled(spec.layer_shape(num_blocks, BLOCK_SIZE), cache_dtype, device) for _ in range(num_layers)]
    table = 1 + torch.randperm(batch_size * blocks_per_row, device=device).int().view(batch_size, blocks_per_row)
    seq_lens = torch.full((batch_size,), context, dtype=torch.int32, device=device)
    last = (context - 1) // BLOCK_SIZE
    slots = table[:, last] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    query = torch.randn(batch_size, args.num_heads, args.head_dim, device=device).to(dtype)
    key, value = torch.randn(2, batch_size, args.num_kv_heads, args.head_dim, device=device).to(dtype)
    backend = TritonAttentionBackend(spec, dtype, device, batch_invariant=args.batch_invariant)
    rows = backend.counting(batch_size)
    plan = backend.plan_static(StaticDecodeBatch(BLOCK_SIZE, table, rows, slots, seq_lens, max_seq_len=context))

    def run() -> None:
        for cache in caches:
            plan.forward(query, key, value, cache, args.head_dim**-0.5)

    run()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    per_layer = seconds(graph.replay, args.num_repeats) / num_layers
    return {"microseconds": round(per_layer * 1e6, 2), "gigabytes_per_s": round(layer_bytes / 1e9 / per_layer, 1)}


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers like those of a model: zeros would toggle fewer wires, and a cooler device clocks higher."""
    if dtype == torch.uint8:  # e4m3, finite
        return torch.randint(0, 0x70, shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def seconds(run, num_repeats: int) -> float:  # noqa: ANN001 -- any function that launches work
    """The median time of a run on the device."""
    times = []
    for _ in range(num_repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
