"""``POST /v1/embeddings`` over simulated engines, whose vectors are known, and over the embedded model."""

import asyncio
import base64
import json

import httpx
import numpy as np
import openai
import pytest
import simulated_pooling
from asgi_client import assert_error, client_of, serving
from loop_watch import never_long
from server_process import REAL, ServerProcess
from simulated_pooling import SIM, simulated_server

from async_streams import until_idle
from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, PoolingParams
from rustvllm.server.flags.log_args import RequestLogSettings
from rustvllm.server.schemas import responses
from rustvllm.server.state import ServerSettings, ServerState

URL = "/v1/embeddings"
WIDE = {"hf_overrides": {"n_embd": 4098}}
PROMPT = "Once upon a time"


def pooling(settings=None, **options):
    """A client of an application over a simulated engine, and the engine."""
    return simulated_server({"runner": "pooling"} | options, settings)


def simulated(ids, width, *, normalised=True):
    vector = simulated_pooling.simulated(ids, width)
    exact = vector.astype(np.float64)
    return (exact / np.linalg.norm(exact)).astype(np.float32) if normalised else vector


def numbers_of(embedding):
    return (
        np.frombuffer(base64.b64decode(embedding), "<f4") if isinstance(embedding, str) else np.array(embedding, "f4")
    )


async def test_every_shape_of_input_and_both_encodings():
    async with pooling() as (client, engine):
        width = engine.config.model.hidden_size
        texts = [PROMPT, "The dog", "a"]
        ids = [list(engine.tokenizer.encode_ids(text)) for text in texts]
        for given, wanted in ((PROMPT, ids[:1]), (texts, ids), (ids[0], ids[:1]), (ids, ids)):
            for encoding in (None, "float", "base64"):
                body = {"input": given, "encoding_format": encoding, "user": "u", "unknown": 1}
                answer = await client.post(URL, json=body, headers={"X-Request-Id": "mine"})
                assert answer.status_code == 200, answer.text
                parsed = responses.EmbeddingResponse.model_validate_json(answer.text, strict=True)
                assert (parsed.id, parsed.model) == ("embd-mine", "rustvllm-tiny")
                assert [each.index for each in parsed.data] == list(range(len(wanted)))
                assert parsed.usage.prompt_tokens == parsed.usage.total_tokens == sum(map(len, wanted))
                assert parsed.usage.completion_tokens == 0
                for each, tokens in zip(parsed.data, wanted, strict=True):
                    assert isinstance(each.embedding, str) is (encoding == "base64")
                    vector = numbers_of(each.embedding)
                    np.testing.assert_array_equal(vector, simulated(tokens, width))


async def test_fields_reach_the_engine():
    settings = ServerSettings(enable_prompt_tokens_details=True)
    overrides = {"hf_overrides": {"is_matryoshka": True}, "scheduling_policy": "priority", "block_size": 4}
    async with pooling(settings, **overrides) as (client, engine):
        ids, width = list(range(5, 25)), engine.config.model.hidden_size
        for fields, expected in (
            ({"use_activation": False}, simulated(ids, width, normalised=False)),
            ({"dimensions": 8, "use_activation": False}, simulated(ids, 8, normalised=False)),
            ({"dimensions": 8}, simulated(ids, 8)),
            ({"truncate_prompt_tokens": 7}, simulated(ids[:7], width)),
            ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, simulated(ids[-7:], width)),
            ({"truncate_prompt_tokens": -1, "priority": -3}, simulated(ids, width)),
            ({"padding": "do_not_pad", "embed_dtype": "float32", "endianness": "native"}, simulated(ids, width)),
        ):
            answer = await client.post(URL, json={"input": ids, **fields})
            assert answer.status_code == 200, answer.text
            np.testing.assert_array_equal(numbers_of(answer.json()["data"][0]["embedding"]), expected)
        usages = [
            (await client.post(URL, json={"input": ids, **fields})).json()["usage"]
            for fields in ({}, {"cache_salt": "own"}, {"cache_salt": "own"})
        ]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [16, 0, 16]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "is required"),
        ({"input": None}, "input", "null"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": [[]]}, "input", "at least one token"),
        ({"input": [""]}, "input", "empty"),
        ({"input": 7}, "input", "a number"),
        ({"input": {"a": 1}}, "input", "an object"),
        ({"input": True}, "input", "a boolean"),
        ({"input": ["a", 1]}, "input", "element 1"),
        ({"input": ["a", [1]]}, "input", "mix"),
        ({"input": [1, 2.5]}, "input", "element 0"),
        ({"input": [[1], [2, None]]}, "input", "null"),
        ({"input": [1_000_000]}, "input", "not in the vocabulary"),
        ({"input": [-1]}, "input", "not in the vocabulary"),
        ({"input": ["a"] * 2049}, "input", "the limit per request is 2048"),
        ({"input": [1] * 513}, "input_tokens", "at most 512 fit"),
        ({"input": "word " * 5000}, "input_tokens", "512"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": 8}, "dimensions", "leave dimensions out"),
        ({"input": "a", "dimensions": "8x"}, "dimensions", "integer"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no token"),
        ({"input": "a", "truncate_prompt_tokens": 600}, "truncate_prompt_tokens", "600"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
        ({"input": "a", "priority": 3}, "priority", "scheduling_policy"),
        ({"input": "a", "cache_salt": "@"}, "cache_salt", "cache_salt"),
        ({"input": "a", "request_id": "\n"}, "request_id", "printable"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "send texts as input"),
        ({"messages": []}, "input", "is required"),
        ({"input": ["a", "b", ""]}, "input", "element 2 of the list: the prompt is empty"),
        ({"input": ["a", "word " * 5000]}, "input_tokens", "element 1 of the list: This model's maximum"),
        ({"input": [[1], [1] * 513]}, "input_tokens", "element 1 of the list"),
        ({"input": [[1], [1_000_000]]}, "input", "element 1 of the list: token id 1000000"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "send texts as input"),
        ({"input": "a", "normalize": True}, "normalize", "use_activation"),
        ({"input": "a", "padding": "max_length"}, "padding", "not supported yet"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": "a", "endianness": "big"}, "endianness", "little-endian"),
        ({"input": "a", "task": "classify"}, "task", "POST /classify classifies"),
    ],
    ids=range(41),
)
async def test_what_is_wrong_is_named(pooled_client, body, param, says):
    status = 404 if says == "does not exist" else 400
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    assert_error(await pooled_client.post(URL, json=body), status, kind, param=param, says=(says,))


async def test_a_body_that_is_no_request(pooled_client):
    headers = {"Content-Type": "application/json"}
    for content, says in ((b"", "empty"), (b"[1]", "object"), (b'{"input": NaN}', "input"), (b'{"input": "a"', "JSON")):
        answer = await pooled_client.post(URL, content=content, headers=headers)
        assert_error(answer, 400, "BadRequestError", param=answer.json()["error"]["param"], says=(says,))
    assert_error(await pooled_client.post(URL, content=b"a"), 400, "BadRequestError", says=("application/json",))


@pytest.fixture
async def pooled_client():
    async with pooling() as (client, _):
        yield client


async def test_dimensions_of_a_model_that_has_some():
    async with pooling(hf_overrides={"matryoshka_dimensions": [4, 8]}) as (client, _):
        answer = await client.post(URL, json={"input": "a", "dimensions": 4})
        assert len(answer.json()["data"][0]["embedding"]) == 4
        for wrong, says in ((5, "one of 4, 8"), (100_000, "between 1 and")):
            answer = await client.post(URL, json={"input": "a", "dimensions": wrong})
            assert_error(answer, 400, "BadRequestError", param="dimensions", says=(says,))


async def test_each_server_says_what_it_does_instead():
    async with pooling() as (client, engine):
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            for stream in (False, True):
                answer = await client.post(path, json={**body, "stream": stream})
                says = ("makes embeddings here", "POST /v1/embeddings", "--runner generate")
                assert_error(answer, 400, "BadRequestError", param="model", says=says)
        assert (await engine.current_stats())["num_requests"] == 0
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "rustvllm-tiny"
    async with serving() as (client, engine):
        answer = await client.post(URL, json={"input": "a"})
        says = ("generates text here", "--runner pooling")
        assert_error(answer, 400, "BadRequestError", param="model", says=says)
        assert engine.seen == []


async def test_metrics_logs_and_the_document_know_it(monkeypatch):
    lines = []
    monkeypatch.setattr("rustvllm.server.http.request_log.logger.info", lambda text, *rest: lines.append(text % rest))
    settings = ServerSettings(request_log=RequestLogSettings(requests=True, outputs=True))
    async with pooling(settings) as (client, _):
        assert (await client.post(URL, json={"input": [[5, 6, 7], [8]], "dimensions": None})).status_code == 200
        text = (await client.get("/metrics")).text
        document = (await client.get("/openapi.json")).json()

    def value(name, label=""):
        lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}") and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    assert value("prompt_tokens_total") == 4
    assert value("generation_tokens_total") == 0
    assert value("request_success_total") == value("request_success_total", 'finished_reason="stop"') == 2
    assert value("e2e_request_latency_seconds_count") == 2
    assert document["paths"][URL]["post"]["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/EmbeddingRequest"
    }
    assert any("prompts of 3, 1 tokens, PoolingParams()" in line for line in lines), lines


@pytest.mark.parametrize("how", ["by a server that stops", "by a pause"])
async def test_an_answer_without_all_of_its_vectors_is_an_error(how):
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**(SIM | {"runner": "pooling", "sim_step_time": 50.0, "max_num_batched_tokens": 16}))
    )
    state = ServerState()
    state.set_ready(engine)
    try:
        async with client_of(state) as client:
            one, many = ({"input": [[5] * 16] * number} for number in (1, 20))
            asked = [asyncio.create_task(client.post(URL, json=body)) for body in (one, many)]
            await asked[0]
            await (state.abort_all() if how == "by a server that stops" else engine.pause_generation())
            assert_error(await asked[1], 503, "ServiceUnavailableError", says=("of 20 texts were aborted", "again"))
            assert (await asked[0]).status_code == 200
            await engine.resume_generation()
            assert len((await client.post(URL, json=many)).json()["data"]) == 20
    finally:
        engine.shutdown()
        state.close()


async def test_more_inputs_than_may_ever_wait_are_no_full_queue():
    async with pooling(max_num_queued_reqs=3, sim_step_time=50.0) as (client, engine):
        answer = await client.post(URL, json={"input": ["a"] * 4})
        says = ("the request has 4 prompts, but at most 3 may wait (max_num_queued_reqs)", "send fewer")
        assert_error(answer, 400, "BadRequestError", param="input", says=says)
        assert (await engine.current_stats())["num_requests"] == 0
        assert len((await client.post(URL, json={"input": ["a"] * 3})).json()["data"]) == 3
    async with pooling(runner="generate", max_num_queued_reqs=3) as (client, _):
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "temperature": 1})
        says = ("the request has 2 prompts with 2 samples each, but at most 3",)
        assert_error(answer, 400, "BadRequestError", param="prompt", says=says)
        assert (await client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1})).status_code == 200


async def test_a_client_that_leaves_frees_its_requests():
    async with pooling(sim_step_time=20.0) as (client, engine):
        task = asyncio.create_task(client.post(URL, json={"input": [[5] * 200] * 300}))
        for _ in range(400):
            if (await engine.current_stats())["num_running"]:
                break
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stats = await until_idle(engine)
        assert stats["num_free_blocks"] == stats["num_usable_blocks"]
        assert (await client.post(URL, json={"input": "a"})).status_code == 200


LARGE = {
    "one wide vector": {"input": [5, 6]},
    "wide vectors as numbers": {"input": [[5, 6]] * 300},
    "wide vectors as base64": {"input": [[5, 6]] * 2048, "encoding_format": "base64"},
    "a long text": {"input": "word " * 400_000, "truncate_prompt_tokens": 9},
    "long lists": {"input": [list(range(5, 400))] * 200, "encoding_format": "base64"},
    "too many inputs": {"input": ["a"] * 100_000},
}


@pytest.mark.parametrize("case", LARGE)
async def test_nothing_of_a_large_request_holds_the_event_loop(case):
    body = json.dumps(LARGE[case], separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json"}
    async with pooling(**WIDE, max_num_batched_tokens=2048) as (client, engine):
        assert engine.config.model.embedding_size == 4098
        assert (await client.post(URL, json={"input": "a"})).status_code == 200
        answer = await never_long(lambda: client.post(URL, content=body, headers=headers))
        assert answer.status_code == (400 if case == "too many inputs" else 200), answer.text[:300]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--api-server-count", "2", "--data-parallel-size", "2"]], ids=["one of each", "two of each"]
)
def test_servers_give_the_vectors_of_the_same_model_offline(flags):
    texts = [f"{PROMPT} there were {number} dogs" for number in range(24)]
    with LLM(runner="pooling") as llm:
        params = [PoolingParams(use_activation=True)] * len(texts)
        expected = [output.outputs.embedding for output in llm.embed(texts, pooling_params=params, use_tqdm=False)]
    with ServerProcess([*REAL, "--port", "0", "--runner", "pooling", "--api-key", "k", *flags]) as server:
        url = server.wait_until_ready()
        assert httpx.post(f"{url}{URL}", json={"input": "a"}).status_code == 401
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=60) as client:
            for number in range(6):
                part = slice(4 * number, 4 * number + 4)
                for encoding in ({}, {"encoding_format": "float"}):
                    answer = client.embeddings.create(model="rustvllm-tiny", input=texts[part], **encoding)
                    found = [each.embedding for each in answer.data]
                    np.testing.assert_allclose(found, expected[part], atol=1e-5, rtol=0)
        headers = {"Authorization": "Bearer k"}
        metrics = httpx.get(f"{url}/metrics", headers=headers).text
        done = [
            line for line in metrics.splitlines() if line.startswith("vllm:request_success_total") and '"stop"' in line
        ]
        assert sum(float(line.rpartition(" ")[2]) for line in done) == 48
        if flags:
            assert len([line for line in done if not line.endswith(" 0")]) == 2, "both engines had some"
