""":class:`ServerLoad`: how many generating requests are open, in all API processes of a server together.

Each process has a number of its own in memory that they share, and reads all of them. No other process writes that
number while it lives, and a whole aligned word is written at a time; so there is nothing to lock. Behind them each has
another, which it changes with the list of adapters (``lora/async_adapters.py``).
"""

import mmap
import os
from array import array
from typing import Self

from rustvllm.server.flags.serve_args import MAX_PROCESSES

_BYTES = 8
_NUM_WORDS = 2 * MAX_PROCESSES


class ServerLoad:
    """The numbers of all API processes.

    Args:
        numbers: Of all processes, 64 bits each, and as many more.
        index: Which one is this process's; it begins with 0, whatever a process before it has left.

    Attributes:
        index: Which number is this process's.
        own: This process's number alone, as the only element.
        adapter_versions: What each process changes with the list of adapters.
    """

    def __init__(self, numbers: memoryview | None = None, index: int = 0) -> None:
        words = memoryview(array("q", [0, 0])) if numbers is None else numbers
        half = len(words) // 2
        self._numbers, self.adapter_versions = words[:half], words[half:]
        self.index = index
        self.own = self._numbers[index : index + 1]
        self.own[0] = 0

    @classmethod
    def attach(cls, descriptor: int, index: int) -> Self:
        """The numbers behind what :func:`create_load_memory` gave the launcher."""
        memory = mmap.mmap(descriptor, _NUM_WORDS * _BYTES)
        os.close(descriptor)
        return cls(memoryview(memory).cast("q"), index)

    @property
    def total(self) -> int:
        """Open requests now."""
        return sum(self._numbers)


def clear_load(descriptor: int, index: int) -> None:
    """Forget what a process had open that has ended."""
    os.pwrite(descriptor, bytes(_BYTES), index * _BYTES)


def create_load_memory() -> int:
    """A descriptor of memory for all processes, with zeros; it has no name and is gone with the last of them."""
    descriptor = os.memfd_create("rustvllm-load")
    os.ftruncate(descriptor, _NUM_WORDS * _BYTES)
    return descriptor
