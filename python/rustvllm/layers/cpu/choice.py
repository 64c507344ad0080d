"""Chooses the kernel that computes dense layers of a shape, for each number of rows, by measuring on this machine.

The contenders take turns computing the same products from a piece of the real weight. A contender whose result differs
from torch's is excluded. A second copy of a weight is made only if it pays and if there is memory for it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rustvllm.layers.cpu.linear import NUM_ROW_CLASSES, ROW_CLASSES, CoreLinear, row_class
from rustvllm.layers.linear import LinearKernel
from rustvllm.logger import init_logger

logger = init_logger(__name__)

PLAIN = "torch"
"""The contender that needs no copy; the results of the others are compared with its results."""
NUM_ROUNDS = 2
HOPELESS = 1.5
"""A contender that took this many times the best one's time is not measured again for that number of rows."""
WORTH_A_CHANGE = 0.9
"""Another contender replaces the first one if its mean time is at most this share of the first one's."""
WORTH_A_COPY = 0.85
"""A further copy is made if the mean time with it is at most this share of the best mean time without."""
WORTH_ITS_ROUNDING = 0.95
"""The matrix unit is used where it takes less than this share of the time."""
MATRIX_ROWS = (2, 16, 128)
"""The numbers of rows for which the matrix unit is measured."""
_WORKLOADS = ({0: 128, 7: 1}, {5: 128, 8: 16})
"""The loads that decide, as counts of products per class of rows: 128 tokens in and 128 out, for one request and for 32
together."""
FAR_CLASSES = frozenset({0, 5})
"""Classes of rows measured with the weight out of the caches, as in a step that reads all layers: a kernel that
is fast with a cached weight may be slow at fetching it, or at reordering it for every call."""
_ORDER = (0, 5, 8, 7, 3, 1, 4, 6, 2)
NUM_NEEDED = 3
"""How many classes of rows, in the order of measurement, are measured even when the time is over."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""How far a result may differ from the plain one, as a share of its largest magnitude."""

Times = dict[str, list[float]]
"""Seconds of each contender by class of rows; infinite if it is excluded."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels that compute layers of a shape.

    Attributes:
        names: A contender for each of ``ROW_CLASSES``.
        times: The measured times.
        matrix_rows: The smallest number of rows for which the core uses the matrix unit; None disables it.
    """

    names: tuple[str, ...]
    times: Times
    matrix_rows: int | None = None

    @property
    def layouts(self) -> tuple[str, ...]:
        """The chosen contenders, each once."""
        return tuple(dict.fromkeys(self.names))

    @classmethod
    def always(cls, name: str) -> Choice:
        """Choose one contender for all rows, without measuring."""
        return cls((name,) * NUM_ROW_CLASSES, {})

    def __str__(self) -> str:
        """Describe for the log which kernel computes how many rows."""
        parts = []
        for name, group in itertools.groupby(range(NUM_ROW_CLASSES), self.names.__getitem__):
            first = next(group)
            low = 1 if first == 0 else ROW_CLASSES[first - 1] + 1
            parts.append(f"{name} from {low} row{'' if low == 1 else 's'}")
        if self.matrix_rows is not None and "core" in self.names:
            parts.append(f"the core by the matrix unit from {self.matrix_rows}")
        return ", ".join(parts)


def measure(
    contenders: Mapping[str, LinearKernel],
    in_features: int,
    dtype: torch.dtype,
    seconds: float,
    push_out: Callable[[], None],
) -> Times:
    """Time the contenders for each class of rows.

    Args:
        contenders: Kernels of the same weight and bias, including ``PLAIN``.
        in_features: The weight's number of inputs.
        dtype: The dtype of inputs and outputs.
        seconds: A time limit. After it, the times of the remaining classes are interpolated from the measured ones.
        push_out: Reads enough other memory to remove a weight from the caches.
    """
    deadline = time.perf_counter() + seconds
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((ROW_CLASSES[-1], in_features), generator=generator).to(dtype)
    times: Times = {name: [math.nan] * NUM_ROW_CLASSES for name in contenders}
    out: set[str] = set()
    for place, index in enumerate(_ORDER):
        if place >= NUM_NEEDED and time.perf_counter() > deadline:
            break
        x = rows[: ROW_CLASSES[index]]
        # The first call is not timed: it touches memory for the first time, and its result is checked.
        expected = contenders[PLAIN].forward(x, None, None)
        for name, kernel in contenders.items():
            if name not in out and not _is_right(name, kernel, x, expected):
                out.add(name)
        best = dict.fromkeys(contenders, math.inf)
        for _ in range(NUM_ROUNDS):
            for name, kernel in contenders.items():
                if name in out or HOPELESS * min(best.values()) < best[name] < math.inf:
                    continue
                if index in FAR_CLASSES:
                    push_out()
                begin = time.perf_counter()
                kernel.forward(x, None, None)
                best[name] = min(best[name], time.perf_counter() - begin)
        for name in contenders:
            times[name][index] = best[name]
    known = [index for index in range(NUM_ROW_CLASSES) if not math.isnan(times[PLAIN][index])]
    for name, by_class in times.items():
        if name in out:
            times[name] = [math.inf] * NUM_ROW_CLASSES
        else:
            logs = [math.log(by_class[index]) for index in known]
            times[name] = np.exp(np.interp(range(NUM_ROW_CLASSES), known, logs)).tolist()
    return times


def best_matrix_rows(kernel: CoreLinear, dtype: torch.dtype, push_out: Callable[[], None]) -> int | None:
    """The smallest number of rows from which the matrix unit is faster for every measured number of rows.

    Args:
        kernel: Has a piece of a weight, and a matrix unit, which is disabled on return.
        dtype: The dtype of inputs and outputs.
        push_out: See ``measure``.
    """
    found: int | None = None
    rows = torch.randn((MATRIX_ROWS[-1], kernel.packed.in_features), generator=torch.Generator().manual_seed(0))
    rows = rows.to(dtype)
    for num_rows in reversed(MATRIX_ROWS):
        x, index = rows[:num_rows], row_class(num_rows)
        best = [math.inf, math.inf]
        is_far = num_rows <= ROW_CLASSES[max(FAR_CLASSES)]
        for turn in range(2 * NUM_ROUNDS if is_far else 2 * NUM_ROUNDS + 2):
            kernel.use_matrix_unit(turn % 2 or None)
            if is_far:
                push_out()
            begin = time.perf_counter()
            kernel.forward(x, None, None)
            # The first call of each touches memory for the first time, which the best of several calls hides.
            best[turn % 2] = min(best[turn % 2], time.perf_counter() - begin)
        if best[1] >= WORTH_ITS_ROUNDING * best[0]:
            break
        found = ROW_CLASSES[index - 1] + 1
    kernel.use_matrix_unit(None)
    return found


def choose(times: Times, *, at_least: float, has_plain: bool, room_for: int) -> Choice:
    """Choose which contenders to keep, and which of them computes how many rows.

    The mean over ``_WORKLOADS`` decides; the time for each workload counts as a multiple of the time that it would take
    with the fastest contender for each class of rows.

    Args:
        times: The times of each contender; the one that exists already comes first.
        at_least: Seconds that it takes to read the piece from memory. A contender that took less had the weight in the
            caches; in a step that reads all layers it would take as long as this.
        has_plain: Whether the plain weight stays because it is also the embedding.
        room_for: How many further copies there is memory for.
    """
    floored = {name: [max(seconds, at_least) for seconds in by_class] for name, by_class in times.items()}
    fastest = [min(by_class[index] for by_class in floored.values()) for index in range(NUM_ROW_CLASSES)]

    def slowness(kept: tuple[str, ...]) -> float:
        best = [min(floored[name][index] for name in kept) for index in range(NUM_ROW_CLASSES)]
        ratios = [
            sum(count * best[index] for index, count in load.items())
            / sum(count * fastest[index] for index, count in load.items())
            for load in _WORKLOADS
        ]
        return sum(ratios) / len(ratios)

    names = [name for name in times if math.isfinite(sum(times[name]))]
    options: dict[int, list[tuple[str, ...]]] = {}
    for size in range(1, len(names) + 1):
        for kept in itertools.combinations(names, size):
            copies = len(kept) - (PLAIN in kept if has_plain else 1)
            options.setdefault(copies, []).append(kept)
    chosen: tuple[str, ...] = options[0][0]  # the plain contender is always right
    for copies in sorted(options):
        best = min(options[copies], key=slowness)
        worth = WORTH_A_CHANGE if copies == 0 else WORTH_A_COPY
        if copies <= max(room_for, 0) and slowness(best) <= worth * slowness(chosen):
            chosen = best
    order = sorted(chosen, key=lambda name: name == PLAIN)  # if they are equally fast, a packed one computes
    best_names = (min(order, key=lambda name: floored[name][index]) for index in range(NUM_ROW_CLASSES))
    return Choice(tuple(best_names), times)


def _is_right(name: str, kernel: LinearKernel, x: Tensor, expected: Tensor) -> bool:
    try:
        found = kernel.forward(x, None, None)
    except (RuntimeError, NotImplementedError) as error:
        logger.warning(
            "dense layers: skipping %s, which cannot compute on this machine: %s", name, str(error).partition("\n")[0]
        )
        return False
    if not bool(expected.isfinite().all()):
        return True  # the weight has values that are not finite, so results cannot be compared
    limit = _TOLERANCE[x.dtype] * float(expected.abs().max())
    distance = float((found.to(torch.float32) - expected.to(torch.float32)).abs().max())
    if distance <= limit:
        return True
    logger.warning(
        "dense layers: skipping %s: for %d rows its result differs from torch's by %g, but the limit is %g",
        name,
        x.shape[0],
        distance,
        limit,
    )
    return False
