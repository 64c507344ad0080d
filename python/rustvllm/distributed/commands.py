"""Commands that rank 0 sends to the other ranks on the step channel, and the collectives that those report back."""

from enum import IntEnum

from rustvllm import _core
from rustvllm.distributed.collective_time import CollectiveTime


class Command(IntEnum):
    """The kind of a frame on the step channel.

    Ranks answer every command but ``STEP`` and ``SHUTDOWN`` with a number, and rank 0 waits for the answers before it
    sends the next frame. ``INIT_CACHE`` and ``ADD_ADAPTER`` only say when; their arguments come as an order on standard
    input. The answer to ``LOAD`` and ``ADD_ADAPTER`` is the digest of the adapters that the rank has read for it, or
    ``NOT_LOADED``.
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


NOT_LOADED = 1
"""The answer of a rank that cannot load an adapter; digests are even."""
WAITS = ("", "all_reduce", "all_gather", "broadcast", "receive", "send", "a collective")
"""Names of the collectives that a rank may wait in, by the number that it reports; the last one is for all others."""
_LAYER_BIT = 8
"""The reported number holds the layer plus 1 from this bit on, or 0 if the collective belongs to no layer."""


def wait_of(activity: int) -> tuple[str, int]:
    """Decode the number that a rank reports: the collective that it waits in, and the layer from 0 (-1: none)."""
    return WAITS[min(activity & 0xFF, len(WAITS) - 1)], (activity >> _LAYER_BIT) - 1


class ReportedTime(CollectiveTime):
    """The collectives of a rank other than 0, written to shared memory: rank 0 can read them even if the rank hangs."""

    __slots__ = ("_current", "_reader")

    def __init__(self, reader: _core.StepReader) -> None:
        self._reader = reader
        self.layer = -1  # before the other fields: one of them reads it
        super().__init__()

    @property
    def current(self) -> str:
        """Name of the collective that is running; empty if none is."""
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
