"""Checkpoints as AWQ, GPTQ, compressed-tensors and FP8 write them, and what their numbers mean, in plain numpy.

Written from the descriptions of the formats, number by number, so that it shares nothing with what reads them.
"""

import json
import re

import numpy as np
import torch

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight neighbouring outputs each nibble of a word is, from the lowest on."""
DENSE = re.compile(
    r"(q|k|v|o|qkv|out|gate|up|gate_up|down)_proj|fc[12]|c_attn|c_proj|c_fc|query_key_value|dense|dense_\w+"
)


def pack_words(numbers, bits):
    """Non-negative numbers of the last axis into int32 words, the first in the lowest bits; what lacks is zeros."""
    per_word = 32 // bits
    missing = -numbers.shape[-1] % per_word
    padded = np.concatenate([numbers, np.zeros((*numbers.shape[:-1], missing), numbers.dtype)], axis=-1)
    parts = padded.astype(np.uint32).reshape(*numbers.shape[:-1], -1, per_word)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for place in range(per_word):
        words |= parts[..., place] << np.uint32(bits * place)
    return words.view(np.int32)


def random_layer(rng, weight, bits, group_size, *, symmetric, order=None):
    """Numbers, zero points and scales that are near a weight ``[out, in]``, the way no particular tool rounds.

    Returns:
        q ``[out, in]`` in 0 … 2^bits − 1, z ``[out, groups]``, s float16 ``[out, groups]``, group of each input.
    """
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    groups = np.arange(in_features) // size
    if order is not None:
        groups = np.empty(in_features, np.int64)
        groups[order] = np.arange(in_features) // size
    top = (1 << bits) - 1
    num_groups = in_features // size
    z = np.full((out_features, num_groups), 1 << (bits - 1))
    s = np.empty((out_features, num_groups), np.float16)
    for group in range(num_groups):
        part = weight[:, groups == group]
        spread = np.abs(part).max(axis=1) * 2 if symmetric else part.max(axis=1) - part.min(axis=1)
        s[:, group] = (spread / top).astype(np.float16)
        if not symmetric:
            z[:, group] = np.clip(np.round(-part.min(axis=1) / s[:, group]), 1, top)
    q = np.clip(np.round(weight / s[:, groups].astype(np.float32)) + z[:, groups], 0, top).astype(np.int64)
    return q, z, s, groups


def meaning(q, z, s, groups):
    """The weight that they stand for, float32: every product is exact but for one rounding."""
    return ((q - z[:, groups]).astype(np.float64) * s.astype(np.float64)[:, groups]).astype(np.float32)


def awq(name, q, z, s, _groups):
    """``qweight`` [in, out/8] and ``qzeros`` [groups, out/8], outputs interleaved in words; scales [groups, out]."""

    def words(numbers):  # [rows, out]
        eights = numbers.reshape(numbers.shape[0], -1, 8)[..., AWQ_ORDER]
        return pack_words(eights.reshape(numbers.shape), 4)

    return {f"{name}.qweight": words(q.T), f"{name}.qzeros": words(z.T), f"{name}.scales": s.T}


def gptq(name, q, z, s, groups, *, bits=4, version=1, with_groups=True):
    """``qweight`` [in·bits/32, out], ``qzeros`` [groups, out·bits/32] (less one in version 1), ``g_idx`` [in]."""
    tensors = {
        f"{name}.qweight": pack_words(q, bits).T,
        f"{name}.qzeros": pack_words(z.T - (version == 1), bits),
        f"{name}.scales": s.T,
    }
    return tensors | ({f"{name}.g_idx": groups.astype(np.int32)} if with_groups else {})


def packed(name, q, z, s, groups, *, bits=4, symmetric=True, with_groups=False):
    """compressed-tensors pack-quantized: numbers and zero points are signed, and stored plus 2^(bits − 1)."""
    tensors = {
        f"{name}.weight_packed": pack_words(q, bits),
        f"{name}.weight_scale": s,
        f"{name}.weight_shape": np.array(q.shape, np.int64),
    }
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = pack_words(z.T, bits).T
    return tensors | ({f"{name}.weight_g_idx": groups.astype(np.int32)} if with_groups else {})


def whole(name, q, z, s, _groups, *, bits=8, symmetric=True):
    """compressed-tensors int-quantized: a signed byte for each number."""
    half = 1 << (bits - 1)
    tensors = {f"{name}.weight": (q - half).astype(np.int8), f"{name}.weight_scale": s}
    return tensors if symmetric else tensors | {f"{name}.weight_zero_point": (z - half).astype(np.int8)}


def write_folder(folder, reference, quantization_config, make_layer, *, skip=lambda _: False, extra=None):
    """A transformers model as a folder whose dense layers are quantised; the model gets the numbers' meaning.

    Args:
        folder: Where to.
        reference: Filled; its dense layers are changed.
        quantization_config: Of ``config.json``.
        make_layer: (name, weight float32 [out, in]) → (tensors by name, their meaning float32 [out, in]).
        skip: Whether a layer of a name stays as it is.
        extra: Further tensors.
    """
    from safetensors.torch import save_file

    reference.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
    turned = type(reference).__name__.startswith("GPT2")
    tensors, num_quantized = {}, 0
    state = reference.state_dict()
    tied = {"lm_head.weight", "embed_out.weight"} if reference.config.tie_word_embeddings else set()
    for full_name, tensor in state.items():
        name, _, kind = full_name.rpartition(".")
        is_dense = kind == "weight" and DENSE.fullmatch(name.rpartition(".")[2]) and not skip(name)
        if is_dense:
            weight = (tensor.T if turned else tensor).float().numpy()
            parts, value = make_layer(name, weight)
            tensors |= parts
            value = torch.from_numpy(np.ascontiguousarray(value))
            with torch.no_grad():
                tensor.copy_(value.T if turned else value)
            num_quantized += 1
        elif full_name not in tied:
            tensors[full_name] = tensor
    tensors |= extra or {}
    assert num_quantized >= 2, f"only {num_quantized} layers are dense"
    as_torch = {
        name: (tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(tensor)))
        for name, tensor in tensors.items()
    }
    save_file({name: tensor.contiguous() for name, tensor in as_torch.items()}, folder / "model.safetensors")
    return reference.eval()
