"""The `openai` SDK used in every way it has: raw and streamed responses, cut streams, time limits, retries, own fields.

What it answers to ordinary calls is in tests/server/test_clients.py.
"""

import asyncio
import json
import signal

import openai
import pytest
from embedded_server import MODEL, wait_until_idle
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server_process import FAKE, REAL, ServerProcess

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": PROMPT}]
ASKED = {"model": MODEL, "temperature": 0, "max_tokens": 12}
LONG = {"model": MODEL, "max_tokens": 480, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def asynchronous(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_raw_responses_have_headers_and_parse_into_types(client):
    raw = client.completions.with_raw_response.create(prompt=PROMPT, logprobs=2, n=1, **ASKED)
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    parsed = raw.parse()
    assert isinstance(parsed, Completion)
    # The SDK takes anything; pydantic does not.
    assert Completion.model_validate_json(raw.text) == parsed
    assert len(parsed.choices[0].logprobs.tokens) == 12
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, seed=1, **ASKED
    )
    chat = ChatCompletion.model_validate_json(raw.text)
    assert chat == raw.parse()
    assert len(chat.choices[0].logprobs.content) == 12
    raw = client.models.with_raw_response.list()
    assert [Model.model_validate(card).id for card in json.loads(raw.text)["data"]] == [MODEL]


def test_a_raw_error_keeps_its_status_and_body(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.with_raw_response.create(prompt=PROMPT, **{**ASKED, "temperature": 3})
    assert caught.value.status_code == 400
    assert caught.value.param == "temperature"
    assert caught.value.type == "BadRequestError"
    assert "got 3" in caught.value.message


def test_streaming_responses_give_lines_and_bytes(client):
    expected = client.completions.create(prompt=PROMPT, **ASKED)
    with client.completions.with_streaming_response.create(prompt=PROMPT, **ASKED) as response:
        assert Completion.model_validate_json(b"".join(response.iter_bytes())).choices == expected.choices
    with client.completions.with_streaming_response.create(prompt=PROMPT, stream=True, **ASKED) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(texts) == expected.choices[0].text


def test_every_chunk_of_a_chat_is_of_its_type(client):
    options = {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 1, "n": 1}
    with client.chat.completions.with_streaming_response.create(
        messages=MESSAGES, stream=True, **options, **ASKED
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    chunks = [ChatCompletionChunk.model_validate_json(line) for line in lines[:-1]]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks[:-1] if chunk.choices[0].logprobs) == 12
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_fields_of_our_own_go_through_extra_body(client):
    answer = client.completions.create(
        prompt=PROMPT,
        **ASKED,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "prompt_logprobs": 1, "ignore_eos": True},
        extra_headers={"X-Request-Id": "of-my-own"},
    )
    assert "of-my-own" in answer.id
    # Fields that the SDK does not know are kept where they stand.
    assert answer.choices[0].stop_reason is None
    assert answer.choices[0].prompt_logprobs[0] is None
    chat = client.chat.completions.create(
        messages=[*MESSAGES, {"role": "assistant", "content": "In a quiet"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "stop_token_ids": [0]},
        **ASKED,
    )
    assert chat.choices[0].message.content


@pytest.mark.parametrize("how", ["close", "leave the context", "forget the response"])
def test_a_stream_that_is_cut_frees_the_server(client, url, how):
    if how == "close":
        stream = client.completions.create(prompt=PROMPT, stream=True, **LONG)
        next(iter(stream))
        stream.close()
    elif how == "leave the context":
        with client.chat.completions.create(messages=MESSAGES, stream=True, n=3, **LONG) as stream:
            next(iter(stream))
    else:
        with client.completions.with_streaming_response.create(prompt=PROMPT, stream=True, **LONG) as response:
            next(response.iter_lines())
    wait_until_idle(url)


async def test_streams_that_are_cut_among_others_leave_those_alone(asynchronous, url):
    expected = (await asynchronous.completions.create(prompt=PROMPT, **ASKED)).choices[0].text

    async def cut():
        stream = await asynchronous.completions.create(prompt=PROMPT, stream=True, **LONG)
        async for _ in stream:
            break
        await stream.close()

    async def whole():
        stream = await asynchronous.completions.create(prompt=PROMPT, stream=True, **ASKED)
        return "".join([chunk.choices[0].text async for chunk in stream])

    results = await asyncio.gather(*(cut() if i % 2 else whole() for i in range(24)))
    assert results[::2] == [expected] * 12
    await asyncio.to_thread(wait_until_idle, url)


async def test_a_cancelled_task_frees_the_server(asynchronous, url):
    task = asyncio.create_task(asynchronous.chat.completions.create(messages=MESSAGES, n=2, **LONG))
    await asyncio.sleep(0)
    await asyncio.wait([task], timeout=0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_idle, url)


def test_a_time_limit_is_the_clients_and_frees_the_server(server, client, url):
    server.process.send_signal(signal.SIGSTOP)  # so that it cannot answer in time, however long the client is held up
    try:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).completions.create(prompt=PROMPT, **LONG)
    finally:
        server.process.send_signal(signal.SIGCONT)
    wait_until_idle(url)


def test_a_server_that_loads_is_asked_again():
    """503 with Retry-After is what the SDK tries again."""
    with ServerProcess([*FAKE, "--port", "0"], FAKE_LOAD_SECONDS="2") as server:
        url = server.wait_for("listening on")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as impatient:
            with pytest.raises(openai.InternalServerError) as caught:
                impatient.completions.create(model="fake", prompt="a", max_tokens=2)
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"] == "1"
            patient = impatient.with_options(max_retries=60)
            assert patient.completions.create(model="fake", prompt="a", max_tokens=2).usage.completion_tokens == 2


async def test_embeddings_of_both_clients():
    texts = [PROMPT, "The dog ran.", "The sea was calm."]
    with ServerProcess([*REAL, "--port", "0", "--runner", "pooling"]) as server:
        base = {"base_url": f"{server.wait_until_ready()}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
        with openai.OpenAI(**base) as client:
            packed = client.embeddings.create(model=MODEL, input=texts)  # the SDK asks for base64 and unpacks it
            raw = client.embeddings.with_raw_response.create(
                model=MODEL, input=texts, encoding_format="float", user="u"
            )
            plain = CreateEmbeddingResponse.model_validate_json(raw.text)
            assert plain == raw.parse()
            [alone] = client.embeddings.create(model=MODEL, input=[5, 6, 7], extra_body={"use_activation": False}).data
            with pytest.raises(openai.BadRequestError) as caught:
                client.embeddings.create(model=MODEL, input="a", dimensions=8)
            assert caught.value.param == "dimensions"
            with pytest.raises(openai.BadRequestError, match="makes embeddings here"):
                client.completions.create(model=MODEL, prompt="a")
        async with openai.AsyncOpenAI(**base) as client:
            several = [client.embeddings.create(model=MODEL, input=text) for text in texts]
            singles = [answer.data[0].embedding for answer in await asyncio.gather(*several)]
    for one, other, single in zip(packed.data, plain.data, singles, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
        assert one.embedding == pytest.approx(single, abs=1e-5)
        assert sum(number * number for number in one.embedding) == pytest.approx(1.0, abs=1e-5)
    assert sum(number * number for number in alone.embedding) > 1.1
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > len(texts)
