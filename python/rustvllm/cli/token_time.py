"""How soon a token can follow another at best on this CPU: products are timed, without torch and without weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rustvllm import _core, envs
from rustvllm.config.checkpoint.forms import KeptLayer
from rustvllm.config.checkpoint.whole_forms import NumberForm
from rustvllm.worker.host_resources import num_compute_threads

SAMPLE_BYTES: Final = 256 << 20
"""Of a model's layers are made and read by turns, as a step reads them: several times what processors keep near them.
A smaller model finds as much there as it does in a step."""
MEASURE_SECONDS: Final = 0.25
"""So long they are read."""
NUM_WINDOWS: Final = 5
"""Parts of that time; the best one counts, for who else computes meanwhile is not this model's."""
STEP_SECONDS: Final = 0.25e-3
"""What a step takes besides: scheduling, sampling, the answer."""
LAYER_SECONDS: Final = 12e-6
"""What a decoder's layer takes besides its products: norms, positions, attention over few tokens."""
SMALLEST_LAYER: Final = 1 << 16
"""Numbers; what has fewer is a norm or a bias, and is part of a layer's rest."""
_UNIT: Final = 256
_LEVEL_TYPES: Final = {4: "Q4_K", 6: "Q6_K", 8: "Q5_K"}


def best_token_seconds(layers: Sequence[KeptLayer], hidden_size: int, num_layers: int) -> float:
    """Seconds of one token of one stream with a short context, with nothing else on the machine.

    Args:
        layers: As they are kept.
        hidden_size: Inputs of most of them.
        num_layers: Of the decoder.
    """
    read = [layer for layer in layers if layer.is_read and layer.num_parameters >= SMALLEST_LAYER]
    groups: dict[tuple[NumberForm | None, int], _Group] = {}
    for layer in read:
        group = groups.setdefault((layer.form, layer.item_bytes), _Group(layer.form, layer.item_bytes))
        group.count += layer.chosen_share
        group.numbers += round(layer.num_parameters * layer.chosen_share)
    return STEP_SECONDS + num_layers * LAYER_SECONDS + _products_seconds(list(groups.values()), hidden_size)


@dataclass(slots=True)
class _Group:
    """Layers of one form: how many, and all their numbers, of experts as many as compute a token."""

    form: NumberForm | None
    item_bytes: int
    count: float = 0.0
    numbers: int = 0


def _products_seconds(groups: Sequence[_Group], hidden_size: int) -> float:
    """Of the products of one row with all layers: from as many of each form's as are its share of a sample."""
    if not groups:
        return 0.0
    threads = _core.CpuThreads(num_compute_threads())
    inputs = -(-hidden_size // _UNIT) * _UNIT
    sizes = {id(group): _num_bytes(group, group.numbers // inputs, inputs) for group in groups}
    share = min(SAMPLE_BYTES / max(sum(sizes.values()), 1), 1.0)
    sample: list[tuple[list[_core.PackedLinear], float]] = []  # with how much more the model has
    for group in groups:
        outputs = max(int(group.numbers / group.count) // inputs, 1)
        num_measured = max(round(group.count * share), 1)
        # A head is much larger than other layers: there are pieces of at most a sample's size.
        outputs = min(outputs, max(int(SAMPLE_BYTES / max(_num_bytes(group, 1, inputs), 1)), 1))
        layers = _layers(threads, group, (outputs, inputs), num_measured)
        sample.append((layers, group.numbers / (num_measured * outputs * inputs)))
    x = np.full((1, inputs), 0.01, np.float32)
    outs = [np.empty((1, layers[0].out_features), np.float32) for layers, _ in sample]
    best = float("inf")
    for _ in range(NUM_WINDOWS):
        total, num_passes, end = 0.0, 0, time.perf_counter() + MEASURE_SECONDS / NUM_WINDOWS
        while num_passes == 0 or time.perf_counter() < end:
            for (layers, more), out in zip(sample, outs, strict=True):
                begin = time.perf_counter()
                for layer in layers:
                    layer.forward(x, out)
                total += more * (time.perf_counter() - begin)
            num_passes += 1
        best = min(best, total / num_passes)
    return best


def _num_bytes(group: _Group, outputs: int, inputs: int) -> int:
    if group.form is None:
        return outputs * inputs * group.item_bytes
    return group.form.num_bytes(outputs, inputs)


def _layers(threads: _core.CpuThreads, group: _Group, shape: tuple[int, int], count: int) -> list[_core.PackedLinear]:
    return [_packed(threads, group.form, group.item_bytes, *shape) for _ in range(count)]


def _packed(
    threads: _core.CpuThreads, form: NumberForm | None, item_bytes: int, outputs: int, inputs: int
) -> _core.PackedLinear:
    """A layer of that form; what its numbers are takes no time."""
    if form is None:
        is_wide = item_bytes == np.float32().itemsize
        packed = _core.PackedLinear(threads, outputs, inputs, "f32" if is_wide else "bf16")
        packed.pack_rows(0, np.zeros((outputs, inputs), np.float32 if is_wide else np.uint16))
        return packed
    rounds = envs.activations() != "float"
    form = form.as_multiplied(inputs, round_activations=rounds)
    rounds = rounds and form.rounds_with(inputs)
    kind: Any = f"w{form.bits}a8" if rounds else f"int{form.bits}"
    packed = _core.PackedLinear(threads, outputs, inputs, kind, form.group_size, scales=form.scales, zeros=form.zeros)
    if form.scales == "two-level":
        name = _LEVEL_TYPES[form.bits]
        block_bytes = next(size for known, _, size in _core.gguf_type_sizes() if known == name)
        packed.pack_blocks(0, name, np.zeros((outputs, inputs // _UNIT * block_bytes), np.uint8))
        return packed
    groups = -(-inputs // form.group_size)
    scales = np.ones((outputs, groups), np.float32)
    zeros = None if form.zeros in ("middle", "codes") else np.zeros_like(scales)
    packed.pack_whole(0, np.zeros((outputs, inputs), np.int8), scales, zeros)
    return packed
