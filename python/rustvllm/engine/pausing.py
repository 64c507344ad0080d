"""``EnginePause``: pauses an engine that runs by itself, as its front ends ask between two steps.

| kind | payload, JSON | answer |
|---|---|---|
| ``pause`` | ``mode``, one of ``MODES`` | as ``pause_state`` |
| ``resume`` | | as ``pause_state`` |
| ``pause_state`` | | ``is_paused``; ``is_at_rest``: nothing runs, and nothing will before the pause ends |

A paused engine still steps: so it takes requests in, which wait, and ends those that are aborted.
"""

import json
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.observe.inspect.queries import Query, answer_with
from rustvllm.parameter_checks import shown

if TYPE_CHECKING:
    from rustvllm.engine.core import EngineCore

logger = init_logger(__name__)

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What becomes of requests in flight: they end at once, run to their ends, or stand still until the pause ends."""
MODES: Final[tuple[PauseMode, ...]] = get_args(PauseMode)
PAUSE, RESUME, PAUSE_STATE = "pause", "resume", "pause_state"
KINDS: Final = frozenset((PAUSE, RESUME, PAUSE_STATE))


def check_mode(mode: object) -> None:
    """Refuse what is not a mode.

    Raises:
        InvalidRequestError: It is none.
    """
    if mode not in MODES:
        raise InvalidRequestError(f"mode must be one of {', '.join(map(repr, MODES))}, got {shown(mode)}", "mode")


class EnginePause:
    """See the module. Belongs to the thread that steps the engine.

    Args:
        core: The engine.
    """

    def __init__(self, core: "EngineCore") -> None:
        self._core, self._scheduler = core, core.scheduler

    def answer(self, query: Query) -> None:
        """Do what is asked, and say how the engine is."""
        answer_with(query, lambda: self._answer(query))

    def _answer(self, query: Query) -> bytes:
        if query.kind == PAUSE:
            self._pause(json.loads(query.payload).get("mode"))
        elif query.kind == RESUME and self._is_paused:
            logger.info("the engine runs on")
            self._core.is_frozen = False
            self._scheduler.set_pause_state("unpaused")
            self._core.handle.wake()  # the step before this query found nothing to do
        state = {"is_paused": self._is_paused, "is_at_rest": self._scheduler.is_at_rest()}
        return json.dumps(state).encode()

    @property
    def _is_paused(self) -> bool:
        return self._scheduler.pause_state != "unpaused"

    def _pause(self, mode: object) -> None:
        check_mode(mode)
        self._core.is_frozen = mode == "keep"
        self._scheduler.set_pause_state("paused_all" if mode == "keep" else "paused_new")
        num_aborted = self._scheduler.abort_all() if mode == "abort" else 0
        logger.info("the engine is paused (mode %s, %d requests aborted)", mode, num_aborted)
