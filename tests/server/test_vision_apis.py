"""Images in Anthropic's Messages API and OpenAI's Responses API: what chat makes of them, takes and refuses."""

import asyncio
import base64
import io
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
from asgi_client import client_of

import vision_checkpoints
from rustvllm import AsyncEngineArgs, AsyncLLM
from rustvllm.batch.journal import BatchJournal
from rustvllm.batch.lines import read_lines
from rustvllm.batch.runner import BatchRunner
from rustvllm.engine.request import images as request_images
from rustvllm.exceptions import InvalidRequestError
from rustvllm.server.state import ServerState
from vision_checkpoints import empty_png, picture

pytest.importorskip("PIL.Image", reason="images need Pillow (the extra rustvllm[vision])")
CHAT, MESSAGES, COUNT, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
APIS = {"messages": MESSAGES, "count": COUNT, "responses": RESPONSES}
LENGTH = 8


def encoded(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


PNG = encoded(picture(1))
URL = "data:image/png;base64," + PNG


class Api:
    """Says the same in the words of one API."""

    def __init__(self, name):
        self.name, self.path = name, {**APIS, "chat": CHAT}[name]

    def text(self, text):
        return {"type": "input_text" if self.name == "responses" else "text", "text": text}

    def image(self, url=URL):
        if self.name == "chat":
            return {"type": "image_url", "image_url": {"url": url}}
        if self.name == "responses":
            return {"type": "input_image", "image_url": url, "detail": "high"}
        before, _, data = url.partition(";base64,")
        source = {"type": "base64", "media_type": before.removeprefix("data:"), "data": data}
        return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}

    def body(self, *parts, **fields):
        return self.of([{"role": "user", "content": list(parts)}], **fields)

    def of(self, messages, **fields):
        """A body of messages, or of items."""
        name = "input" if self.name == "responses" else "messages"
        greedy = {"temperature": 0} if self.name != "count" else {}
        length = {"count": {}, "responses": {"max_output_tokens": LENGTH}}.get(self.name, {"max_tokens": LENGTH})
        return {name: messages, **greedy, **length, **fields}

    def result(self, *parts):
        """A conversation in which a tool has answered with parts."""
        user = {"role": "user", "content": [self.text("look")]}
        if self.name == "chat":
            call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            answer = {"role": "assistant", "content": None, "tool_calls": [call]}
            return self.of([user, answer, {"role": "tool", "tool_call_id": "c1", "content": list(parts)}])
        if self.name == "responses":
            call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
            output = {"type": "function_call_output", "call_id": "c1", "output": list(parts)}
            return self.of([user, call, output])
        call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": list(parts)}
        return self.of([user, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}])

    def place(self, part=0):
        """How an error names the image of a part."""
        if self.name == "responses":
            return f"input[0].content[{part}].image_url"
        return f"messages[0].content[{part}].source.data"


def said(answer):
    """Text and length of prompt of an answer of any API."""
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"], answer["usage"]["input_tokens"]
    return answer["content"][0]["text"], answer["usage"]["input_tokens"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    vision_checkpoints.write(folder, "smolvlm")
    limits = {"max_model_len": 400, "num_gpu_blocks_override": 100, "limit_mm_per_prompt": {"image": 2}}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), dtype="float32", **limits))
    yield engine
    engine.shutdown()


@asynccontextmanager
async def vision(engine):
    """A client of an application over a model that sees, and the requests that reached its engine."""
    seen = []
    process = engine.input_processor.process_off_loop

    async def noted(*args, **named):
        seen.append(await process(*args, **named))
        return seen[-1]

    state = ServerState()
    state.set_ready(engine)
    with mock.patch.object(engine.input_processor, "process_off_loop", noted):
        try:
            async with client_of(state) as client:
                yield SimpleNamespace(client=client, engine=engine, seen=seen, state=state)
                await until_nothing_is_held(engine)
        finally:
            state.close()


async def until_nothing_is_held(engine):
    for _ in range(500):
        if not engine._requests._image_bytes and not len(engine._requests):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"pixels are still held: {engine._requests._image_bytes}")


async def answer_of(served, api, body, status=200):
    answer = await served.client.post(api.path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def refusals(served, make, status=400):
    """What each of the two APIs, and the counter of tokens, say of a body that ``make`` makes for it."""
    found = {}
    for name in APIS:
        error = (await answer_of(served, Api(name), make(Api(name)), status))["error"]
        found[name] = error["message"]
        if name == "responses":
            assert error["param"] == "input"
    return found


async def test_all_apis_make_the_same_of_the_same_images(engine):
    other = "data:image/webp;base64," + encoded(picture(2, (30, 70)), "WEBP")
    shapes = [
        lambda api: api.body(api.text("see "), api.image(), api.image(other), api.text(" what")),
        lambda api: api.body(api.image()),
        lambda api: api.result(api.image(), api.text("a fox")),
        lambda api: api.result(api.image()),
    ]
    async with vision(engine) as served:
        for shape in shapes:
            found = {}
            for name in ("chat", "messages", "responses"):
                answer = said(await answer_of(served, Api(name), shape(Api(name))))
                request = served.seen[-1]
                assert request.multimodal, "the image has reached the engine"
                ids = request.prompt_token_ids.tolist()
                assert len(ids) == answer[1]
                found[name] = answer[0], ids, request.multimodal
            assert found["messages"] == found["responses"] == found["chat"]
            counted = await answer_of(served, Api("count"), shape(Api("count")))
            assert counted == {"input_tokens": len(ids)}
        assert len({tuple(request.prompt_token_ids.tolist()) for request in served.seen}) == len(shapes)


async def test_what_the_bytes_are_counts_and_not_what_they_are_called(engine):
    """Also: a URL that holds the image, no media type as vLLM allows, and an image in an earlier turn."""
    async with vision(engine) as served:
        api = Api("messages")
        right = said(await answer_of(served, api, api.body(api.image())))
        wrong = api.image()
        wrong["source"]["media_type"] = "image/jpeg"
        by_url = {"type": "image", "source": {"type": "url", "url": URL}}
        bare = {"type": "image", "source": {"type": "base64", "data": PNG}}
        for image in (wrong, by_url, bare):
            assert said(await answer_of(served, api, api.body(image))) == right
        turns = [
            {"role": "user", "content": [api.image()]},
            {"role": "user", "content": "what?"},
            {"role": "assistant", "content": "a fox"},
            {"role": "user", "content": [api.text("sure?")]},
        ]
        assert said(await answer_of(served, api, api.of(turns)))[1] > right[1]


SOURCES = [
    (None, "source must be an object such as"),
    ("x" * 1000, "source must be an object such as"),
    ({}, "source.type must be base64, or url with a data: URL, got None"),
    ({"type": "file", "file_id": "file_1"}, "got 'file': this server stores no files"),
    ({"type": "base64", "media_type": "image/png"}, "source.data must be a string, got None"),
    ({"type": "base64", "media_type": "image/png", "data": 10**40}, "source.data must be a string, got 1000000"),
    ({"type": "base64", "media_type": "application/pdf", "data": PNG}, "media_type must be one of image/jpeg, image"),
    ({"type": "base64", "media_type": ["image/png"], "data": PNG}, "media_type must be one of image/jpeg, image"),
    ({"type": "base64", "media_type": "image/png", "data": "####"}, "source.data is not valid base64"),
    ({"type": "base64", "media_type": "image/png", "data": ""}, "source.data is an empty file: send PNG"),
    ({"type": "base64", "media_type": "image/png", "data": "é"}, "source.data is not valid base64"),
    ({"type": "base64", "media_type": "image/png", "data": "\ud800"}, "surrogates"),
    ({"type": "url", "url": "https://example.com/a.png"}, "source.url is a URL with 'https', and this server does not"),
    ({"type": "url", "url": "file:///etc/passwd"}, "source.url is a URL with 'file', and this server does not fetch"),
    ({"type": "url"}, "source.url must be a string"),
]
IMAGES = [
    ({}, "image_url must be a string"),
    ({"image_url": {"url": URL}}, "image_url must be a string"),
    ({"image_url": None, "file_id": "file_1"}, "file_id names a file, and this server stores none"),
    ({"image_url": URL, "file_id": "file_1"}, "file_id names a file, and this server stores none"),
    ({"image_url": "https://example.com/a.png"}, "image_url is a URL with 'https', and this server does not fetch"),
    ({"image_url": "data:image/png,abc"}, "image_url must be a data: URL in base64"),
    ({"image_url": "data:image/png;base64,QUJD"}, "image_url is not an image that this server reads"),
]


async def test_sources_that_are_wrong_are_refused_by_name(engine):
    async with vision(engine) as served:
        for source, says in SOURCES:
            for name in ("messages", "count"):
                body = json.dumps(Api(name).body(Api(name).text("a"), {"type": "image", "source": source}))
                answer = await served.client.post(
                    APIS[name], content=body, headers={"content-type": "application/json"}
                )
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error"
                if says != "surrogates":  # no JSON: what refuses it reads no places
                    assert f"messages[0].content[1].{says}" in error["message"] or says in error["message"]
                    assert "messages[0].content[1]" in error["message"]
        api = Api("responses")
        for part, says in IMAGES:
            error = (await answer_of(served, api, api.body(api.text("a"), {"type": "input_image", **part}), 400))[
                "error"
            ]
            assert f"input[0].content[1].{says}" in error["message"]
            assert error["param"] == "input"
            result = api.result({"type": "input_image", **part})
            error = (await answer_of(served, api, result, 400))["error"]
            assert f"input[2].output[0].{says}" in error["message"]
        assert not served.seen, "none has got to the engine"
        assert await answer_of(served, api, api.body(api.image()))


async def test_the_limits_are_those_of_chat(engine):
    async with vision(engine) as served:
        many = await refusals(served, lambda api: api.body(*[api.image()] * 3))
        typed = await refusals(served, lambda api: api.body(api.image(), api.text("an <image> in words")))
        bomb = "data:image/png;base64," + base64.b64encode(empty_png(30_000, 2_000)).decode()
        large = await refusals(served, lambda api: api.body(api.image(), api.image(bomb)))
        for name in APIS:
            assert "comes with 3 images; the limit is 2" in many[name]
            assert "has 2 image placeholders (<image>, id " in typed[name]
            assert f"{Api(name).place(1)} has 30000 x 2000 pixels; the limit is" in large[name]
        for name in ("messages", "responses"):
            api = Api(name)
            error = (await answer_of(served, api, api.body(api.image(), api.text("x" * 390)), 400))["error"]
            assert "maximum context length is 400 tokens" in error["message"]
        counted = await answer_of(served, Api("count"), api.body(api.text("x")) | Api("count").body(
            Api("count").image(), Api("count").text("x" * 390)))  # fmt: skip
        assert counted["input_tokens"] > 400, "what is too long is counted all the same"
        assert not served.seen


async def test_a_prompt_with_images_that_may_be_cut_is_served_where_it_fits(engine):
    """A cut could take a part of an image: what does not fit whole is refused."""
    api, chat = Api("responses"), Api("chat")
    async with vision(engine) as served:
        plain = said(await answer_of(served, api, api.body(api.image(), api.text("what"))))
        auto = said(await answer_of(served, api, api.body(api.image(), api.text("what"), truncation="auto")))
        assert auto == plain
        num_tokens = plain[1]
        for keep in (-1, num_tokens, 400):
            body = chat.body(chat.image(), chat.text("what"), truncate_prompt_tokens=keep)
            assert said(await answer_of(served, chat, body)) == plain
        assert [len(request.prompt_token_ids) for request in served.seen] == [num_tokens] * 5
        assert all(request.multimodal for request in served.seen)
        for text in ("x" * 390, "word " * 3000):  # too long with the image, and without it
            body = api.body(api.image(), api.text(text), truncation="auto")
            error = (await answer_of(served, api, body, 400))["error"]
            assert error["message"].startswith("This model's maximum context length is 400 tokens")
            assert error["message"].endswith("Shorten it: truncation does not cut a prompt with images.")
        body = chat.body(chat.image(), chat.text("what"), truncate_prompt_tokens=num_tokens - 1)
        error = (await answer_of(served, chat, body, 400))["error"]
        assert error["message"] == (
            f"truncate_prompt_tokens is {num_tokens - 1}, but the prompt has {num_tokens} tokens, and one with images "
            "is not cut: raise truncate_prompt_tokens, or shorten the prompt"
        )
        body = chat.body(chat.image(), truncate_prompt_tokens=401)
        assert "truncate_prompt_tokens is 401" in (await answer_of(served, chat, body, 400))["error"]["message"]
        assert len(served.seen) == 5


async def test_too_many_pixels_at_once_are_a_503_and_are_released(engine):
    async with vision(engine) as served:
        table = served.engine._requests
        for name in ("messages", "responses"):
            api = Api(name)
            table._max_image_bytes = 1
            table._image_bytes["another"] = 1
            answer = await served.client.post(api.path, json=api.body(api.image()))
            assert answer.status_code == 503, answer.text
            assert "try again later" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
            assert list(table._image_bytes) == ["another"]
            del table._image_bytes["another"]
            table._max_image_bytes = None
            await answer_of(served, api, api.body(api.image()))
            assert not table._image_bytes


async def test_a_client_that_leaves_lets_go_of_its_pixels(engine):
    """In the middle of a stream, and while a whole answer is made."""
    async with vision(engine) as served:
        for name in ("messages", "responses"):
            for stream in (True, False):
                api = Api(name)
                long = {"max_output_tokens": 300} if name == "responses" else {"max_tokens": 300}
                body = {**api.body(api.image(), stream=stream), **long}
                await leave_midway(served, api.path, body)
                await until_nothing_is_held(served.engine)


async def leave_midway(served, path, body):
    """Call the application as a server does whose client goes away once the engine has its request."""
    gone = asyncio.Event()
    content = json.dumps(body).encode()
    sent, said = [], []

    async def receive():
        if not sent:
            sent.append(True)
            return {"type": "http.request", "body": content, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        said.append(message)

    headers = [(b"host", b"a"), (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
             "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
             "client": None, "server": None}  # fmt: skip
    task = asyncio.ensure_future(served.client._transport.app(scope, receive, send))
    while not served.engine._requests._image_bytes:
        assert not task.done(), said
        await asyncio.sleep(0)
    gone.set()
    await task


async def test_without_pillow_an_image_says_what_to_install(engine, monkeypatch):
    def missing():
        raise InvalidRequestError("images need Pillow, which is not installed: pip install", "image_url")

    async with vision(engine) as served:
        monkeypatch.setattr(request_images, "require_pillow", missing)
        for message in (await refusals(served, lambda api: api.body(api.image()))).values():
            assert "images need Pillow" in message


async def test_lines_of_a_batch(engine, tmp_path):
    lines = [
        {"custom_id": name, "method": "POST", "url": Api(name).path, "body": Api(name).body(Api(name).image(url))}
        for name, url in [("chat", URL), ("messages", URL), ("responses", URL)]
    ]
    for name in ("messages", "responses"):
        wrong = {**lines[1 + (name == "responses")], "custom_id": f"{name} wrong"}
        lines.append({**wrong, "body": Api(name).body(Api(name).image("data:image/png;base64,QUJD"))})
    text = "\n".join(map(json.dumps, lines)).encode()
    async with vision(engine) as served:
        with BatchJournal(tmp_path / "out.jsonl", resume=False) as journal:
            runner = BatchRunner(served.state, journal)
            journal.finish(await runner.run(read_lines(io.BytesIO(text), "m", 1 << 20)))
    answers = [json.loads(line)["response"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["status_code"] for answer in answers] == [200, 200, 200, 400, 400]
    first, *others = [said(answer["body"]) for answer in answers[:3]]
    assert others == [first] * 2
    assert (runner.counts.answered, runner.counts.failed) == (3, 2)
    assert (runner.counts.prompt_tokens, runner.counts.completion_tokens) == (3 * first[1], 3 * LENGTH)
    for answer in answers[3:]:
        assert "is not an image that this server reads" in answer["body"]["error"]["message"]


async def test_a_model_that_sees_none_refuses_images_by_name():
    from asgi_client import serving

    async with serving() as (client, engine):
        served = SimpleNamespace(client=client)
        found = await refusals(served, lambda api: api.body(api.text("a"), api.image()))
        for name, message in found.items():
            assert message.startswith(f"{Api(name).place(1)} is an image, which this model, or this endpoint, does not")
        assert not engine.seen
