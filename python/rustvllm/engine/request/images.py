"""The images of a prompt: checked, made into tiles in a few threads, and given their places among the token ids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from rustvllm import _core
from rustvllm.config import ModelConfig
from rustvllm.config.vision import VisionConfig
from rustvllm.exceptions import InvalidRequestError, QueueFullError
from rustvllm.images.decode_process import DecodeProcess
from rustvllm.images.decoding import decode_image, read_data_url, require_pillow, to_rgb
from rustvllm.images.expansion import ImageTokens, MultimodalSpan
from rustvllm.images.tiles import ImageTiles, make_tiles
from rustvllm.text.tokenizer import Tokenizer

NUM_THREADS: Final = 2
"""Images that are decoded at the same time in a process; further ones wait."""
MAX_WAITING_IMAGES: Final = 1024
"""Most images of all requests whose images wait in a process or are being decoded."""
MAX_WAITING_CHARS: Final = 512 << 20
"""Most characters of their URLs."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image that came in a message.

    Attributes:
        url: ``data:`` and the file in base64.
        where: Names it in errors, such as ``messages[0].content[1]``.
        before: The beginning of the URL, if ``url`` is the rest alone: a copy of megabytes less.
    """

    url: str
    where: str
    before: str = ""


@cache
def _threads() -> ThreadPoolExecutor:
    """The threads that decode images, of this process."""
    return ThreadPoolExecutor(NUM_THREADS, "images")


class WaitingImages:
    """Counts the images of requests that wait for their images."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_images = self._num_chars = 0

    @contextmanager
    def counting(self, num_images: int, num_chars: int) -> Iterator[None]:
        """Count the images of a request meanwhile.

        Raises:
            QueueFullError: There are too many with those that wait. Alone, a request with any images is let in.
        """
        with self._lock:
            images, chars = self._num_images + num_images, self._num_chars + num_chars
            if self._num_images and (images > MAX_WAITING_IMAGES or chars > MAX_WAITING_CHARS):
                raise QueueFullError(
                    f"{self._num_images} images with {self._num_chars} characters wait to be decoded; {num_images} "
                    f"more with {num_chars} would exceed the limit of {MAX_WAITING_IMAGES} images or "
                    f"{MAX_WAITING_CHARS} characters: try again later"
                )
            self._num_images, self._num_chars = images, chars
        try:
            yield
        finally:
            with self._lock:
                self._num_images -= num_images
                self._num_chars -= num_chars


_waiting = WaitingImages()


async def place_off_loop(
    reader: PromptImages, ids: _core.TokenIds, images: Sequence[object]
) -> tuple[_core.TokenIds, list[MultimodalSpan]]:
    """:meth:`PromptImages.place` in one of a few threads, while the event loop continues.

    If this is cancelled, images of the request that still wait are not decoded.

    Raises:
        InvalidRequestError: As there.
        QueueFullError: Too many images wait.
    """
    num_chars = sum(len(image.url) for image in images if isinstance(image, EncodedImage))
    has_left = threading.Event()
    with _waiting.counting(len(images), num_chars):
        try:
            return await asyncio.get_running_loop().run_in_executor(
                _threads(), reader.place_elsewhere, ids, images, has_left
            )
        finally:
            has_left.set()


class _OfThread(threading.local):
    """A process that decodes, for each of the threads."""

    def __init__(self) -> None:
        self.process = DecodeProcess()


_of_thread = _OfThread()


def read_media(data: object) -> tuple[object, ...]:
    """The images of ``multi_modal_data``.

    Raises:
        InvalidRequestError: It is not such a dict, or holds something other than images.
    """
    if not isinstance(data, Mapping):
        raise InvalidRequestError(
            f"multi_modal_data must be a dict such as {{'image': image}}, got {type(data).__name__}", "prompt"
        )
    for name, value in data.items():
        is_empty = value is None or (isinstance(value, list | tuple) and not value)
        if name != "image" and not is_empty:
            raise InvalidRequestError(
                f"multi_modal_data has {name!r:.40}, which is not supported yet: prompts can hold images only", "prompt"
            )
    images = data.get("image")
    if images is None:
        return ()
    return tuple(images) if isinstance(images, list | tuple) else (images,)


class PromptImages:
    """Reads images for one model.

    Args:
        model: Says how it sees images, if it does.
        tokenizer: Of the model; None if there is none.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._vision, self._name = model.vision, model.served_model_name[0]
        self._tokens = None if model.vision is None else ImageTokens(model.vision, tokenizer, self._name)

    def check(self, images: Sequence[object]) -> None:
        """Refuse images that the model does not see, or too many, before any is decoded.

        Raises:
            InvalidRequestError: Names the number and the limit.
        """
        if not images:
            return
        if self._vision is None:
            raise InvalidRequestError(
                f"the prompt comes with {len(images)} images, but {self._name} sees none: send text alone, or serve a "
                "model such as SmolVLM",
                "prompt",
            )
        if len(images) > self._vision.max_images:
            raise InvalidRequestError(
                f"the prompt comes with {len(images)} images; the limit is {self._vision.max_images} "
                "(limit_mm_per_prompt)",
                "prompt",
            )

    def place(self, ids: _core.TokenIds, images: Sequence[object]) -> tuple[_core.TokenIds, list[MultimodalSpan]]:
        """Make tiles of images and put their tokens into the prompt. Takes long: call it off the event loop.

        Args:
            ids: Of the prompt, with one placeholder for each image.
            images: Pillow images or :class:`EncodedImage`, as many as :meth:`check` allows.

        Raises:
            InvalidRequestError: An image is broken or too large, or there are not as many placeholders as images.
        """
        return self._place(ids, images, None)

    def place_elsewhere(
        self, ids: _core.TokenIds, images: Sequence[object], has_left: threading.Event
    ) -> tuple[_core.TokenIds, list[MultimodalSpan]]:
        """:meth:`place`, with the images of messages decoded in a process of this thread's.

        Args:
            ids: As there.
            images: Likewise.
            has_left: Set when the caller has gone.

        Raises:
            InvalidRequestError: As there.
            CancelledError: ``has_left`` was set before all images were decoded.
        """
        return self._place(ids, images, _of_thread.process, has_left)

    def _place(
        self,
        ids: _core.TokenIds,
        images: Sequence[object],
        process: DecodeProcess | None,
        has_left: threading.Event | None = None,
    ) -> tuple[_core.TokenIds, list[MultimodalSpan]]:
        assert self._vision is not None
        assert self._tokens is not None
        self._tokens.check_count(ids, len(images))
        tiles: list[ImageTiles] = []
        for index, image in enumerate(images):
            if has_left is not None and has_left.is_set():
                raise CancelledError
            if process is not None and isinstance(image, EncodedImage):
                require_pillow()
                tiles.append(process.tiles_of(image.url, image.where, self._vision, image.before))
            else:
                tiles.append(make_tiles(_decoded(image, f"image {index + 1}", self._vision), self._vision))
        return self._tokens.expand(ids, tiles)


def _decoded(image: object, name: str, vision: VisionConfig) -> Any:
    if isinstance(image, EncodedImage):
        return decode_image(read_data_url(image.before + image.url, image.where), image.where, vision)
    pillow = require_pillow()
    if not isinstance(image, pillow.Image):
        raise InvalidRequestError(f"{name} must be a PIL.Image.Image, got {type(image).__name__}", "prompt")
    return to_rgb(image, name, "prompt", vision)
