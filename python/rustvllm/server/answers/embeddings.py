"""Embeddings as JSON: a list of numbers each, or base64; many of them in a thread and in pieces."""

import asyncio
import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from rustvllm.server.answers.large_answers import PiecewiseResponse

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_FEW_NUMBERS = 2048
"""Numbers that become JSON in about a millisecond; more are made in a thread, so many at a time."""
_FEW_BYTES = 1 << 18
"""Bytes of numbers that become base64 in well under a millisecond."""


async def embeddings_response(
    vectors: "Sequence[npt.NDArray[np.float32]]", header: dict[str, Any], usage: dict[str, Any], *, is_base64: bool
) -> Response:
    """The answer to a request for embeddings.

    Args:
        vectors: Of each input.
        header: What the answer begins with.
        usage: Its token counts.
        is_base64: Whether vectors are base64.
    """
    num_numbers = sum(vector.size for vector in vectors)
    few = _FEW_BYTES // 4 if is_base64 else _FEW_NUMBERS

    pieces = _pieces(vectors, header, usage, is_base64=is_base64)
    if num_numbers <= few:
        return Response(b"".join(pieces), media_type="application/json")
    return await asyncio.to_thread(PiecewiseResponse, pieces)


def _pieces(
    vectors: Sequence["npt.NDArray[np.float32]"], header: dict[str, Any], usage: dict[str, Any], *, is_base64: bool
) -> Iterator[bytes]:
    yield _encoded(header)[:-1]
    yield b',"data":['
    for index, vector in enumerate(vectors):
        yield b'%b{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"", index)
        if is_base64:
            yield b'"%b"}' % b64encode(vector.astype("<f4", copy=False).tobytes())
            continue
        for first in range(0, vector.size, _FEW_NUMBERS):
            yield b"," if first else b"["
            yield _encoded(vector[first : first + _FEW_NUMBERS].tolist())[1:-1]
        yield b"]}"
    yield b'],"usage":'
    yield _encoded(usage)
    yield b"}"


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
