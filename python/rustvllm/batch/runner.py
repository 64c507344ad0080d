""":class:`BatchRunner`: the lines of a batch through the server's endpoints, many at a time."""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rustvllm.batch.endpoint import call_endpoint
from rustvllm.batch.journal import BatchJournal, Place
from rustvllm.batch.lines import BatchLine
from rustvllm.config import SchedulerConfig
from rustvllm.exceptions import EngineDeadError
from rustvllm.server.app import build_app
from rustvllm.server.errors import BadRequestError, error_body
from rustvllm.server.state import ServerState

_MAX_PAUSE_SECONDS = 5.0


@dataclass
class BatchCounts:
    """What a batch came to.

    Attributes:
        earlier: Lines that a run before this one had answered.
        answered: Lines with status 200, those of ``earlier`` not among them.
        failed: Lines with an error.
        prompt_tokens, completion_tokens: Of ``answered``: what was read, and what was generated.
        seconds: From the first line to the last answer.
    """

    earlier: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Lines so far."""
        return self.earlier + self.answered + self.failed


class BatchRunner:
    """Answers lines; belongs to one event loop.

    Args:
        state: Serves the model.
        journal: Takes the answers.
        on_answer: Called after each with the counts so far.
    """

    def __init__(
        self, state: ServerState, journal: BatchJournal, on_answer: Callable[[BatchCounts], None] = lambda _: None
    ) -> None:
        self.counts = BatchCounts()
        self._state = state
        self._journal = journal
        self._on_answer = on_answer
        self._app = build_app(state)
        self._places: list[Place | None] = []
        self._num_trying = 0
        self._refused = asyncio.Lock()
        self._slots = asyncio.Semaphore(window(state.model.engine.config.scheduler))

    async def run(self, lines: Iterable[BatchLine]) -> list[Place]:
        """Answer every line.

        Returns:
            Where the answers are in the journal, in the order of the lines.

        Raises:
            EngineDeadError: The engine died; what was answered is in the journal.
            OSError: The journal cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for line in lines:
                    index = len(self._places)
                    self._places.append(None)
                    if line.problem is not None:
                        self._note(index, line, HTTPStatus.BAD_REQUEST, _problem(line))
                    elif (place := self._journal.earlier.get(line.answer_id)) is not None:
                        self._places[index] = place
                        self.counts.earlier += 1
                        self._on_answer(self.counts)
                    else:
                        await self._slots.acquire()
                        tasks.create_task(self._answer(index, line))
                    await asyncio.sleep(0)
        except* (EngineDeadError, OSError) as group:
            raise _first(group) from None
        return [place for place in self._places if place is not None]

    async def _answer(self, index: int, line: BatchLine) -> None:
        try:
            status, _, body = await self._try(line)
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                # One at a time, so that two that were refused do not take the queue's places from each other.
                async with self._refused:
                    status, body = await self._try_again(line)
            self._note(index, line, status, body)
        finally:
            self._slots.release()

    async def _try(self, line: BatchLine) -> tuple[int, dict[bytes, bytes], bytes]:
        self._num_trying += 1
        try:
            status, headers, body = await call_endpoint(self._app, line.url, line.body)
        finally:
            self._num_trying -= 1
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._state.model.engine.check_health()  # a dead engine ends the run, not only this line
        return status, headers, body

    async def _try_again(self, line: BatchLine) -> tuple[int, bytes]:
        """Until the queue has room for it: the lines that fill it end. What is refused all alone always will be."""
        while True:
            is_alone = not self._num_trying
            status, headers, body = await self._try(line)
            if status != HTTPStatus.SERVICE_UNAVAILABLE or (is_alone and not self._num_trying):
                return status, body
            await asyncio.sleep(min(float(headers.get(b"retry-after", b"1")), _MAX_PAUSE_SECONDS))

    def _note(self, index: int, line: BatchLine, status: int, body: bytes) -> None:
        error = None
        if status == HTTPStatus.OK:
            self.counts.answered += 1
            num_read, num_generated = _tokens_of(json.loads(body)["usage"])
            self.counts.prompt_tokens += num_read
            self.counts.completion_tokens += num_generated
        else:
            self.counts.failed += 1
            error = _error_of(status, body)
        self._places[index] = self._journal.add(_answer_line(line, status, body, error))
        self._on_answer(self.counts)


def window(scheduler: SchedulerConfig) -> int:
    """Lines under way at a time: as many as a step takes, and as many again that wait, so that no step is short."""
    return max(1, min(2 * scheduler.max_num_seqs, scheduler.max_num_queued_reqs))


def _answer_line(line: BatchLine, status: int, body: bytes, error: Any) -> bytes:
    """A line of the output; ``body`` is JSON without line ends and goes in as it is."""
    return b"".join(
        (
            b'{"id":',
            json.dumps(line.answer_id).encode(),
            b',"custom_id":',
            json.dumps(line.custom_id, ensure_ascii=False).encode(),
            b',"response":{"status_code":%d,"request_id":"%s","body":' % (status, secrets.token_hex(16).encode()),
            body,
            b'},"error":',
            json.dumps(error, ensure_ascii=False).encode(),
            b"}\n",
        )
    )


def _tokens_of(usage: Mapping[str, int]) -> tuple[int, int]:
    """Tokens that an answer read and generated, whatever its API calls them; reranking generates none."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage.get("completion_tokens", 0)
    return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]


def _problem(line: BatchLine) -> bytes:
    answer = error_body(BadRequestError(line.problem or "", param=line.param), line.url)
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _error_of(status: int, body: bytes) -> Any:
    """The error object of an answer, so that a client finds it where files of this kind have it."""
    try:
        return json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {
            "message": f"The endpoint answered {status}.",
            "type": "InternalServerError",
            "param": None,
            "code": status,
        }


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
