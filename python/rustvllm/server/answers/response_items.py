""":class:`ItemReader`: a whole answer as the output items of a response. Those of streams are read in the core.

Items follow each other: at most one is open at a time. Text, thoughts and the arguments of a call are all the text of
their item.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rustvllm.outputs import CompletionOutput
from rustvllm.server.answers.logprobs import LogprobsRenderer
from rustvllm.server.answers.turn import TurnReader
from rustvllm.text.turn_formats import custom_input

ItemKind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
Status = Literal["in_progress", "completed", "incomplete"]
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}


@dataclass(frozen=True)
class Item:
    """What stays the same of an output item.

    Attributes:
        kind: Its type.
        index: Of the item in the output.
        name: Of the tool that is called.
        call_id: Of the call.
        id: Its own.
    """

    kind: ItemKind
    index: int
    name: str = ""
    call_id: str = ""
    id: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", _ID_PREFIXES[self.kind] + secrets.token_hex(16))

    def part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        """The one part of a message, or of thoughts."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def as_dict(self, status: Status, text: str, logprobs: list[Any], *, is_new: bool = False) -> dict[str, Any]:
        """The item as the API shows it; one that is new has no part yet."""
        head: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        content = [] if is_new else [self.part(text, logprobs)]
        if self.kind == "message":
            return {**head, "role": "assistant", "content": content}
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content, "encrypted_content": None}
        said = "arguments" if self.kind == "function_call" else "input"
        return {**head, "call_id": self.call_id, "name": self.name, said: text}


@dataclass(frozen=True)
class Step:
    """What is new of an item.

    Attributes:
        item: Which one.
        kind: ``open``: the item begins; ``more``: it has this text; ``close``: it has no more.
        text: Of ``more``.
        logprobs: Of ``more``: those of the tokens of its text, as the API shows them.
        is_whole: Of ``close``: nothing of the item is missing.
    """

    item: Item
    kind: Literal["open", "more", "close"]
    text: str = ""
    logprobs: Sequence[Any] = ()
    is_whole: bool = True


@dataclass
class ItemReader:
    """Makes the steps of one answer.

    Attributes:
        reader: Finds thoughts and calls in the text; None: it is all a message.
        custom: Names of the custom tools.
        logprobs: Shows log-probabilities, of which those of messages are passed on; None: there are none.
    """

    reader: TurnReader | None
    custom: frozenset[str]
    logprobs: LogprobsRenderer | None = None
    _open: Item | None = field(default=None, init=False)
    _num_items: int = field(default=0, init=False)
    _custom_arguments: list[str] = field(default_factory=list, init=False)
    _pending: list[Any] = field(default_factory=list, init=False)  # log-probabilities whose text is held back
    _places: "LogprobPieces | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            self._places = LogprobPieces(self.reader, self.logprobs)

    def read(self, completion: CompletionOutput) -> list[Step]:
        """The steps of more of the answer, or of all of it."""
        steps: list[Step] = []
        if self.reader is not None:
            self.reader.count(completion.token_ids)
        for text, logprobs in [(completion.text, ())] if self._places is None else self._places.of(completion):
            if self.reader is None:
                if text or completion.token_ids:
                    self._say(steps, text, logprobs)
                continue
            self._pending += logprobs
            for delta in self.reader.read(text, ()):
                self._add(steps, delta)
        return steps

    def finish(self, *, is_whole: bool) -> list[Step]:
        """The steps that end the answer, which has one item at least; ``is_whole``: it was not cut short."""
        steps: list[Step] = []
        if self.reader is not None:
            for delta in self.reader.finish():
                self._add(steps, delta)
        if self._num_items == 0:
            self._say(steps, "", ())
        if self._pending and self._open is not None and self._open.kind == "message":
            self._say(steps, "", ())
        self._close(steps, is_whole=is_whole)
        return steps

    def _add(self, steps: list[Step], delta: dict[str, Any]) -> None:
        if "content" in delta:
            self._say(steps, delta["content"], ())
            return
        self._pending.clear()  # of thoughts and calls
        if "reasoning" in delta:
            if self._open is None or self._open.kind != "reasoning":
                self._begin(steps, "reasoning")
            assert self._open is not None
            steps.append(Step(self._open, "more", delta["reasoning"]))
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                name = function["name"]
                kind: ItemKind = "custom_tool_call" if name in self.custom else "function_call"
                self._begin(steps, kind, name, call["id"])
            arguments = function["arguments"]
            if not arguments or self._open is None:
                continue
            if self._open.kind == "custom_tool_call":
                self._custom_arguments.append(arguments)
            else:
                steps.append(Step(self._open, "more", arguments))

    def _say(self, steps: list[Step], text: str, logprobs: Sequence[Any]) -> None:
        if self._open is None or self._open.kind != "message":
            self._begin(steps, "message")
        assert self._open is not None
        shown, self._pending = [*self._pending, *logprobs], []
        if text or shown:
            steps.append(Step(self._open, "more", text, shown))

    def _begin(self, steps: list[Step], kind: ItemKind, name: str = "", call_id: str = "") -> None:
        self._close(steps, is_whole=True)
        self._open = Item(kind, self._num_items, name, call_id)
        self._num_items += 1
        steps.append(Step(self._open, "open"))

    def _close(self, steps: list[Step], *, is_whole: bool) -> None:
        if self._open is None:
            return
        if self._open.kind == "custom_tool_call":
            text = custom_input("".join(self._custom_arguments))
            self._custom_arguments.clear()
            if text:
                steps.append(Step(self._open, "more", text))
        steps.append(Step(self._open, "close", is_whole=is_whole))
        self._open = None


class LogprobPieces:
    """Finds the text that log-probabilities belong to.

    Args:
        reader: Of the answer; None: it is all a message, whose text goes with all of them.
        logprobs: Shows log-probabilities.
    """

    def __init__(self, reader: TurnReader | None, logprobs: LogprobsRenderer) -> None:
        self._logprobs = logprobs
        self._is_read = reader is not None
        self._markers: frozenset[int] = frozenset()  # tokens that belong to no item
        self._heads: frozenset[int] = frozenset()  # those of them behind which stand words of a message's head
        self._is_in_head = False
        if reader is not None:
            formats = reader.reading.formats
            self._markers = frozenset({*formats.marker_ids.values(), *(formats.reasoning_ids or ())})
            self._heads = frozenset(formats.head_ids)
        self._num_chars = 0

    def of(self, completion: CompletionOutput) -> Iterator[tuple[str, Sequence[Any]]]:
        """More of the answer: its text, token by token where that is needed, with what is shown of its tokens."""
        text, offsets = completion.text, completion.text_offsets
        shown: Sequence[Any] = self._logprobs(completion)["content"] if completion.token_ids else ()
        if not self._is_read or not shown or offsets is None or len(offsets) != len(shown):
            yield text, shown
        else:
            before = self._num_chars
            ends = [max(offset - before, 0) for offset in offsets[1:]] + [len(text)]
            begin = 0
            for token_id, logprob, end in zip(completion.token_ids, shown, ends, strict=True):
                is_marker = token_id in self._markers
                if is_marker:
                    self._is_in_head = token_id in self._heads
                yield text[begin:end], () if is_marker or self._is_in_head else (logprob,)
                begin = max(begin, end)
        self._num_chars += len(text)


def whole_items(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The items that steps add up to."""
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    logprobs: list[Any] = []
    for step in steps:
        if step.kind == "open":
            texts, logprobs = [], []
        elif step.kind == "more":
            texts.append(step.text)
            logprobs += step.logprobs
        else:
            status: Status = "completed" if step.is_whole else "incomplete"
            items.append(step.item.as_dict(status, "".join(texts), logprobs))
    return items
