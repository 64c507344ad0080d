"""Images in conversations over HTTP: API servers and an engine in processes of their own, and wrong requests."""

import asyncio
import base64
import io

import anthropic
import httpx
import openai
import pytest
from server_process import REAL, ServerProcess

import vision_checkpoints
from vision_checkpoints import empty_png, greedy, picture, processor_of

Image = pytest.importorskip("PIL.Image", reason="images need Pillow (the extra rustvllm[vision])")
URL = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    return folder, vision_checkpoints.write(folder, "smolvlm"), processor_of(folder)


@pytest.fixture(scope="module")
def server(checkpoint):
    options = ["--port", "0", "--api-server-count", "2", "--max-model-len", "400", "--num-gpu-blocks-override", "200"]
    command = [*REAL, str(checkpoint[0]), *options, "--limit-mm-per-prompt", '{"image": 2}', "--dtype", "float32"]
    with ServerProcess(command) as process:
        process.wait_until_ready()
        yield process


def data_url(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def image_part(image, kind="PNG"):
    return {"type": "image_url", "image_url": {"url": data_url(image, kind), "detail": "auto"}}


def text_part(text):
    return {"type": "text", "text": text}


def chat(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}], **GREEDY}


def ask(server, body, path=URL):
    return httpx.post(server.url + path, json=body, timeout=60)


def refused(server, body, match, status=400):
    answer = ask(server, body)
    assert answer.status_code == status, answer.text
    assert match in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_conversation_equals_transformers(server, checkpoint, kind):
    _, reference, processor = checkpoint
    images = [picture(1), picture(2, (30, 70))]
    parts = [text_part("see "), *[image_part(image, kind) for image in images], text_part(" what")]
    if kind == "WEBP":  # which is lossy here, so that what is compared is what was sent
        images = [
            Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))) for part in parts[1:3]
        ]
    text = "user:see <image><image> what\nassistant:"
    ids, expected, _ = greedy(reference, processor, text, [image.convert("RGB") for image in images], 8)
    answer = ask(server, chat(*parts)).json()
    assert answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_many_at_once(server, checkpoint):
    """Each has an image of its own, some streams, on connections to both API servers."""
    _, reference, processor = checkpoint

    async def one(client, seed):
        body = chat(image_part(picture(seed)), text_part(f"{seed} what")) | {"logprobs": True}
        answer = await client.post(URL, json=body, headers={"Connection": "close"})
        return [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]], answer.json()

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(8)))

    for seed, (logprobs, answer) in enumerate(asyncio.run(run())):
        text = f"user:<image>{seed} what\nassistant:"
        _, expected, found = greedy(reference, processor, text, [picture(seed)], 8)
        assert answer["choices"][0]["token_ids"] == expected
        assert logprobs == pytest.approx(found.max(-1).values.tolist(), abs=1e-4)


def test_streams_and_the_prefix_cache(server):
    body = chat(image_part(picture(50)), text_part("what a picture"))
    whole = ask(server, body).json()["choices"][0]["message"]["content"]
    with httpx.stream("POST", server.url + URL, json=body | {"stream": True}, timeout=60) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    import json

    deltas = [json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(deltas) == whole


def test_the_clients_of_other_apis(server):
    """What Anthropic's and OpenAI's own packages send, with the types that they have for it, and what they read."""
    url = data_url(picture(3))
    said = ask(server, chat(image_part(picture(3)), text_part("?"))).json()
    expected = said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]
    source = anthropic.types.Base64ImageSourceParam(type="base64", media_type="image/png", data=url.partition(",")[2])
    blocks = [anthropic.types.ImageBlockParam(type="image", source=source), text_part("?")]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        asked = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": blocks}]}
        with client.messages.stream(**asked, max_tokens=8, extra_body={"temperature": 0}) as stream:
            message = stream.get_final_message()
        assert (message.content[0].text, message.usage.input_tokens) == expected
        assert client.messages.count_tokens(**asked).input_tokens == expected[1]
    image = openai.types.responses.ResponseInputImageParam(type="input_image", image_url=url, detail="auto")
    items = [{"role": "user", "content": [image, {"type": "input_text", "text": "?"}]}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        asked = {"model": asked["model"], "input": items, "max_output_tokens": 8, "temperature": 0}
        *_, last = client.responses.create(**asked, stream=True)
        response = last.response
        assert (response.output_text, response.usage.input_tokens) == expected


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "this server does not fetch images"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "this server does not fetch images"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0] must have an image as"),
        ({"type": "image_url", "image_url": 7}, "must have an image as"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,####"}}, "is not valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}, "is not an image that this server"),
        ({"type": "input_image", "image_url": "data:text/plain,abc"}, "must be a data: URL in base64"),
        ({"type": "image_pil", "image_pil": "a"}, "must be a PIL.Image.Image, got str"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio', which is not supported yet"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "'video_url', which is not supported yet"),
    ],
)
def test_parts_that_are_wrong(server, part, match):
    refused(server, chat(part), match)


def test_numbers_that_are_wrong(server):
    image = image_part(picture(1))
    refused(server, chat(image, image, image), "comes with 3 images; the limit is 2")
    refused(server, chat(image, text_part("an <image> in words")), "has 2 image placeholders (<image>, id ")
    refused(server, chat(image, text_part("x" * 390)), "maximum context length is 400 tokens")
    bomb = base64.b64encode(empty_png(30_000, 2_000)).decode()
    refused(
        server,
        chat({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bomb}"}}),
        "30000 x 2000 pixels",
    )
    # Text that mentions the mark is text.
    assert ask(server, chat(text_part("an <image> in words"))).status_code == 200
    answer = ask(server, {"messages": chat(image)["messages"]}, "/tokenize")
    assert answer.status_code == 400
    assert "send text parts only" in answer.json()["error"]["message"]
