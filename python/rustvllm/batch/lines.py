"""The input of a batch: one request per line, each checked by itself. A wrong line gets an answer; it ends nothing."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import pydantic_core

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
MAX_CUSTOM_ID_CHARS = 512
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20


@dataclass(frozen=True)
class BatchLine:
    """One line of the input.

    Attributes:
        number: From 1, empty lines counted.
        answer_id: The id of its answer: made from the line's bytes and the model's name, so that it is the same in
            another run.
        custom_id: The client's name for it; None when the line has none that could be read.
        url: Which endpoint it is for.
        body: The request, as JSON.
        problem: What is wrong with the line, or None; ``url`` and ``body`` are empty then.
        param: Which field that is about, or None.
    """

    number: int
    answer_id: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str | None = None
    param: str | None = None


class _WrongLineError(Exception):
    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def count_lines(file: BinaryIO) -> int:
    """How many lines of ``file`` are not empty; reads it to its end, in bounded memory."""
    count, has_text = 0, False
    while piece := file.readline(_SKIP_BYTES):
        has_text = has_text or bool(piece.strip())
        if piece.endswith(b"\n"):
            count += has_text
            has_text = False
    return count + has_text


def read_lines(file: BinaryIO, model: str, max_line_bytes: int) -> Iterator[BatchLine]:
    """The requests of a batch file, one at a time and in order; empty lines are left out.

    Args:
        file: At its beginning.
        model: The name of the model, part of every ``answer_id``.
        max_line_bytes: A longer line is a wrong one; it is not kept in memory.
    """
    seen: dict[str, int] = {}
    number = 0
    while line := file.readline(max_line_bytes + 1):
        number += 1
        digest = hashlib.blake2b(model.encode() + b"\0" + line, digest_size=16)
        if len(line) > max_line_bytes and not line.endswith(b"\n"):
            size = len(line)
            while not line.endswith(b"\n") and (line := file.readline(_SKIP_BYTES)):
                digest.update(line)
                size += len(line)
            problem = f"it has {size} bytes; {max_line_bytes} are taken at most (--max-body-bytes)"
            yield _wrong(number, digest.hexdigest(), None, _WrongLineError(problem))
            continue
        text = line.removeprefix(_BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
        if text:
            yield _read_line(number, digest.hexdigest(), text, seen)


def _read_line(number: int, digest: str, text: bytes, seen: dict[str, int]) -> BatchLine:
    custom_id = None
    try:
        request = _parse(text)
        custom_id = _custom_id(request)
        if (first := seen.setdefault(custom_id, number)) != number:
            raise _WrongLineError(f"its custom_id {custom_id[:80]!r} is also on line {first}", "custom_id")
        url, body = _url_and_body(request)
    except _WrongLineError as problem:
        return _wrong(number, digest, custom_id, problem)
    return BatchLine(number, _answer_id(digest), custom_id, url, body)


def _parse(text: bytes) -> Mapping[str, Any]:
    try:
        request = pydantic_core.from_json(text, allow_inf_nan=False)
    except (ValueError, RecursionError) as exc:
        raise _WrongLineError(f"it is not valid JSON: {str(exc)[:200]}") from None
    if not isinstance(request, dict):
        raise _WrongLineError("it must be a JSON object with custom_id, method, url and body")
    return request


def _custom_id(request: Mapping[str, Any]) -> str:
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id or len(custom_id) > MAX_CUSTOM_ID_CHARS:
        raise _WrongLineError(f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id")
    return custom_id


def _url_and_body(request: Mapping[str, Any]) -> tuple[str, bytes]:
    method, url, body = request.get("method"), request.get("url"), request.get("body")
    if method != "POST":
        raise _WrongLineError(f"method must be 'POST', got {str(method)[:80]!r}", "method")
    if url not in ENDPOINTS:
        raise _WrongLineError(f"url must be one of {', '.join(ENDPOINTS)}, got {str(url)[:80]!r}", "url")
    if not isinstance(body, dict):
        raise _WrongLineError("body must be an object: the request body for that url", "body")
    if body.get("stream"):
        raise _WrongLineError("body.stream must be false: a batch cannot stream answers", "stream")
    try:
        return url, json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:  # a number of thousands of digits; nested deeper than json goes
        raise _WrongLineError(f"body cannot be read: {str(exc)[:200]}", "body") from None


def _wrong(number: int, digest: str, custom_id: str | None, problem: _WrongLineError) -> BatchLine:
    message = f"Line {number} of the batch is wrong: {problem}."
    return BatchLine(number, _answer_id(digest), custom_id, problem=message, param=problem.param)


def _answer_id(digest: str) -> str:
    return f"batch_req_{digest}"
