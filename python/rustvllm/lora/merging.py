"""Adapters that are added to a model's weights while it is loaded, so that steps cost what they cost without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from rustvllm.config.lora import MAX_RANK
from rustvllm.lora.modules import adaptable_parts
from rustvllm.lora.weights import ModuleMatrices, read_adapter

if TYPE_CHECKING:
    from rustvllm.models.interface import CausalLM


def changes_by(folders: Sequence[str], model: CausalLM) -> Mapping[str, Callable[[Tensor], None]]:
    """What changes each weight that the adapters name, one adapter after the other.

    Args:
        folders: Of the adapters, as peft's ``save_pretrained`` writes them.
        model: With or without memory.

    Returns:
        By the name of the tensor in the model, what is called with it in float32, as checkpoints have it, of all
        ranks, and writes it.

    Raises:
        ModelLoadError: A folder is wrong, or not this model's adapter.
    """
    parts = adaptable_parts(model)
    names = {(id(part.linear), part.first): f"{name}.weight" for name, part in parts.items()}
    found: dict[str, list[ModuleMatrices]] = {}
    for folder in folders:
        for matrices in read_adapter(Path(folder).name, Path(folder), model, parts, MAX_RANK):
            name = names[id(matrices.part.linear), matrices.part.first]
            found.setdefault(name, []).append(matrices)
    tensors = model.checkpoint_tensors()
    return {
        name: partial(_merge, of_tensor, tensors[name].stride() != of_tensor[0].part.linear.weight.stride())
        for name, of_tensor in found.items()
    }


def _merge(of_tensor: Sequence[ModuleMatrices], is_turned: bool, tensor: Tensor) -> None:
    for matrices in of_tensor:
        matrices.merge(tensor.t() if is_turned else tensor)
