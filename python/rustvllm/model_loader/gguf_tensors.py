"""The tensors of a GGUF file under the names, and with the order of rows, that the models' own checkpoints have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rustvllm.config.checkpoint.gguf_file import FLOAT_TYPES, GgufFile
from rustvllm.exceptions import ModelLoadError
from rustvllm.model_loader.checkpoint import StoredTensor

_ROTARY: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA: Final[Mapping[str, str]] = {
    **_ROTARY,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2: Final[Mapping[str, str]] = {
    **{name: module for name, module in _ROTARY.items() if name not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS: Final[Mapping[str, str]] = {
    **{name: module for name, module in _ROTARY.items() if name != "ffn_norm"},
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_QWEN2_MOE: Final[Mapping[str, str]] = {
    **_ROTARY,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DOTS1: Final[Mapping[str, str]] = {
    **_ROTARY,
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GLM4_MOE: Final[Mapping[str, str]] = {
    **{name: module for name, module in _DOTS1.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}
_GPT2: Final[Mapping[str, str]] = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_LAYERS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    # architecture -> what comes before a layer's number, and its modules
    "dots1": ("model.layers", _DOTS1),
    "gemma2": ("model.layers", _GEMMA),
    "gemma3": ("model.layers", _GEMMA),
    "glm4moe": ("model.layers", _GLM4_MOE),
    "gpt-oss": ("model.layers", _GPT_OSS),
    "gpt2": ("h", _GPT2),
    "granite": ("model.layers", _ROTARY),
    "llama": ("model.layers", _ROTARY),
    "olmo2": ("model.layers", _OLMO2),
    "phi3": ("model.layers", {**_ROTARY, "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": ("model.layers", _ROTARY),
    "qwen2moe": ("model.layers", _QWEN2_MOE),
    "qwen3": ("model.layers", _ROTARY),
    "qwen3moe": ("model.layers", _ROTARY),
    "smollm3": ("model.layers", _ROTARY),
}
_INTERLEAVED: Final = frozenset(("granite", "llama", "smollm3"))
"""Architectures whose converter puts the rows of a head's two halves in turns."""
_AROUND: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_AROUND_GPT2: Final[Mapping[str, str]] = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
}
_OF_THE_CONFIGURATION: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are read with the metadata."""
_PREFIX: Final = "model."
"""Of a checkpoint's names, which the models here are without."""
_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_STACK: Final = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.(weight|bias)")
"""The maps of all experts of a layer, ``[experts, outputs, inputs]``, or their biases, ``[experts, outputs]``."""
_STACK_DIMS: Final[Mapping[str, int]] = {"weight": 3, "bias": 2}
_BARE: Final[Mapping[str, str]] = {".sinks": "weight", ".e_score_correction_bias": "bias"}
"""Parameters whose names in a checkpoint have no ``weight`` or ``bias`` behind them, and which of these files have."""
_ONE_OUTPUT: Final = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")
"""A map with one output, ``[1, inputs]``, which files store as a vector."""
_ONE_EXPERT: Final = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)")
"""The map of one expert, in files that older converters wrote."""
_EXPERTS: Final = ".experts."
_EXPERT_NUMBER: Final = re.compile(r"\.experts\.\d+\.")


def read_gguf_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a GGUF model, by the name that a checkpoint has for it.

    Raises:
        ModelLoadError: The file is damaged, or of an architecture or a type that is not served.
    """
    file = GgufFile(path)
    file.refuse_unread_types()
    heads = file.integer(f"{file.architecture}.attention.head_count") or 0
    kv_heads = file.integer(f"{file.architecture}.attention.head_count_kv") or heads
    tensors: dict[str, StoredTensor] = {}
    paths = file.header.paths
    for name, kind, stored_shape, part, offset, nbytes in file.header.tensors():
        if name in _OF_THE_CONFIGURATION:
            continue
        is_vector = len(stored_shape) == 1
        shape = [1, *stored_shape] if is_vector and _ONE_OUTPUT.fullmatch(name) else stored_shape
        if (stack := _STACK.fullmatch(name)) is not None:
            if len(shape) != (num_dims := _STACK_DIMS[stack[1]]):
                raise ModelLoadError(
                    f"{path}: the tensor {name!r} has the shape {shape}, but must have {num_dims} dimensions"
                )
            tensors |= _expert_tensors(paths[part], name, kind, shape, offset, nbytes, file.architecture)
            continue
        if kind not in FLOAT_TYPES and len(shape) != 2:
            raise ModelLoadError(
                f"{path}: the tensor {name!r} has the type {kind} and the shape {shape}, but must have 2 dimensions"
            )
        renamed = _checkpoint_name(name, file.architecture)
        is_turned = file.architecture == "gpt2" and len(shape) == 2 and name.startswith("blk.")
        tensors[renamed] = StoredTensor(
            paths[part],
            renamed,
            tuple(reversed(shape)) if is_turned else tuple(shape),
            kind,
            offset,
            nbytes,
            is_turned=is_turned,
            interleaved_rows=_interleaved_rows(name, shape, heads, kv_heads)
            if file.architecture in _INTERLEAVED
            else 0,
            added=1.0 if file.architecture in ("gemma2", "gemma3") and name.endswith("norm.weight") else 0.0,
        )
    return tensors


def _expert_tensors(
    part: Path, name: str, kind: str, shape: list[int], offset: int, nbytes: int, architecture: str
) -> dict[str, StoredTensor]:
    """The map of each expert, or its bias, as it lies in the tensor of all."""
    each = nbytes // shape[0]
    module, _, weight = _checkpoint_name(name, architecture).partition(_EXPERTS)
    names = [f"{module}{_EXPERTS}{number}.{weight}" for number in range(shape[0])]
    return {
        own: StoredTensor(part, own, tuple(shape[1:]), kind, offset + number * each, each)
        for number, own in enumerate(names)
    }


def _checkpoint_name(name: str, architecture: str) -> str:
    """The name in a checkpoint; one that is not known stays, and is refused with what does not fit the model."""
    prefix, modules = _LAYERS.get(architecture, ("", {}))
    if (match := _BLOCK.fullmatch(name)) is not None:
        layer, module, kind = match.groups()
        if (expert := _ONE_EXPERT.fullmatch(module)) is not None and f"{expert[1]}_exps" in modules:
            module, _, own = modules[f"{expert[1]}_exps"].partition(_EXPERTS)
            return f"{prefix}.{layer}.{module}{_EXPERTS}{expert[2]}.{own}.{kind}"
        own = f"{prefix}.{layer}.{modules.get(module)}"
        return name if module not in modules else own if own.endswith(tuple(_BARE)) else f"{own}.{kind}"
    stem, _, kind = name.rpartition(".")
    around = _AROUND_GPT2 if architecture == "gpt2" else _AROUND
    return f"{around[stem]}.{kind}" if stem in around else name


def file_name(name: str, architecture: str) -> str:
    """The name in a GGUF file of what a checkpoint, or a model without the checkpoint's prefix, calls ``name``."""
    prefix, modules = _LAYERS.get(architecture, ("", {}))
    stem, _, kind = name.rpartition(".")
    around = _AROUND_GPT2 if architecture == "gpt2" else _AROUND
    for ours, theirs in around.items():
        if stem in (theirs, theirs.removeprefix(_PREFIX)):
            return f"{ours}.{kind}"
    layers = prefix.removeprefix(_PREFIX) + "."
    for ending, stored_kind in _BARE.items():
        if name.endswith(ending):
            stem, kind = name, stored_kind
    bare = _EXPERT_NUMBER.sub(_EXPERTS, stem.removeprefix(_PREFIX))
    layer, _, module = bare.removeprefix(layers).partition(".")
    found = next((ours for ours, theirs in modules.items() if theirs == module), None)
    return f"blk.{layer}.{found}.{kind}" if found is not None and bare.startswith(layers) else name


def _interleaved_rows(name: str, shape: list[int], heads: int, kv_heads: int) -> int:
    """Rows of a head whose two halves lie in turns, as llama.cpp turns pairs that are neighbours; 0: none do."""
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in ("attn_q", "attn_k"):
        return 0
    num_heads = heads if match[2] == "attn_q" else kv_heads
    if num_heads == 0 or shape[0] % (2 * num_heads):
        raise ModelLoadError(
            f"the tensor {name!r} has {shape[0]} rows, which cannot be split into {num_heads} heads of two halves"
        )
    return shape[0] // num_heads
