"""The time that a rank spends in collectives. Imports no torch, because a rank needs this before it loads torch."""

from dataclasses import dataclass


@dataclass(slots=True)
class CollectiveTime:
    """A rank's collectives so far: reports of stalls name the current one, benchmarks give their share of the time.

    Attributes:
        seconds: Time in collectives that have ended.
        calls: Number of collectives that have ended.
        current: Name of the collective that is running; empty if none is.
        layer: The model's layer, from 0, that began the last ``all_reduce``; -1 if it belonged to no layer.
    """

    seconds: float = 0.0
    calls: int = 0
    current: str = ""
    layer: int = -1
