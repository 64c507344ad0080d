"""Caches of more than 2^31 numbers, as a GPU with much memory has them: no place in one is counted in 32 bits.

On the CPU such a cache takes memory only where it is touched.
"""

import numpy as np
import pytest
import torch

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.kernels.rotary_write import rotary_write
from rustvllm.worker.block_copier import zeros_on_host

BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 2, 16
NUM_BLOCKS = 2**31 // (BLOCK_SIZE * KV_HEADS * HEAD_DIM) + 8


@pytest.fixture(scope="module")
def large(device):
    """Eight-bit numbers, of which both halves, keys and values, have more than 32 bits count with a sign."""
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    if device.type == "cpu":
        return zeros_on_host(shape, torch.uint8)
    if torch.cuda.mem_get_info(device)[0] < 2 * NUM_BLOCKS * BLOCK_SIZE * KV_HEADS * HEAD_DIM:
        pytest.skip("the GPU has less free memory than the cache takes")
    return torch.zeros(shape, dtype=torch.uint8, device=device)


@pytest.fixture
def small(device):
    return torch.zeros((2, 40, BLOCK_SIZE, KV_HEADS, HEAD_DIM), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("length", [3, 530])  # the second is read in parts
def test_attention_over_the_last_blocks(device, large, small, length):
    num_new, num_used = min(length, 3), -(-length // BLOCK_SIZE)
    first = NUM_BLOCKS - num_used
    generator = torch.Generator().manual_seed(length)
    old = torch.randint(0, 0x70, (2, num_used, *small.shape[2:]), generator=generator, dtype=torch.uint8)
    qkv = torch.randn(3, 8, HEAD_DIM, generator=generator).to(device)
    backend = TritonAttentionBackend(KVCacheSpec(1, KV_HEADS, HEAD_DIM), torch.float32, device)
    outs = []
    for cache, block in ((large, first), (small, 1)):
        cache[:, block : block + num_used] = old.to(device)
        table = torch.arange(block, block + num_used, dtype=torch.int32, device=device)[None]
        slots = torch.arange(length - num_new, length, dtype=torch.int32, device=device) + block * BLOCK_SIZE
        starts = np.arange(num_new + 1, dtype=np.int32) if length > 3 else np.array([0, num_new], np.int32)
        # Three decodes of one sequence, or its prompt.
        lens = np.arange(length - num_new + 1, length + 1, dtype=np.int32) if length > 3 else np.array([3], np.int32)
        step = AttentionMetadata(BLOCK_SIZE, table.expand(lens.size, -1).contiguous(), slots, starts, lens)
        outs.append(backend.plan(step).forward(*qkv.split([4, 2, 2], 1), cache, 0.25))
    assert first * BLOCK_SIZE * KV_HEADS * HEAD_DIM > 2**31 - 2**20
    assert torch.equal(*outs)
    assert outs[0].abs().sum() > 1
    assert torch.equal(large[:, first:], small[:, 1 : 1 + num_used])


def test_turned_heads_come_to_the_last_block(device, large, small):
    qkv, table = torch.randn(3, 8, HEAD_DIM, device=device), torch.randn(8, HEAD_DIM, device=device)
    positions, slots = (torch.arange(3, dtype=torch.int32, device=device) for _ in range(2))
    last = NUM_BLOCKS - 1
    large[:, last] = 0
    rotary_write(qkv, 4, positions, table, large, slots + last * BLOCK_SIZE)
    rotary_write(qkv, 4, positions, table, small, slots + BLOCK_SIZE)
    assert torch.equal(large[:, last], small[:, 1])
    assert torch.count_nonzero(small[:, 1]) > 0
