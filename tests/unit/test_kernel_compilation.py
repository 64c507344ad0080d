"""Every kernel, as it would be launched, compiles for GPUs that are not here, within the shared memory that they have.

The functions that launch are called with tensors on the CPU; what they would launch is caught and compiled by Triton's
own compiler and assembler, which need no device. What the machine code computes, only a GPU shows.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not made for this platform", allow_module_level=True)
sys.path.append(str(Path(__file__).parents[2] / "benches" / "python"))

from gpu_kernel_code import (
    CASES,
    Launches,
    costs,
    launch_adapters,
    launch_attention,
    launch_draft_attention,
    launch_quantized,
    launch_rotary_write,
)

from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.kernels import (
    activation,
    draw,
    known_ids,
    lora,
    matmul,
    norm,
    penalties,
    rotary,
    tile_list,
    truncation,
    verify,
)
from rustvllm.kernels.quantized_matmul import QuantizedWeight, quantized_linear

SHARED_BYTES = {90: 227 << 10, 80: 99 << 10}
"""Of Hopper; and the least that any GPU has that untuned sizes are for."""


@pytest.fixture(params=[90, 80])
def launches(request, monkeypatch, repository):
    """What would be launched on a GPU of this compute capability.

    Triton keeps what it compiles by the kernel's source, its options, and the versions of itself and of the assembler,
    so that only kernels that are new or have changed are compiled again.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(repository / "target" / "triton"))
    caught = Launches(request.param)
    with caught.catching():
        yield caught


def check(launches, *, at_least):
    compiled = launches.compiled()
    assert len(compiled) >= at_least
    for kernel in compiled:
        assert kernel.metadata.shared <= SHARED_BYTES[launches.target.arch], kernel.metadata
        assert kernel.asm["cubin"]
    return compiled


@pytest.mark.parametrize(("head_dim", "dtype", "fp8"), [(128, torch.bfloat16, False), (64, torch.float16, True)])
def test_attention(launches, head_dim, dtype, fp8):
    options = {"sliding_window": 100, "soft_cap": 30.0, "alibi_slopes": [0.5] * 8, "sinks": torch.ones(8)}
    options = options if fp8 else {}
    launch_attention(head_dim, dtype, fp8=fp8, **options)
    _, prompts, decodes = check(launches, at_least=3)  # written, prompts, decodes with their parts put together
    if launches.target.arch == 90:
        assert "wgmma" in prompts.asm["ptx"], "Hopper's matrix instructions lie idle"
    assert "mma.sync" in decodes.asm["ptx"]


@pytest.mark.parametrize("width", [2, 8, 17])
def test_attention_of_steps_with_drafts(launches, width):
    launch_draft_attention(128, torch.bfloat16, width)
    _, rows = check(launches, at_least=2)  # written, and one kernel for all requests
    assert "mma" in rows.asm["ptx"]


def test_steps_with_any_drafts_are_verified_by_the_same_code(launches):
    for num_reqs, width, offset in ((1, 5, 0), (3, 8, 1), (64, 6, 3)):
        ids = torch.zeros((2, num_reqs * width + 4), dtype=torch.int32)[:, offset:]
        starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
        verify.verify(*ids, starts, width, ids, ids[0], which=starts, rows=starts)
    assert launches.variants() == {"_verify_kernel": 1}


def test_steps_of_all_sizes_run_the_same_code(launches):
    """What is compiled for the first steps serves all others: no later step waits for a compiler."""
    backend = TritonAttentionBackend(KVCacheSpec(1, 2, 64), torch.float16, torch.device("cpu"))
    cache = torch.zeros(2, 8, 16, 2, 64, dtype=torch.float16)
    for num_prompts, num_decodes, longest, width in [(0, 1, 5, 1), (1, 0, 5, 16), (1, 2, 5000, 33), (3, 70, 90, 64)]:
        query_lens = np.array([5] * num_prompts + [1] * num_decodes, np.int32)
        starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        seq_lens = np.full(query_lens.size, longest, np.int32)
        table = torch.zeros(query_lens.size, width, dtype=torch.int32)
        slots = torch.zeros(int(starts[-1]) + 1, dtype=torch.int32)[1:]
        qkv = torch.zeros(int(starts[-1]), 12, 64, dtype=torch.float16)
        plan = backend.plan(AttentionMetadata(16, table, slots, starts, seq_lens))
        plan.forward(*qkv.split([8, 2, 2], 1), cache, 0.1)
    # Prompts and decodes have sizes of their own.
    assert launches.variants() == {"_kv_write_kernel": 1, "_attention_kernel": 2}


@pytest.mark.parametrize("fp8", [False, True])
def test_what_comes_before_attention(launches, fp8):
    launch_rotary_write(128, norms=True, fp8=fp8)
    check(launches, at_least=1)


@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, False), (torch.float32, True)])
def test_adapters(launches, dtype, has_bias):
    launch_adapters(dtype, has_bias=has_bias)
    for code in check(launches, at_least=2):
        assert dtype == torch.float32 or "mma.sync" in code.asm["ptx"]


def test_steps_with_any_adapters_run_the_same_code(launches):
    table = torch.zeros(9, 3, lora.LAYER_COLUMNS + lora.PART_COLUMNS, dtype=torch.int64)
    for runs in ([1], [16, 1, 3], [40, 64]):
        rows, tiles = lora.make_tiles([(n, np.arange(count, dtype=np.int32)) for n, count in enumerate(runs)])
        staged = torch.zeros(rows.size + 1, dtype=torch.int32)[1:], torch.zeros(tiles.size + 1, dtype=torch.int32)[1:]
        x, out = torch.zeros(sum(runs), 512, dtype=torch.float16), torch.zeros(sum(runs), 96, dtype=torch.float16)
        of_step = lora.AdapterTiles(staged[0], staged[1].view(tiles.shape))
        for slots, ranks in ((1, 1), (4, 16), (9, 33)):
            lora.add_adapters(x, out, None, of_step, table[:slots, ranks % 3], num_ranks=ranks, num_outputs=96)
    assert launches.variants() == {"_shrink_kernel": 1, "_expand_kernel": 1}


@pytest.mark.parametrize(
    ("dtype", "bits", "zeros", "group_size"),
    [(torch.bfloat16, 4, "point", 128), (torch.float16, 8, "middle", 32), (torch.float32, 4, "minimum", 32)],
)
def test_quantised_weights(launches, dtype, bits, zeros, group_size):
    launch_quantized(dtype, bits, zeros, group_size)
    codes = check(launches, at_least=6)
    products = [code for code in codes if "dot" in code.asm["ttir"]]
    assert len(products) >= 4
    assert all(dtype == torch.float32 or "mma" in code.asm["ptx"] for code in products)


def test_any_number_of_rows_runs_code_that_is_there_already(launches):
    """One for few rows, one for many, whatever is added; with and without splits."""
    weight = QuantizedWeight(torch.zeros((64, 1024), dtype=torch.uint8), torch.zeros(64, 64), None, 2048, 32)
    x = torch.zeros(257, 2048, dtype=torch.float16)
    for rows in (1, 2, 16, 17, 64, 100, 256):
        quantized_linear(x[:rows], weight)
    assert launches.variants() == {"_quantized_kernel": 2, "_sum_kernel": 1}


def test_everything_else(launches):
    x = torch.zeros(4, 512, dtype=torch.bfloat16)
    weight = x[0]
    norm.add_rms_norm(x, x, weight, 1e-5)
    norm.layer_norm(x, weight, weight, 1e-5)
    rotary.rotary(x.view(4, 8, 64), x[:, :16], x[:, :16], interleaved=True)
    activation.silu_and_mul(x)
    activation.gelu_and_mul(x)
    matmul.linear(x, torch.zeros(4096, 512, dtype=torch.bfloat16), None)
    logits, ids = torch.zeros(4, 32000), torch.zeros(4, dtype=torch.int64)
    ones = torch.ones(4)
    counts = torch.zeros(4, 32000, dtype=torch.int32)
    penalties.apply_penalties(logits, ids, ids, ones, ones, ones, counts, counts > 0)
    truncation.apply_top_k_top_p(logits, ids, ones)
    draw.draw(logits, ids, ids)
    draw.counter_uniform(ids, ids)
    draw.argmax(x)
    known_ids.known_ids(*torch.zeros((3, 4), dtype=torch.int32))
    inputs = torch.zeros((5, 16), dtype=torch.int32)
    draw.choose(x, draw.StaticDraws(ones, inputs[:2], inputs[2], inputs[3], inputs[4], inputs, None, inputs[1]))
    starts, tiles = torch.tensor([0, 4, 4], dtype=torch.int32), torch.zeros((2, 3), dtype=torch.int32)
    tile_list.list_tiles(*tiles, starts, 4, skip_decodes=True)
    tile_list.list_decodes(*tiles[:, :2], starts)
    verify.verify(*tiles, starts, 4, tiles, tiles[0], which=starts, rows=starts)
    verify.verify(*tiles, starts, 4, tiles, tiles[0])
    check(launches, at_least=17)


@pytest.mark.slow
@pytest.mark.timeout(600)  # it compiles every kernel: 51 s alone, 107 to 120 next to two others on two cores
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_kernel_spills(capability, monkeypatch, tmp_path):
    """What a kernel keeps in memory because it has too few registers, it waits for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = costs(capability, CASES)
    assert len(rows) > 20
    assert [row for row in rows if row["spilled"]] == []
    assert all(0 < row["registers"] <= 255 for row in rows)
    limit = SHARED_BYTES.get(capability, SHARED_BYTES[80])
    assert [row for row in rows if row["shared"] > limit] == []
