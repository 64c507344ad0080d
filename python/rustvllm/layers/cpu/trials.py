"""``LinearTrials``: measures, with pieces of a model's own layers, which kernel computes them fastest.

A step reads all layers, so each weight comes from memory. Between two measurements other layers are therefore read,
which removes the measured piece from the caches.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from rustvllm import _core
from rustvllm.layers.cpu.choice import PLAIN, Choice, best_matrix_rows, choose, measure
from rustvllm.layers.cpu.linear import CoreLinear, OneDnnLinear
from rustvllm.layers.cpu.narrow import NARROW_KINDS
from rustvllm.layers.cpu.options import LinearOptions, make_kernel
from rustvllm.layers.linear import Linear, LinearKernel
from rustvllm.logger import init_logger

logger = init_logger(__name__)

MEASURE_SECONDS = 0.4
"""The total time for measured products; a measurement that has begun is completed."""
SAMPLE_BYTES = 4 << 20
"""Size of the piece of a weight that is measured."""
PUSHED_OUT_BYTES = 64 << 20
"""How much is read between two measurements of a weight that must not be in the caches."""
MOST_READ = 1 << 30
"""The most bytes of packed weights that are read to measure the speed of memory."""

Shape = tuple[int, int]
"""``out_features, in_features``."""


class LinearTrials:
    """See the module.

    Args:
        threads: The threads for the core's products.
        options: What the flags and the environment ask for.
        linears: The model's layers that matter for its speed, packed for the core; the caller may pack them again.
        num_choices: How many calls of :meth:`choose` share the time.
    """

    def __init__(
        self, threads: _core.CpuThreads, options: LinearOptions, linears: Iterable[Linear], num_choices: int
    ) -> None:
        self._threads, self._options = threads, options
        self._others = deque(linears)  # read in turn to push a weight out of the caches
        self._seconds_each = MEASURE_SECONDS / max(num_choices, 1)

    def choose(self, piece: Tensor, shape: Shape, *, has_plain: bool, room_for: int) -> Choice:
        """Measure the contenders for layers of a shape, and choose.

        Args:
            piece: ``[num_sampled(shape), in_features]`` or fewer rows, of such a layer's weight.
            shape: Of the whole layers.
            has_plain: See :func:`~rustvllm.layers.cpu.choice.choose`.
            room_for: likewise.
        """
        rate = self._reading_rate
        names = ["core", *(["onednn"] if OneDnnLinear.is_available(piece.dtype) else []), PLAIN]
        contenders = {name: self._contender(name, piece) for name in names}
        matrix_rows = self._best_matrix_rows(contenders["core"], piece.dtype)
        times = measure(contenders, shape[1], piece.dtype, self._seconds_each, self._push_out)
        choice = choose(times, at_least=piece.nbytes / rate, has_plain=has_plain, room_for=room_for)
        choice = replace(choice, matrix_rows=matrix_rows)
        logger.debug("dense layers of %d x %d%s: %s", *shape, " (tied head)" if has_plain else "", choice)
        for name, by_class in times.items():
            logger.debug("  %s: %s us", name, " ".join(f"{seconds * 1e6:.0f}" for seconds in by_class))
        return choice

    def matrix_rows_of(self, kernel: CoreLinear, dtype: torch.dtype, group: int | None) -> int | None:
        """The smallest number of rows for which the matrix unit computes a layer faster; None if it never does.

        Args:
            kernel: Of the whole layer.
            dtype: The dtype of inputs and outputs.
            group: The group size of a layer that was stored as integers; None: it is packed as the options ask, or has
                its 16 bits.
        """
        if not kernel.takes_matrix_unit:
            return None
        if group is None and kernel.packed.kind not in NARROW_KINDS.values():
            return self.matrix_rows_as_asked(kernel, dtype)
        alike = CoreLinear(self._threads, self.piece_of(kernel, dtype), None, kernel.packed.kind, group)
        return self._best_matrix_rows(alike, dtype)

    def matrix_rows_as_asked(self, kernel: CoreLinear, dtype: torch.dtype) -> int | None:
        """As :meth:`matrix_rows_of`, of a layer that is packed as the options ask."""
        return self._best_matrix_rows(self._contender("core", self.piece_of(kernel, dtype)), dtype)

    def piece_of(self, kernel: CoreLinear, dtype: torch.dtype) -> Tensor:
        """The first rows of a layer's weight, as many as are measured: float32 ``[n, in_features]``."""
        shape = kernel.packed.out_features, kernel.packed.in_features
        return kernel.unpack(min(self.num_sampled(shape, dtype), shape[0]))

    def num_sampled(self, shape: Shape, dtype: torch.dtype) -> int:
        """How many outputs are measured: a multiple of 64, and enough for every thread."""
        return max(SAMPLE_BYTES // (shape[1] * dtype.itemsize), 64 * self._threads.num_threads) // 64 * 64

    def _contender(self, name: str, piece: Tensor) -> LinearKernel:
        return make_kernel(name, self._threads, self._options, piece, None)

    def _best_matrix_rows(self, kernel: LinearKernel, dtype: torch.dtype) -> int | None:
        """Set and return the smallest number of rows for which the matrix unit is faster; None if it never is."""
        if not (self._options.matrix_unit and isinstance(kernel, CoreLinear) and kernel.takes_matrix_unit):
            return None
        found = best_matrix_rows(kernel, dtype, self._push_out)
        kernel.use_matrix_unit(found)
        return found

    @cached_property
    def _reading_rate(self) -> float:
        """Bytes per second that all threads together read from packed weights, layer after layer."""
        kernels = [linear.kernel for linear in self._others if isinstance(linear.kernel, CoreLinear)]
        sizes = [kernel.nbytes for kernel in kernels]
        while sum(sizes) > MOST_READ and len(sizes) > 1:
            sizes.pop()
        fastest = math.inf
        for _ in range(2 if sizes else 0):
            begin = time.perf_counter()
            for kernel in kernels[: len(sizes)]:
                kernel.read()
            fastest = min(fastest, time.perf_counter() - begin)
        return sum(sizes) / fastest if sizes else math.inf

    def _push_out(self) -> None:
        """Remove a weight from the caches by reading other packed layers, not the same as last time."""
        num_read = 0
        for _ in range(len(self._others)):
            linear = self._others.popleft()
            self._others.append(linear)
            if isinstance(linear.kernel, CoreLinear):
                linear.kernel.read()
                num_read += linear.kernel.nbytes
            if num_read >= PUSHED_OUT_BYTES:
                return
