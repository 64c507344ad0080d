"""Ragged batches over a paged cache whose unwritten slots hold NaN; and how close kernels must come."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.kernels import reference

FP8_NAN = 0x7F

DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.float16, id="float16"),
    pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.gpu),
]
TOLERANCES = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 1.6e-2, "rtol": 1.6e-2},
}


@dataclass(frozen=True)
class Step:
    """A step: what a backend plans with, what a layer gives it, and the cache as it was before."""

    metadata: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor

    def expected(self, scale, **options):
        """What the reference gives, and the cache that it leaves."""
        cache = self.cache.clone()
        reference.kv_write(self.key, self.value, cache, self.metadata.slot_mapping)
        out = torch.zeros_like(self.query)
        if options.get("alibi_slopes"):
            options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], device=out.device)
        if options.get("sinks") is not None:
            options["sinks"] = options["sinks"].to(out.device)
        starts, lens = (torch.from_numpy(a) for a in (self.metadata.query_start_loc, self.metadata.seq_lens))
        reference.paged_attention(out, self.query, cache, self.metadata.block_table, starts, lens, scale, **options)
        return out, cache

    def copy(self):
        return replace(self, cache=self.cache.clone())


def make_step(requests, num_heads, num_kv_heads, head_dim, *, block_size, dtype, device, seed, fp8=False, padding=0):
    """A step of requests with so many tokens (computed, new)."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    seq_lens = np.array([computed + new for computed, new in requests], np.int32)
    starts = np.concatenate(([0], np.cumsum([new for _, new in requests]))).astype(np.int32)
    num_blocks = -(-seq_lens // block_size)
    blocks = rng.permutation(int(num_blocks.sum()) + 3) + 1  # scattered; block 0 is the null block
    table = np.full((len(requests), int(num_blocks.max()) + 2), 10**6, np.int32)  # what is stale must not be read
    shape = KVCacheSpec(1, num_kv_heads, head_dim).layer_shape(len(blocks) + 1, block_size)
    cache = torch.full(shape, FP8_NAN, dtype=torch.uint8) if fp8 else torch.full(shape, torch.nan, dtype=dtype)
    cache[:, 0] = 0
    slot_mapping, taken = [], 0
    for row, (computed, new) in enumerate(requests):
        table[row, : num_blocks[row]] = blocks[taken : taken + num_blocks[row]]
        taken += int(num_blocks[row])
        positions = np.arange(computed + new)
        slots = table[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        old = torch.randn(2, computed, num_kv_heads, head_dim, generator=generator).to(dtype)
        reference.kv_write(*old, cache, torch.from_numpy(slots[:computed]))
        slot_mapping += slots[computed:].tolist()
    slot_mapping += [-1] * padding
    num_tokens = int(starts[-1]) + padding
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)  # as models give them: not contiguous
    metadata = AttentionMetadata(
        block_size,
        torch.from_numpy(table).to(device),
        torch.tensor(slot_mapping, dtype=torch.int32, device=device),
        starts,
        seq_lens,
        has_padding=padding > 0,
    )
    return Step(metadata, query, key, value, cache.to(device))


class StaticMemory:
    """The memory of a captured step of so many tokens and requests, which steps are written into one after another.

    Its block table has more rows than requests and they lie apart, as those of a batch do.
    """

    ROWS = (7, 2, 0, 8, 3, 5)

    def __init__(self, num_tokens, num_reqs, device):
        self.num_tokens = num_tokens
        self.table = torch.zeros(9, 32, dtype=torch.int32, device=device)
        self.rows = torch.tensor(self.ROWS[:num_reqs], dtype=torch.int32, device=device)
        self.slots, self.starts, self.lens = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (num_tokens, num_reqs + 1, num_reqs)
        )

    def arrays(self):
        return self.table, self.rows, self.slots, self.starts, self.lens

    def write(self, step):
        n, length = len(step.metadata.seq_lens), step.query.shape[0]
        self.table.fill_(1 << 30)  # of a request that is not there; it must not be looked at
        self.table[self.rows[:n].long(), : step.metadata.block_table.shape[1]] = step.metadata.block_table
        self.slots.fill_(-1)
        self.slots[:length] = step.metadata.slot_mapping
        self.starts.fill_(length)
        self.starts[: n + 1] = torch.from_numpy(step.metadata.query_start_loc)
        self.lens.zero_()
        self.lens[:n] = torch.from_numpy(step.metadata.seq_lens)

    def check(self, plan, step, scale):
        """That attention by ``plan`` is the reference's, of the step that was written last."""
        length = step.query.shape[0]
        expected, expected_cache = step.expected(scale)
        cache = step.cache.clone()
        rest = self.num_tokens - length
        padded = [torch.cat((x, x.new_zeros(rest, *x.shape[1:]))) for x in (step.query, step.key, step.value)]
        out = plan.forward(*padded, cache, scale)
        torch.testing.assert_close(out[:length], expected, **TOLERANCES[out.dtype])
        torch.testing.assert_close(cache, expected_cache, atol=0, rtol=0, equal_nan=True)
