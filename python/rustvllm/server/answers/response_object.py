"""The ``response`` object of an answer: what it repeats of its request, how it ended, and its usage."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import SamplingParams
from rustvllm.server.answers.large_answers import json_pieces
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.schemas.responses_request import ResponsesRequest

_MAX_MESSAGE_CHARACTERS = 1024


@dataclass(frozen=True)
class Outcome:
    """How a response ended.

    Attributes:
        status: Its ``status``.
        error: Why it failed.
        incomplete_details: Why it is incomplete.
    """

    status: Literal["completed", "incomplete", "failed"]
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None


def outcome_of(finish_reason: str | None) -> Outcome:
    """The outcome of an answer that ended for a reason of chat's."""
    if finish_reason == "length":
        return Outcome("incomplete", incomplete_details={"reason": "max_output_tokens"})
    if finish_reason == "abort":
        return failed(HTTPStatus.INTERNAL_SERVER_ERROR, "The server ended this response before it was complete.")
    return Outcome("completed")


def failed(status: HTTPStatus, message: str) -> Outcome:
    """The outcome of an answer that an error ended, which would have had this status by itself."""
    return Outcome("failed", {"code": error_code(status), "message": message[:_MAX_MESSAGE_CHARACTERS]})


def error_code(status: HTTPStatus) -> str:
    """The API's name for an error that happens while a response is made."""
    return "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"


def response_usage(usage: UsageCounter) -> dict[str, Any]:
    """Token counts under the names of this API."""
    counts = usage.as_dict()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,  # what the prefix cache keeps costs nothing, and is not counted
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": counts.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": counts["total_tokens"],
    }


class Echo:
    """What a response repeats of its request; made where that may take long.

    Attributes:
        fields: The members.
        json: The same as the inner part of a JSON object.

    Raises:
        InvalidRequestError: A member holds NaN or an infinity.
    """

    def __init__(self, asked: ResponsesRequest, params: SamplingParams) -> None:
        self.fields = _echoed(asked, params)
        try:
            self.json = _json(self.fields)[1:-1]
        except ValueError:
            name = next(name for name, value in self.fields.items() if not _is_json(value))
            place = "text.format.schema" if name == "text" else name
            raise InvalidRequestError(
                f"{place} holds NaN or an infinity, which JSON does not have: leave it out.", name
            ) from None


class ResponseFrame:
    """All of a response but its output.

    Args:
        header: With ``id``, ``created`` and ``model``.
        echo: What it repeats.
    """

    def __init__(self, header: Mapping[str, Any], echo: Echo) -> None:
        self._head = {"id": header["id"], "object": "response", "created_at": header["created"]}
        self._model = {"model": header["model"]}
        self._echo = echo

    def whole(self, outcome: Outcome, output: list[dict[str, Any]], usage: UsageCounter) -> dict[str, Any]:
        """The response in one piece."""
        return {
            **self._head,
            **_state(outcome),
            **self._model,
            "output": output,
            "usage": response_usage(usage),
            **self._echo.fields,
        }

    def in_progress(self) -> list[bytes]:
        """The response before anything was said, as parts of its JSON."""
        return list(self._json(_state(None), (b"[]",), None))

    @property
    def num_bytes(self) -> int:
        """About how many there are in it without its output."""
        return len(self._echo.json)

    def ended(self, outcome: Outcome, output: Iterable[bytes], usage: UsageCounter | None) -> Iterator[bytes]:
        """The response at its end, as parts of its JSON; ``output`` is those of the list of items."""
        return self._json(_state(outcome), output, None if usage is None else response_usage(usage))

    def _json(self, state: dict[str, Any], output: Iterable[bytes], usage: dict[str, Any] | None) -> Iterator[bytes]:
        yield _json({**self._head, **state, **self._model})[:-1] + b',"output":'
        yield from output
        yield b',"usage":%b,' % _json(usage)
        yield self._echo.json
        yield b"}"


def _is_json(value: Any) -> bool:
    try:
        _json(value)
    except ValueError:
        return False
    return True


def _json(value: Any) -> bytes:
    """Compact JSON; raises ``ValueError`` for NaN and infinity."""
    return b"".join(json_pieces(value))


def _state(outcome: Outcome | None) -> dict[str, Any]:
    """How a response is; None: in progress."""
    if outcome is None:
        return {"status": "in_progress", "completed_at": None, "error": None, "incomplete_details": None}
    return {
        "status": outcome.status,
        "completed_at": int(time.time()) if outcome.status == "completed" else None,
        "error": outcome.error,
        "incomplete_details": outcome.incomplete_details,
    }


def _echoed(asked: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Members that repeat the request, with the defaults that it left to the server; its fields have been checked."""
    reasoning, text = asked.reasoning, asked.text
    summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    user = {} if asked.user is None else {"user": asked.user}  # alone of all members it must not be null
    return {
        "background": False,
        "conversation": None,
        "frequency_penalty": params.frequency_penalty,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": summary},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {
            "format": _format(None if text is None else text.format),
            "verbosity": "medium" if text is None or text.verbosity is None else text.verbosity,
        },
        "tool_choice": _tool_choice(asked.tool_choice),
        "tools": [_tool(tool) for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": asked.truncation or "disabled",
        **user,
    }


def _format(asked: Mapping[str, Any] | None) -> dict[str, Any]:
    if asked is None or asked["type"] != "json_schema":
        return {"type": "text" if asked is None else asked["type"]}
    return {name: asked.get(name) for name in ("type", "name", "description", "schema", "strict")}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"type": tool["type"], "name": tool["name"], "description": tool.get("description")}
    if tool["type"] == "custom":
        return {**shown, "format": {"type": "text"}}
    return {**shown, "parameters": tool.get("parameters"), "strict": bool(tool.get("strict"))}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice["type"] == "allowed_tools":
        tools = [{"type": tool.get("type") or "function", "name": tool["name"]} for tool in choice["tools"]]
        return {"type": "allowed_tools", "mode": choice["mode"], "tools": tools}
    return {"type": choice["type"], "name": choice["name"]}
