"""What a client makes of the events of a streamed response, each of which is held to the SDK's types on the way."""

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rustvllm.server.schemas.responses_answer import ResponseEvent, ResponseObject

URL = "/v1/responses"
_EVENTS = TypeAdapter(ResponseStreamEvent)
_NAMES = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a finished stream: framed exactly, numbered from 0 on, and of the SDK's types and ours."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for number, frame in enumerate(frames):
        first, second = frame.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        assert event["sequence_number"] == number
        _EVENTS.validate_python(event, strict=False)
        ResponseEvent.model_validate(event, strict=True)
        events.append(event)
    return events


def check_whole(answer: dict[str, Any]) -> None:
    """An answer in one piece is of the SDK's type and of ours."""
    Response.model_validate(answer)
    ResponseObject.model_validate(answer, strict=True)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response at the end of a stream, once the events before it have been found to add up to it."""
    created, in_progress, *others, last = events
    assert created["type"] == "response.created"
    assert in_progress["type"] == "response.in_progress"
    assert created["response"] == in_progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    answer: dict[str, Any] = last["response"]
    check_whole(answer)
    assert last["type"] == f"response.{answer['status']}"
    fixed = {name for name in answer if name not in CHANGING}
    assert {name: answer[name] for name in fixed} == {name: created["response"][name] for name in fixed}
    items: list[dict[str, Any]] = []
    for event in others:
        _follow(items, event)
    assert [item.pop("is_done") for item in items] == [True] * len(items)
    assert items == answer["output"]
    return answer


CHANGING = ("status", "output", "usage", "completed_at", "error", "incomplete_details")


def _follow(items: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """Apply an event to the items before it: at most the last of them is open."""
    kind = event["type"]
    if kind == "response.output_item.added":
        assert event["output_index"] == len(items)
        assert all(item["is_done"] for item in items)
        assert event["item"]["status"] == "in_progress"
        items.append({**event["item"], "is_done": False})
        return
    item = items[-1]
    assert event["output_index"] == len(items) - 1
    assert not item["is_done"]
    if kind == "response.output_item.done":
        done = event["item"]
        said = {name: value for name, value in item.items() if name not in ("is_done", "status")}
        assert said == {name: value for name, value in done.items() if name != "status"}
        items[-1] = {**done, "is_done": True}
        return
    assert event["item_id"] == item["id"]
    if kind == "response.content_part.added":
        assert item["content"] == []
        item["content"] = [event["part"]]
        return
    if kind == "response.content_part.done":
        assert item["content"] == [event["part"]]
        return
    name, field = _NAMES[item["type"]]
    holder = item["content"][event["content_index"]] if "content" in item else item
    if kind == f"{name}.delta":
        holder[field] += event["delta"]
        if item["type"] == "message":
            holder["logprobs"] = [*holder["logprobs"], *event["logprobs"]]
    else:
        assert kind == f"{name}.done"
        assert event[field] == holder[field]
        assert item["type"] != "message" or event["logprobs"] == holder["logprobs"]
        assert item["type"] != "function_call" or event["name"] == item["name"]


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same request have in common."""
    ids = ("id", "call_id")
    output = [{name: of for name, of in item.items() if name not in ids} for item in answer["output"]]
    return {name: of for name, of in answer.items() if name not in ("id", "created_at", "completed_at")} | {
        "output": output
    }


def text_of(answer: dict[str, Any]) -> str:
    """The text of all messages."""
    return "".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message")
