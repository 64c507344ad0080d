"""Large answers, which are made in a thread and in pieces, so that other requests go on meanwhile.

A thread alone would not do: one call of the C encoder, and the freeing of one large object, hold the interpreter's lock
to their end. So JSON is made, and what it was made of is freed, a few thousand values at a time. Nor is it put
together: to copy a hundred megabytes takes tens of milliseconds.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rustvllm.outputs import CompletionOutput, RequestOutput

FEW_PARTS = 128
"""Choices, or candidates with log-probabilities, that become JSON in well under 5 ms."""
TURN_SECONDS = 0.001
"""After so much time with one stream other requests get their turn on the event loop."""
_FEW_CHARS = 1 << 18
"""Characters, or token ids times eight, that become JSON in well under 5 ms."""
_FEW_BYTES = 1 << 15
"""Of values of any kind that become JSON in well under 5 ms."""
_CANDIDATES_PER_PLACE = 8
_BLOCK_BYTES = 1 << 17
"""Bytes that are sent in one go: as many as a connection's buffers take."""
_FEW_VALUES = 2048
"""Values that are encoded, or freed, in one go: about half a millisecond."""


def is_large(outputs: Sequence[RequestOutput], samples: Sequence[CompletionOutput]) -> bool:
    """Whether an answer has so many parts that making it would hold up the event loop."""
    num_parts = max(len(outputs), len(samples))
    if num_parts > FEW_PARTS:
        return True
    num_parts += sum(sum(map(len, sample.logprobs or ())) for sample in samples)
    num_parts += sum(_CANDIDATES_PER_PLACE * len(output.prompt_logprobs or ()) for output in outputs)
    num_chars = sum(len(sample.text) + 8 * len(sample.token_ids) for sample in samples)
    # Each choice may repeat its prompt, as text and as ids.
    times = max(len(samples) // max(len(outputs), 1), 1)
    num_chars += times * sum(len(output.prompt or "") + 8 * len(output.prompt_ids) for output in outputs)
    return num_parts > FEW_PARTS or num_chars > _FEW_CHARS


async def json_response(
    outputs: list[RequestOutput],
    samples: list[CompletionOutput],
    whole: Callable[[], dict[str, Any]],
    num_echoed_bytes: int = 0,
) -> Response:
    """The answer that ``whole`` makes of the outputs of a request.

    Args:
        outputs: The last output of each prompt. Nothing else changes them; those of a large answer are taken apart.
        samples: The choices, likewise.
        whole: Makes the answer.
        num_echoed_bytes: JSON of the request that the answer repeats, besides the prompts.
    """
    if is_large(outputs, samples) or num_echoed_bytes > _FEW_BYTES:
        return await asyncio.to_thread(_large_response, outputs, samples, whole)
    return JSONResponse(whole())


def _large_response(
    outputs: list[RequestOutput], samples: list[CompletionOutput], whole: Callable[[], dict[str, Any]]
) -> Response:
    answer = whole()
    response = PiecewiseResponse(json_pieces(answer))
    _free(answer)
    while samples:
        _free(samples.pop().logprobs)
    while outputs:
        outputs.pop()
    return response


class PiecewiseResponse(Response):
    """JSON that is sent in pieces, at the client's pace, while other requests have their turns.

    Args:
        pieces: The body; small ones are put together here, which may take long: in a thread.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.status_code, self.background = HTTPStatus.OK, None
        self._blocks = list(_blocks(pieces))
        self.init_headers({"content-length": str(sum(map(len, self._blocks)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's signature
        """Send it (the ASGI entry point)."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        began = time.monotonic()
        for index, block in enumerate(self._blocks):
            self._blocks[index] = b""
            await send({"type": "http.response.body", "body": block, "more_body": True})
            if time.monotonic() - began > TURN_SECONDS:
                await asyncio.sleep(0)
                began = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _BLOCK_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


def json_pieces(value: Any) -> Iterator[bytes]:
    """``value`` as compact JSON, in pieces of some thousand values."""
    size = _size(value)
    if size <= _FEW_VALUES:
        yield _encoded(value)
    elif isinstance(value, dict):
        for index, (name, member) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if index else b"{", _encoded(str(name)))
            yield from json_pieces(member)
        yield b"}"
    else:
        step = max(_FEW_VALUES * len(value) // size, 1)
        for first in range(0, len(value), step):
            yield b"," if first else b"["
            if step > 1:
                yield _encoded(value[first : first + step])[1:-1]
            else:
                yield from json_pieces(value[first])
        yield b"]"


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _free(value: Any) -> None:
    """Take a dict or a list apart, so that it is not freed in one go."""
    if _size(value) <= _FEW_VALUES:
        return
    while value:
        _free(value.popitem()[1] if isinstance(value, dict) else value.pop())


def _size(value: Any) -> int:
    """About how many values ``value`` consists of, if the items of a list are alike."""
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    if isinstance(value, list):
        return 1 + len(value) * _size(value[len(value) // 2]) if value else 1
    return 1
