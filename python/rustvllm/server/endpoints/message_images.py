"""The images of a conversation: found in its messages and handed on, and not looked at here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rustvllm.engine.request.images import EncodedImage
from rustvllm.exceptions import InvalidRequestError

MEDIA_PARTS: Final = (
    "image_url",
    "image",
    "input_image",
    "image_pil",
    "image_embeds",
    "input_audio",
    "audio_url",
    "audio",
    "video_url",
    "video",
    "file",
    "input_file",
)
"""Types of parts that hold something other than text."""


@dataclass(slots=True)
class MessageImages:
    """Takes the images of a conversation, in their order.

    Attributes:
        placeholder: Stands for an image in a message that is one text.
        found: The images so far.
    """

    placeholder: str
    found: list[object] = field(default_factory=list)

    def take(self, where: str, kind: str, part: Mapping[str, Any]) -> None:
        """Take the image of a part.

        Args:
            where: The part, for messages.
            kind: Its type, one of ``MEDIA_PARTS``.
            part: As it was sent.

        Raises:
            InvalidRequestError: It is another medium, or has no image where its type says.
        """
        if kind == "image_pil":  # of a Python program; what it holds is checked with the other images
            self.found.append(part.get("image_pil"))
            return
        value = part.get("image_url")
        if isinstance(value, EncodedImage):  # of another API, which names it in its own words
            self.found.append(value)
            return
        if kind not in ("image_url", "input_image"):
            raise InvalidRequestError(
                f"{where} has the type {kind!r}, which is not supported yet; send text, and images as 'image_url'.",
                "messages",
            )
        url = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(url, str):
            raise InvalidRequestError(
                f'{where} must have an image as {{"image_url": {{"url": "data:image/png;base64,..."}}}}.', "messages"
            )
        self.found.append(EncodedImage(url, f"{where}.image_url"))


def images_of(tokenizer: Any, placeholder_ids: Sequence[int]) -> MessageImages:
    """What takes the images of a conversation.

    Args:
        tokenizer: Of the model.
        placeholder_ids: What stands for an image in a message that is one text.
    """
    return MessageImages("".join(token or "" for token in tokenizer.convert_ids_to_tokens([*placeholder_ids])))


def image_part(url: str, where: str, before: str = "") -> dict[str, Any]:
    """A part of a chat message, for an image in a body of another API.

    Args:
        url: As the body has it.
        where: The place in the body, for messages.
        before: What makes a ``data:`` URL of base64 that came by itself.
    """
    return {"type": "image_url", "image_url": EncodedImage(url, where, before)}


def refuse_media(where: str, kind: str, part: Mapping[str, Any]) -> InvalidRequestError:
    """The error for a part that holds something other than text, of a model that takes text alone."""
    image = part.get("image_url")
    what = f"{image.where} is an image" if isinstance(image, EncodedImage) else f"{where} has the type {kind!r}"
    return InvalidRequestError(
        f"{what}, which this model, or this endpoint, does not take: send text parts only.", "messages"
    )
