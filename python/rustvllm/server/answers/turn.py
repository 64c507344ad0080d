""":class:`TurnReader`: one answer as content, thoughts and tool calls, in pieces for a stream or whole."""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rustvllm.text.turn_formats import Tools, TurnFormats, TurnParser

_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True)
class TurnReading:
    """How the answers of one request are read.

    Attributes:
        formats: Of the model.
        tools: Those that may be called; None: calls are text.
        is_parallel: More than one call is passed on.
        tells_calls: An answer with calls ends by ``tool_calls``.
        begins_within: The prompt ends within thoughts.
        shows_reasoning: Thoughts are passed on.
        thinks_once: Thoughts come before the answer or not at all; their marker within it is text.
    """

    formats: TurnFormats
    tools: Tools | None = None
    is_parallel: bool = True
    tells_calls: bool = True
    begins_within: bool = False
    shows_reasoning: bool = True
    thinks_once: bool = False


class TurnReaders:
    """The readers of a request's choices, each made when it is first asked for: there may be thousands.

    Attributes:
        num_reasoning_tokens: Tokens within the thoughts of all choices so far, where their markers are tokens.
    """

    def __init__(self, reading: TurnReading) -> None:
        self._reading = reading
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

    def __post_init__(self) -> None:
        reading, formats = self.reading, self.reading.formats
        calls = None if reading.tools is None else formats.tool_calls
        self._parser = TurnParser(
            calls, formats.reasoning, reading.tools, reading.begins_within, thinks_once=reading.thinks_once
        )
        self._is_thinking = reading.begins_within

    def read(self, text: str, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        """What is new, as deltas of the message.

        Args:
            text: More of the answer.
            token_ids: More of its tokens.
        """
        self._count(token_ids)
        return self._deltas(self._parser.push(text))

    def finish(self) -> list[dict[str, Any]]:
        """What was held back, as deltas of the message."""
        return self._deltas(self._parser.finish())

    def message(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """The members of a whole message; its content is None if it has calls or thoughts alone."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for delta in [*self.read(text, token_ids), *self.finish()]:
            content.append(delta.get("content", ""))
            reasoning.append(delta.get("reasoning", ""))
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({key: call[key] for key in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        said, thought = "".join(content), "".join(reasoning)
        message: dict[str, Any] = {"content": said or (None if calls or self._has_thought else "")}
        if thought:
            message.update(reasoning=thought, reasoning_content=thought)
        if calls:
            message["tool_calls"] = calls
        return message

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended: ``stop`` behind a call is ``tool_calls``, unless its tool was named."""
        return "tool_calls" if reason == "stop" and self.num_calls and self.reading.tells_calls else reason

    def _deltas(self, events: list[tuple[str, str]]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for kind, text in events:
            if kind == "content":
                deltas.append({"content": text})
            elif kind == "reasoning":
                self._has_thought = True
                if self.reading.shows_reasoning:
                    deltas.append({"reasoning": text, "reasoning_content": text})
            elif kind == "call":
                self.num_calls += 1
                if self._is_passed_on:
                    call = {"id": self._new_id(text), "type": "function", "function": {"name": text, "arguments": ""}}
                    deltas.append({"tool_calls": [{"index": self.num_calls - 1, **call}]})
            elif kind == "arguments" and self._is_passed_on:
                deltas.append({"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]})
        return deltas

    @property
    def _is_passed_on(self) -> bool:
        return self.reading.is_parallel or self.num_calls == 1

    def _new_id(self, name: str) -> str:
        kind = self.reading.formats.call_ids
        if kind == "numbered":
            return f"functions.{name}:{self.num_calls - 1}"
        prefix, length = ("", 9) if kind == "short" else ("call_", 24)
        return prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(length))

    def _count(self, token_ids: Sequence[int]) -> None:
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
