"""What rank 0 tells the other ranks on the step channel, and what they say that they wait in."""

from enum import IntEnum

from rustvllm import _core
from rustvllm.distributed.collective_time import CollectiveTime


class Command(IntEnum):
    """A frame of the step channel. All but a step are answered with a number before the next one comes.

    Of ``INIT_CACHE`` and ``ADD_ADAPTER`` the frame says when, and an order on standard input says what.
    """

    LOAD = 1
    NUM_BLOCKS = 2
    INIT_CACHE = 3
    WARM_UP = 4
    STEP = 5
    PING = 6
    ADD_ADAPTER = 7
    REMOVE_ADAPTER = 8
    SHUTDOWN = 9


WAITS = ("", "all_reduce", "all_gather", "broadcast", "receive", "send", "a collective")
"""What a rank may wait in, by the number that it says; the last stands for all others."""
_LAYER_BIT = 8
"""From here on the number has the layer, from 1; 0: it is for none."""


def wait_of(activity: int) -> tuple[str, int]:
    """What a rank waits in, and for which layer, from 0 (-1: none), by the number that it says."""
    return WAITS[min(activity & 0xFF, len(WAITS) - 1)], (activity >> _LAYER_BIT) - 1


class ReportedTime(CollectiveTime):
    """The time in collectives of a rank that follows, which rank 0 can see even when this rank is stopped."""

    __slots__ = ("_current", "_reader")

    def __init__(self, reader: _core.StepReader) -> None:
        self._reader = reader
        self.layer = -1  # before the other fields: one of them reads it
        super().__init__()

    @property
    def current(self) -> str:
        """The collective that has not ended; empty: none."""
        return self._current

    @current.setter
    def current(self, name: str) -> None:
        self._current = name
        if not name:
            self._reader.note_activity(0)
            return
        kind = WAITS.index(name) if name in WAITS else len(WAITS) - 1
        layer = self.layer if name == "all_reduce" else -1
        self._reader.note_activity(kind | (layer + 1) << _LAYER_BIT)
