""":class:`TurnReader`: one answer as content, thoughts and tool calls, in pieces for a stream or whole."""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rustvllm.text.turn_formats import CoreTurnReading, Tools, TurnFormats, TurnParser

REASONING_FIELDS: Final = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}
"""Fields of a message that hold thoughts, by the value of ``--reasoning-field``."""
_ID_CHARS = string.ascii_letters + string.digits


def whole_characters(text: str) -> str:
    """A text with a mark in place of each half of a character, which JSON can escape and UTF-8 cannot express."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclass(frozen=True, kw_only=True)
class TurnReading:
    """How the answers of one request are read.

    Attributes:
        formats: Of the model.
        tools: Those that may be called; None: calls are text.
        is_parallel: More than one call is passed on; else the first, and nothing behind it.
        tells_calls: An answer with calls ends by ``tool_calls``.
        begins_within: The prompt ends within thoughts.
        reasoning_fields: Thoughts are passed on in these; empty: not at all.
        thinks_once: Thoughts come before the answer or not at all; their marker within it is text.
    """

    formats: TurnFormats
    tools: Tools | None = None
    is_parallel: bool = True
    tells_calls: bool = True
    begins_within: bool = False
    reasoning_fields: Sequence[str] = REASONING_FIELDS["both"]
    thinks_once: bool = False

    def in_core(self) -> CoreTurnReading:
        """The same for the core, which reads what streams say."""
        return CoreTurnReading(
            None if self.tools is None else self.formats.tool_calls,
            self.formats.reasoning,
            self.tools,
            self.begins_within,
            thinks_once=self.thinks_once,
            parallel=self.is_parallel,
            reasoning_fields=self.reasoning_fields,
        )


class TurnReaders:
    """The readers of a request's choices, each made when it is first asked for: there may be thousands.

    Attributes:
        core_reading: How they read.
        num_reasoning_tokens: Tokens within the thoughts of all choices so far, where their markers are tokens.
    """

    def __init__(self, reading: TurnReading) -> None:
        self._reading = reading
        self.core_reading = reading.in_core()
        self._readers: dict[int, TurnReader] = {}
        self.num_reasoning_tokens = 0

    def __getitem__(self, index: int) -> "TurnReader":
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = TurnReader(self._reading, self)
        return reader


@dataclass
class TurnReader:
    """Reads one answer.

    Attributes:
        reading: How.
        group: Of this reader; counts for all.
        num_calls: Calls so far.
    """

    reading: TurnReading
    group: TurnReaders
    num_calls: int = 0
    _parser: TurnParser = field(init=False)
    _is_thinking: bool = field(init=False)
    _has_thought: bool = field(init=False, default=False)
    _has_called: bool = field(init=False, default=False)  # and may do so only once

    def __post_init__(self) -> None:
        self._parser = TurnParser(self.group.core_reading)
        self._is_thinking = self.reading.begins_within

    def read(self, text: str, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        """What is new, as deltas of the message.

        Args:
            text: More of the answer.
            token_ids: More of its tokens.
        """
        self.count(token_ids)
        return self._deltas(self._parser.push(text))

    def finish(self) -> list[dict[str, Any]]:
        """What was held back, as deltas of the message."""
        return self._deltas(self._parser.finish())

    def message(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """The members of a whole message; its content is None if it has calls or thoughts alone."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        fields = (*self.reading.reasoning_fields, None)
        for delta in [*self.read(text, token_ids), *self.finish()]:
            content.append(delta.get("content", ""))
            reasoning += [text for name, text in delta.items() if name == fields[0]]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({key: call[key] for key in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        said, thought = "".join(content), "".join(reasoning)
        message: dict[str, Any] = {"content": said or (None if calls or self._has_thought else "")}
        if thought:
            message.update(dict.fromkeys(self.reading.reasoning_fields, thought))
        if calls:
            message["tool_calls"] = calls
        return message

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended: ``stop`` behind a call is ``tool_calls``, unless its tool was named."""
        return "tool_calls" if reason == "stop" and self.num_calls and self.reading.tells_calls else reason

    def _deltas(self, events: list[tuple[str, str]]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for kind, text in events:
            if self._has_called:
                break
            if kind == "content":
                deltas.append({"content": text})
            elif kind == "reasoning":
                self._has_thought = True
                if self.reading.reasoning_fields:
                    deltas.append(dict.fromkeys(self.reading.reasoning_fields, text))
            elif kind == "call":
                self.num_calls += 1
                call = {"id": self._new_id(text), "type": "function", "function": {"name": text, "arguments": ""}}
                deltas.append({"tool_calls": [{"index": self.num_calls - 1, **call}]})
            elif kind == "arguments":
                deltas.append({"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]})
            elif kind == "end":
                self._has_called = not self.reading.is_parallel
        return deltas

    def _new_id(self, name: str) -> str:
        kind = self.reading.formats.call_ids
        if kind == "numbered":
            return f"functions.{name}:{self.num_calls - 1}"
        prefix, length = ("", 9) if kind == "short" else ("call_", 24)
        return prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(length))

    def count(self, token_ids: Sequence[int]) -> None:
        """Count those of more tokens of the answer that are thoughts."""
        ids = self.reading.formats.reasoning_ids
        if ids is None:
            return
        begin, end = ids
        for token_id in token_ids:
            if token_id == begin and not self._is_thinking:
                self._is_thinking = True
            elif token_id == end:
                self._is_thinking = False
            elif self._is_thinking:
                self.group.num_reasoning_tokens += 1
