"""Where the matrices of an adapter go: a module of the checkpoint → rows of one of the model's dense layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rustvllm.layers.linear import Linear
from rustvllm.layers.parallel import Shard
from rustvllm.layers.whole_rows import storage_of
from rustvllm.model_loader.slicing import slices_of

if TYPE_CHECKING:
    from torch import Tensor

    from rustvllm.models.interface import CausalLM


@dataclass(frozen=True, slots=True)
class LinearPart:
    """The rows of a dense layer that a checkpoint stores as a module of its own; all of them where it is not fused.

    Attributes:
        linear: The layer.
        first: Its first row.
        num_outputs: How many.
        shard: What this rank has of the part, where several share the layer.
    """

    linear: Linear
    first: int
    num_outputs: int
    shard: Shard | None = None

    @property
    def own_shape(self) -> tuple[int, int]:
        """Outputs and inputs that this rank has."""
        return self.num_outputs, self.linear.weight.shape[1]

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Outputs of the part and inputs of the layer, as checkpoints have them: of all ranks."""
        own = self.own_shape
        if self.shard is None:
            return own
        return (self.shard.whole, own[1]) if self.shard.dim == 0 else (own[0], self.shard.whole)

    def own(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank needs of an adapter's matrices, ``[rank, inputs]`` and ``[outputs, rank]``."""
        if self.shard is None:
            return down, up
        return (down, self.shard.take(up)) if self.shard.dim == 0 else (self.shard.take(down), up)


def adaptable_parts(model: CausalLM) -> dict[str, LinearPart]:
    """Every part of the model's dense layers by its module's name in checkpoints, without prefix; not the head."""
    linears = {
        storage_of(module.weight): module
        for module in model.modules()
        if isinstance(module, Linear) and module is not model.lm_head
    }
    tied = model.tied_embedding
    parts = {}
    tensors = model.checkpoint_tensors()
    slices = slices_of(model, tensors) if model.group.size > 1 else {}
    for name, tensor in tensors.items():
        linear = linears.get(storage_of(tensor))
        if linear is None or tensor.dim() != 2 or not name.endswith(".weight") or tensor is tied:
            continue
        num_inputs = linear.weight.shape[1]
        cut = slices.get(name)
        is_turned = tensor.stride() != linear.weight.stride()
        shard = None if cut is None else Shard(1 - cut.dim if is_turned else cut.dim, cut.parts)
        parts[name.removesuffix(".weight")] = LinearPart(
            linear, int(tensor.storage_offset()) // num_inputs, tensor.numel() // num_inputs, shard
        )
    return parts


def adaptable_linears(model: CausalLM) -> Iterator[Linear]:
    """The layers of these parts, each once."""
    seen = {}
    for part in adaptable_parts(model).values():
        seen[id(part.linear)] = part.linear
    yield from seen.values()


def find_part(model: CausalLM, parts: Mapping[str, LinearPart], module: str) -> LinearPart | None:
    """The part that a checkpoint calls ``module``, with or without one of the model's prefixes."""
    spellings = [module, *(module.removeprefix(prefix) for prefix in model.prefixes if module.startswith(prefix))]
    return next((parts[name] for name in spellings if name in parts), None)


def full_names(model: CausalLM, parts: Mapping[str, LinearPart]) -> dict[str, str]:
    """What transformers calls the module of each part → the part's name."""
    prefix = model.prefixes[0] if model.prefixes else ""
    return {prefix + name: name for name in parts}
