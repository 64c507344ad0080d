"""An answer of Anthropic's Messages API: its blocks, why it ended, and what it cost."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from rustvllm.server.answers.turn import whole_characters

CONTENT_OF: Final = {"text": "text", "thinking": "thinking", "tool_use": "input"}
"""Where a block of each kind has what it says."""
_MAX_DEPTH: Final = 200
"""Lists and objects within each other in the arguments of a call."""


def message_content(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a whole answer, in the order in which a stream has them.

    Args:
        deltas: Of the chat message, as :meth:`~rustvllm.server.answers.turn.TurnReader.read` gives them.
    """
    blocks: list[dict[str, Any]] = []
    parts: list[list[str]] = []  # of the text of each block
    for delta in deltas:
        block, text, is_new = _part(delta)
        if is_new or not blocks or blocks[-1]["type"] != block["type"]:
            blocks.append(block)
            parts.append([])
        parts[-1].append(text)
    for block, texts in zip(blocks, parts, strict=True):
        text, kind = "".join(texts), block["type"]
        block[CONTENT_OF[kind]] = _arguments(text) if kind == "tool_use" else text
    return [block for block in blocks if block["type"] != "text" or block["text"]]


def _part(delta: dict[str, Any]) -> tuple[dict[str, Any], str, bool]:
    """What a delta adds to: an empty block of the kind, the text, and whether the block is another one in any case."""
    if (text := delta.get("content")) is not None:
        return new_block("text"), text, False
    if "tool_calls" not in delta:
        return new_block("thinking"), next(iter(delta.values())), False
    [call] = delta["tool_calls"]
    function = call["function"]
    block = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
    return block, function["arguments"], "id" in call


def new_block(kind: Literal["text", "thinking"]) -> dict[str, Any]:
    """A block that says nothing yet."""
    if kind == "text":
        return {"type": "text", "text": "", "citations": None}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object that JSON can express, whatever the model wrote.

    An answer that was cut in the middle of them has none, nor has one whose lists are nested too deeply. NaN,
    infinities and numbers beyond the range of floats become null.
    """
    try:
        arguments = json.loads(text or "{}", parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(arguments, dict) or _is_deep(text, arguments):
        return {}
    if "\\ud" in text.lower():  # perhaps half of a character
        whole: dict[str, Any] = json.loads(whole_characters(json.dumps(arguments, ensure_ascii=False)))
        return whole
    return arguments


def _finite(number: str) -> float | None:
    value = float(number)
    return value if math.isfinite(value) else None


def _is_deep(text: str, value: Any) -> bool:
    """Whether a value of this JSON text is nested so deeply that it may not become JSON again."""
    if text.count("[") + text.count("{") <= _MAX_DEPTH:
        return False
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def message_usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, int]:
    """The ``usage`` of a message: tokens of the prompt that were cached count by themselves."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "output_tokens": num_output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
    }


@dataclass(frozen=True)
class Ending:
    """Why a message ended, in the words of this API.

    Attributes:
        finish_reason: In the engine's words.
        stop_reason: The stop string that ended it, or the token; None: neither.
        has_calls: Whether it calls tools.
        is_as_long_as_asked: Whether it has as many tokens as it was to have at most.
    """

    finish_reason: str | None
    stop_reason: int | str | None
    has_calls: bool
    is_as_long_as_asked: bool

    def as_dict(self) -> dict[str, str | None]:
        """``stop_reason`` and ``stop_sequence``; both are None for one that was aborted."""
        reason, sequence = None, None
        if self.finish_reason == "length":
            reason = "max_tokens" if self.is_as_long_as_asked else "model_context_window_exceeded"
        elif self.finish_reason == "stop" and isinstance(self.stop_reason, str):
            reason, sequence = "stop_sequence", self.stop_reason  # also of a call, which it may have cut
        elif self.finish_reason in ("stop", "tool_calls") and self.has_calls:
            reason = "tool_use"
        elif self.finish_reason == "stop":
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}
