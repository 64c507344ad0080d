"""Queries to the thread that steps an engine: :class:`Query`, its sources, and the queue within a process.

Other processes send queries through ``_core.EngineServer``, other threads of this process through :class:`QueryQueue`.
The thread takes them between two steps (``run_loop.py``), and ``inspection.py`` answers them.
"""

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rustvllm.exceptions import EngineDeadError, QueryError, QueryTimeoutError, RustVLLMError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

MAX_OPEN_QUERIES: Final = 8
"""The most queries without an answer: as many as a client in another process may have."""


class Query(Protocol):
    """A query; the thread that takes it answers it once, or fails it."""

    @property
    def kind(self) -> str:
        """What kind of query it is."""

    @property
    def payload(self) -> bytes:
        """Its parameters."""

    def answer(self, answer: bytes, /) -> None:
        """Give the answer."""

    def fail(self, message: str, /) -> None:
        """Say why there is no answer."""


def answer_with(query: Query, make: Callable[[], bytes | None]) -> None:
    """Answer a query, or say why it cannot be answered; the engine goes on in either case.

    Args:
        query: The query.
        make: Returns the answer; None if it will be given later.
    """
    try:
        answer = make()
    except RustVLLMError as error:
        query.fail(str(error))
    except Exception as error:
        logger.exception("the query %r failed", query.kind)
        query.fail(f"the query {query.kind!r} failed: {type(error).__name__}: {error}")
    else:
        if answer is not None:
            query.answer(answer)


class QuerySource(Protocol):
    """Has queries for the thread that steps."""

    def take_queries(self) -> Sequence[Query]:
        """The waiting queries, oldest first; called after every step, so it must be cheap."""


class LocalQuery:
    """A query from another thread of this process."""

    def __init__(self, kind: str, payload: bytes) -> None:
        self.kind, self.payload = kind, payload
        self.outcome: concurrent.futures.Future[bytes] = concurrent.futures.Future()

    def answer(self, answer: bytes) -> None:
        """Give the answer."""
        self.outcome.set_result(answer)

    def fail(self, message: str) -> None:
        """Say why there is no answer."""
        self.outcome.set_exception(QueryError(message))


class QueryQueue:
    """Queries from threads of this process.

    Args:
        wake: Called when there is a new query.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._waiting: deque[LocalQuery] = deque()
        self._lock = threading.Lock()
        self._num_open = 0
        self._death: str | None = None

    def ask(self, kind: str, payload: bytes, timeout: float) -> bytes:
        """Send a query, and wait for the answer.

        Raises:
            QueryTimeoutError: There is no answer within ``timeout`` seconds.
            QueryError: Too many queries are open, or the engine says why there is no answer.
            EngineDeadError: The engine has ended.
        """
        query = LocalQuery(kind, payload)
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)
            if self._num_open >= MAX_OPEN_QUERIES:
                raise QueryError(
                    f"{MAX_OPEN_QUERIES} queries have no answer yet, which is the limit; the engine is in a long step "
                    "or has stalled"
                )
            self._num_open += 1
            self._waiting.append(query)
        query.outcome.add_done_callback(self._close_one)
        self._wake()
        try:
            return query.outcome.result(timeout)
        except concurrent.futures.TimeoutError:
            raise QueryTimeoutError(
                f"the engine gave no answer within {timeout:g} s: it is in a long step or has stalled"
            ) from None

    def take_queries(self) -> Sequence[LocalQuery]:
        """The waiting queries, oldest first."""
        if not self._waiting:
            return ()
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
        return taken

    def close(self, reason: str) -> None:
        """Fail the waiting queries and all future ones with a reason, because the engine has ended."""
        with self._lock:
            self._death = reason
            taken = list(self._waiting)
            self._waiting.clear()
        for query in taken:
            query.outcome.set_exception(EngineDeadError(reason))

    def _close_one(self, _: object) -> None:
        with self._lock:
            self._num_open -= 1
