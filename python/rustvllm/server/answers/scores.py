"""Classes, scores and ranked documents as JSON; many of them in a thread and in pieces."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from rustvllm.config.classifier import ClassifierConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_FEW_NUMBERS = 2048
"""Numbers that become JSON in about a millisecond; more are made in a thread, so many at a time."""
_FEW_CHARS = 1 << 16
"""Characters of documents that become JSON in well under a millisecond."""


async def classification_response(
    vectors: "Sequence[npt.NDArray[np.float32]]",
    classifier: ClassifierConfig,
    header: dict[str, Any],
    usage: dict[str, Any],
) -> Response:
    """The answer to a request for classes.

    Args:
        vectors: Of each input a probability for each label.
        classifier: Has the labels' names.
        header: What the answer begins with.
        usage: Its token counts.
    """
    num_numbers = len(vectors) * classifier.num_labels
    return await _answer(lambda: _classes(vectors, classifier, header, usage), is_small=num_numbers <= _FEW_NUMBERS)


def _classes(
    vectors: "Sequence[npt.NDArray[np.float32]]",
    classifier: ClassifierConfig,
    header: dict[str, Any],
    usage: dict[str, Any],
) -> Iterator[bytes]:
    yield _encoded(header)[:-1]
    yield b',"data":['
    for index, probs in enumerate(vectors):
        label = _encoded(classifier.label(int(probs.argmax())))
        yield b'%b{"index":%d,"label":%b,"probs":' % (b"," if index else b"", index, label)
        for first in range(0, probs.size, _FEW_NUMBERS):
            yield b"," if first else b"["
            yield _encoded(probs[first : first + _FEW_NUMBERS].tolist())[1:-1]
        yield b'],"num_classes":%d}' % probs.size
    yield b'],"usage":'
    yield _encoded(usage)
    yield b"}"


def score_response(scores: Sequence[float], header: dict[str, Any], usage: dict[str, Any]) -> Response:
    """The answer to a request for scores; a few thousand are JSON in about a millisecond.

    Args:
        scores: Of each pair, in order.
        header: What the answer begins with.
        usage: Its token counts.
    """
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return Response(_encoded({**header, "data": data, "usage": usage}), media_type="application/json")


async def rerank_response(
    scores: Sequence[float], best: Sequence[int], documents: Sequence[str] | None, header: dict[str, Any]
) -> Response:
    """The answer to a request for reranking.

    Args:
        scores: Of each document.
        best: Indices of the documents that are given, the best first.
        documents: Their texts; None: results have none.
        header: What the answer begins with.
    """
    num_chars = 0 if documents is None else sum(len(documents[index]) for index in best)
    is_small = num_chars <= _FEW_CHARS and len(best) <= _FEW_NUMBERS
    return await _answer(lambda: _results(scores, best, documents, header), is_small=is_small)


def _results(
    scores: Sequence[float], best: Sequence[int], documents: Sequence[str] | None, header: dict[str, Any]
) -> Iterator[bytes]:
    yield _encoded(header)[:-1]
    yield b',"results":['
    for place, index in enumerate(best):
        yield b'%b{"index":%d,' % (b"," if place else b"", index)
        if documents is not None:
            yield b'"document":{"text":%b,"multi_modal":null},' % _encoded(documents[index])
        yield b'"relevance_score":%b}' % _encoded(scores[index])
    yield b"]}"


async def _answer(pieces: Callable[[], Iterator[bytes]], *, is_small: bool) -> Response:
    def body() -> bytes:
        return b"".join(pieces())

    return Response(body() if is_small else await asyncio.to_thread(body), media_type="application/json")


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
