"""Measures the attention of a whole step with each CPU backend in turn; nothing else of the model runs.

    python benches/python/attention_cost.py [--num-threads 1] [--dtype float32 bfloat16] [--num-rounds 12]

There are twelve layers of twelve heads of 64 features (GPT-2 small), each with its own cache, whose blocks lie in
random order. The report has the lowest wall time and the lowest processor time of the rounds, in milliseconds. The last
line is the speed at which memory is read.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from rustvllm.attention.backend import AttentionBackend
from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.selector import make_attention_backend

SPEC = KVCacheSpec(num_layers=12, num_kv_heads=12, head_dim=64)
BLOCK_SIZE = 16
STEPS = [(32, 256, 1), (1, 1024, 1), (256, 64, 1), (1, 128, 128), (1, 512, 512)]
"""Requests, tokens of each, and how many of these are new."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--num-rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    for dtype in args.dtype:
        for num_reqs, seq_len, num_new in STEPS:
            measure(num_reqs, seq_len, num_new, getattr(torch, dtype), args.num_threads, args.num_rounds)
    numbers = torch.ones(64 << 20)
    seconds = min(timed(numbers.sum)[0] for _ in range(5)) / 1e3
    print(f"reading memory: {numbers.nbytes / 1e9 / seconds:.1f} GB/s")


def measure(num_reqs: int, seq_len: int, num_new: int, dtype: torch.dtype, num_threads: int, num_rounds: int) -> None:
    """Print a line per backend; backends alternate."""
    columns = -(-seq_len // BLOCK_SIZE)
    num_blocks = num_reqs * columns + 1
    caches = [torch.randn(SPEC.layer_shape(num_blocks, BLOCK_SIZE)).to(dtype) for _ in range(SPEC.num_layers)]
    blocks = np.random.default_rng(0).permutation(num_blocks - 1) + 1
    table = blocks.reshape(num_reqs, columns).astype(np.int32)
    positions = np.arange(seq_len - num_new, seq_len)
    slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    metadata = AttentionMetadata(
        block_size=BLOCK_SIZE,
        block_table=torch.from_numpy(table),
        slot_mapping=torch.from_numpy(slots.reshape(-1).astype(np.int32)),
        query_start_loc=(np.arange(num_reqs + 1) * num_new).astype(np.int32),
        seq_lens=np.full(num_reqs, seq_len, np.int32),
    )
    query, key, value = torch.randn(num_reqs * num_new, 3, SPEC.num_kv_heads, SPEC.head_dim).to(dtype).unbind(1)
    backends = [
        make_attention_backend(name, SPEC, dtype, torch.device("cpu"), num_threads) for name in ("torch", "cpu")
    ]

    def step(backend: AttentionBackend) -> None:
        plan = backend.plan(metadata)
        for cache in caches:
            plan.forward(query, key, value, cache, 0.125)

    times = {backend.name: [] for backend in backends}
    with torch.inference_mode():
        for _ in range(num_rounds):
            for backend in backends:
                times[backend.name].append(timed(lambda backend=backend: step(backend)))
    for name, taken in times.items():
        wall, processor = (min(column) for column in zip(*taken, strict=True))
        print(
            f"{num_reqs:3} x {seq_len:4} tokens, {num_new:3} new, {str(dtype)[6:]:8} {name:5}: "
            f"{wall:7.2f} ms, processor {processor:7.2f} ms"
        )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of wall time and of processor time that the work takes."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3


if __name__ == "__main__":
    main()
