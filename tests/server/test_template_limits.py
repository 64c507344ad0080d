"""A model's own chat template has the limits of one that comes with a request, and delays no other request."""

import asyncio
import os
import resource
import signal
import time

import psutil
import pytest
import uvloop
from asgi_client import assert_error, serving
from fake_engine import FakeEngine
from loop_watch import watched_loop

from rustvllm.exceptions import InvalidRequestError
from rustvllm.server.state import ServerState
from rustvllm.text.chat_renderer import (
    LONG_ORDER_BYTES,
    ChatRenderer,
    ProcessEndedError,
    TemplateProcess,
    probe_order,
    read_text,
    render_order,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TWO_FACED = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}"
    "{% if messages[0].content == 'memory' %}{{ 'a' * (messages|length * 1000000000) }}{% endif %}"
    "{% if messages[0].content == 'text' %}{{ 'a' * (messages|length * 20000000) }}{% endif %}"
    "<{{ messages[0].content }}>"
)


def chat(content):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


@pytest.fixture
def renderer():
    renderer = ChatRenderer(TWO_FACED, {}, "a test")
    yield renderer
    renderer.close()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for %}", "not valid"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    ],
)
def test_a_model_whose_template_is_too_much_is_not_served(template, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        ServerState().set_ready(FakeEngine(chat_template=template))
    assert "the chat template of fake" in str(caught.value)


async def test_a_constant_of_a_template_is_not_computed_in_this_process():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with serving(FakeEngine(chat_template="{{ 'a' * 10**9 }}")) as (client, _):
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "in KiB"
        answer = await client.post(CHAT, json=chat("x"))
        assert_error(answer, 400, "BadRequestError", param="messages", says=("more memory", "256 MiB"))
        assert (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})).status_code == 200


async def test_a_template_that_goes_over_its_limits_delays_no_other_and_the_next_chat_is_served():
    async with serving(FakeEngine(chat_template=TWO_FACED)) as (client, engine):
        assert (await client.post(CHAT, json=chat("first"))).status_code == 200
        with watched_loop() as watch:
            bombs = [asyncio.create_task(client.post(CHAT, json=chat(word))) for word in ("loop", "memory", "text")]
            behind = [asyncio.create_task(client.post(CHAT, json=chat(f"good {i}"))) for i in range(5)]
            served = 0
            while not bombs[0].done():
                assert (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})).status_code == 200
                served += 1
                await asyncio.sleep(0.01)
        assert served > 10
        assert watch.longest < 0.2, "a loop in this process would have taken two seconds and more"
        for bomb, says in zip(bombs, ("did not finish", "more memory", "longer than"), strict=True):
            answer = await bomb
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] in ("chat_template", "messages")
            for words in (says, "2 seconds", "256 MiB"):
                assert words in answer.text
        assert [(await answer).status_code for answer in behind] == [200] * 5
        assert {f"<good {i}>" for i in range(5)} <= {request.prompt for request in engine.seen}


async def test_a_process_that_dies_is_replaced():
    async with serving(FakeEngine(chat_template=TWO_FACED)) as (client, engine):
        for content in ("short", "x" * LONG_ORDER_BYTES):
            body = {**chat(content), "truncate_prompt_tokens": 9}
            for _ in range(2):
                assert (await client.post(CHAT, json=body)).status_code == 200
                for child in psutil.Process().children():
                    if "template_worker" in " ".join(child.cmdline()):
                        os.kill(child.pid, signal.SIGKILL)
        assert len(engine.seen) == 4


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_answer_is_read_although_the_process_has_ended_and_the_next_order_was_not_begun(run):
    async def ask():
        process = TemplateProcess()
        try:
            link = await process.connect()
            await link.ask(probe_order(TWO_FACED))
            first = asyncio.create_task(link.ask(render_order({}, chat("memory")["messages"], {})))
            await asyncio.sleep(0)
            end = time.monotonic() + 30
            while process.is_alive and time.monotonic() < end:
                time.sleep(0.01)  # noqa: ASYNC251 -- the event loop is to be late
            assert not process.is_alive
            behind = [asyncio.create_task(link.ask(render_order({}, chat("x")["messages"], {}))) for _ in range(9)]
            await asyncio.wait([first, *behind])
            with pytest.raises(InvalidRequestError, match="more memory"):
                read_text(first.result())
            for each in behind:
                with pytest.raises(ProcessEndedError) as caught:
                    each.result()
                assert not caught.value.was_served
        finally:
            process.close()

    run(ask())


def test_without_an_event_loop_the_limits_are_the_same(renderer):
    def render(content):
        return renderer.render_blocking(renderer.prepare(chat(content)["messages"], {}))

    assert render("x") == "<x>"
    for content, says in (("loop", "did not finish"), ("memory", "more memory"), ("text", "longer than")):
        with pytest.raises(InvalidRequestError, match=says):
            render(content)
        assert render("still there") == "<still there>"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_on_either_event_loop_a_text_is_rendered_and_a_limit_is_an_error(run):
    async def render_all():
        renderer = ChatRenderer(TWO_FACED, {}, "a test")

        async def render(content):
            return await renderer.render(renderer.prepare(chat(content)["messages"], {}))

        try:
            assert await render("x") == "<x>"
            with pytest.raises(InvalidRequestError, match="did not finish"):
                await render("loop")
            assert await render("still there") == "<still there>"
        finally:
            renderer.close()

    run(render_all())
