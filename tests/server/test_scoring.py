"""``POST /classify``, ``/score`` and ``/rerank`` over simulated engines with known numbers, and over a real one."""

import asyncio
import io
import json

import httpx
import numpy as np
import pytest
import simulated_pooling
from asgi_client import assert_error, leaving, serving
from loop_watch import never_long
from server_process import REAL, ServerProcess
from simulated_pooling import SIM, simulated_server

from async_streams import until_idle
from rustvllm import LLM, AsyncEngineArgs, AsyncLLM
from rustvllm.batch.journal import BatchJournal
from rustvllm.batch.lines import read_lines
from rustvllm.batch.runner import BatchRunner
from rustvllm.engine.request.pairs import MAX_PAIR_CHARS
from rustvllm.server.schemas import responses
from rustvllm.server.state import ServerSettings, ServerState

EMBED = {"runner": "pooling"}
TOKENS = {"classifier_from_token": ["Ġno", "Ġyes"], "method": "from_2_way_softmax"}
RERANKER = {"convert": "classify", "hf_overrides": TOKENS}
LABELS = {"0": "bad", "1": "fair", "2": "good"}
CLASSIFIER = {"convert": "classify", "hf_overrides": {"id2label": LABELS}}
SCORES, RANKS = ("/score", "/v1/score"), ("/rerank", "/v1/rerank", "/v2/rerank")
QUERY = "What did the dog do?"
DOCUMENTS = ["The dog ran.", "Rain fell on the sea.", "Mom made a cake.", "The dog ran."]
TEMPLATE = "{{ instruction or 'none' }}: {{ messages[1].content }} / {{ messages[0].content }}{{ more or '' }}"


def pooling(options, settings=None, **more):
    """A client of an application over a simulated engine, and the engine."""
    return simulated_server(options | more, settings)


def engine_state(client):
    """What the application that a client calls knows."""
    app = client._transport.app
    while not hasattr(app, "state"):
        app = app.app
    return app.state.server


def simulated(ids, width):
    return simulated_pooling.simulated(ids, width).astype(np.float64)


def probabilities(numbers):
    if len(numbers) == 1:
        return 1 / (1 + np.exp(-numbers))
    powers = np.exp(numbers - numbers.max())
    return powers / powers.sum()


def cosine(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


async def test_classes_have_labels_and_probabilities():
    async with pooling(CLASSIFIER) as (client, engine):
        texts = [QUERY, "The dog", "a"]
        ids = [list(engine.tokenizer.encode_ids(text)) for text in texts]
        for given, wanted in ((QUERY, ids[:1]), (texts, ids), (ids[0], ids[:1]), (ids, ids)):
            body = {"input": given, "user": "u", "unknown": 1}
            answer = await client.post("/classify", json=body, headers={"X-Request-Id": "mine"})
            assert answer.status_code == 200, answer.text
            parsed = responses.ClassificationResponse.model_validate_json(answer.text, strict=True)
            assert (parsed.id, parsed.model) == ("classify-mine", "rustvllm-tiny")
            assert [each.index for each in parsed.data] == list(range(len(wanted)))
            assert parsed.usage.prompt_tokens == parsed.usage.total_tokens == sum(map(len, wanted))
            for each, tokens in zip(parsed.data, wanted, strict=True):
                expected = probabilities(simulated(tokens, 3))
                np.testing.assert_allclose(each.probs, expected, atol=1e-6, rtol=0)
                assert (each.num_classes, each.label) == (3, LABELS[str(expected.argmax())])
        raw = (await client.post("/classify", json={"input": ids[0], "use_activation": False})).json()
        np.testing.assert_allclose(raw["data"][0]["probs"], simulated(ids[0], 3), atol=1e-6, rtol=0)
        cut = (await client.post("/classify", json={"input": ids[0], "truncate_prompt_tokens": 3})).json()
        assert cut["usage"]["prompt_tokens"] == 3
    async with pooling({"convert": "classify"}) as (client, _):
        assert (await client.post("/classify", json={"input": "a"})).json()["data"][0]["label"].startswith("LABEL_")


async def scores_of(client, path, body):
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    parsed = responses.ScoreResponse.model_validate_json(answer.text, strict=True)
    assert parsed.id.startswith("score-")
    assert [each.index for each in parsed.data] == list(range(len(parsed.data)))
    return [each.score for each in parsed.data], parsed.usage


async def ranks_of(client, path, body):
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return responses.RerankResponse.model_validate_json(answer.text, strict=True)


@pytest.mark.parametrize("options", [EMBED, RERANKER], ids=["embeddings", "classifier"])
async def test_scores_and_ranks(options):
    async with pooling(options) as (client, engine):

        def ids(text):
            return list(engine.tokenizer.encode_ids(text))

        def score(one, other):
            if options is RERANKER:
                return probabilities(simulated(ids(one + other), 1))[0]
            return cosine(*(simulated(ids(text), engine.config.model.hidden_size) for text in (one, other)))

        wanted = [score(QUERY, document) for document in DOCUMENTS]
        for path in SCORES:
            found, usage = await scores_of(client, path, {"text_1": QUERY, "text_2": DOCUMENTS})
            np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)
            every = [QUERY + text for text in DOCUMENTS] if options is RERANKER else {QUERY, *DOCUMENTS}
            assert usage.prompt_tokens == usage.total_tokens == sum(len(ids(text)) for text in every)
        for first, second in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            given = {first: DOCUMENTS, second: [{"text": text} for text in DOCUMENTS[::-1]]}
            found, _ = await scores_of(client, "/score", given)
            both = zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)
            np.testing.assert_allclose(found, [score(*pair) for pair in both], atol=1e-6, rtol=0)
        order = sorted(range(4), key=lambda index: -wanted[index])
        assert wanted[0] == wanted[3]
        assert order.index(0) + 1 == order.index(3), "equal scores keep the order of the request"
        for path in RANKS:
            ranked = await ranks_of(client, path, {"query": QUERY, "documents": DOCUMENTS, "model": "rustvllm-tiny"})
            assert ranked.id.startswith("score-")
            assert [each.index for each in ranked.results] == order
            assert [each.document.text for each in ranked.results] == [DOCUMENTS[index] for index in order]
            found = [each.relevance_score for each in ranked.results]
            np.testing.assert_allclose(found, [wanted[index] for index in order], atol=1e-6, rtol=0)
            assert ranked.usage.prompt_tokens == ranked.usage.total_tokens == usage.prompt_tokens
        for top_n, count in ((0, 4), (None, 4), (1, 1), (3, 3), (99, 4)):
            ranked = await ranks_of(client, "/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": top_n})
            assert [each.index for each in ranked.results] == order[:count]
        body = {"query": {"text": QUERY}, "documents": DOCUMENTS[0], "return_documents": False}
        [result] = (await client.post("/rerank", json=body)).json()["results"]
        assert result.keys() == {"index", "relevance_score"}


async def test_a_template_makes_the_prompt_of_a_pair():
    async with pooling(RERANKER, ServerSettings(chat_template=TEMPLATE)) as (client, engine):
        for fields, before, behind in (
            ({}, "none", ""),
            ({"instruction": "find"}, "find", ""),
            ({"instruction": "find", "chat_template_kwargs": {"instruction": "own", "more": "!"}}, "own", "!"),
        ):
            found, _ = await scores_of(client, "/score", {"text_1": QUERY, "text_2": DOCUMENTS, **fields})
            texts = [f"{before}: {document} / {QUERY}{behind}" for document in DOCUMENTS]
            numbers = [simulated(list(engine.tokenizer.encode_ids(text)), 1) for text in texts]
            np.testing.assert_allclose(found, [probabilities(each)[0] for each in numbers], atol=1e-6, rtol=0)
        many = {"query": QUERY, "documents": [f"{number}" for number in range(100)]}
        ranked = await ranks_of(client, "/rerank", many)
        assert sorted(each.index for each in ranked.results) == list(range(100))
    raising = ServerSettings(chat_template="{{ raise_exception('no') }}")
    async with pooling(RERANKER, raising) as (client, _):
        answer = await client.post("/score", json={"text_1": "a", "text_2": "b"})
        assert_error(answer, 400, "BadRequestError", param="messages", says=("refused",))


async def test_salts_and_adapters_and_priorities_are_those_of_embeddings():
    settings = ServerSettings(enable_prompt_tokens_details=True)
    for options in (EMBED, RERANKER):
        async with pooling(options, settings, scheduling_policy="priority", block_size=4) as (client, _):
            body = {"text_1": "The dog ran in the park and then it ", "text_2": "ran home", "priority": -1}
            cached = []
            for fields in ({}, {}, {"cache_salt": "own"}, {"cache_salt": "own"}):
                _, usage = await scores_of(client, "/score", body | fields)
                cached.append(usage.prompt_tokens_details.cached_tokens)
            assert cached[1] == cached[3] > 0 == cached[0] == cached[2]


WRONG_PAIRS = [
    ({}, "text_1", "a score needs two fields"),
    ({"text_1": "a"}, "text_2", "got text_1"),
    ({"text_1": "a", "documents": "b"}, "text_1", "got text_1, documents"),
    ({"text_1": "a", "text_2": "b", "items": "c"}, "text_1", "got text_1, text_2, items"),
    ({"text_1": [], "text_2": "b"}, "text_1", "empty list"),
    ({"text_1": "a", "text_2": []}, "text_2", "empty list"),
    ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "text_1 has 2 texts and text_2 has 3"),
    ({"text_1": "a", "text_2": ["b", 7]}, "text_2", "text_2 element 1 must be a text, got 7"),
    ({"text_1": "a", "text_2": [["b"]]}, "text_2", "element 0 must be a text"),
    ({"text_1": "a", "text_2": {"image": "b"}}, "text_2", 'must have a "text"'),
    ({"text_1": "a", "text_2": [{"content": [{"type": "image_url"}]}]}, "text_2", "images are not supported"),
    ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "has 2049 texts; the limit per request is 2048"),
    ({"text_1": "a", "text_2": ["b" * 9, "word " * 600]}, "input_tokens", "512"),
    ({"text_1": "a", "text_2": "word " * 5000}, "input_tokens", "512"),
    ({"text_1": "a", "text_2": "b", "model": "other"}, "model", "does not exist"),
    ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no token"),
    ({"text_1": "a", "text_2": "b", "truncation_side": "up"}, "truncation_side", "'left' or 'right'"),
    ({"text_1": "a", "text_2": "b", "priority": 3}, "priority", "scheduling_policy"),
    ({"text_1": "a", "text_2": "b", "cache_salt": "@"}, "cache_salt", "cache_salt"),
    ({"text_1": "a", "text_2": "b", "use_activation": "x"}, "use_activation", "boolean"),
    ({"text_1": "a", "text_2": "b", "chat_template_kwargs": 7}, "chat_template_kwargs", "should be an object"),
    ({"text_1": "a", "text_2": "b", "chat_template_kwargs": {"messages": 7}}, "chat_template_kwargs", "messages"),
    ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 5}, "max_tokens_per_doc", "truncate_prompt_tokens"),
    ({"text_1": "a", "text_2": "b", "padding": "max_length"}, "padding", "not supported yet"),
    ({"text_1": "a", "text_2": "b", "dimensions": "x"}, "dimensions", "POST /v1/embeddings takes it"),
]
WRONG_RANKS = [
    ({"documents": ["a"]}, "query", "is required"),
    ({"query": "a"}, "documents", "is required"),
    ({"query": ["a"], "documents": ["a"]}, "query", "one text, not a list"),
    ({"query": None, "documents": ["a"]}, "query", "must be a text"),
    ({"query": "a", "documents": []}, "documents", "empty list"),
    ({"query": "a", "documents": ["b"] * 2049}, "documents", "the limit per request is 2048"),
    ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal to 0"),
    ({"query": "a", "documents": ["b"], "top_n": "x"}, "top_n", "integer"),
    ({"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields", "send each document as a text"),
    ({"query": "a", "documents": ["b"], "max_tokens_per_query": 4}, "max_tokens_per_query", "not supported yet"),
]


@pytest.mark.parametrize("options", [EMBED, RERANKER], ids=["embeddings", "classifier"])
async def test_what_is_wrong_is_named(options):
    async with pooling(options) as (client, engine):
        for path, cases in (("/score", WRONG_PAIRS), ("/rerank", WRONG_RANKS)):
            for body, param, says in cases:
                answer = await client.post(path, json=body)
                status, kind = (404, "NotFoundError") if says == "does not exist" else (400, "BadRequestError")
                assert_error(answer, status, kind, param=param, says=(says,))
        empty = {"text_1": "", "text_2": ""}
        param = "text_1" if options is EMBED else "text_2"
        assert_error(await client.post("/score", json=empty), 400, "BadRequestError", param=param, says=("empty",))
        assert (await engine.current_stats())["num_running"] == 0
        await scores_of(client, "/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 0, "unknown": 1})


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/rerank", {"query": "", "documents": ["a", "b"]}, "query", "query: the prompt is empty"),
        ("/rerank", {"query": "a", "documents": [""]}, "documents", "documents: the prompt is empty"),
        (
            "/rerank",
            {"query": "a", "documents": ["a", "b", "b", ""]},
            "documents",
            "element 3 of documents: the prompt is",
        ),
        ("/score", {"text_1": ["a", ""], "text_2": ["b", "c"]}, "text_1", "element 1 of text_1: the prompt is empty"),
        ("/score", {"text_1": "", "text_2": ""}, "text_1", "text_1: the prompt is empty"),
        (
            "/score",
            {"data_1": "a", "data_2": ["a", "x " * 600]},
            "input_tokens",
            "element 1 of data_2: This model's maximum",
        ),
    ],
)
async def test_a_text_without_a_vector_is_named_where_the_request_has_it(path, body, param, says):
    async with pooling(EMBED) as (client, _):
        assert_error(await client.post(path, json=body), 400, "BadRequestError", param=param, says=(says,))
        await scores_of(client, "/score", {"text_1": "a", "text_2": ["a", "b"]})


async def test_pairs_that_would_take_too_much_memory_are_refused_before_they_are_made():
    async with pooling(RERANKER) as (client, _):
        query = "a" * (MAX_PAIR_CHARS // 2048)
        body = {"query": query, "documents": ["b"] * 2048, "truncate_prompt_tokens": 4}
        answer = await client.post("/rerank", json=body)
        assert_error(answer, 400, "BadRequestError", param="documents", says=(f"the limit is {MAX_PAIR_CHARS}",))
        ranked = await ranks_of(client, "/rerank", body | {"query": query[:99], "top_n": 1})
        assert ranked.usage.total_tokens == 4 * 2048


async def test_wrong_inputs_of_classes_are_those_of_embeddings():
    async with pooling(CLASSIFIER) as (client, _):
        for body, param, says in (
            ({}, "input", "is required"),
            ({"input": []}, "input", "empty list"),
            ({"input": [""]}, "input", "empty"),
            ({"input": ["a", 1]}, "input", "element 1"),
            ({"input": ["a"] * 2049}, "input", "the limit per request is 2048"),
            ({"input": [1] * 513}, "input_tokens", "at most 512 fit"),
            ({"input": "a", "messages": [{"role": "user"}]}, "messages", "send texts as input"),
            ({"input": "a", "task": "embed"}, "task", "POST /v1/embeddings makes embeddings"),
            ({"input": "a", "dimensions": 2}, "dimensions", "POST /v1/embeddings takes it"),
        ):
            assert_error(await client.post("/classify", json=body), 400, "BadRequestError", param=param, says=(says,))


async def test_each_server_says_what_it_does_instead():
    bodies = {
        "/v1/completions": {"prompt": "a"},
        "/v1/embeddings": {"input": "a"},
        "/classify": {"input": "a"},
        "/score": {"text_1": "a", "text_2": "b"},
        "/rerank": {"query": "a", "documents": ["b"]},
    }
    for options, says in (
        (EMBED, {"/v1/completions": "generates no text", "/classify": "does not classify: use LLM.embed"}),
        (RERANKER, {"/v1/completions": "--runner generate", "/v1/embeddings": "start the engine with --convert embed"}),
        (
            CLASSIFIER,
            {
                "/v1/completions": "classifies here and generates no text",
                "/v1/embeddings": "makes no embeddings",
                "/score": "a score needs a model with one label, and it has 3",
                "/rerank": "a score needs a model with one label, and it has 3",
            },
        ),
    ):
        async with pooling(options) as (client, engine):
            for path, body in bodies.items():
                answer = await client.post(path, json=body)
                if path in says:
                    assert_error(answer, 400, "BadRequestError", param="model", says=(says[path],))
                else:
                    assert answer.status_code == 200, answer.text
            assert engine.config.model.runner_type == "pooling"
    async with serving() as (client, engine):
        for path in ("/classify", "/score", "/rerank"):
            answer = await client.post(path, json=bodies[path])
            assert_error(answer, 400, "BadRequestError", param="model", says=("generates text here",))
        assert engine.seen == []


async def test_metrics_and_the_document_know_them():
    async with pooling(RERANKER) as (client, _):
        await ranks_of(client, "/rerank", {"query": QUERY, "documents": DOCUMENTS})
        text = (await client.get("/metrics")).text
        document = (await client.get("/openapi.json")).json()
    done = [line for line in text.splitlines() if line.startswith("vllm:request_success_total") and '"stop"' in line]
    assert sum(float(line.rpartition(" ")[2]) for line in done) == 4
    for path, name in (
        ("/classify", "Classification"),
        *((path, "Score") for path in SCORES),
        *((path, "Rerank") for path in RANKS),
    ):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}Request"}


@pytest.mark.parametrize(
    ("options", "path", "body"),
    [
        (EMBED, "/v1/embeddings", {"input": ["word " * 100] * 300}),
        (CLASSIFIER, "/classify", {"input": ["word " * 100] * 300}),
        (RERANKER, "/score", {"text_1": "word " * 100, "text_2": ["word " * 100] * 300}),
        (EMBED, "/score", {"text_1": "a", "text_2": [f"{number} " * 50 for number in range(300)]}),
        (RERANKER, "/rerank", {"query": "word " * 100, "documents": ["word " * 100] * 300}),
    ],
    ids=["embeddings", "classes", "scores", "cosines", "ranks"],
)
async def test_a_client_that_leaves_ends_its_requests(options, path, body):
    async with pooling(options, sim_step_time=20.0) as (client, engine):
        gone = asyncio.Event()
        task = asyncio.create_task(leaving(client._transport.app, path, body, gone))
        for _ in range(2000):
            if (await engine.current_stats())["num_running"]:
                break
            await asyncio.sleep(0.005)
        assert (await engine.current_stats())["num_running"]
        assert engine_state(client).engine_request_ids
        gone.set()
        sent = await task
        assert [message["status"] for message in sent if "status" in message] in ([], [499])
        stats = await until_idle(engine)
        assert stats["num_free_blocks"] == stats["num_usable_blocks"]
        assert stats["num_generation_tokens"] == 0
        assert not engine_state(client).engine_request_ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": QUERY, "documents": DOCUMENTS}),
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/v1/embeddings", {"input": DOCUMENTS}),
    ],
    ids=["rerank", "score", "embeddings"],
)
async def test_a_stop_of_the_server_gives_no_half_answers(path, body):
    async with pooling(EMBED) as (client, engine):
        state = engine_state(client)
        await engine.pause_generation(mode="keep")
        task = asyncio.create_task(client.post(path, json=body))
        while len(state.engine_request_ids) < 3:  # noqa: ASYNC110 -- nothing signals it
            await asyncio.sleep(0.001)
        await state.abort_all()
        await engine.resume_generation()
        assert_error(await task, 503, "ServiceUnavailableError", says=("the server is stopping",))


WIDE = {"hf_overrides": {"n_embd": 4098}, "runner": "pooling"}
CUT = {"truncate_prompt_tokens": 9}
LARGE = {
    "many cosines": (WIDE, None, "/score", {"text_1": "a", "text_2": [f"{number}" for number in range(2048)]}),
    "many pairs": (RERANKER, None, "/rerank", {"query": QUERY, "documents": [f"{number}" for number in range(2048)]}),
    "many templates": (RERANKER, TEMPLATE, "/rerank", {"query": QUERY, "documents": [f"{n}" for n in range(2048)]}),
    "long documents": (RERANKER, None, "/rerank", {"query": QUERY, "documents": ["word " * 40_000] * 20, **CUT}),
    "a long template": (RERANKER, TEMPLATE, "/score", {"text_1": "word " * 200_000, "text_2": "a", **CUT}),
    "special tokens": (CLASSIFIER, None, "/score", {"text_1": "word " * 200_000, "text_2": ["a"] * 9, **CUT}),
    "many labels": (
        {"convert": "classify", "hf_overrides": {"num_labels": 4096}}, None, "/classify", {"input": ["a"] * 200},
    ),
    "too many texts": (EMBED, None, "/score", {"text_1": "a", "text_2": ["a"] * 100_000}),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
async def test_nothing_of_a_large_request_holds_the_event_loop(case):
    options, template, path, fields = LARGE[case]
    if case == "special tokens":  # one label, and pairs that the tokenizer puts together
        options = {"convert": "classify", "hf_overrides": {"num_labels": 1}}
    body = json.dumps(fields, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json"}
    async with pooling(options, ServerSettings(chat_template=template), max_num_batched_tokens=2048) as (client, _):
        answer = await never_long(lambda: client.post(path, content=body, headers=headers))
        assert answer.status_code == (400 if case == "too many texts" else 200), answer.text[:300]


@pytest.mark.slow
@pytest.mark.parametrize("options", [EMBED, RERANKER], ids=["embeddings", "classifier"])
@pytest.mark.parametrize(
    "flags", [[], ["--api-server-count", "2", "--data-parallel-size", "2"]], ids=["one of each", "two of each"]
)
def test_servers_give_the_scores_of_the_same_model_offline(options, flags):
    documents = [f"There were {number} dogs" for number in range(24)]
    with LLM(**options) as llm:
        expected = [output.outputs.score for output in llm.score(QUERY, documents, use_tqdm=False)]
    own = [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", json.dumps(value).strip('"'))
    ]
    with ServerProcess([*REAL, "--port", "0", *own, "--api-key", "k", *flags]) as server:
        url = server.wait_until_ready()
        for path in (*SCORES, *RANKS, "/classify"):
            assert httpx.post(f"{url}{path}", json={}).status_code == 401
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            for _ in range(3):
                answer = client.post("/score", json={"text_1": QUERY, "text_2": documents}).json()
                np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-5, rtol=0)
            best = client.post("/v2/rerank", json={"query": QUERY, "documents": documents, "top_n": 1}).json()
            assert best["results"][0]["index"] == int(np.argmax(expected))


async def test_a_batch_file_may_ask_for_scores_and_ranks(tmp_path):
    lines = [
        {"custom_id": path, "method": "POST", "url": path, "body": body}
        for paths, body in (
            (SCORES, {"text_1": QUERY, "text_2": DOCUMENTS}),
            (RANKS, {"query": QUERY, "documents": DOCUMENTS}),
        )
        for path in paths
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**(SIM | RERANKER)))
    state = ServerState()
    state.set_ready(engine)
    try:
        with BatchJournal(tmp_path / "out.jsonl", resume=False) as journal:
            runner = BatchRunner(state, journal)
            journal.finish(await runner.run(list(read_lines(io.BytesIO(content), "m", 10_000))))
    finally:
        engine.shutdown()
        state.close()
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [*SCORES, *RANKS]
    for answer in answers:
        assert answer["response"]["status_code"] == 200, answer
        body = answer["response"]["body"]
        assert len(body["data" if answer["custom_id"] in SCORES else "results"]) == len(DOCUMENTS)
