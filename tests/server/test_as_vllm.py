"""Requests that vLLM 0.32 serves, or serves otherwise than OpenAI: as there, or refused by name."""

import json

import pytest
from asgi_client import assert_error, serving
from fake_engine import FakeEngine

from rustvllm.server.endpoint_table import ENDPOINTS, UNBUILT_ENDPOINTS
from rustvllm.server.state import ServerSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def called(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]


SERVED = [
    ([{"role": "critic", "content": "a"}], {}, "<critic>a<assistant>"),
    ([{"role": "user"}, user("a")], {}, "<user><user>a<assistant>"),
    ([user([]), user(None)], {}, "<user><user><assistant>"),
    ([user([{"type": "thinking", "thinking": "hm", "closed": True}])], {}, "<user>hm<assistant>"),
    ([user([{"type": "text", "text": ""}, {"type": "text", "text": "a"}])], {}, "<user>a<assistant>"),
    (called('{"x": 1}'), {}, '<user>a<assistant>{"x": 1}<assistant>'),
    (called('{"x": '), {}, "<user>a<assistant>{}<assistant>"),
    (called("[1]"), {}, "<user>a<assistant>{}<assistant>"),
    (called("[" * 5000), {}, "<user>a<assistant>{}<assistant>"),
    (called(7), {}, "<user>a<assistant>{}<assistant>"),
    ([user("a")], {"chat_template_kwargs": {"add_generation_prompt": False}}, "<user>a<assistant>"),
    ([user("a")], {"stream_options": {}}, "<user>a<assistant>"),
    ([user("a")], {"reasoning_effort": "high"}, "<user>a<assistant>"),
]


@pytest.mark.parametrize(("messages", "fields", "prompt"), SERVED)
async def test_a_conversation_is_rendered_as_there(messages, fields, prompt):
    async with serving(FakeEngine(chat_template=TEMPLATE)) as (client, engine):
        answer = await client.post(CHAT, json={"messages": messages, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    assert bytes(engine.seen[0].prompt_token_ids.tolist()).decode() == prompt


REFUSED = [
    (COMPLETIONS, {"prompt": "a", "thinking_token_budget": 5}, "thinking_token_budget", "needs a model that marks"),
    (COMPLETIONS, {"prompt": "a", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "not supported yet"),
    (CHAT, {"messages": [user("a")], "reasoning_effort": "huge"}, "reasoning_effort", "'high'"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
    (CHAT, {"messages": [user("a")], "structured_outputs": {}}, "structured_outputs", "got none"),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds", "prompt_embeds is not supported yet"),
    (COMPLETIONS, {}, "prompt", "prompt is required"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    (CHAT, {"messages": [user([{"type": "image_url", "image_url": {}}])]}, "messages", "'image_url'"),
    (CHAT, {"messages": []}, "messages", "must not be empty"),
]


@pytest.mark.parametrize(("url", "body", "param", "says"), REFUSED)
async def test_what_is_not_built_is_refused_by_name(url, body, param, says):
    async with serving() as (client, _):
        assert_error(await client.post(url, json=body), 400, "BadRequestError", param=param, says=(says,))


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'\xef\xbb\xbf{"prompt": "a"}', 200),
        (b'{"prompt": "a", "unknown": %b}' % nested(300), 200),
        (b'{"prompt": "a", "kv_transfer_params": %b}' % nested(300), 400),
        (b'{"prompt": %b}' % nested(300), 400),
        (b'{"unknown": %b, "prompt": NaN}' % nested(300), 400),
        (b'{"unknown": %b, "n": %b, "prompt": "a"}' % (nested(300), b"9" * 5000), 400),
        (b'{"prompt": "a", "unknown": %b}' % nested(100_000), 400),
        (nested(300), 400),
    ],
    ids=["mark", "deep", "deep and known", "deep prompt", "no number", "long number", "too deep", "no object"],
)
async def test_bodies_of_unusual_forms(body, status):
    async with serving() as (client, _):
        answer = await client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    if status == 400:
        assert_error(answer, 400, "BadRequestError", param=answer.json()["error"]["param"])


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/v1/models/", "../models"),
        ("/v1/completions/", "http://server/v1/completions"),
        ("/v1/chat/completions/", "http://server/v1/chat/completions"),
        ("/tokenize/", "http://server/tokenize"),
        ("/redoc", "docs"),
    ],
)
async def test_a_trailing_slash_and_redoc_lead_to_where_it_is(path, location):
    async with serving() as (client, _):
        method = "GET" if path in ("/v1/models/", "/redoc") else "POST"
        body = {"messages": [user("a")]} if "chat" in path else {"prompt": "a"}
        moved = await client.request(method, path, json=body)
        there = await client.request(method, path, json=body, follow_redirects=True)
    assert (moved.status_code, moved.headers["location"]) == (307, location)
    assert there.status_code == 200


async def test_a_probe_with_head_hears_what_get_says():
    rows = [row for row in ENDPOINTS if row.method == "GET" and not row.is_watching]
    paths = {row.path.replace("{model_id:path}", "fake") for row in rows}
    assert len(paths) > 8
    async with serving(settings=ServerSettings(dashboard="any")) as (client, _):
        for path in sorted(paths | {"/docs", "/redoc", "/openapi.json"}):
            heard, told = await client.head(path), await client.get(path)
            assert heard.status_code == told.status_code, path
            assert heard.headers.keys() == told.headers.keys(), path
        for path in ("/dashboard/events", "/v1/completions"):
            assert (await client.head(path)).status_code == 405


@pytest.mark.parametrize("path", ["/generative_scoring", "/pause", "/v1/uploads", "/v1/uploads/x/parts", "/v2/embed"])
async def test_endpoints_of_vllm_that_are_not_built_say_so(path):
    assert any(row.path.split("/{")[0] == path.removesuffix("/x/parts") for row in UNBUILT_ENDPOINTS)
    async with serving() as (client, _):
        answer = await client.post(path, content=json.dumps({}))
        assert_error(answer, 501, "NotImplementedError", says=(path,))
        realtime = await client.get("/v1/realtime")
        assert_error(realtime, 501, "NotImplementedError", says=("/v1/realtime",))
