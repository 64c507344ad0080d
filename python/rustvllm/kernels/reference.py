"""Each kernel's work in plain torch: slow, written to be read, mostly with the kernels' signatures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rustvllm.kernels.draw import NO_TOKEN, NOTHING_LEFT
from rustvllm.kernels.fp8 import MAX as FP8_MAX

if TYPE_CHECKING:
    from rustvllm.kernels.draw import StaticDraws
    from rustvllm.kernels.quantized_matmul import QuantizedWeight


def encode_e4m3(x: Tensor) -> Tensor:
    """Encode numbers as e4m3 in uint8, to the nearest, ties to even; values beyond ±448 become ±448."""
    x = x.to(torch.float32)
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(code: Tensor) -> Tensor:
    """Decode e4m3 in uint8 to float32."""
    return code.view(torch.float8_e4m3fn).to(torch.float32)


def kv_write(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, key_scale: float = 1.0, value_scale: float = 1.0
) -> None:
    """See ``kv_write.kv_write``."""
    flat = kv_cache.view(2, -1, *key.shape[1:])
    for token, slot in enumerate(slot_mapping[: key.shape[0]].tolist()):
        if slot < 0:
            continue
        for part, (new, factor) in enumerate(((key, key_scale), (value, value_scale))):
            is_fp8 = kv_cache.dtype == torch.uint8
            row = encode_e4m3(new[token].float() * (1.0 / factor)) if is_fp8 else new[token]
            flat[part, slot] = row


def paged_attention(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """See ``paged_attention.paged_attention``; request by request, in float64."""
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    block_size = kv_cache.shape[2]
    group_size = query.shape[1] // num_kv_heads
    flat = kv_cache.view(2, -1, num_kv_heads, head_dim)
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[request : request + 2].tolist()
        key_positions = torch.arange(seq_len, device=query.device)
        blocks = block_table[request, key_positions // block_size].long()
        parts = flat[:, blocks * block_size + key_positions % block_size]
        parts = decode_e4m3(parts) if kv_cache.dtype == torch.uint8 else parts
        keys, values = (part.double().repeat_interleave(group_size, 1) for part in parts)  # [S, H, D]
        keys, values = keys * key_scale, values * value_scale
        positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        scores = torch.einsum("qhd,khd->hqk", query[start:end].double(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distances = positions[:, None] - key_positions
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.double()[:, None, None] * distances
        is_seen = distances >= 0
        if sliding_window is not None:
            is_seen &= distances < sliding_window
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1)[..., :seq_len]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """See ``norm.rms_norm``."""
    x32 = x.to(torch.float32)
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight_offset:
        return (scaled * (weight.to(torch.float32) + weight_offset)).to(x.dtype)
    return weight * scaled.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See ``norm.layer_norm``."""
    x32 = x.to(torch.float32)
    centred = x32 - x32.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(torch.float32)
    return (out if bias is None else out + bias.to(torch.float32)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """See ``rotary.rotary``."""
    num_pairs = cos.shape[-1]
    turned = x[..., : 2 * num_pairs].to(torch.float32)
    cos, sin = cos.to(torch.float32)[:, None], sin.to(torch.float32)[:, None]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * num_pairs :]), -1)


def rotary_write(
    qkv: Tensor,
    num_heads: int,
    positions: Tensor,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm_weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    is_by_head: bool = False,
) -> Tensor:
    """See ``rotary_write.rotary_write``; norms, rotates and writes one after the other."""
    if is_by_head:
        qkv = qkv.unflatten(1, (num_heads, 3)).transpose(1, 2).flatten(1, 2)
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
    if norm_weights is not None:
        of_query, of_key = norm_weights
        query = rms_norm(query, of_query, eps, weight_offset=weight_offset)
        key = rms_norm(key, of_key, eps, weight_offset=weight_offset)
    cos, sin = table[positions.long()].chunk(2, -1)
    kv_write(rotary(key, cos, sin), value, kv_cache, slot_mapping)
    return rotary(query, cos, sin)


def silu_and_mul(x: Tensor) -> Tensor:
    """See ``activation.silu_and_mul``."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gelu_and_mul(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """See ``activation.gelu_and_mul``."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``matmul.linear``; in float64."""
    out = x.double() @ weight.double().t()
    return (out if bias is None else out + bias.double()).to(x.dtype)


def add_adapters(
    x: Tensor,
    out: Tensor,
    bias: Tensor | None,
    runs: Sequence[tuple[Sequence[int], Tensor, Sequence[tuple[int, Tensor, Tensor | None]]]],
) -> None:
    """See ``lora.add_adapters``; adapter by adapter, in float64.

    Args:
        x: ``[num_tokens, in_features]``.
        out: ``[num_tokens, out_features]``, changed in place.
        bias: ``[out_features]``, which ``out`` contains; None if there is none.
        runs: For each adapter its rows, the down matrix for all ranks, and for each of its parts the first output, the
            up matrix, and the gains or None.
    """
    for rows, down, parts in runs:
        ranks = x[list(rows)].double() @ down.double().t()
        first_rank = 0
        for first, up, gains in parts:
            outputs = slice(first, first + up.shape[0])
            own = out[list(rows), outputs].double()
            if gains is not None:
                constant = 0.0 if bias is None else bias[outputs].double()
                own = (own - constant) * gains + constant
            own += ranks[:, first_rank : first_rank + up.shape[1]] @ up.double().t()
            out[list(rows), outputs] = own.to(out.dtype)
            first_rank += up.shape[1]


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
) -> None:
    """See ``penalties.apply_penalties``."""
    for index, row in enumerate(rows.tolist()):
        slot = int(slots[index])
        counts = output_counts[slot]
        old = logits[row].clone()
        repeated = torch.where(old > 0, old / repetition[index], old * repetition[index])
        new = torch.where((counts > 0) | prompt_mask[slot], repeated, old)
        logits[row] = new - frequency[index] * counts - presence[index] * (counts > 0)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """See ``truncation.apply_top_k_top_p``; by sorting, in float64."""
    vocab_size = logits.shape[1]
    for index, row in enumerate(logits):
        ordered = row.double().sort(descending=True).values
        k = vocab_size if top_k is None else int(top_k[index])
        if 0 < k < vocab_size:
            ordered = ordered[:k]
        num_kept = len(ordered)
        if top_p is not None and top_p[index] < 1:
            probabilities = ordered.softmax(0)
            before = probabilities.cumsum(0) - probabilities
            num_kept = max(1, int((before < float(top_p[index])).sum()))
        row[row < ordered[num_kept - 1]] = -torch.inf


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """See ``draw.draw``, with given uniform numbers; for rows with a finite distribution, in float64."""
    running = logits.double().softmax(-1).cumsum(-1)
    target = uniforms[:, None] * running[:, -1:]
    return (running <= target).sum(-1)


def _uniform(seed: int, position: int) -> float:
    """See ``draw.counter_uniform``; for the lower 64 bits of a seed."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    state = mix(seed + golden & mask)
    state = mix(state ^ position * golden & mask)
    return float(mix(state + golden & mask) >> 11) * 2.0**-53


def choose(logits: Tensor, draws: StaticDraws) -> None:
    """See ``draw.choose``; row by row."""
    for index, row in enumerate(logits.float()):
        token_id = int(row.argmax())
        is_number = bool(row[token_id] > -torch.inf)
        if is_number and draws.temperatures[index] >= 1e-5:
            low, high = draws.seeds[:, index].tolist()
            seed = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
            uniform = torch.tensor([_uniform(seed, int(draws.positions[index]))], dtype=torch.float64)
            tempered = row / draws.temperatures[index]
            if bool(tempered.double().softmax(0).isfinite().all()):
                token_id = int(draw(tempered[None], uniform))
        missing = NO_TOKEN if bool(row.isnan().any()) else NOTHING_LEFT
        draws.sampled[draws.which[0], index] = token_id if is_number else missing
        if draws.last_token_ids is not None:
            draws.last_token_ids[draws.rows[index]] = token_id if is_number else 0


def verify(
    sampled: Tensor,
    input_ids: Tensor,
    query_start_loc: Tensor,
    width: int,
    out: Tensor,
    last_token_ids: Tensor,
    *,
    which: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """See ``verify.verify``; request by request."""
    target = (out if which is None else out[int(which[0])]).view(-1)
    starts = query_start_loc.tolist()
    for request, (begin, end) in enumerate(pairwise(starts)):
        given: list[int] = []
        for place in range(begin, end):
            given.append(int(sampled[place]))
            if place + 1 == end or given[-1] != int(input_ids[place + 1]):
                break
        target[request * width : (request + 1) * width] = torch.tensor(given + [-1] * (width - len(given)))
        known = [token_id for token_id in given if token_id >= 0]
        last_token_ids[request if rows is None else int(rows[request])] = known[-1] if known else 0


def unpack(weight: QuantizedWeight) -> Tensor:
    """See ``quantized_matmul.unpack``; all rows in float32."""
    out_features, in_features = weight.out_features, weight.in_features
    numbers = weight.numbers.to(torch.float32)
    if weight.bits == 4:
        feature = torch.arange(in_features, device=numbers.device)
        pairs = weight.numbers[:, feature // 64 * 32 + feature % 32]
        numbers = torch.where(feature % 64 < 32, pairs % 16, pairs // 16).to(torch.float32)
    group = torch.arange(in_features, device=numbers.device) // weight.group_size
    scales = weight.scales.to(torch.float32).t()[:, group]
    assert numbers.shape == scales.shape == (out_features, in_features)
    if weight.offsets is None:
        return (numbers - (8 if weight.bits == 4 else 0)) * scales
    offsets = weight.offsets.to(torch.float32).t()[:, group]
    return numbers * scales - offsets if weight.zeros == "minimum" else (numbers - offsets) * scales


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """See ``quantized_matmul.quantized_linear``."""
    out = x.double() @ unpack(weight).to(x.dtype).double().t()
    if bias is not None:
        out += bias.double()
    return (out if residual is None else out + residual.double()).to(x.dtype)
