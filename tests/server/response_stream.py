"""What tests of responses share: an engine that says a text, tools, and what a client makes of a stream's events.

Each event is held to the SDK's types on the way.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
from asgi_client import assert_error, serving
from fake_engine import FakeEngine
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.schemas.responses_answer import ResponseEvent, ResponseObject

URL = "/v1/responses"
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}<{{ message.role }}>"
    "{{ '[' + message.reasoning + ']' if message.reasoning else '' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '#' + message.tool_call_id if message.tool_call_id else '' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '' }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY}
PATCH = {"type": "custom", "name": "patch", "description": "Change a file."}
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


def saying(
    text: str, template: str = TEMPLATE, **settings: Any
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, FakeEngine]]:
    """A client of a server whose model says a text, a character a step."""
    engine = FakeEngine(chat_template=template, max_model_len=4000)
    engine.says = text
    return serving(engine, ServerSettings(**settings))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, and fail where it does not come."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


async def answered(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """A whole answer, and the same of a stream, which must say the same."""
    body = {"input": "Hi", "max_output_tokens": 1000, **fields}
    whole = await client.post(URL, json=body)
    assert whole.status_code == 200, whole.text
    answer: dict[str, Any] = whole.json()
    check_whole(answer)
    streamed = joined(events_of(await client.post(URL, json={**body, "stream": True})))
    assert without_ids(streamed) == without_ids(answer)
    ids = [item["id"] for item in answer["output"]]
    assert len(set(ids)) == len(ids)
    return answer


async def refused(body: dict[str, Any], template: str = TEMPLATE, **kinds: Any) -> None:
    """Whole and streamed, a body is refused in the same words."""
    async with saying("Yes.", template) as (client, engine):
        for stream in (False, True):
            response = await client.post(URL, json={"input": "Hi", **body, "stream": stream})
            assert_error(response, 400, "BadRequestError", **kinds)
    assert not engine.seen
