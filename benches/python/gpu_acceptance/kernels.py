"""Checks every kernel against its reference: attention, what comes before it, layers, the sampler's with a real
vocabulary.
"""

from typing import Any

import numpy as np
import torch

from gpu_acceptance.finding import DEVICE, DRY, Finding, replayed, synchronize
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.attention.static_batch import StaticDecodeBatch
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.kernels import (
    activation,
    draw,
    matmul,
    norm,
    penalties,
    quantized_matmul,
    reference,
    rotary,
    truncation,
    verify,
)
from rustvllm.sample.random import counter_uniform

MIXED = [(0, 700), (1500, 1), (3000, 33), (40, 1), (0, 1), (900, 1)]
DECODES = [(20000, 1), (7, 1), (511, 1), (0, 1)]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# requests as (computed, new) tokens, heads, KV heads, features, dtype, block size, 8-bit cache, options
ATTENTION = {
    "heads of 128": (MIXED, 32, 8, 128, BF16, 16, False, {}),
    "long decodes in parts": (DECODES, 32, 8, 128, BF16, 16, False, {}),
    "eight-bit cache": (MIXED, 32, 8, 128, BF16, 16, True, {}),
    "seven heads share one": (MIXED, 14, 2, 64, BF16, 16, False, {}),
    "heads of their own": (MIXED, 12, 12, 64, FP16, 16, False, {}),
    "float32": ([(0, 130), (700, 1), (50, 9)], 4, 2, 64, FP32, 16, False, {}),
    "a window": (MIXED, 16, 8, 128, BF16, 16, False, {"sliding_window": 256}),
    "a window and a cap": (MIXED, 8, 4, 256, BF16, 16, False, {"sliding_window": 512, "soft_cap": 50.0}),
    "slopes": (MIXED, 8, 8, 128, BF16, 16, False, {"alibi_slopes": [2.0**-i for i in range(8)]}),
    "blocks of three": ([(0, 90), (200, 1), (30, 5)], 3, 3, 80, FP16, 3, False, {}),
    "float32, heads of 256": ([(0, 40), (100, 1)], 4, 2, 256, FP32, 16, False, {}),
    "batch-invariant": (MIXED, 32, 8, 128, BF16, 16, False, {"batch_invariant": True}),
}
DRY_ATTENTION = {
    "float32": ([(0, 7), (20, 1)], 4, 2, 16, FP32, 4, False, {}),
    "eight-bit cache, a window": ([(0, 7), (20, 1)], 2, 1, 16, FP16, 4, True, {"sliding_window": 9, "soft_cap": 5.0}),
}
LIMITS = {FP32: 1e-4, FP16: 3e-3, BF16: 1.2e-2}
"""Limits of the norm of the difference over the norm of the expected values."""


def kernels(found: Finding) -> None:
    """Check all kernels."""
    for seed, (name, case) in enumerate((DRY_ATTENTION if DRY else ATTENTION).items()):
        found.attempt(f"attention: {name}", attention, name, seed, *case)
    found.attempt("a captured plan", captured_plan)
    if not DRY:
        found.attempt("a cache beyond 2^31 numbers", large_cache)
    for dtype in (FP32,) if DRY else (BF16, FP16, FP32):
        found.attempt(f"layers in {dtype}", layers, dtype)
        found.attempt(f"norms, turns and writes in {dtype}", turned_and_written, dtype)
        found.attempt(f"quantised weights in {dtype}", quantised, dtype)
    found.attempt("truncation", truncated)
    found.attempt("draws", draws)
    found.attempt("penalties", penalised)
    found.attempt("drafts that are kept", verified)


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative distance of two tensors; infinite if one contains NaN."""
    if not bool(out.isfinite().all()):
        return float("inf")
    return float((out.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def attention(found: Finding, name: str, seed: int, *case: Any) -> None:
    from ragged import make_step

    requests, heads, kv_heads, head_dim, dtype, block_size, fp8, given = case
    options = dict(given)
    invariant = options.pop("batch_invariant", False)
    step = make_step(
        requests, heads, kv_heads, head_dim, block_size=block_size, dtype=dtype, device=DEVICE, seed=seed, fp8=fp8
    )
    scale = head_dim**-0.5
    expected, expected_cache = step.expected(scale, **options)
    backend = TritonAttentionBackend(KVCacheSpec(1, kv_heads, head_dim), dtype, DEVICE, batch_invariant=invariant)
    out = backend.plan(step.metadata).forward(step.query, step.key, step.value, step.cache, scale, **options)
    error = distance(out, expected)
    kept = torch.equal(step.cache.view(torch.uint8), expected_cache.view(torch.uint8))
    limit = LIMITS[dtype] * (2 if fp8 else 1)
    found.check(f"attention: {name}", error <= limit and kept, error=error, cache_is_right=kept)


QUANTISED = ((4, "point", 128), (4, "middle", 32), (4, "minimum", 32), (8, "middle", 32), (8, "minimum", 16))
"""Bits, kind of zeros, group size: AWQ, Q4_0, Q4_K, Q8_0, and Q6_K in a layer with others."""


def quantised(found: Finding, dtype: torch.dtype) -> None:
    """Check products with weights of 4 and 8 bits, for few rows, which are split, and many; and the unpacked weight."""
    shape = (48, 256) if DRY else (4096, 4096)
    generator = torch.Generator().manual_seed(11)
    for bits, zeros, group in QUANTISED:
        numbers = torch.randint(0, 16, shape, generator=generator)
        stored = quantized_matmul.pack_nibbles(numbers.to(torch.uint8)) if bits == 4 else (16 * numbers - 128).char()
        scales, minima = torch.rand((2, shape[1] // group, shape[0]), generator=generator).half()
        offsets = {"middle": None, "point": (16 * minima).byte(), "minimum": minima}[zeros]
        weight = quantized_matmul.QuantizedWeight(
            stored.to(DEVICE), scales.to(DEVICE), None if offsets is None else offsets.to(DEVICE), shape[1], group
        )
        worst = distance(quantized_matmul.unpack(weight, FP32), reference.unpack(weight)) / LIMITS[FP32]
        for rows in (1, 5, 40) if DRY else (1, 16, 100, 256):
            x = torch.randn((rows, shape[1]), generator=generator).to(dtype).to(DEVICE)
            residual = torch.randn((rows, shape[0]), generator=generator).to(dtype).to(DEVICE)
            for invariant in (False, True):
                out = quantized_matmul.quantized_linear(x, weight, None, residual, is_invariant=invariant)
                expected = reference.quantized_linear(x, weight, None, residual)
                worst = max(worst, distance(out, expected) / LIMITS[dtype])
        name = f"quantised weights in {dtype}: {bits} bits, {zeros}, groups of {group}"
        found.check(name, worst <= 1, error_over_limit=worst)


def captured_plan(found: Finding) -> None:
    """Check one plan over fixed memory, replayed for batches of other lengths, with padding rows."""
    from ragged import make_step

    rows, heads, kv_heads, head_dim, dtype = (3, 2, 1, 16, FP32) if DRY else (8, 32, 8, 128, BF16)
    batches = [[(900, 1), (30, 1), (0, 1)], [(2000, 1)] * rows, [(5, 1), (1023, 1), (64, 1), (15, 1), (16, 1)]]
    if DRY:
        batches = [[(9, 1), (3, 1)], [(20, 1)] * rows]
    steps = [
        make_step(batch, heads, kv_heads, head_dim, block_size=16, dtype=dtype, device=DEVICE, seed=70 + index)
        for index, batch in enumerate(batches)
    ]
    num_blocks = max(step.cache.shape[1] for step in steps)
    width = max(step.metadata.block_table.shape[1] for step in steps)
    cache = torch.zeros((2, num_blocks, 16, kv_heads, head_dim), dtype=dtype, device=DEVICE)
    table = torch.zeros((rows, width), dtype=torch.int32, device=DEVICE)
    slots = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    lengths = torch.ones(rows, dtype=torch.int32, device=DEVICE)
    query = torch.zeros((rows, heads, head_dim), dtype=dtype, device=DEVICE)
    key, value = torch.zeros((2, rows, kv_heads, head_dim), dtype=dtype, device=DEVICE)
    backend = TritonAttentionBackend(KVCacheSpec(1, kv_heads, head_dim), dtype, DEVICE)
    plan = backend.plan_static(StaticDecodeBatch(16, table, backend.counting(rows), slots, lengths, 4096))
    outs: list[torch.Tensor] = []
    replay = replayed(lambda: outs.append(plan.forward(query, key, value, cache, head_dim**-0.5)))
    worst, harmless = 0.0, True
    for step in steps:
        expected, _ = step.expected(head_dim**-0.5)
        count = step.metadata.seq_lens.size
        cache.fill_(torch.nan)
        cache[:, : step.cache.shape[1]] = step.cache
        cache[:, 0] = 0
        table.zero_()
        table[:count, : step.metadata.block_table.shape[1]] = step.metadata.block_table
        slots.fill_(-1)
        slots[:count] = step.metadata.slot_mapping
        lengths.fill_(1)
        lengths[:count] = torch.from_numpy(step.metadata.seq_lens).to(DEVICE)
        for static, given in ((query, step.query), (key, step.key), (value, step.value)):
            static.zero_()
            static[:count] = given
        replay()
        synchronize()
        worst = max(worst, distance(outs[-1][:count], expected))
        harmless = harmless and bool(outs[-1].isfinite().all()) and not bool(cache[:, 0].any())
    found.check("a captured plan", worst <= LIMITS[dtype] and harmless, error=worst, padding_is_harmless=harmless)


def large_cache(found: Finding) -> None:
    """Check the last blocks of a cache with more numbers than 32 bits can count."""
    from ragged import make_step

    step = make_step([(0, 200), (300, 1), (128, 40)], 16, 8, 128, block_size=16, dtype=BF16, device=DEVICE, seed=5)
    own = step.cache.shape[1]
    num_blocks = 2**31 // (16 * 8 * 128) + own + 100
    if torch.cuda.mem_get_info()[0] < 5 * num_blocks * 16 * 8 * 128:
        found.check("a cache beyond 2^31 numbers", True, skipped="too little free memory")
        return
    expected, _ = step.expected(128**-0.5)
    cache = torch.empty((2, num_blocks, 16, 8, 128), dtype=BF16, device=DEVICE)
    cache[:, -own:] = step.cache
    shift = num_blocks - own
    metadata = step.metadata
    metadata.block_table.copy_(torch.where(metadata.block_table < own, metadata.block_table + shift, 0))
    metadata.slot_mapping.add_(shift * 16)
    backend = TritonAttentionBackend(KVCacheSpec(1, 8, 128), BF16, DEVICE)
    out = backend.plan(metadata).forward(step.query, step.key, step.value, cache, 128**-0.5)
    error = distance(out, expected)
    found.check("a cache beyond 2^31 numbers", error <= LIMITS[BF16], error=error, numbers=cache.numel())


def layers(found: Finding, dtype: torch.dtype) -> None:
    """Check norms, activations, rotary positions, and products whose rows have the same bits in any batch."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    errors = []
    for size in (64,) if DRY else (1024, 2304, 4096):
        for rows in (1, 5 if DRY else 300):
            x, residual, weight, bias = random(rows, size), random(rows, size), random(size), random(size)
            pair = random(rows, 2 * size)
            both, total = norm.add_rms_norm(x, residual, weight, 1e-6)
            errors += [
                distance(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6)),
                distance(total, x.double() + residual.double()),
                distance(both, reference.rms_norm(total.double(), weight.double(), 1e-6)),
                distance(norm.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x.double(), weight, bias, 1e-5)),
                distance(activation.silu_and_mul(pair), reference.silu_and_mul(pair.double())),
                distance(activation.gelu_and_mul(pair), reference.gelu_and_mul(pair.double())),
            ]
    head_dim = 16 if DRY else 128
    for num_pairs in (head_dim // 2, head_dim // 4):
        x, angles = random(7, 12, head_dim)[:, 1:-1], 3 * torch.randn(7, num_pairs, device=DEVICE)
        for interleaved in (False, True):
            given = (angles.cos().to(dtype), angles.sin().to(dtype))
            expected = reference.rotary(x.double(), *given, interleaved=interleaved)
            errors.append(distance(rotary.rotary(x, *given, interleaved=interleaved), expected))
    outputs, inputs, rows = (40, 80, 40) if DRY else (3072, 1024, 300)
    weight, x = random(outputs, inputs) * inputs**-0.5, random(rows, inputs)
    together = matmul.linear(x, weight)
    errors.append(distance(together, reference.linear(x.double(), weight.double())))
    alike = all(torch.equal(matmul.linear(x[:count], weight), together[:count]) for count in (1, 2, 17, 33))
    found.check(f"layers in {dtype}", max(errors) <= LIMITS[dtype] and alike, error=max(errors), rows_alike=alike)


def turned_and_written(found: Finding, dtype: torch.dtype) -> None:
    """Check the kernel between projection and attention, with and without head norms, for both kinds of cache."""
    from rustvllm.kernels.rotary_write import rotary_write

    heads, kv_heads, head_dim, tokens = (4, 2, 16, 5) if DRY else (32, 8, 128, 300)
    worst, kept = 0.0, True
    for fp8 in (False, True):
        for has_norms in (False, True):
            qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=DEVICE).to(dtype)
            table = torch.randn(500, head_dim, device=DEVICE).to(dtype)
            positions = torch.randint(0, 500, (tokens,), dtype=torch.int32, device=DEVICE)
            slots = torch.randperm(tokens + 3, device=DEVICE)[:tokens].int() - 1
            shape = (2, tokens + 2, 1, kv_heads, head_dim)
            caches = [torch.zeros(shape, dtype=torch.uint8 if fp8 else dtype, device=DEVICE) for _ in range(2)]
            weights = tuple(torch.randn(2, head_dim, device=DEVICE).to(dtype)) if has_norms else None
            given = (qkv, heads, positions, table)
            options = {"norm_weights": weights, "eps": 1e-6}
            out = rotary_write(*given, caches[0], slots, **options)
            worst = max(worst, distance(out, reference.rotary_write(*given, caches[1], slots, **options)))
            kept = kept and float((caches[0].float() - caches[1].float()).abs().max()) <= (8 if fp8 else 0.1)
    found.check(
        f"norms, turns and writes in {dtype}", worst <= LIMITS[dtype] and kept, error=worst, cache_is_right=kept
    )


def vocabulary() -> int:
    return 700 if DRY else 151936


def truncated(found: Finding) -> None:
    rows, vocab = 3 if DRY else 6, vocabulary()
    logits = 3 * torch.randn(rows, vocab, device=DEVICE)
    logits[0, ::3] = -torch.inf
    most = 0
    for top_k, top_p in ((20, 1.0), (0, 0.9), (50, 0.8), (0, 0.999), (1, 1.0), (vocab, 0.5)):
        k = torch.full((rows,), top_k, dtype=torch.int64, device=DEVICE)
        p = torch.full((rows,), top_p, device=DEVICE)
        got, expected = logits.clone(), logits.clone()
        truncation.apply_top_k_top_p(got, k, p)
        reference.apply_top_k_top_p(expected, k, p)
        most = max(most, int((got.isfinite() != expected.isfinite()).sum(1).max()))
    found.check("truncation", most <= 2, ids_that_differ_in_a_row=most)


def verified(found: Finding) -> None:
    """Check 64 requests with up to 7 drafts out of two ids each; some of them have no token."""
    counts = torch.randint(0, 9, (64,))
    starts = torch.cat((torch.zeros(1), counts.cumsum(0))).to(torch.int32).to(DEVICE)
    both = torch.randint(0, 2, (2, int(starts[-1])), dtype=torch.int32, device=DEVICE)
    rows = torch.randperm(64, dtype=torch.int32, device=DEVICE)
    results = []
    for function in (verify.verify, reference.verify):
        out, last = torch.full((2, 64 * 8), -9, dtype=torch.int32, device=DEVICE), torch.zeros_like(rows)
        function(both[0], both[1], starts, 8, out, last, which=torch.ones_like(rows), rows=rows)
        results.append((out, last))
    same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    num_kept = int((results[0][0][1].view(64, 8)[:, 1:] >= 0).sum())
    found.check("drafts that are kept", same and num_kept > 0, kept=num_kept)


def draws(found: Finding) -> None:
    rows = 8 if DRY else 256
    seeds = torch.randint(0, 2**62, (rows,), device=DEVICE)
    positions = torch.randint(0, 5000, (rows,), device=DEVICE)
    numbers = draw.counter_uniform(seeds, positions)
    same = torch.equal(numbers.cpu(), counter_uniform(seeds.cpu(), positions.cpu()))
    logits = 4 * torch.randn(rows, vocabulary(), device=DEVICE)
    drawn = draw.draw(logits, seeds, positions)
    expected = torch.cat([reference.draw(logits[i : i + 8], numbers[i : i + 8]) for i in range(0, rows, 8)])
    share = float((drawn != expected).float().mean())
    wrong = logits[:3].clone()
    wrong[0], wrong[1, 5], wrong[2] = torch.nan, torch.nan, -torch.inf
    none = draw.draw(wrong, seeds[:3], positions[:3]).tolist()
    is_told = none == [draw.NO_TOKEN, draw.NO_TOKEN, draw.NOTHING_LEFT]
    found.check("draws", same and share <= 0.02 and is_told, share_that_differs=share, no_number=none)
    found.attempt("tokens of a graph", chosen, logits.to(FP32 if DRY else BF16), seeds, positions)


def chosen(found: Finding, logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> None:
    """Check that a replayed graph chooses what is drawn without one; every third row takes its largest logit."""
    rows = logits.shape[0]
    temperatures = 0.8 + 0.01 * torch.arange(rows, device=DEVICE)
    temperatures[::3] = 0.0
    inputs = torch.zeros((4, rows), dtype=torch.int32, device=DEVICE)
    inputs[0], inputs[1] = positions, torch.arange(rows, device=DEVICE)
    inputs[2], inputs[3] = (halves := seeds.view(torch.int32).view(rows, 2).T)[0], halves[1]
    ids, last = torch.full((2, 2, rows), -9, dtype=torch.int32, device=DEVICE)
    counters = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    which = torch.ones(1, dtype=torch.int32, device=DEVICE)
    draws_ = draw.StaticDraws(temperatures, inputs[2:], inputs[0], inputs[1], which, ids, last[0], counters)
    replay = replayed(lambda: draw.choose(logits, draws_))
    replay()
    synchronize()
    expected = draw.argmax(logits)
    drawn = temperatures > 0
    tempered = logits.float() / torch.where(drawn, temperatures, 1.0)[:, None]
    expected = torch.where(drawn, draw.draw(tempered, seeds, positions), expected)
    largest = torch.equal(expected[::3], logits[::3].float().argmax(1))
    same = torch.equal(ids[1], expected.int()) and torch.equal(last[0], ids[1]) and bool((ids[0] == -9).all())
    found.check("tokens of a graph", same and largest and not bool(counters.any()), same=same, largest=largest)


def penalised(found: Finding) -> None:
    rows, vocab = 4, vocabulary()
    counts = torch.randint(-2, 4, (rows + 1, vocab), device=DEVICE).clamp(min=0).int()
    mask = torch.rand(rows + 1, vocab, device=DEVICE) < 0.2
    which, slots = torch.randperm(rows, device=DEVICE), torch.from_numpy(np.array([4, 0, 2, 1])).to(DEVICE)
    numbers = [torch.rand(rows, device=DEVICE) + 0.5 for _ in range(3)]
    got = torch.randn(rows, vocab, device=DEVICE)
    expected = got.clone()
    penalties.apply_penalties(got, which, slots, *numbers, counts, mask)
    reference.apply_penalties(expected, which, slots, *numbers, counts, mask)
    error = distance(got, expected)
    found.check("penalties", error < 1e-5, error=error)
