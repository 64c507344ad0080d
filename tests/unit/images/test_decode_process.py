"""Images decoded in a process of their own: the same pixels and errors, and limits that end the process."""

import base64
import dataclasses
import io
import os
import signal

import numpy as np
import pytest

from rustvllm.config.vision import TILED, VisionConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.images import decode_process
from rustvllm.images.decode_process import DecodeProcess
from rustvllm.images.tiles import make_tiles

Image = pytest.importorskip("PIL.Image", reason="images need Pillow (the extra rustvllm[vision])")
VISION = VisionConfig(kind=TILED, image_token_id=1, tokens_per_tile=4, tile_size=8, longest_edge=16, splits=True)
WHERE = "messages[0].content[1]"


@pytest.fixture
def process():
    process = DecodeProcess()
    yield process
    process.close()


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 16, 3), np.uint8))


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_the_same_tiles_one_image_after_the_other(process, monkeypatch):
    monkeypatch.setattr(decode_process, "_PIECE_CHARS", 100)
    for seed in range(3):
        assert process.tiles_of(data_url(picture(seed)), WHERE, VISION) == make_tiles(picture(seed), VISION)
    other = dataclasses.replace(VISION, splits=False)
    assert process.tiles_of(data_url(picture(1)), WHERE, other) == make_tiles(picture(1), other)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("https://example.com", "this server does not fetch images"),
        ("data:image/png;base64,QUJD", "is not an image that this server reads"),
        ("data:image/png;base64,é", "is not valid base64"),
        ("", "is a URL with 'no scheme'"),
    ],
)
def test_errors_come_back_and_the_process_goes_on(process, url, match):
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=match) as caught:
            process.tiles_of(url, WHERE, VISION)
        assert str(caught.value).startswith(WHERE)
        assert caught.value.param == "image_url"
        assert process.tiles_of(data_url(picture(1)), WHERE, VISION).rows


def test_a_process_that_ended_is_replaced(process):
    first = process.tiles_of(data_url(picture(1)), WHERE, VISION)
    child = process._process
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert process.tiles_of(data_url(picture(1)), WHERE, VISION) == first
    assert process._process is not child


def test_a_process_that_is_killed_over_an_image_is_replaced_once(process, monkeypatch):
    first, ask, pids = process.tiles_of(data_url(picture(1)), WHERE, VISION), process._ask, []

    def killed(head, before, url):
        pids.append(process._process.pid)
        if len(pids) <= num_kills:
            os.kill(pids[-1], signal.SIGKILL)
        return ask(head, before, url)

    monkeypatch.setattr(process, "_ask", killed)
    num_kills = 1
    assert process.tiles_of(data_url(picture(1)), WHERE, VISION) == first
    assert len(set(pids)) == 2
    num_kills = 4
    with pytest.raises(
        InvalidRequestError, match=r"content\[1\] cannot be decoded: .* was ended by SIGKILL: try again"
    ):
        process.tiles_of(data_url(picture(1)), WHERE, VISION)
    assert len(set(pids)) == 3
    assert process.tiles_of(data_url(picture(1)), WHERE, VISION) == first


def test_half_an_answer_is_none(process):
    """A process that ends within its answer must not give the engine half of an image."""
    process.tiles_of(data_url(picture(1)), WHERE, VISION)
    facts = b'{"rows": 0, "columns": 0, "digest": "00"}'
    answers = [facts[:9], facts, facts + (5).to_bytes(4, "big") + b"half"]
    for answer in answers:
        process._answers = io.BytesIO(len(facts).to_bytes(4, "big") + answer)
        with pytest.raises(EOFError):
            process._ask(b"{}", "", "")


def test_an_interrupted_image_leaves_no_answer_to_the_next(process, monkeypatch):
    tiles = [process.tiles_of(data_url(picture(seed)), WHERE, VISION) for seed in (1, 2)]

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decode_process, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.tiles_of(data_url(picture(1)), WHERE, VISION)
    assert process.tiles_of(data_url(picture(2)), WHERE, VISION) == tiles[1] != tiles[0]


def test_what_is_wrong_with_the_tiles_is_said(process):
    wrong = dataclasses.replace(VISION, resample=77)
    with pytest.raises(InvalidRequestError, match=r"cannot be made into tiles: ValueError: Unknown resampling filter"):
        process.tiles_of(data_url(picture(1)), WHERE, wrong)
    assert process.tiles_of(data_url(picture(1)), WHERE, VISION).rows


def test_an_image_that_takes_too_much_ends_the_process(process):
    process.tiles_of(data_url(picture(1)), WHERE, VISION)
    child = process._process
    os.kill(child.pid, signal.SIGSTOP)  # as busy as one can be
    process._channel.settimeout(0.2)
    with pytest.raises(InvalidRequestError, match="cannot be decoded within 10 seconds of processor time and 2 GiB"):
        process.tiles_of(data_url(picture(2)), WHERE, VISION)
    assert child.poll() is not None
    assert process.tiles_of(data_url(picture(2)), WHERE, VISION).rows
