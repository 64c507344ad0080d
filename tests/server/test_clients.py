"""The `openai` SDK against a server process: over the fake engine, a small Llama, and the model in the package."""

import asyncio
import signal

import httpx
import openai
import pytest
from fake_engine import expected_text
from server_process import FAKE, REAL, STOP_SECONDS, ServerProcess

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module", params=["fake", "stories260K", "embedded"])
def served(request):
    """Kind and base URL of a server that is ended by Ctrl-C after the module's tests, in time and leaving nothing."""
    command = {"fake": FAKE, "embedded": REAL}.get(request.param)
    if command is None:
        model = request.getfixturevalue("shared_dir") / "data" / request.param / "hf"
        command = [*REAL, str(model), "--served-model-name", request.param]
    with ServerProcess([*command, "--port", "0"]) as server:
        yield request.param, server.wait_until_ready()
        code, seconds = server.end(signal.SIGINT)
        server.assert_nothing_left()
        assert code == 0, server.output
        assert seconds < STOP_SECONDS
        assert "Traceback" not in server.output


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_models(client, model, served):
    assert client.models.retrieve(model).id == model
    assert model == served[0] or served[0] == "embedded"


def test_completion_and_its_stream_say_the_same(client, model, served):
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    choice = whole.choices[0]
    assert choice.finish_reason in ("length", "stop")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert 0 < whole.usage.completion_tokens <= 24
    assert choice.text.strip()
    if served[0] == "fake":
        assert choice.text == expected_text(len(PROMPT) + 1, 24)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == choice.text
    assert [chunk.choices[0].finish_reason for chunk in texts if chunk.choices[0].finish_reason] == [
        choice.finish_reason
    ]
    assert last.choices == []
    assert last.usage == whole.usage


def test_chat_and_its_stream_say_the_same(client, model):
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content.strip()
    assert whole.choices[0].finish_reason in ("length", "stop")
    first, *rest = list(client.chat.completions.create(**asked, stream=True))
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == message.content
    assert rest[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_samples_with_a_seed_repeat_and_differ_from_each_other(client, model, served):
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 24, "n": 3, "seed": 7, "temperature": 1.0}
    first = [choice.text for choice in client.completions.create(**asked).choices]
    second = [choice.text for choice in client.completions.create(**asked).choices]
    assert first == second
    assert len(set(first)) == 3


def test_errors_are_the_sdks_own_exceptions(client, model):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="no-such-model", prompt="a")
    assert unknown.value.body["param"] == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}], temperature=-1)
    assert "temperature" in wrong.value.body["message"]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="a", temperature=-1, stream=True)
    with pytest.raises(openai.BadRequestError) as other_runner:
        client.embeddings.create(model=model, input="a")
    assert "--runner pooling" in other_runner.value.body["message"]
    with pytest.raises(openai.InternalServerError) as unbuilt:
        client.moderations.create(model=model, input="a")
    assert unbuilt.value.status_code == 501
    assert client.completions.create(model=model, prompt="a", max_tokens=1).choices


def test_a_stream_closed_half_way_leaves_the_server_free(client, model, served):
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    for _ in range(200):
        load = httpx.get(f"{served[1]}/load").json()
        if load["num_running"] == 0 and load["server_load"] == 0:
            break
    assert load["num_running"] == 0
    assert client.completions.create(model=model, prompt=PROMPT, max_tokens=4).usage.completion_tokens == 4


async def test_two_hundred_mixed_requests_at_once_all_end_right(served, model):
    async def one(client, i):
        kind, stream = i % 2, i % 4 < 2
        asked = {"model": model, "max_tokens": i % 17 + 2, "temperature": 0, "stream": stream}
        if kind:
            answer = await client.chat.completions.create(messages=MESSAGES, **asked)
        else:
            answer = await client.completions.create(prompt=PROMPT, **asked)
        if not stream:
            choice = answer.choices[0]
            return kind, asked["max_tokens"], choice.message.content if kind else choice.text, choice.finish_reason
        text, reasons = "", []
        async for chunk in answer:
            choice = chunk.choices[0]
            text += (choice.delta.content or "") if kind else choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
        assert len(reasons) == 1
        return kind, asked["max_tokens"], text, reasons[0]

    limits = httpx.Limits(max_connections=None)
    async with openai.AsyncOpenAI(
        base_url=f"{served[1]}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits, timeout=100),
    ) as client:
        answers = await asyncio.gather(*(one(client, i) for i in range(200)))
    longest = {}
    for kind, max_tokens, text, _ in answers:
        longest[kind] = max(longest.get(kind, (0, "")), (max_tokens, text))
    for kind, max_tokens, text, reason in answers:
        # Greedy answers to one prompt are prefixes of each other, whatever else was in the batch.
        assert longest[kind][1].startswith(text.removesuffix("\ufffd"))
        assert reason in ("length", "stop")
        assert text or max_tokens < 4
    async with httpx.AsyncClient() as plain:
        load = (await plain.get(f"{served[1]}/load")).json()
    assert (load["server_load"], load["num_running"]) == (0, 0)
