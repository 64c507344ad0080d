""":class:`ResponseEventRenderer`: a streamed response as its numbered events.

The core reads the answer and renders the events of its items, and what these repeat at their end. What is made here
comes before the first item and behind the last one: the response as it begins, and as it ends.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import ClassVar

from rustvllm.outputs import CompletionOutput
from rustvllm.server.answers.response_items import LogprobPieces
from rustvllm.server.answers.response_object import Outcome, ResponseFrame, error_code, failed, outcome_of
from rustvllm.server.answers.turn import TurnReader
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.errors import describe
from rustvllm.server.stream.chunks import ChunkRenderer
from rustvllm.server.stream.sse import json_bytes
from rustvllm.text.turn_formats import CoreResponseEvents

_OPENING: tuple[str, ...] = ("response.created", "response.in_progress")
"""The events that a response begins with; the core numbers its own behind them."""
_FEW_BYTES = 256 << 10
"""What is joined and sent in one go at either end of a stream."""


class ResponseEventRenderer(ChunkRenderer):
    """The events of one streamed response; its one choice is the response.

    Attributes:
        frame: What each state of the response repeats.
        response_events: Renders the events of the items.
    """

    end: ClassVar[bytes] = b""
    frame: ResponseFrame
    _has_begun = False

    def show(self, frame: ResponseFrame, reader: TurnReader | None, custom: frozenset[str]) -> None:
        """What the events are about; to be called before the first.

        Args:
            frame: What each state of the response repeats.
            reader: Reads the answer for thoughts and calls; None: it is all a message.
            custom: Names of the custom tools.
        """
        self.frame, self._reader = frame, reader
        reading = None if reader is None else reader.group.core_reading
        self._events = self.response_events = CoreResponseEvents(reading, custom)
        self._places = None if self._logprobs is None else LogprobPieces(reader, self._logprobs)
        self._first: Iterable[bytes] = ()
        self._last: Iterable[bytes] = ()

    @property
    def is_core_rendered(self) -> bool:
        """Events with log-probabilities pass here, and an opening that is large comes in pieces before them."""
        return super().is_core_rendered and self.frame.num_bytes * len(_OPENING) <= _FEW_BYTES

    def wants_chunk(self, completion: CompletionOutput) -> bool:
        """Tokens without a text are looked at, too: thoughts are counted in tokens."""
        return bool(completion.text or completion.token_ids)

    def opening(self) -> bytes:
        """The events that a response begins with; nothing if they repeat so much that they come in pieces."""
        self._has_begun = True
        state = self.frame.in_progress()
        parts = [part for number, kind in enumerate(_OPENING) for part in _event(kind, number, b'"response":', state)]
        if sum(map(len, parts)) <= _FEW_BYTES:
            return b"".join(parts)
        self._first = parts
        return b""

    def large_opening(self) -> Iterator[bytes]:
        """The events that a response begins with, a few of their bytes at a time."""
        parts, self._first = self._first, ()
        return _pieces(parts)

    def text(self, index: int, text: str, completion: CompletionOutput) -> bytes:  # noqa: ARG002 -- there is one choice
        """The events of more of the answer."""
        if self._reader is not None:
            self._reader.count(completion.token_ids)
        if self._places is None:
            return self._events.read(text)
        places = self._places.of(completion)
        return b"".join([self._events.read(text, json_bytes(shown)[1:-1]) for text, shown in places])

    def finish(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: int | str | None,  # noqa: ARG002 -- this API has no place for it
        completion: CompletionOutput | None = None,
    ) -> bytes:
        """The events of what was new at last; what ends the response is left to :meth:`closing`."""
        outcome = outcome_of(finish_reason)
        opening = b"" if self._has_begun else self.opening()
        news = b"" if completion is None else self.text(index, text, completion)
        self._last = chain(
            self.large_opening(),
            self._events.finish(outcome.status == "completed"),
            self._ended(outcome, self._usage),
        )
        return opening + news

    def closing(self) -> Iterator[bytes]:
        """The end of the response, a few of its bytes at a time."""
        return _pieces(self._last)

    def error(self, exc: BaseException) -> bytes:
        """The events of an error that ends the stream; a response that has begun keeps what was said so far."""
        status, message, param, _ = describe(exc)
        if not self._has_begun:
            members = {"code": error_code(status), "message": message, "param": param}
            return b"".join(_event("error", 0, json_bytes(members)[1:-1]))
        return b"".join(chain(self._events.break_off(), self._ended(failed(status, message), None)))

    def _ended(self, outcome: Outcome, usage: UsageCounter | None) -> Iterator[bytes]:
        """The last event, once it is asked for: the items are complete by then."""
        state = self.frame.ended(outcome, self._events.output(), usage)
        number = self._events.take_number()
        yield from _event(f"response.{outcome.status}", number, b'"response":', state)


def _event(kind: str, number: int, body: bytes, parts: Iterable[bytes] = ()) -> Iterator[bytes]:
    """An event: its members but type and number, the last of which may be in parts."""
    name = kind.encode()
    yield b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b' % (name, name, number, body)
    yield from parts
    yield b"}\n\n"


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """What parts are together, a few of their bytes at a time."""
    some: list[bytes] = []
    size = 0
    for part in parts:
        for start in range(0, len(part), _FEW_BYTES):
            piece = part[start : start + _FEW_BYTES]
            some.append(piece)
            size += len(piece)
            if size > _FEW_BYTES:
                yield b"".join(some)
                some, size = [], 0
    if some:
        yield b"".join(some)
