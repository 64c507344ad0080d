"""The requests of classification, scores and reranking, as pydantic models."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from rustvllm.engine.request.pairs import as_texts
from rustvllm.exceptions import InvalidRequestError
from rustvllm.server.schemas.numbers import Int
from rustvllm.server.schemas.protocol import MAX_INPUTS, InputsRequest, PooledRequest, described

_ANY = "texts"
_TEXT = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ]
}
_TEXTS = {"anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}]}
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""vLLM's names of the two sides; a request has one pair of them."""


def _parse_texts(value: Any) -> list[str]:
    """One text or several, as a list."""
    if isinstance(value, list) and len(value) > MAX_INPUTS:
        raise ValueError(f"has {len(value)} texts; the limit per request is {MAX_INPUTS}")
    if value == []:
        raise ValueError("is an empty list; at least one text is needed")
    try:
        return as_texts(value, _ANY)
    except InvalidRequestError as error:
        raise ValueError(str(error).removeprefix(f"{_ANY} ")) from None  # the field's own name comes before it


def _parse_text(value: Any) -> str:
    if isinstance(value, list):
        raise ValueError("must be one text, not a list")
    [text] = _parse_texts(value)
    return text


Texts = Annotated[list[str], BeforeValidator(_parse_texts), WithJsonSchema(_TEXTS)]
OneText = Annotated[str, BeforeValidator(_parse_text), WithJsonSchema(_TEXT)]


class ClassificationRequest(InputsRequest):
    """Body of ``POST /classify``."""


class ScoringRequest(PooledRequest):
    """Fields of scores and reranking."""

    instruction: str | None = described("The variable `instruction` of the template that `--chat-template` names.")
    chat_template_kwargs: dict[str, Any] | None = described("Further variables of that template.")


class ScoreRequest(ScoringRequest):
    """Body of ``POST /score``: ``text_1`` and ``text_2``, or one of the other pairs of names."""

    text_1: Texts | None = described("A text, or as many as `text_2` has.")
    text_2: Texts | None = described("Texts; each is scored with its partner in `text_1`, or with the only one there.")
    queries: Texts | None = described("The same as `text_1`, with `documents` or `items`.")
    documents: Texts | None = described("The same as `text_2`.")
    items: Texts | None = described("The same as `text_2`.")
    data_1: Texts | None = described("The same as `text_1`, with `data_2`.")
    data_2: Texts | None = described("The same as `text_2`.")

    def sides(self) -> tuple[tuple[str, str], list[str], list[str]]:
        """The names of the two sides, and their texts.

        Raises:
            InvalidRequestError: There is not one pair of names.
        """
        given = [name for name in dict.fromkeys(name for pair in _PAIRS for name in pair) if getattr(self, name)]
        if tuple(given) not in _PAIRS:
            pairs = ", ".join(f"{first} and {second}" for first, second in _PAIRS)
            got = ", ".join(given) or "none of them"
            missing = "text_2" if given == ["text_1"] else given[0] if given else "text_1"
            raise InvalidRequestError(f"a score needs two fields: {pairs}; got {got}", missing)
        first, second = given
        return (first, second), getattr(self, first), getattr(self, second)


class RerankRequest(ScoringRequest):
    """Body of ``POST /rerank``, ``/v1/rerank`` and ``/v2/rerank``, as Jina's and Cohere's APIs have it."""

    query: OneText
    documents: Texts
    top_n: Annotated[Int, Field(ge=0)] | None = described("Give the best so many; 0 or left out: all.", minimum=0)
    return_documents: bool | None = described("Whether results have their document's text.", True)
