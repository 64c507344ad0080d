"""``EnginePause``: pauses an engine that runs by itself, as its front ends ask between two steps.

| kind | payload, JSON | answer |
|---|---|---|
| ``pause`` | ``mode``, one of ``MODES`` | as ``pause_state`` |
| ``pause_as_before`` | | as ``pause_state``; does nothing if the engine was paused or resumed before |
| ``resume`` | | as ``pause_state`` |
| ``pause_state`` | | ``is_paused``; ``is_at_rest``: nothing runs, and nothing will before the pause ends |

A paused engine still steps: so it takes requests in, which wait, and ends those that are aborted.

A pause outlives an engine that dies: its front ends know of it (:class:`PauseOrders`), and tell the engine that takes
its place. Each of them does so when it connects, at another time; so what one of them asked since then comes first.
"""

import json
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from rustvllm.exceptions import InvalidRequestError, QueryError
from rustvllm.logger import init_logger
from rustvllm.observe.inspect.queries import Query, answer_with
from rustvllm.parameter_checks import shown

if TYPE_CHECKING:
    from rustvllm.engine.core import EngineCore
    from rustvllm.engine.core_client.remote import RemoteClient

logger = init_logger(__name__)

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What becomes of requests in flight: they end at once, run to their ends, or stand still until the pause ends."""
MODES: Final[tuple[PauseMode, ...]] = get_args(PauseMode)
PAUSE, PAUSE_AS_BEFORE, RESUME, PAUSE_STATE = "pause", "pause_as_before", "resume", "pause_state"
KINDS: Final = frozenset((PAUSE, PAUSE_AS_BEFORE, RESUME, PAUSE_STATE))
Order: TypeAlias = tuple[str, bytes]
"""The kind and the payload of a query."""


def check_mode(mode: object) -> None:
    """Refuse what is not a mode.

    Raises:
        InvalidRequestError: It is none.
    """
    if mode not in MODES:
        raise InvalidRequestError(f"mode must be one of {', '.join(map(repr, MODES))}, got {shown(mode)}", "mode")


class PauseOrders:
    """What a front end asked of engines that were dead then: the engines that take their places are asked it.

    Written on the event loop, and read by the threads that connect again.
    """

    def __init__(self) -> None:
        self._missed: dict[int, Order] = {}

    def miss(self, rank: int, order: Order) -> None:
        """The engine of that rank was dead when this was asked."""
        self._missed[rank] = order

    def reconnect(self, client: "RemoteClient", rank: int, timeout: float) -> None:
        """Connect to the engine in a dead one's place, which is paused as that was before it gets requests; blocks.

        Args:
            client: Connects.
            rank: Whose place.
            timeout: Seconds to wait for it, and for its answer.

        Raises:
            EngineDeadError: There is none yet.
        """
        first = self._missed.get(rank) or ((PAUSE_AS_BEFORE, b"") if client.was_paused(rank) else None)
        client.reconnect(rank, timeout, first)
        missed = self._missed.pop(rank, None)
        if missed is None or missed == first:
            return
        try:  # asked while it connected
            client.query(rank, *missed, timeout)
        except QueryError as error:
            logger.error("engine %d does not answer %r: %s; ask it again", rank, missed[0], error)  # noqa: TRY400 -- the text says it


class EnginePause:
    """See the module. Belongs to the thread that steps the engine.

    Args:
        core: The engine.
    """

    def __init__(self, core: "EngineCore") -> None:
        self._core, self._scheduler = core, core.scheduler
        self._was_asked = False  # to pause, or to go on

    def answer(self, query: Query) -> None:
        """Do what is asked, and say how the engine is."""
        answer_with(query, lambda: self._answer(query))

    def _answer(self, query: Query) -> bytes:
        if query.kind == PAUSE:
            self._pause(json.loads(query.payload).get("mode"))
        elif query.kind == PAUSE_AS_BEFORE and not self._was_asked:
            self._pause("wait")
        elif query.kind == RESUME and self._is_paused:
            logger.info("the engine runs on")
            self._core.is_frozen = False
            self._scheduler.set_pause_state("unpaused")
            self._core.handle.wake()  # the step before this query found nothing to do
        self._was_asked |= query.kind != PAUSE_STATE
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
