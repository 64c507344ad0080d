"""Images from bytes: formats, sizes that are checked before work, and files that are broken."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest

from rustvllm.exceptions import InvalidRequestError
from rustvllm.images import decoding
from rustvllm.images.decoding import decode_image, read_data_url

Image = pytest.importorskip("PIL.Image", reason="images need Pillow (the extra rustvllm[vision])")
ImageOps = pytest.importorskip("PIL.ImageOps")
WHERE = "messages[0].content[1]"


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(mode="RGB", size=(7, 5)):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode) if mode != "RGBA" else Image.fromarray(pixels)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind):
    image = picture()
    lossless = {"WEBP": {"lossless": True}}.get(kind, {})
    found = decode_image(encoded(image, kind, **lossless), WHERE)
    assert (found.mode, found.size) == ("RGB", image.size)
    if kind in ("PNG", "WEBP"):
        assert np.array_equal(np.asarray(found), np.asarray(image))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "I;16", "CMYK"])
def test_other_modes_become_rgb(mode):
    image = Image.new(mode, (4, 3)) if mode == "I;16" else picture("RGB", (4, 3)).convert(mode)
    assert decode_image(encoded(image, "JPEG" if mode == "CMYK" else "PNG"), WHERE).mode == "RGB"


@pytest.mark.parametrize("clear", [None, 40_000])
def test_grey_of_16_bits_keeps_its_shades(clear):
    values = np.array([[0, 255, 256, 40_000, 65_535]], np.uint16)
    data = encoded(Image.fromarray(values), "PNG")
    assert Image.open(io.BytesIO(data)).mode.startswith("I;16")
    if clear is not None:
        data = data[:33] + chunk(b"tRNS", struct.pack(">H", clear)) + data[33:]  # behind the head
    found = np.asarray(decode_image(data, WHERE))
    assert found[0].tolist() == [[shade] * 3 for shade in (0, 0, 1, 156 if clear is None else 255, 255)]


def test_transparency_is_on_white():
    image = Image.new("RGBA", (2, 1), (0, 0, 255, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    assert np.asarray(decode_image(encoded(image, "PNG"), WHERE)).tolist() == [[[255, 255, 255], [0, 0, 0]]]
    image = Image.new("RGB", (2, 1), (0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0))
    data = encoded(image, "PNG", transparency=(0, 0, 255))
    assert np.asarray(decode_image(data, WHERE)).tolist() == [[[255, 255, 255], [0, 0, 0]]]


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (3, 3), color) for color in ("red", "lime", "blue")]
    for kind in ("GIF", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        red, green, blue = np.asarray(decode_image(data, WHERE))[1, 1].tolist()
        assert red > 240
        assert green < 16
        assert blue < 16


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_photo_is_turned_upright_as_pillow_does_it(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(size=(6, 4)), kind, exif=exif)
    opened = Image.open(io.BytesIO(data))
    assert opened.getexif()[0x0112] == orientation
    upright = ImageOps.exif_transpose(opened)
    assert (upright.size == (4, 6)) is (orientation in range(5, 9))
    assert np.array_equal(np.asarray(decode_image(data, WHERE)), np.asarray(upright))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"garbage", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff"])
def test_broken_exif_spoils_no_image(exif):
    image = picture()
    data = encoded(image, "PNG")
    data = data[:33] + chunk(b"eXIf", exif) + data[33:]
    assert np.array_equal(np.asarray(decode_image(data, WHERE)), np.asarray(image))
    assert decode_image(encoded(image, "JPEG", exif=b"Exif\0\0" + exif), WHERE).size == image.size


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width, height):
    """The head of a PNG that claims a size, and nothing of its pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"no image", "is not an image that this server reads"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image that this server reads"),
        (encoded(picture(), "BMP"), "is not an image that this server reads"),
        (encoded(picture(), "TIFF"), "is not an image that this server reads"),
        (encoded(picture(size=(90, 90)), "PNG")[:400], "cannot be decoded"),
        (encoded(picture(size=(90, 90)), "JPEG")[:700], "cannot be decoded"),
        (png_of(9, 9), "cannot be decoded"),
        (png_of(8000, 8000), "has 8000 x 8000 pixels; the limit is 50000000 in all: send a smaller image"),
        (png_of(30000, 30000), "has too many pixels; the limit is 50000000"),
        (png_of(50_000_000, 1), "has 50000000 x 1 pixels; the limit is 1000000 for a side: send a part of the image"),
        (png_of(1, 1_000_001), "has 1 x 1000001 pixels; the limit is 1000000 for a side"),
        (b"", "is an empty file: send PNG, JPEG, WebP or GIF"),
        (bytes(decoding.MAX_IMAGE_BYTES + 1), "has 20971521 bytes; the limit is 20971520: send a smaller image"),
    ],
)
def test_what_is_refused(data, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        decode_image(data, WHERE)
    assert str(caught.value).startswith(WHERE)
    assert caught.value.param == "image_url"


def broken(how):
    """An image as a caller of Python may have it."""
    if how == "truncated":
        return Image.open(io.BytesIO(encoded(picture(size=(64, 64)), "PNG")[:600]))
    if how == "closed":
        image = Image.open(io.BytesIO(encoded(picture(), "PNG")))
        image.close()
        return image
    return Image.new(how, (4, 4))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("truncated", "image 2 cannot be decoded: .*truncated"),
        ("closed", "image 2 cannot be decoded: Operation on closed image"),
        ("La", "image 2 cannot be decoded: conversion from La"),
    ],
)
def test_images_of_python_that_are_broken(how, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        decoding.to_rgb(broken(how), "image 2", "prompt")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("size", [(decoding.MAX_SIDE + 1, 1), (1, decoding.MAX_SIDE + 1)])
def test_an_image_of_python_with_a_long_side(size):
    with pytest.raises(InvalidRequestError, match=r"has \d+ x \d+ pixels; the limit is 1000000 for a side"):
        decoding.to_rgb(Image.new("L", size), "image 2", "prompt")
    allowed = decoding.to_rgb(Image.new("L", tuple(side - (side > 1) for side in size)), "image 2", "prompt")
    assert max(allowed.size) == decoding.MAX_SIDE


def test_an_image_that_needs_more_memory_than_there_is(monkeypatch):
    monkeypatch.setattr(decoding, "_on_white", lambda _: bytes(1 << 60))
    with pytest.raises(InvalidRequestError, match="needs more memory than there is: send a smaller image"):
        decode_image(encoded(picture(), "PNG"), WHERE)


def test_data_urls(monkeypatch):
    data = bytes(range(256)) * 5
    text = base64.b64encode(data).decode()
    for size in (4, 64, 1 << 18):
        monkeypatch.setattr(decoding, "_PIECE_CHARS", size)
        assert read_data_url("data:image/png;base64," + text, WHERE) == data
        assert read_data_url("data:;BASE64," + text, WHERE) == data
        assert read_data_url("Data:image/png;charset=utf-8; base64 ," + text, WHERE) == data


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("https://example.com/a.png", "is a URL with 'https', and this server does not fetch images: send the image"),
        ("http://127.0.0.1/", "is a URL with 'http'"),
        ("file:///etc/passwd", "is a URL with 'file'"),
        ("a.png", "is a URL with 'no scheme'"),
        ("", "is a URL with 'no scheme'"),
        ("data:", "must be a data: URL in base64"),
        ("data:image/png,abc", "must be a data: URL in base64"),
        ("data:" + "a" * 300 + ";base64,abcd", "must be a data: URL in base64"),
        ("data:image/png;base64,ab*d", "is not valid base64"),
        ("data:image/png;base64,abc", "is not valid base64"),
        ("data:image/png;base64,abc=abcd", "is not valid base64"),
        ("data:image/png;base64,é", "is not valid base64"),
        (
            "data:image/png;base64," + "A" * (decoding._MAX_URL_CHARS + 4),
            "has 20971[0-9]{3} bytes; the limit is 20971520",
        ),
    ],
)
@pytest.mark.parametrize("piece", [4, 1 << 18])
def test_urls_that_are_refused(url, match, piece, monkeypatch):
    if len(url) < 1000:
        monkeypatch.setattr(decoding, "_PIECE_CHARS", piece)
    with pytest.raises(InvalidRequestError, match=match):
        read_data_url(url, WHERE)


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(InvalidRequestError, match=r"images need Pillow, .*: pip install 'rustvllm\[vision\]'"):
        decode_image(png_of(1, 1), WHERE)
