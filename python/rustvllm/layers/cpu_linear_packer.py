"""Gives every dense layer of a model on the CPU its kernel, one layer at a time, and says what that takes.

A weight is kept once: where a packed copy computes every number of rows, the weight itself is given up as soon as it is
packed. An embedding that is the head, too, stays for its look-ups.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn

from rustvllm import _core
from rustvllm.layers.cpu_linear import (
    CORE_DTYPES,
    CoreLinear,
    LinearByRows,
    OneDnnLinear,
    TorchLinear,
    WeightKind,
)
from rustvllm.layers.cpu_linear_choice import PLAIN, Choice, choose, measure
from rustvllm.layers.linear import Linear, LinearKernel
from rustvllm.logger import init_logger

logger = init_logger(__name__)

MEASURE_SECONDS = 0.25
"""What all measurements of a model may take together; a product that has begun is ended."""
SAMPLE_BYTES = 4 << 20
"""The piece of a weight that is measured: more than a core's own cache, with what lies beside it."""
NOT_WORTH_MEASURING = 1 << 16
"""Weights of fewer numbers are torch's: what a call costs outweighs what the product costs."""

Shape = tuple[int, int]  # out_features, in_features


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """What was asked for.

    Attributes:
        kernel: ``torch``, ``onednn`` or ``core`` for every layer; None: what measures best.
        kind: what a number of a packed weight is; None: as the model's.
        group_size: inputs that share a scale, with int8; None: all of an output's.
    """

    kernel: str | None = None
    kind: WeightKind | None = None
    group_size: int | None = None


class LinearPacker:
    """See the module.

    Args:
        threads: which the core's products use.
        options: what was asked for.
        outline: the model, perhaps without memory (on the meta device).
        embedding: its embedding, if that is the head, too.
        room: bytes of copies that may lie beside the weights that they were made of.
    """

    def __init__(
        self,
        threads: _core.CpuThreads,
        options: LinearOptions,
        outline: nn.Module,
        embedding: Tensor | None,
        room: int,
    ) -> None:
        self._threads = threads
        self._options = options
        linears = [module for module in outline.modules() if isinstance(module, Linear)]
        self._count = Counter(_shape(linear.weight) for linear in linears if linear.weight is not embedding)
        self._plain_bytes = sum(linear.weight.nbytes for linear in linears if linear.weight is not embedding)
        self._head_bytes = 0 if embedding is None else embedding.nbytes
        shapes = [*self._count, *([] if embedding is None else [_shape(embedding)])]
        self._num_measured = max(sum(map(_is_measured, shapes)), 1)
        self._room = room
        self._choices: dict[tuple[Shape, bool], Choice] = {}
        self._missing: dict[int, tuple[Linear, list[int]]] = {}
        self._layers: Counter[str] = Counter()
        self._copied_bytes = 0
        self._beside_bytes = 0
        self._seconds = 0.0

    def resident_bytes(self, plain_bytes: int) -> int:
        """What a model takes in memory at least once it is packed.

        Args:
            plain_bytes: what it takes as it is.
        """
        if self._options.kind != "int8":
            return plain_bytes
        packed = sum(count * _int8_bytes(shape, self._options.group_size) for shape, count in self._count.items())
        return plain_bytes - self._plain_bytes + packed

    def watch(self, model: nn.Module, embedding: Tensor | None) -> None:
        """Note what must be filled before each layer can be packed; ``filled`` then packs it.

        Args:
            model: with memory; pages that nothing was written to take none.
            embedding: as in the constructor.
        """
        for linear in model.modules():
            if isinstance(linear, Linear) and linear.weight is not embedding:
                tensors = [linear.weight, *([] if linear.bias is None else [linear.bias])]
                entry = (linear, [sum(tensor.numel() for tensor in tensors)])
                self._missing |= {tensor.untyped_storage().data_ptr(): entry for tensor in tensors}

    def filled(self, target: Tensor) -> None:
        """Hear that a parameter, or a part of one, has its values: the layer may be complete."""
        linear, left = self._missing.get(target.untyped_storage().data_ptr(), (None, [0]))
        if linear is None:
            return
        left[0] -= target.numel()
        if left[0] == 0:
            self._forget(linear)
            self._pack(linear, is_tied=False)

    def finish(self, model: nn.Module, embedding: Tensor | None) -> LinearKernel | None:
        """Pack what is not packed yet, and say in the log what everything takes.

        Args:
            model: filled.
            embedding: as in the constructor; None by now, if the checkpoint has another head.

        Returns:
            The kernel of a head that is the embedding and no layer of its own.
        """
        self._missing.clear()
        is_layer = False
        for linear in model.modules():
            if isinstance(linear, Linear) and linear.kernel is None:
                is_tied = linear.weight is embedding
                is_layer |= is_tied
                self._pack(linear, is_tied=is_tied)
        head = None
        if embedding is not None and not is_layer:
            choice = self._choice(embedding, None, is_tied=True)
            head = self._kernel(choice, embedding, None, has_plain=True)
        self._log_summary()
        return head

    def _forget(self, linear: Linear) -> None:
        for tensor in (linear.weight, linear.bias):
            if tensor is not None:
                self._missing.pop(tensor.untyped_storage().data_ptr(), None)

    def _pack(self, linear: Linear, *, is_tied: bool) -> None:
        choice = self._choice(linear.weight, linear.bias, is_tied=is_tied)
        has_plain = is_tied or PLAIN in choice.layouts
        linear.kernel = self._kernel(choice, linear.weight, linear.bias, has_plain=has_plain)
        if not has_plain:
            linear.release_weight()

    @property
    def needs_torch_threads(self) -> bool:
        """Whether some layer is computed by torch's threads."""
        return any(name != "core" for choice in self._choices.values() for name in choice.layouts)

    def _log_summary(self) -> None:
        kinds = ", ".join(f"{count} by {name}" for name, count in self._layers.most_common())
        logger.info(
            "dense layers: %s; packed copies %.1f MiB, %.1f MiB of them beside other copies (measured in %.2f s)",
            kinds or "none",
            self._copied_bytes / 2**20,
            self._beside_bytes / 2**20,
            self._seconds,
        )

    def _kernel(self, choice: Choice, weight: Tensor, bias: Tensor | None, *, has_plain: bool) -> LinearKernel:
        made = {name: self._contender(name, weight, bias) for name in choice.layouts}
        copies = [kernel.nbytes for kernel in made.values() if kernel.nbytes]
        self._layers[" and ".join(made)] += 1
        self._copied_bytes += sum(copies)
        self._beside_bytes += sum(copies if has_plain else copies[1:])
        if len(made) == 1:
            return made[choice.names[0]]
        return LinearByRows([made[name] for name in choice.names])

    def _contender(self, name: str, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        if name == "core":
            return CoreLinear(self._threads, weight, bias, self._options.kind, self._options.group_size)
        if name == "onednn":
            return OneDnnLinear(weight, bias)
        return TorchLinear(weight, bias)

    def _choice(self, weight: Tensor, bias: Tensor | None, *, is_tied: bool) -> Choice:
        shape = _shape(weight)
        if (shape, is_tied) not in self._choices:
            choice = self._make_choice(shape, weight, bias, is_tied=is_tied)
            self._choices[shape, is_tied] = choice
            logger.debug("dense layers of %d x %d%s: %s", *shape, " (tied head)" if is_tied else "", choice)
            for name, times in choice.times.items():
                logger.debug("  %s: %s us", name, " ".join(f"{seconds * 1e6:.0f}" for seconds in times))
        return self._choices[shape, is_tied]

    def _make_choice(self, shape: Shape, weight: Tensor, bias: Tensor | None, *, is_tied: bool) -> Choice:
        dtype = weight.dtype
        if self._options.kind is not None:
            return Choice.always("core")
        if self._options.kernel is not None:
            return Choice.always(self._options.kernel)
        if dtype not in CORE_DTYPES or not _is_measured(shape):
            return Choice.always(PLAIN)
        begin = time.perf_counter()
        # A multiple of 64 outputs, enough of them for every thread to have some.
        num_outputs = max(SAMPLE_BYTES // (shape[1] * dtype.itemsize), 64 * self._threads.num_threads) // 64 * 64
        piece = weight[:num_outputs]
        piece_bias = None if bias is None else bias[:num_outputs]
        names = ["core", *(["onednn"] if OneDnnLinear.is_available(dtype) else []), PLAIN]
        contenders = {name: self._contender(name, piece, piece_bias) for name in names}
        times = measure(contenders, shape[1], dtype, MEASURE_SECONDS / self._num_measured)
        self._seconds += time.perf_counter() - begin
        each = weight.nbytes * (1 if is_tied else max(self._count[shape], 1))
        # A copy of a tied head comes before second copies of layers.
        room = self._room if is_tied else self._room - self._head_bytes
        choice = choose(times, has_plain=is_tied, room_for=room // each)
        self._room -= (len(choice.layouts) - (PLAIN in choice.layouts if is_tied else 1)) * each
        return choice


def _shape(weight: Tensor) -> Shape:
    return weight.shape[0], weight.shape[1]


def _is_measured(shape: Shape) -> bool:
    return shape[0] * shape[1] >= NOT_WORTH_MEASURING


def _int8_bytes(shape: Shape, group_size: int | None) -> int:
    groups = 1 if group_size is None else -(-shape[1] // group_size)
    return shape[0] * (shape[1] + 4 * groups)
