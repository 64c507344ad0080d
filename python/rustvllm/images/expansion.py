"""The tokens of images in a prompt: each placeholder becomes as many as its image has features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from rustvllm.config.vision import FRAMED, GRID, SINGLE, VisionConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.text.tokenizer import TokenIds

if TYPE_CHECKING:
    from rustvllm.images.tiles import ImageTiles
    from rustvllm.text.tokenizer import Tokenizer

MultimodalSpan = tuple[int, int, bytes, bytes]
"""Offset, length, digest and content of an image in a prompt, as the core takes them."""
_FAKE: Final = "<fake_token_around_image>"
_WHOLE: Final = "<global-img>"
"""Tokens that stand around those of Idefics3's tiles."""


class ImageTokens:
    """Puts the tokens of images into prompts of one model.

    Args:
        vision: How the model sees images.
        tokenizer: Of the model; None if there is none.
        name: Of the model, for messages.
    """

    def __init__(self, vision: VisionConfig, tokenizer: Tokenizer | None, name: str) -> None:
        self._vision = vision
        self._tokenizer = tokenizer
        self._name = name
        self._known: dict[tuple[int, int], npt.NDArray[np.int32]] = {}

    def expand(self, ids: TokenIds, images: Sequence[ImageTiles]) -> tuple[TokenIds, list[MultimodalSpan]]:
        """The prompt with the tokens of its images, and where each image is.

        Args:
            ids: Of the prompt, with one placeholder for each image.
            images: In the order of the placeholders.

        Raises:
            InvalidRequestError: See :meth:`check_count`.
        """
        array = np.array(ids.tolist(), np.int32)
        places = self._places(array, len(images))
        if self._vision.kind == FRAMED:
            return self._framed(array, places.tolist(), images)
        parts: list[npt.NDArray[np.int32]] = []
        spans: list[MultimodalSpan] = []
        length = begin = 0
        for place, image in zip(places.tolist(), images, strict=True):
            own = self._tokens_of(image.rows, image.columns)
            length += place - begin
            spans.append((length, own.size, image.digest, image.content))
            parts += [array[begin:place], own]
            length, begin = length + own.size, place + 1
        return TokenIds(np.concatenate([*parts, array[begin:]])), spans

    def check_count(self, ids: TokenIds, num_images: int) -> None:
        """Refuse a prompt with another number of placeholders than images.

        Raises:
            InvalidRequestError: Names both numbers.
        """
        self._places(np.array(ids.tolist(), np.int32), num_images)

    def _framed(
        self, ids: npt.NDArray[np.int32], places: Sequence[int], images: Sequence[ImageTiles]
    ) -> tuple[TokenIds, list[MultimodalSpan]]:
        """Gemma 3's tokens: a blank line, those of an image between two marks, and a blank line.

        The prompt becomes what its text with blank lines around the marks would be, so that line breaks which meet
        these are one token with them.
        """
        vision = self._vision
        parts: list[npt.NDArray[np.int32]] = []
        spans: list[MultimodalSpan] = []
        own = np.full(vision.tokens_per_tile, vision.image_token_id, np.int32)
        opening, closing = np.array([vision.around_ids[0]], np.int32), np.array([vision.around_ids[1]], np.int32)
        length = begin = 0
        for index, (place, image) in enumerate(zip(places, images, strict=True)):
            text = self._with_blank_lines(ids[begin:place], is_first=index == 0)
            parts += [text, opening, own, closing]
            spans.append((length + text.size + 1, own.size, image.digest, image.content))
            length, begin = length + text.size + own.size + 2, place + 1
        parts.append(self._with_blank_lines(ids[begin:], is_first=not places, is_last=True))
        return TokenIds(np.concatenate(parts)), spans

    def _with_blank_lines(
        self, ids: npt.NDArray[np.int32], *, is_first: bool, is_last: bool = False
    ) -> npt.NDArray[np.int32]:
        """Tokens between two images, with a blank line where there is one, at each end.

        Args:
            ids: The tokens.
            is_first: Whether no image is before them.
            is_last: Whether none is behind them.
        """
        begin, end = 0, ids.size
        num_before, num_behind = 2 * (not is_first), 2 * (not is_last)
        while num_before and begin < end and (count := self._num_line_breaks(int(ids[begin]))):
            num_before, begin = num_before + count, begin + 1
        while num_behind and begin < end and (count := self._num_line_breaks(int(ids[end - 1]))):
            num_behind, end = num_behind + count, end - 1
        if begin == end:
            return self._line_breaks(num_before + num_behind)
        return np.concatenate((self._line_breaks(num_before), ids[begin:end], self._line_breaks(num_behind)))

    def _num_line_breaks(self, token_id: int) -> int:
        """How many line breaks a token is; 0: it is something else."""
        text = self._needed_tokenizer().decode([token_id], skip_special_tokens=False)
        return 0 if text.strip("\n") else len(text)

    def _line_breaks(self, count: int) -> npt.NDArray[np.int32]:
        found = self._needed_tokenizer().encode("\n" * count, add_special_tokens=False) if count else []
        return np.array(found, np.int32)

    def _needed_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "images of this model need its tokenizer: start the engine without skip_tokenizer_init", "prompt"
            )
        return self._tokenizer

    def _places(self, ids: npt.NDArray[np.int32], num_images: int) -> npt.NDArray[np.int64]:
        places = np.flatnonzero(ids == self._vision.placeholder_id)
        if places.size != num_images:
            token_id = self._vision.placeholder_id
            shown = f"id {token_id}"
            if self._tokenizer is not None:
                shown = f"{self._tokenizer.convert_ids_to_tokens([token_id])[0]}, {shown}"
            hint = "; a chat template may leave out images in messages of some roles, such as results of tools"
            raise InvalidRequestError(
                f"the prompt has {places.size} image placeholders ({shown}), but comes with {num_images} images: write "
                f"one placeholder for each image{hint if places.size < num_images else ''}",
                "prompt",
            )
        return places

    def _tokens_of(self, rows: int, columns: int) -> npt.NDArray[np.int32]:
        if self._vision.kind == GRID:
            return np.full(rows * columns, self._vision.image_token_id, np.int32)
        if self._vision.kind == SINGLE:
            return np.full(self._vision.tokens_per_tile, self._vision.image_token_id, np.int32)
        if (found := self._known.get((rows, columns))) is None:
            found = self._known[rows, columns] = self._tiled(rows, columns)
        return found

    def _tiled(self, rows: int, columns: int) -> npt.NDArray[np.int32]:
        """Idefics3's tokens: a line of tiles for each row, an empty line, and the whole image."""
        tokenizer = self._needed_tokenizer()
        [placeholder] = tokenizer.convert_ids_to_tokens([self._vision.image_token_id])
        tile = (placeholder or "") * self._vision.tokens_per_tile
        lines = [
            "".join(f"{_FAKE}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        text = "".join(lines) + ("\n" if lines else "") + f"{_FAKE}{_WHOLE}{tile}{_FAKE}"
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        needed = (rows * columns + 1) * self._vision.tokens_per_tile
        if (found := int((ids == self._vision.image_token_id).sum())) != needed:
            raise InvalidRequestError(
                f"the tokenizer of {self._name} makes {found} placeholders of {needed}: it does not belong to a model "
                "that sees images",
                "prompt",
            )
        return ids
