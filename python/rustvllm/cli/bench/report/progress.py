"""The progress bar of a load: finished requests, events per second, failures."""

import sys
import time
from typing import Any, Self


class LoadProgress:
    """Called ten times a second by the core while a load runs; shows a bar on a terminal only.

    Args:
        total: Requests of the run.
        enabled: Show it if there is a terminal.
    """

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        self._events, self._time = 0, time.monotonic()
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="req", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, completed: int, failed: int, events: int, is_warmup: bool) -> None:
        """Show the counts so far."""
        if self._bar is None:
            return
        if is_warmup:
            self._bar.set_postfix_str("warm-up")
            return
        now = time.monotonic()
        rate = (events - self._events) / max(now - self._time, 1e-3)
        self._events, self._time = events, now
        self._bar.set_postfix_str(f"{rate:,.0f} events/s" + (f", {failed} failed" if failed else ""), refresh=False)
        self._bar.update(completed + failed - self._bar.n)

    def finish(self, measured: dict[str, Any]) -> None:
        """Bring the bar to its end."""
        if self._bar is not None:
            self._bar.update(measured["completed"] + measured["failed"] - self._bar.n)
