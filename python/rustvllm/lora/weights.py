"""``adapter_model.safetensors`` of peft: the two matrices of each module, checked against the model before use."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rustvllm.config.hub.adapters import CONFIG_NAME, WEIGHTS_NAME
from rustvllm.exceptions import ModelLoadError
from rustvllm.lora.modules import LinearPart, adaptable_parts, find_part, full_names
from rustvllm.lora.peft_config import ModuleSettings, read_peft_config

if TYPE_CHECKING:
    from rustvllm.models.interface import CausalLM

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_"
    r"(?:([AB])(?:\.default)?\.weight|(magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_MAX_NAMED: Final = 3
_MAGNITUDES: Final = "magnitude_vector"
_ROWS_BYTES: Final = 4 << 20
"""Of a layer's weights that are unpacked at once, at least a row."""


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """What an adapter adds to a part of a layer, ``up (down x)``, and what it multiplies the part's own product by.

    Attributes:
        part: Of the layer.
        down: float32 ``[rank, num_inputs]``, this rank's inputs.
        up: float32 ``[num_outputs, rank]``, this rank's outputs, with the scale in it, and the gains.
        gains: float32 ``[num_outputs]``, factors on the part's own product (DoRA); None: all are 1.
    """

    part: LinearPart
    down: Tensor
    up: Tensor
    gains: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModuleMatrices:
    """What an adapter has for a part of a layer, of all ranks.

    Attributes:
        adapter: Its name, for messages.
        module: The part's, as the file has it.
        part: Of the layer.
        down: float32 ``[rank, num_inputs]``.
        up: float32 ``[num_outputs, rank]``, with the scale in it.
        magnitudes: float32 ``[num_outputs]``, how long the rows of the weight are with the adapter (DoRA); None: as
            they come.
    """

    adapter: str
    module: str
    part: LinearPart
    down: Tensor
    up: Tensor
    magnitudes: Tensor | None

    def merge(self, weight: Tensor) -> None:
        """Add to the part's weight, float32 ``[num_outputs, num_inputs]``, which is written.

        Raises:
            ModelLoadError: A magnitude cannot be had.
        """
        for rows in _pieces(*weight.shape):
            weight[rows].addmm_(self.up[rows], self.down)
            if self.magnitudes is not None:
                norms = torch.linalg.vector_norm(weight[rows], dim=1)
                weight[rows] *= self._gains(norms, self.magnitudes[rows], rows.start)[:, None]

    def as_delta(self) -> ModuleDelta:
        """What is added while the model runs; rows of the layer's weight are read for magnitudes, some at a time.

        Raises:
            ModelLoadError: A magnitude cannot be had.
        """
        part = self.part
        down, up = (matrix.contiguous() for matrix in part.own(self.down, self.up))
        if self.magnitudes is None:
            return ModuleDelta(part, down, up)
        if part.shard is not None and part.shard.dim == 1:
            raise ModelLoadError(
                f"adapter {self.adapter!r}: use_dora needs whole rows of {self.module}, but several ranks share its "
                "inputs: leave out --tensor-parallel-size, or merge the adapter (--merge-lora)"
            )
        magnitudes = self.magnitudes if part.shard is None else part.shard.take(self.magnitudes)
        norms = torch.empty(part.num_outputs)
        for rows in _pieces(*part.own_shape):
            weight = part.linear.weight_rows(rows.stop - rows.start, part.first + rows.start)
            norms[rows] = torch.linalg.vector_norm(torch.addmm(weight, up[rows], down), dim=1)
        gains = self._gains(norms, magnitudes, 0)
        return ModuleDelta(part, down, up * gains[:, None], gains)

    def _gains(self, norms: Tensor, magnitudes: Tensor, first: int) -> Tensor:
        """What makes rows as long as they must be."""
        gains = magnitudes / norms
        if not bool(torch.isfinite(gains).all()):
            row = int((~torch.isfinite(gains)).nonzero()[0, 0])
            raise ModelLoadError(
                f"adapter {self.adapter!r}: output {first + row} of {self.module} has weights of length "
                f"{float(norms[row]):g} with the adapter, which cannot be scaled to the magnitude "
                f"{float(magnitudes[row]):g}"
            )
        return gains


def digest_of(adapter: Iterable[ModuleMatrices]) -> int:
    """A digest of what was read, by which ranks find out that they have read the same: 64 bits, and even."""
    digest = hashlib.blake2b(digest_size=8)
    for matrices in adapter:
        digest.update(matrices.module.encode())
        for matrix in (matrices.down, matrices.up, matrices.magnitudes):
            if matrix is not None:
                digest.update(matrix.numpy().data)
    return int.from_bytes(digest.digest()) & ~1


def _pieces(num_outputs: int, num_inputs: int) -> Iterator[slice]:
    """Rows of a weight that are unpacked at once."""
    count = max(1, _ROWS_BYTES // (4 * num_inputs))
    for begin in range(0, num_outputs, count):
        yield slice(begin, min(begin + count, num_outputs))


def read_adapter(
    name: str, folder: Path, model: CausalLM, parts: Mapping[str, LinearPart], max_rank: int
) -> list[ModuleMatrices]:
    """Read an adapter's folder.

    Args:
        name: The adapter's, for messages.
        folder: As peft's ``save_pretrained`` writes it.
        model: What it is added to.
        parts: Of the model, as ``adaptable_parts`` gives them.
        max_rank: Largest rank that is served.

    Raises:
        ModelLoadError: A file is wrong, the adapter asks for what is not served, or it does not fit the model; nothing
            has changed.
    """
    config = read_peft_config(folder / CONFIG_NAME, name, max_rank)
    file = folder / WEIGHTS_NAME
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            keys = opened.keys()
            pairs = _pairs(name, keys, has_magnitudes=config.uses_dora)
            names = full_names(model, parts)
            settings = config.for_modules(name, {*pairs, *names})
            shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in keys}
            placed = {module: _place(name, module, pairs[module], shapes, settings, model, parts) for module in pairs}
            _check_complete(name, settings, names, parts, placed)
            read = []
            for module, part in placed.items():
                matrices = {kind: opened.get_tensor(key) for kind, key in pairs[module].items()}
                read.append(_scaled(name, module, part, matrices, settings))
            return read
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"adapter {name!r}: {file} is not a complete safetensors file: {error}") from error


def _pairs(name: str, keys: Iterable[str], *, has_magnitudes: bool) -> dict[str, dict[str, str]]:
    """By module, the names of its two matrices (``A`` and ``B``), and of its magnitudes where there must be some."""
    pairs: dict[str, dict[str, str]] = {}
    for key in sorted(keys):
        match = _TENSOR.fullmatch(key)
        if match is None or (match[3] and not has_magnitudes):
            raise ModelLoadError(f"adapter {name!r}: {_stranger(key)}")
        pairs.setdefault(match[1], {})[match[2] or _MAGNITUDES] = key
    if not pairs:
        raise ModelLoadError(f"adapter {name!r}: {WEIGHTS_NAME} holds no tensors")
    wanted = ("A", "B", _MAGNITUDES) if has_magnitudes else ("A", "B")
    parts = {module: found for module, found in pairs.items() if len(found) < len(wanted)}
    for module, found in parts.items():
        there, missing = min(found), next(kind for kind in wanted if kind not in found)
        raise ModelLoadError(
            f"adapter {name!r}: {module} has lora_{there} but no lora_{missing}, as have {len(parts)} of {len(pairs)} "
            "modules; the file is incomplete, so save or download the adapter again"
        )
    return pairs


def _stranger(key: str) -> str:
    """Why a tensor of this name is refused."""
    for part, what in (
        ("lora_embedding_", "an embedding's matrices are not served"),
        ("lora_magnitude_vector", f"{CONFIG_NAME} has no use_dora, without which magnitudes mean nothing"),
        ("modules_to_save", "whole modules (modules_to_save) are not served"),
        (".bias", "biases (lora_bias, bias) are not served"),
    ):
        if part in key:
            advice = "save the adapter again" if "magnitude" in part else "merge the adapter into the checkpoint"
            return f"it has the tensor {key!r:.200}: {what}; {advice}"
    return f"the tensor {key!r:.200} is none of lora_A and lora_B"


def _place(
    name: str,
    module: str,
    keys: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    settings: ModuleSettings,
    model: CausalLM,
    parts: Mapping[str, LinearPart],
) -> LinearPart:
    """The part of the model that a module's matrices fit."""
    part, config = find_part(model, parts, module), settings.config
    made_for = f"; it was made for {config.base_model!r:.200}" if config.base_model else ""
    if part is None and find_part(model, adaptable_parts(model), module) is not None:
        raise ModelLoadError(
            f"adapter {name!r}: {module} belongs to experts, which compute only some tokens, and adapters of requests "
            "cannot change it: merge the adapter into the checkpoint, or with merge_lora while it is loaded"
        )
    if part is None:
        what = "embeddings and heads" if module.endswith(("lm_head", "embed_out", "embed_tokens", "wte")) else "this"
        raise ModelLoadError(
            f"adapter {name!r}: {module} is not a dense layer of {type(model).__name__}'s blocks, and {what} cannot be "
            f"adapted{made_for}"
        )
    down, up = shapes[keys["A"]], shapes[keys["B"]]
    if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
        raise ModelLoadError(f"adapter {name!r}: the matrices of {module} do not match each other: {down} and {up}")
    num_outputs, num_inputs = part.stored_shape
    if (down[1], up[0]) != (num_inputs, num_outputs):
        raise ModelLoadError(
            f"adapter {name!r}: {module} has {down[1]} inputs and {up[0]} outputs, but the model's has {num_inputs} "
            f"and {num_outputs}: the adapter belongs to another model{made_for}"
        )
    if config.uses_dora and shapes[keys[_MAGNITUDES]] not in ((num_outputs,), (num_outputs, 1), (1, num_outputs)):
        raise ModelLoadError(
            f"adapter {name!r}: the magnitudes of {module} are {shapes[keys[_MAGNITUDES]]}, but it has {num_outputs} "
            "outputs"
        )
    if down[0] != settings.rank_of(module):
        raise ModelLoadError(
            f"adapter {name!r}: {module} has rank {down[0]}, but {CONFIG_NAME} says {settings.rank_of(module)}"
        )
    return part


def _check_complete(
    name: str,
    settings: ModuleSettings,
    names: Mapping[str, str],
    parts: Mapping[str, LinearPart],
    placed: Mapping[str, LinearPart],
) -> None:
    """Every module that the configuration names has its matrices, and no two have the same place."""
    places = {(id(part.linear), part.first) for part in placed.values()}
    if len(places) < len(placed):
        raise ModelLoadError(f"adapter {name!r}: two of its modules refer to the same part of the model")
    wanted = settings.targets(names)
    missing = [full for full in wanted if (id(parts[names[full]].linear), parts[names[full]].first) not in places]
    if missing:
        raise ModelLoadError(
            f"adapter {name!r}: target_modules of {CONFIG_NAME} names {len(wanted)} modules of the model, but "
            f"{len(missing)} of them have no tensors: {', '.join(missing[:_MAX_NAMED])}; the file is incomplete"
        )


def _scaled(
    name: str, module: str, part: LinearPart, matrices: Mapping[str, Tensor], settings: ModuleSettings
) -> ModuleMatrices:
    for kind, matrix in matrices.items():
        if matrix.dtype not in _FLOATS:
            raise ModelLoadError(
                f"adapter {name!r}: lora_{kind} of {module} is {str(matrix.dtype).removeprefix('torch.')}, but must be "
                "float32, float16 or bfloat16"
            )
    # By numpy, in this thread alone: torch's threads would have to wait for those that compute the steps meanwhile.
    numbers = {kind: matrix.to(torch.float32).numpy() for kind, matrix in matrices.items()}
    for kind, found in numbers.items():
        if not np.isfinite(found).all():
            raise ModelLoadError(f"adapter {name!r}: lora_{kind} of {module} has a value that is not finite")
    scale = settings.scale_of(module)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = numbers["B"] * np.float32(scale)
    if not np.isfinite(scaled).all():
        raise ModelLoadError(
            f"adapter {name!r}: lora_B of {module} times its scale {scale:g} (lora_alpha and r) is more than float32 "
            "holds"
        )
    down, up = torch.from_numpy(numbers["A"]), torch.from_numpy(scaled)
    magnitudes = torch.from_numpy(numbers[_MAGNITUDES].ravel()) if _MAGNITUDES in numbers else None
    return ModuleMatrices(name, module, part, down, up, magnitudes)
