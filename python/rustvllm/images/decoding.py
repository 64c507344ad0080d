"""Images as callers send them, decoded within limits: every size is checked before the work that it causes."""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any, Final

from rustvllm.exceptions import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES: Final = 20 << 20
"""Most bytes of an image as a file."""
MAX_PIXELS: Final = 50_000_000
"""Most pixels of an image, width times height: 150 MB once decoded."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""What is decoded; of an animation, the first frame."""
_MAX_URL_CHARS: Final = 4 * -(-MAX_IMAGE_BYTES // 3)
_MAX_HEADER_CHARS: Final = 256
_PIECE_CHARS: Final = 1 << 18
_WHITE: Final = (255, 255, 255)


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
    if not url.startswith("data:"):
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


def decode_image(data: bytes, where: str) -> Image:
    """An image from the bytes of a file, in RGB.

    Args:
        data: Of a PNG, JPEG, WebP or GIF file.
        where: Names the image in messages.

    Raises:
        InvalidRequestError: It is broken, of another format, or too large; or Pillow is not installed.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_many_bytes(where, len(data))
    pillow = require_pillow()
    try:
        opened = pillow.open(io.BytesIO(data), formats=FORMATS)
        check_pixels(opened, where)
        return as_rgb(opened)
    except InvalidRequestError:
        raise
    except pillow.DecompressionBombError:
        raise InvalidRequestError(f"{where} has too many pixels; the limit is {MAX_PIXELS}", "image_url") from None
    except pillow.UnidentifiedImageError:
        raise InvalidRequestError(
            f"{where} is not an image that this server reads: send PNG, JPEG, WebP or GIF", "image_url"
        ) from None
    except Exception as error:  # decoders raise whatever a broken file makes them raise
        raise InvalidRequestError(f"{where} cannot be decoded: {error!s:.200}", "image_url") from error


def check_pixels(image: Image, where: str) -> None:
    """Refuse an image with too many pixels, which are not decoded yet.

    Raises:
        InvalidRequestError: Names the size and the limit.
    """
    width, height = image.size
    if not width or not height:
        raise InvalidRequestError(f"{where} has no pixels: {width} x {height}", "image_url")
    if width * height > MAX_PIXELS:
        raise InvalidRequestError(
            f"{where} has {width} x {height} pixels; the limit is {MAX_PIXELS} in all: send a smaller image",
            "image_url",
        )


def as_rgb(image: Image) -> Image:
    """The first frame in RGB, upright, on white where it is transparent."""
    from PIL import Image as pillow  # noqa: N813 -- the module is named like the class
    from PIL import ImageOps

    upright: Image = ImageOps.exif_transpose(image)
    if upright.mode == "RGB":
        upright.load()
        return upright
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        ground = pillow.new("RGBA", layer.size, (*_WHITE, 255))
        return pillow.alpha_composite(ground, layer).convert("RGB")
    return upright.convert("RGB")


def _too_many_bytes(where: str, num_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} has {num_bytes} bytes; the limit is {MAX_IMAGE_BYTES}: send a smaller image", "image_url"
    )
