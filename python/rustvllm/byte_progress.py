"""How far reading many bytes is: a bar on a terminal, else a line in the log now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from rustvllm.logger import init_logger

logger = init_logger(__name__)

LOG_INTERVAL = 10.0
"""Seconds between two lines in the log; what takes less has none."""


class ByteProgress:
    """Counts bytes; a context manager, whose end takes the bar away.

    Args:
        action: What is done with the bytes, such as ``loading``.
        name: Of the model.
        is_shown: False counts only.
    """

    def __init__(self, action: str, name: str, *, is_shown: bool) -> None:
        self._action, self._name = action, name
        self._is_shown = is_shown
        self._bar: Any = None
        self._total = 0
        self._done = 0
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def begin(self, total: int) -> None:
        """Say how many bytes there are."""
        self._total = total
        if self._is_shown and sys.stderr.isatty():
            from tqdm import tqdm

            class Bar(tqdm):  # type: ignore[type-arg]
                monitor_interval = 0  # no thread that watches it

            title = f"{self._action.capitalize()} {self._name}"
            self._bar = Bar(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024, leave=False)

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._is_shown and (now := time.monotonic()) - self._logged >= LOG_INTERVAL:
            self._logged = now
            logger.info(
                "%s %s: %.1f of %.1f GiB after %.0f s",
                self._action,
                self._name,
                self._done / 2**30,
                self._total / 2**30,
                now - self._started,
            )
