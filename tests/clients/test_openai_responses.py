"""The Responses API through the `openai` SDK: whole, streamed in both of its ways, parsed, and in turns."""

import json
from typing import Literal

import httpx
import openai
import pytest
from embedded_server import MODEL, wait_until_idle
from openai.types.responses import Response
from pydantic import BaseModel

INPUT = "Tell me a story about a fox."
ASKED = {"model": MODEL, "input": INPUT, "temperature": 0, "max_output_tokens": 24}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


class Animal(BaseModel):
    kind: Literal["bird", "beast"]
    legs: Literal[2, 4]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def streamed(client, **fields):
    """The last state of a streamed response, and the text of its deltas."""
    text = ""
    for event in client.responses.create(stream=True, **fields):
        if event.type == "response.output_text.delta":
            text += event.delta
    return event.response, text


def test_an_answer_is_that_of_a_chat_whole_and_streamed(client):
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": INPUT}], temperature=0, max_tokens=24
    )
    whole = client.responses.create(**ASKED)
    last, text = streamed(client, **ASKED)
    assert whole.output_text == last.output_text == text == chat.choices[0].message.content
    assert whole.status == last.status == {"length": "incomplete", "stop": "completed"}[chat.choices[0].finish_reason]
    assert whole.usage.output_tokens == last.usage.output_tokens == chat.usage.completion_tokens
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.model == MODEL


def test_raw_answers_are_of_the_types_of_the_sdk(client):
    raw = client.responses.with_raw_response.create(metadata={"a": "b"}, **LOGPROBS, **ASKED)
    assert Response.model_validate_json(raw.text) == raw.parse()
    assert raw.parse().metadata == {"a": "b"}


def test_log_probabilities_are_those_of_a_chat(client):
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": INPUT}],
        temperature=0,
        max_tokens=24,
        logprobs=True,
        top_logprobs=2,
    )
    whole = client.responses.create(**LOGPROBS, **ASKED).output[0].content[0]
    last, _ = streamed(client, **LOGPROBS, **ASKED)
    expected = [place.token for place in chat.choices[0].logprobs.content]
    assert [place.token for place in whole.logprobs] == expected
    assert [place.token for place in last.output[0].content[0].logprobs] == expected
    assert all(len(place.top_logprobs) == 2 for place in whole.logprobs)
    for place, other in zip(whole.logprobs, chat.choices[0].logprobs.content, strict=True):
        assert place.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert client.responses.create(top_logprobs=2, **ASKED).output[0].content[0].logprobs == []


def test_the_helper_for_streams_puts_the_answer_together(client):
    with client.responses.stream(**{**ASKED, "max_output_tokens": 200}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert final.output_text == client.responses.create(**{**ASKED, "max_output_tokens": 200}).output_text


def test_an_answer_is_parsed_into_a_model(client):
    asked = {"model": MODEL, "input": INPUT, "max_output_tokens": 120, "text_format": Animal}
    parsed = client.responses.parse(**asked).output_parsed
    assert isinstance(parsed, Animal)
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Animal)


def test_a_conversation_goes_on_with_the_items_of_the_answer(client):
    items = [{"role": "user", "content": "Hello"}]
    first = client.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=200)
    items += first.output
    items.append({"role": "user", "content": "And then?"})
    second = client.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=16)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens


def test_errors_are_those_of_the_sdk(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ASKED, "temperature": 3})
    assert (caught.value.param, caught.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.BadRequestError, match="stores no answers"):
        client.responses.create(previous_response_id="resp_1", **ASKED)
    for ask in (
        lambda: client.responses.retrieve("resp_1"),
        lambda: client.responses.delete("resp_1"),
        lambda: client.responses.cancel("resp_1"),
        lambda: client.responses.input_items.list("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError, match="stores none"):
            ask()


def test_a_stream_that_is_cut_frees_the_server(client, url):
    long = {"model": MODEL, "input": INPUT, "max_output_tokens": 480, "extra_body": {"ignore_eos": True}}
    with client.responses.create(stream=True, **long) as stream:
        next(iter(stream))
    wait_until_idle(url)


def test_every_answer_and_event_is_of_the_schema_of_the_server(url):
    """Its own OpenAPI document, which clients make code of."""
    jsonschema = pytest.importorskip("jsonschema")
    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    content = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    body = {**ASKED, **LOGPROBS}
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60).json()
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(answer)
    frames = httpx.post(f"{url}/v1/responses", json={**body, "stream": True}, timeout=60).text.split("\n\n")[:-1]
    schema = {**content["text/event-stream"]["schema"], "components": document["components"]}
    for frame in frames:
        jsonschema.Draft202012Validator(schema).validate(json.loads(frame.split("\ndata: ")[1]))
