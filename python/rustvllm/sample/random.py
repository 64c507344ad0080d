"""Counter-based random numbers: one uniform number per (seed, position), the same on every device and in any batch.

The generator applies SplitMix64's output function (Steele, Lea and Flood, 2014) to the seed and then to the position.
It is stateless, so preemption, batch order and chunking cannot shift a stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch needs."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def counter_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One uniform number per pair.

    Args:
        seeds: int64 ``[n]``.
        positions: int64 ``[n]``, of the token to be sampled in its own sequence.

    Returns:
        float64 ``[n]`` in ``[0, 1)``, multiples of 2⁻⁵³.
    """
    if seeds.device.type == "cpu":
        return torch.from_numpy(_on_host(seeds.numpy(), positions.numpy()))
    return _on_device(seeds, positions)


def _on_device(seeds: Tensor, positions: Tensor) -> Tensor:
    state = _mix(seeds + _GOLDEN)
    state = _mix(state ^ (positions * _GOLDEN))
    state = _mix(state + _GOLDEN)
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def _on_host(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """See ``_on_device``; in numpy, whose operations on small arrays cost a tenth of torch's."""
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    state = mix(seeds.view(np.uint64) + golden)
    state = mix(state ^ (positions.view(np.uint64) * golden))
    state = mix(state + golden)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
