"""The experts of folders that store those of a layer as one tensor, as gpt-oss does: a tensor for each expert here.

Published folders have them in MXFP4: ``_blocks`` ``[experts, outputs, groups, 16]``, the 4-bit codes of 32 inputs each,
with ``_scales`` ``[experts, outputs, groups]``. Folders in floating point have ``[experts, inputs, outputs]`` instead.
In both, outputs of the gate and of ``up`` lie in turns. All parts are described as they lie in the file, so no second
copy exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from rustvllm.exceptions import ModelLoadError
from rustvllm.model_loader.checkpoint import StoredTensor

STACKED_ARCHITECTURES: Final = ("GptOssForCausalLM",)
_STACK: Final = re.compile(r"(.+\.mlp\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_KINDS: Final[Mapping[str, tuple[str, int, str]]] = {
    # what follows the map's name -> how the part of an expert is called, dimensions of the stack, what they are
    "": ("weight", 3, "experts, inputs, outputs"),
    "_bias": ("bias", 2, "experts, outputs"),
    "_blocks": ("weight_blocks", 4, "experts, outputs, groups, 16"),
    "_scales": ("weight_scales", 3, "experts, outputs, groups"),
}


def split_stacks(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder, those of all experts of a layer as one for each expert and map.

    Args:
        stored: Every tensor of the folder, by its name.
        folder: For messages.

    Raises:
        ModelLoadError: A stack has other dimensions, or an odd number of outputs of gates and ``up`` together.
    """
    split: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = _STACK.fullmatch(name)
        parts = [tensor] if match is None else _split(tensor, *match.groups(), folder=folder)
        split |= {part.name: part for part in parts}
    return split


def _split(stack: StoredTensor, prefix: str, module: str, suffix: str, *, folder: Path) -> Iterator[StoredTensor]:
    kind, num_dims, dims = _KINDS[suffix]
    if len(stack.shape) != num_dims or 0 in stack.shape:
        raise ModelLoadError(
            f"{folder}: the tensor {stack.name!r} has the shape {list(stack.shape)}, but must have {num_dims} "
            f"dimensions ({dims})"
        )
    num_experts, *shape = stack.shape
    num_outputs = shape[-1] if suffix == "" else shape[0]
    maps = ("gate_proj", "up_proj") if module == "gate_up_proj" else ("down_proj",)
    if num_outputs % len(maps):
        raise ModelLoadError(
            f"{folder}: the tensor {stack.name!r} has {num_outputs} outputs for gates and features, which must be even"
        )
    each = stack.nbytes // num_experts
    for number in range(num_experts):
        for place, own in enumerate(maps):
            expert = replace(stack, name=f"{prefix}{number}.{own}.{kind}", offset=stack.offset + number * each)
            yield _every(expert, shape, place, len(maps), each, is_turned=suffix == "")


def _every(
    expert: StoredTensor, shape: list[int], first: int, step: int, nbytes: int, *, is_turned: bool
) -> StoredTensor:
    """Every ``step``-th output of an expert's tensor, from the ``first`` on; ``is_turned``: inputs come first there."""
    if is_turned:
        num_inputs, num_outputs = shape
        item = nbytes // (num_inputs * num_outputs)
        return replace(
            expert,
            shape=(num_outputs // step, num_inputs),
            offset=expert.offset + first * item,
            nbytes=nbytes // step,
            row_stride=step * item,
            item_stride=num_outputs * item,
        )
    row_bytes = nbytes // shape[0]
    return replace(
        expert,
        shape=(shape[0] // step, *shape[1:]),
        offset=expert.offset + first * row_bytes,
        nbytes=nbytes // step,
        row_stride=step * row_bytes if step > 1 else 0,
    )
