"""``StepTimes``: the steps of an engine, read from the file of ``--step-trace-file``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepTimes:
    """When steps ended, and how long each took: times of CLOCK_MONOTONIC in nanoseconds, in order.

    Attributes:
        done: When a step's tokens were there.
        duration: The time from the end of the previous step, or from the step's launch if that was later. So a step
            launched while another computes is not counted twice, and the host's time between two does not count.
    """

    done: Nanoseconds
    duration: Nanoseconds

    @classmethod
    def read(cls, path: Path) -> "StepTimes":
        """Read the file; an incomplete last line is left out."""
        lines = path.read_text(encoding="ascii").splitlines(keepends=True)
        return cls.of([json.loads(line) for line in lines if line.endswith("\n")])

    @classmethod
    def of(cls, steps: list[dict[str, Any]]) -> "StepTimes":
        """Make it from the file's objects."""
        rows = sorted((step["done_ns"], step["launch_ns"]) for step in steps)
        done = np.array([row[0] for row in rows], np.int64)
        begin = np.array([row[1] for row in rows], np.int64)
        if done.size:
            begin[1:] = np.maximum(begin[1:], done[:-1])
        return cls(done, done - begin)

    def between(self, begin: int, end: int) -> "StepTimes":
        """The steps that ended in this time."""
        first, last = np.searchsorted(self.done, [begin, end])
        return StepTimes(self.done[first:last], self.duration[first:last])

    def longest_within(self, begin: Nanoseconds, end: Nanoseconds, num_steps: Nanoseconds) -> Nanoseconds:
        """The part of gaps between two events of a stream that steps explain.

        Args:
            begin: Times of the earlier events, ``[gaps]``.
            end: Times of the later events, ``[gaps]``.
            num_steps: How many tokens came, which is how many steps it took, ``[gaps]``.

        Returns:
            ``[gaps]``; the time of ``num_steps`` consecutive steps, namely the slowest ones that ended within the gap,
            because it is unknown which of them made the tokens. If there are fewer, the time of all; 0 if there are
            none.
        """
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.duration)])
        first, last = np.searchsorted(self.done, begin), np.searchsorted(self.done, end, "right")
        explained = np.zeros(begin.size, np.int64)
        for length in np.unique(last - first):
            if length == 0:
                continue
            of_length = np.flatnonzero(last - first == length)
            for steps in np.unique(np.minimum(num_steps[of_length], length)):
                gaps = of_length[np.minimum(num_steps[of_length], length) == steps]
                starts = first[gaps][:, None] + np.arange(length - steps + 1)  # [gaps, windows]
                explained[gaps] = (total[starts + steps] - total[starts]).max(axis=1, initial=0)
        return explained
