"""How soon a token can follow another at best on this CPU: products are timed, without torch and without weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from rustvllm import _core, envs
from rustvllm.config.checkpoint_forms import KeptLayer
from rustvllm.config.whole_forms import NumberForm
from rustvllm.worker.host_resources import num_compute_threads

SAMPLE_BYTES: Final = 96 << 20
"""Of a form are measured together: more than processors keep near them."""
MEASURE_SECONDS: Final = 0.08
"""A form is measured so long."""
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
    threads = _core.CpuThreads(num_compute_threads())
    count: Counter[tuple[NumberForm | None, int]] = Counter()
    numbers: Counter[tuple[NumberForm | None, int]] = Counter()
    for layer in read:
        count[layer.form, layer.item_bytes] += 1
        numbers[layer.form, layer.item_bytes] += layer.num_parameters
    seconds = STEP_SECONDS + num_layers * LAYER_SECONDS
    for (form, item_bytes), total in numbers.items():
        # A head is much larger than other layers: there are pieces of at most a sample's size.
        outputs = max(total // count[form, item_bytes] // hidden_size, 1)
        seconds += _seconds(threads, form, item_bytes, outputs, hidden_size, total)
    return seconds


def _seconds(
    threads: _core.CpuThreads, form: NumberForm | None, item_bytes: int, outputs: int, inputs: int, total: int
) -> float:
    """Of the products of one row with all layers of a form, from those with as many as are a sample."""
    inputs = -(-inputs // _UNIT) * _UNIT
    each = form.num_bytes(outputs, inputs) if form is not None else outputs * inputs * item_bytes
    num_measured = max(min(SAMPLE_BYTES // max(each, 1), total // (outputs * inputs)), 1)
    packed = [_packed(threads, form, item_bytes, outputs, inputs) for _ in range(num_measured)]
    x, out = np.full((1, inputs), 0.01, np.float32), np.empty((1, outputs), np.float32)
    least, end = float("inf"), time.perf_counter() + MEASURE_SECONDS
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for layer in packed:
            layer.forward(x, out)
        least = min(least, time.perf_counter() - begin)
    return least * total / (num_measured * outputs * inputs)


def _packed(
    threads: _core.CpuThreads, form: NumberForm | None, item_bytes: int, outputs: int, inputs: int
) -> _core.PackedLinear:
    """A layer of that form; what its numbers are takes no time."""
    if form is None:
        is_wide = item_bytes == np.float32().itemsize
        packed = _core.PackedLinear(threads, outputs, inputs, "f32" if is_wide else "bf16")
        packed.pack_rows(0, np.zeros((outputs, inputs), np.float32 if is_wide else np.uint16))
        return packed
    rounds = envs.activations() != "float" and form.rounds_with(inputs)
    kind: Any = f"w{form.bits}a8" if rounds else f"int{form.bits}"
    packed = _core.PackedLinear(threads, outputs, inputs, kind, form.group_size, scales=form.scales, zeros=form.zeros)
    if form.scales == "two-level":
        name = _LEVEL_TYPES[form.bits]
        block_bytes = next(size for known, _, size in _core.gguf_type_sizes() if known == name)
        packed.pack_blocks(0, name, np.zeros((outputs, inputs // _UNIT * block_bytes), np.uint8))
        return packed
    groups = -(-inputs // form.group_size)
    scales = np.ones((outputs, groups), np.float32)
    packed.pack_whole(
        0, np.zeros((outputs, inputs), np.int8), scales, None if form.zeros == "middle" else np.zeros_like(scales)
    )
    return packed
