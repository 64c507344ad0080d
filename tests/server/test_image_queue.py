"""Images that wait to be decoded: how many may wait, and what becomes of those whose client has left."""

import asyncio
import threading
from dataclasses import replace

import pytest
from asgi_client import assert_error, client_of, leaving
from fake_engine import FakeEngine

from async_streams import until
from rustvllm.config.vision import SINGLE, VisionConfig
from rustvllm.engine.input_processor import InputProcessor
from rustvllm.engine.request import images
from rustvllm.images.tiles import ImageTiles
from rustvllm.server.app import build_app
from rustvllm.server.state import ServerState

pytest.importorskip("PIL.Image", reason="images need Pillow (the extra rustvllm[vision])")
URL = "/v1/chat/completions"
VISION = VisionConfig(kind=SINGLE, image_token_id=ord("~"), tokens_per_tile=4, tile_size=8)


def body_of(*urls, **fields):
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **fields}


class SlowDecoder:
    """Stands for the processes that decode: an image takes until ``go`` is set."""

    def __init__(self):
        self.go = threading.Event()
        self.urls = []

    def tiles_of(self, url, _where, vision, before=""):
        self.urls.append((before + url).rpartition(",")[2])
        assert self.go.wait(30)
        return ImageTiles(bytes(vision.max_image_bytes), bytes(16), 0, 0)


@pytest.fixture
def decoder(monkeypatch):
    decoder = SlowDecoder()
    monkeypatch.setattr(
        "rustvllm.images.decode_process.DecodeProcess.tiles_of", lambda _, *order: decoder.tiles_of(*order)
    )
    yield decoder
    decoder.go.set()


@pytest.fixture
async def state():
    engine = FakeEngine()
    engine.config = replace(engine.config, model=replace(engine.config.model, vision=VISION))
    engine.input_processor = InputProcessor(engine.config, engine.tokenizer)
    state = ServerState()
    state.set_ready(engine)
    yield state
    state.close()
    assert not engine.running
    assert images._waiting._num_images == images._waiting._num_chars == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_images_of_a_client_that_has_left_are_not_decoded(state, decoder, stream):
    app, gone = build_app(state), asyncio.Event()
    async with client_of(state) as client:
        first = [
            asyncio.create_task(leaving(app, URL, body_of(name, f"{name}2", stream=stream), gone)) for name in "ab"
        ]
        await until(lambda: len(decoder.urls) == images.NUM_THREADS)
        waiting = [asyncio.create_task(leaving(app, URL, body_of(f"c{number}"), gone)) for number in range(5)]
        last = asyncio.create_task(client.post(URL, json=body_of("last")))
        await until(lambda: images._waiting._num_images == 4 + 5 + 1)
        gone.set()
        for sent in await asyncio.gather(*first, *waiting):
            assert [message.get("status", 499) for message in sent if "status" in message] in ([], [499])
        assert images._waiting._num_images == 1
        decoder.go.set()
        assert (await last).status_code == 200
    assert sorted(decoder.urls) == ["a", "b", "last"], "neither second images nor those that waited"
    assert len(state.model.engine.seen) == 1


async def test_more_images_than_may_wait_are_refused_until_there_is_room(state, decoder, monkeypatch):
    monkeypatch.setattr(images, "MAX_WAITING_IMAGES", 4)
    async with client_of(state) as client:
        asked = [asyncio.create_task(client.post(URL, json=body_of(name, name))) for name in "ab"]
        await until(lambda: images._waiting._num_images == 4)
        says = ("4 images with", "wait to be decoded; 1 more with", "the limit of 4 images", "try again later")
        assert_error(await client.post(URL, json=body_of("c")), 503, "ServiceUnavailableError", says=says)
        text = {"messages": [{"role": "user", "content": "text"}], "max_tokens": 1}
        assert (await client.post(URL, json=text)).status_code == 200
        decoder.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
        assert (await client.post(URL, json=body_of("c"))).status_code == 200
        monkeypatch.setattr(images, "MAX_WAITING_CHARS", 9)
        assert (await client.post(URL, json=body_of("c"))).status_code == 200, "alone it is let in"
        decoder.go.clear()
        asked = [asyncio.create_task(client.post(URL, json=body_of("a")))]
        await until(lambda: images._waiting._num_images == 1)
        says = ("1 images with 23 characters", "1 more with 23", "9 characters")
        assert_error(await client.post(URL, json=body_of("c")), 503, "ServiceUnavailableError", says=says)
        decoder.go.set()
        assert (await asked[0]).status_code == 200
