"""Images as callers send them, decoded within limits: every size is checked before the work that it causes."""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rustvllm.config.vision import VisionConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.images.grids import check_grid

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES: Final = 20 << 20
"""Most bytes of an image as a file."""
MAX_PIXELS: Final = 50_000_000
"""Most pixels of an image, width times height: 150 MB once decoded."""
MAX_SIDE: Final = 1_000_000
"""Most pixels of a side. Pillow's table for a resize has 48 bytes for each of them: 2.4 GB for an image of one row."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""What is decoded; of an animation, the first frame."""
_MAX_URL_CHARS: Final = 4 * -(-MAX_IMAGE_BYTES // 3)
_MAX_HEADER_CHARS: Final = 256
_PIECE_CHARS: Final = 1 << 18
_WHITE: Final = (255, 255, 255)
_ORIENTATION: Final = 0x0112
"""The EXIF tag that says how a photo is to be turned."""
_TURNS: Final = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Its values → Pillow's names of what makes such a photo upright."""


def require_pillow() -> Any:
    """Pillow's module ``PIL.Image``.

    Raises:
        InvalidRequestError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InvalidRequestError(
            "images need Pillow, which is not installed: pip install 'rustvllm[vision]'", "image_url"
        ) from None
    return Image


def read_data_url(url: str, where: str) -> bytes:
    """The bytes of an image in a ``data:`` URL.

    Args:
        url: As the caller sent it.
        where: Names it in messages.

    Raises:
        InvalidRequestError: It is another URL, no base64, or too long.
    """
    if url[:5].lower() != "data:":
        scheme = url.partition(":")[0] if ":" in url[:32] else "no scheme"
        raise InvalidRequestError(
            f"{where} is a URL with {scheme!r:.40}, and this server does not fetch images: send the image itself as "
            "data:image/png;base64,...",
            "image_url",
        )
    end = url.find(",", 0, _MAX_HEADER_CHARS)
    head = url[5:end].split(";") if end >= 0 else []
    if not head or head[-1].strip().lower() != "base64":
        raise InvalidRequestError(
            f"{where} must be a data: URL in base64, such as data:image/png;base64,..., got {url[:40]!r}", "image_url"
        )
    num_chars = len(url) - end - 1
    if num_chars > _MAX_URL_CHARS:
        raise _too_many_bytes(where, num_chars * 3 // 4)
    try:
        # In pieces, because other threads wait while one is decoded; whole groups of four, so that each stands alone.
        pieces = range(end + 1, len(url), _PIECE_CHARS)
        decoded = [base64.b64decode(url[at : at + _PIECE_CHARS].encode("ascii"), validate=True) for at in pieces]
        if any(4 * len(piece) != 3 * _PIECE_CHARS for piece in decoded[:-1]):
            raise ValueError("padding before the end")
        return b"".join(decoded)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{where} is not valid base64: {error}", "image_url") from None


def decode_image(data: bytes, where: str, vision: VisionConfig | None = None) -> Image:
    """An image from the bytes of a file, in RGB.

    Args:
        data: Of a PNG, JPEG, WebP or GIF file.
        where: Names the image in messages.
        vision: How the model sees images; None: only what is true of every model is checked.

    Raises:
        InvalidRequestError: It is broken, of another format, or too large; or Pillow is not installed.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_many_bytes(where, len(data))
    if not data:
        raise InvalidRequestError(f"{where} is an empty file: send PNG, JPEG, WebP or GIF", "image_url")
    pillow = require_pillow()
    try:
        opened = pillow.open(io.BytesIO(data), formats=FORMATS)
    except pillow.DecompressionBombError:
        raise InvalidRequestError(f"{where} has too many pixels; the limit is {MAX_PIXELS}", "image_url") from None
    except pillow.UnidentifiedImageError:
        raise InvalidRequestError(
            f"{where} is not an image that this server reads: send PNG, JPEG, WebP or GIF", "image_url"
        ) from None
    except Exception as error:  # decoders raise whatever a broken file makes them raise
        raise _cannot_be_decoded(where, error, "image_url") from error
    return to_rgb(opened, where, "image_url", vision)


def to_rgb(image: Image, where: str, param: str, vision: VisionConfig | None = None) -> Image:
    """An image in RGB, with its first frame, upright, and on white where it is transparent.

    Args:
        image: As Pillow has opened it; its pixels may not be decoded yet.
        where: Names it in messages.
        param: Likewise, what it came in.
        vision: How the model sees images, if its shape counts.

    Raises:
        InvalidRequestError: It is broken or closed, or has too many pixels, a wrong shape, or a mode without colours.
    """
    try:
        _check_pixels(image, where, param, vision)
        return _as_rgb(image)
    except InvalidRequestError:
        raise
    except Exception as error:  # as above
        raise _cannot_be_decoded(where, error, param) from error


def _check_pixels(image: Image, where: str, param: str, vision: VisionConfig | None) -> None:
    width, height = image.size
    if not width or not height:
        raise InvalidRequestError(f"{where} has no pixels: {width} x {height}", param)
    if width * height > MAX_PIXELS:
        raise InvalidRequestError(
            f"{where} has {width} x {height} pixels; the limit is {MAX_PIXELS} in all: send a smaller image",
            param,
        )
    if max(width, height) > MAX_SIDE:
        raise InvalidRequestError(
            f"{where} has {width} x {height} pixels; the limit is {MAX_SIDE} for a side: send a part of the image",
            param,
        )
    if vision is not None:
        check_grid(width, height, vision, where)


def _as_rgb(image: Image) -> Image:
    turn = _turn_of(image)
    flat = _on_white(image)
    return flat if turn is None else flat.transpose(turn)


def _turn_of(image: Image) -> Any:
    """What makes a photo upright, as Pillow's ``Transpose``; None: it is."""
    from PIL.Image import Transpose

    try:
        orientation = image.getexif().get(_ORIENTATION)
        return Transpose[_TURNS[orientation]] if orientation in _TURNS else None
    except Exception:  # noqa: BLE001 -- broken EXIF spoils no pixel, and broken pixels are an error when they are read
        return None


def _on_white(image: Image) -> Image:
    from PIL import Image as pillow  # noqa: N813 -- the module is named like the class

    if image.mode == "RGB" and not image.has_transparency_data:
        image.load()
        return image
    if image.mode.startswith("I;16"):
        image = _in_8_bits(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        ground = pillow.new("RGBA", layer.size, (*_WHITE, 255))
        return pillow.alpha_composite(ground, layer).convert("RGB")
    return image.convert("RGB")


def _in_8_bits(image: Image) -> Image:
    """Grey of 16 bits in 8; Pillow itself would make everything white that is lighter than a 256th of white."""
    from PIL import Image as pillow  # noqa: N813 -- as above

    values = np.asarray(image)
    grey = pillow.fromarray((values >> 8).astype(np.uint8))
    if isinstance(clear := image.info.get("transparency"), int):
        grey.putalpha(pillow.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


def _cannot_be_decoded(where: str, error: Exception, param: str) -> InvalidRequestError:
    if isinstance(error, MemoryError):
        return InvalidRequestError(f"{where} needs more memory than there is: send a smaller image", param)
    return InvalidRequestError(f"{where} cannot be decoded: {str(error) or type(error).__name__:.200}", param)


def _too_many_bytes(where: str, num_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has {num_bytes} bytes; the limit is {MAX_IMAGE_BYTES}: send a smaller image", "image_url"
    )
