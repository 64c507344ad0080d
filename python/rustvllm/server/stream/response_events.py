""":class:`ResponseEvents`: a streamed response as its events, which are numbered.

The numbers are why the core does not render them. What an event repeats of what was said before (all of a text, an
item, the output) is put together out of pieces that have been JSON since they were new.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from rustvllm.outputs import CompletionOutput
from rustvllm.server.answers.response_items import Item, ItemReader, Step
from rustvllm.server.answers.response_object import ResponseFrame, error_code, failed, outcome_of
from rustvllm.server.errors import describe
from rustvllm.server.stream.chunks import ChunkRenderer
from rustvllm.server.stream.sse import json_bytes, json_string

_TEXT, _LOGPROBS = "@text", "@logprobs"
"""Stand in an item for its text and its log-probabilities. A name of a tool cannot hold them."""
_NAMES = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_SAID = {"message": b"text", "reasoning": b"text", "function_call": b"arguments", "custom_tool_call": b"input"}
_PIECES_PER_BLOCK = 256
"""Pieces of a text that are joined on the way, so that there is little left to join at its end."""
_FEW_BYTES = 256 << 10
"""What is joined and sent in one go at the end of a stream."""


class _OpenItem:
    """The item that is open: the constant parts of its events, and what it has said, as JSON."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self._texts: list[bytes] = []
        self._blocks: list[bytes] = []
        self._logprobs: list[bytes] = []
        where: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if item.kind in ("message", "reasoning"):
            where["content_index"] = 0
        self.where = json_bytes(where)[1:-1]

    def add(self, text: bytes, logprobs: bytes) -> None:
        """More of its text, as a JSON string, and its log-probabilities, as elements of a list."""
        self._texts.append(text[1:-1])
        if len(self._texts) == _PIECES_PER_BLOCK:
            self._blocks.append(b"".join(self._texts))
            self._texts.clear()
        if logprobs:
            self._logprobs.append(b"," + logprobs if self._logprobs else logprobs)

    @property
    def text(self) -> bytes:
        """All of its text, as a JSON string."""
        return b"".join((b'"', *self._blocks, *self._texts, b'"'))

    @property
    def logprobs(self) -> list[bytes]:
        """All of its log-probabilities, as the parts of a JSON list: together they may take tens of megabytes."""
        return [b"[", *self._logprobs, b"]"]

    def filled(self, shape: dict[str, Any]) -> list[bytes]:
        """The JSON of a shape that has the marks of the text and the log-probabilities."""
        before, _, after = json_bytes(shape).partition(b'"%b"' % _TEXT.encode())
        between, has_logprobs, end = after.partition(b'["%b"]' % _LOGPROBS.encode())
        logprobs = self.logprobs if has_logprobs else []
        return [before, self.text, between, *logprobs, end]


class ResponseEvents(ChunkRenderer):
    """The events of one streamed response; its one choice is the response.

    Attributes:
        frame: What each state of the response repeats.
        items: Reads the answer.
    """

    end: ClassVar[bytes] = b""
    frame: ResponseFrame
    items: ItemReader
    _number = 0
    _current: _OpenItem | None = None

    def show(self, frame: ResponseFrame, items: ItemReader) -> None:
        """What the events are about; to be called before the first."""
        self.frame, self.items = frame, items
        self._finished: list[list[bytes]] = []
        self._first: list[bytes] = []
        self._last: list[bytes] = []

    @property
    def is_core_rendered(self) -> bool:
        """The core does not number events."""
        return False

    def wants_chunk(self, completion: CompletionOutput) -> bool:
        """Tokens without a text are looked at, too: thoughts are counted in tokens."""
        return bool(completion.text or completion.token_ids)

    def opening(self) -> bytes:
        """The events that a response begins with; nothing if they repeat so much that they come in pieces."""
        state = self.frame.in_progress()
        kinds = ("response.created", "response.in_progress")
        parts = [part for kind in kinds for part in self._event(kind, b'"response":', state)]
        if sum(map(len, parts)) <= _FEW_BYTES:
            return b"".join(parts)
        self._first = parts
        return b""

    def large_opening(self) -> Iterator[bytes]:
        """The events that a response begins with, a few of their bytes at a time."""
        parts, self._first = self._first, []
        return _pieces(parts)

    def text(self, index: int, text: str, completion: CompletionOutput) -> bytes:  # noqa: ARG002 -- there is one choice
        """The events of more of the answer."""
        return b"".join(self._render(self.items.read(completion)))

    def finish(
        self,
        index: int,  # noqa: ARG002 -- there is one choice
        text: str,  # noqa: ARG002 -- the completion's
        finish_reason: str,
        stop_reason: int | str | None,  # noqa: ARG002 -- this API has no place for it
        completion: CompletionOutput | None = None,
    ) -> bytes:
        """The events of what was held back; what ends the response is left to :meth:`closing`."""
        outcome = outcome_of(finish_reason)
        news = [] if completion is None else self._render(self.items.read(completion))
        self._last = self._render(self.items.finish(is_whole=outcome.status == "completed"))
        state = self.frame.ended(outcome, self._output(), self._usage)
        self._last += self._event(f"response.{outcome.status}", b'"response":', state)
        return b"".join(news)

    def closing(self) -> Iterator[bytes]:
        """The end of the response, a few of its bytes at a time."""
        return _pieces(self._last)

    def error(self, exc: BaseException) -> bytes:
        """The events of an error that ends the stream; a response that has begun keeps what was said so far."""
        status, message, param, _ = describe(exc)
        if not self._number:
            members = {"code": error_code(status), "message": message, "param": param}
            return b"".join(self._event("error", json_bytes(members)[1:-1]))
        parts = [] if self._current is None else self._close(is_whole=False)
        state = self.frame.ended(failed(status, message), self._output(), None)
        return b"".join([*parts, *self._event("response.failed", b'"response":', state)])

    def _output(self) -> list[bytes]:
        """The items so far."""
        parts: list[bytes] = [b"["]
        for index, item in enumerate(self._finished):
            parts += [b"," if index else b"", *item]
        return [*parts, b"]"]

    def _render(self, steps: list[Step]) -> list[bytes]:
        parts: list[bytes] = []
        for step in steps:
            if step.kind == "open":
                parts += self._open(step.item)
            elif step.kind == "more":
                parts += self._more(step)
            else:
                parts += self._close(is_whole=step.is_whole)
        return parts

    def _open(self, item: Item) -> list[bytes]:
        current = self._current = _OpenItem(item)
        new = json_bytes(item.as_dict("in_progress", "", [], is_new=True))
        parts = self._event("response.output_item.added", b'"output_index":%d,"item":' % item.index, [new])
        if item.kind in ("message", "reasoning"):
            part = json_bytes(item.part("", []))
            parts += self._event("response.content_part.added", b'%b,"part":' % current.where, [part])
        return parts

    def _more(self, step: Step) -> list[bytes]:
        current = self._current
        assert current is not None
        text = json_string(step.text)
        logprobs = json_bytes(step.logprobs)[1:-1] if step.logprobs else b""
        current.add(text, logprobs)
        body = b'%b,"delta":%b' % (current.where, text)
        if step.item.kind == "message":
            body += b',"logprobs":[%b]' % logprobs
        return self._event(f"{_NAMES[step.item.kind]}.delta", body)

    def _close(self, *, is_whole: bool) -> list[bytes]:
        current, self._current = self._current, None
        assert current is not None
        item = current.item
        done: list[bytes] = [b'%b,"%b":' % (current.where, _SAID[item.kind]), current.text]
        if item.kind == "message":
            done += [b',"logprobs":', *current.logprobs]
        elif item.kind == "function_call":
            done.append(b',"name":' + json_string(item.name))
        parts = self._event(f"{_NAMES[item.kind]}.done", b"", done)
        if item.kind in ("message", "reasoning"):
            part = current.filled(item.part(_TEXT, [_LOGPROBS]))
            parts += self._event("response.content_part.done", b'%b,"part":' % current.where, part)
        whole = current.filled(item.as_dict("completed" if is_whole else "incomplete", _TEXT, [_LOGPROBS]))
        self._finished.append(whole)
        return parts + self._event("response.output_item.done", b'"output_index":%d,"item":' % item.index, whole)

    def _event(self, kind: str, body: bytes, parts: list[bytes] | None = None) -> list[bytes]:
        """An event: its members but type and number, the last of which may be in parts."""
        name = kind.encode()
        head = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b' % (name, name, self._number, body)
        self._number += 1
        return [head, *(parts or ()), b"}\n\n"]


def _pieces(parts: list[bytes]) -> Iterator[bytes]:
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
