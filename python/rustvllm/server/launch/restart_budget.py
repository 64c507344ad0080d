"""How often a process may die and be started again before that counts as the end."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

MAX_RESTARTS: Final = 3
RESTART_WINDOW_SECONDS: Final = 300.0


class RestartBudget:
    """At most ``MAX_RESTARTS`` within ``RESTART_WINDOW_SECONDS``, for all processes of one kind together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._restarts: deque[float] = deque()

    def take(self) -> bool:
        """Whether one more restart is within the limit; if so, it counts."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= MAX_RESTARTS:
            return False
        self._restarts.append(now)
        return True

    @property
    def used(self) -> str:
        """How much of it is used, in words."""
        return f"{len(self._restarts)} of {MAX_RESTARTS} within {RESTART_WINDOW_SECONDS / 60:g} minutes"
