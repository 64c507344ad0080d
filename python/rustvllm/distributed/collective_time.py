"""What a rank spent in collectives. Needs no torch: a rank has one before it loads that."""

from dataclasses import dataclass


@dataclass(slots=True)
class CollectiveTime:
    """What a rank spent in collectives so far: a stalled one says in which, a benchmark what share they take.

    Attributes:
        seconds: In those that ended.
        calls: How many ended.
        current: The name of the one that has not ended; empty: none.
        layer: Of the model, from 0, for which the last one that belongs to a layer was begun; -1: none was.
    """

    seconds: float = 0.0
    calls: int = 0
    current: str = ""
    layer: int = -1
