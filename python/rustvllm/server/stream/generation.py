"""Runs the engine for one HTTP request: one engine request per prompt, merged, and aborted when the client leaves."""

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from rustvllm.exceptions import InvalidRequestError, RequestFailedError
from rustvllm.lora.request import LoRARequest
from rustvllm.outputs import CompletionOutput, PromptIds, RequestOutput
from rustvllm.sampling_params import PoolingParams, SamplingParams
from rustvllm.server.errors import ClientDisconnectedError
from rustvllm.server.http.request_ids import MAX_REQUEST_ID_CHARS, REQUEST_ID, RequestId, is_valid_request_id
from rustvllm.server.http.request_log import RequestLog
from rustvllm.server.schemas.request_body import is_large
from rustvllm.server.state import ServedModel, ServerState
from rustvllm.tenant import Tenant
from rustvllm.text.turn_formats import CoreTurnReading

if TYPE_CHECKING:
    from rustvllm.engine.request.prompts import PromptType
    from rustvllm.engine.request.state import EventSink
    from rustvllm.engine.request.stream import RequestStream

_TURN_SECONDS = 0.001
"""After so much time with the prompts of one request others get their turn on the event loop."""

_TASKS_AT_ONCE = 64
"""Tasks that are begun or ended in one go: a millisecond of work."""

OF_ONE_PROMPT = ("prompt", "input_tokens")
"""What errors are named after that concern one prompt of several."""

PromptOutput = tuple[int, RequestOutput]
"""Index of the prompt within the HTTP request, and news of it."""
T = TypeVar("T")


def new_request_id(prefix: str, request: Request, requested: str | None) -> str:
    """The id of an answer: ``prefix`` and the client's own (header ``X-Request-Id``, else the field), or a random one.

    Raises:
        InvalidRequestError: The client's id is too long or not printable.
    """
    noted: RequestId | None = request.scope.get(REQUEST_ID)
    own = request.headers.get("x-request-id") or requested
    if not own:
        return prefix + (secrets.token_hex(16) if noted is None else noted.text)
    if not is_valid_request_id(own):
        what = f"{len(own)} characters" if len(own) > MAX_REQUEST_ID_CHARS else repr(own)
        raise InvalidRequestError(
            f"request_id must be at most {MAX_REQUEST_ID_CHARS} printable characters, got {what}.", "request_id"
        )
    if noted is not None:
        noted.text = own
    return prefix + own


class WrongElementError(InvalidRequestError):
    """One of several prompts is wrong.

    Attributes:
        index: Of the prompt.
        reason: What is wrong with it, without saying which it is.
    """

    def __init__(self, index: int, error: InvalidRequestError) -> None:
        super().__init__(f"element {index} of the list: {error}", error.param)
        self.index = index
        self.reason = str(error)


class StreamSinks(Protocol):
    """Where a stream's text goes, prompt by prompt, without passing the :class:`Generation`."""

    def sink(self, prompt_index: int) -> "EventSink | None":
        """Takes a prompt's events; None: its text comes in the outputs."""

    def begin(self, prompt_index: int, prompt_ids: PromptIds) -> None:
        """The engine has taken a prompt, which has these token ids."""


class Generation:
    """The engine requests of one HTTP request, as one asynchronous iterator of :data:`PromptOutput`.

    Closing it aborts whatever still runs, every sample of every prompt.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._streams: list[RequestStream] = []
        self._engine_ids: list[str] = []
        self._merged: AsyncGenerator[PromptOutput, None] | None = None
        self._log: RequestLog | None = None

    @classmethod
    async def start(
        cls,
        state: ServerState,
        model: ServedModel,
        prompts: Sequence["PromptType"],
        params: SamplingParams | PoolingParams,
        request_id: str,
        priority: int,
        sinks: StreamSinks | None = None,
        *,
        arrival_ns: int | None = None,
        tenant: Tenant | None = None,
        lora_request: LoRARequest | None = None,
        ends_after_call: CoreTurnReading | None = None,
    ) -> "Generation":
        """Hand all prompts to the engine: either every one is accepted or none runs on.

        With ``sinks`` new text goes there, and the outputs hold each sample's end. ``arrival_ns`` is when the request
        came in, ``tenant`` whose share of the engine it is charged to, ``lora_request`` its adapter; each
        answer ends behind its first call, read by ``ends_after_call``.

        Raises:
            InvalidRequestError: A prompt or a parameter is wrong.
            QueueFullError: The engine takes no more.
            EngineDeadError: The engine has stopped.
        """
        _check_count(len(prompts), params, model.max_num_queued)
        generation = cls(state)
        # Clients may send the same id twice at a time; the engine's ids must differ all the same.
        stem = f"{request_id}-{secrets.token_hex(4)}"
        wanted = state.settings.request_log
        log = RequestLog(wanted, request_id, params) if wanted.requests else None
        if log is not None and log.wants_outputs:
            generation._log = log
        try:
            began = time.monotonic()
            for index, prompt in enumerate(prompts):
                if time.monotonic() - began > _TURN_SECONDS:
                    await asyncio.sleep(0)
                    began = time.monotonic()
                engine_id = f"{stem}-{index}"
                # Text that is to be logged comes in the outputs.
                sink = None if sinks is None or generation._log is not None else sinks.sink(index)
                try:
                    stream = await model.engine.add_request(
                        engine_id,
                        prompt,
                        params,
                        priority=priority,
                        sink=sink,
                        arrival_ns=arrival_ns,
                        tenant=tenant,
                        lora_request=lora_request,
                        ends_after_call=ends_after_call,
                    )
                except InvalidRequestError as error:
                    if len(prompts) == 1 or error.param not in OF_ONE_PROMPT:
                        raise
                    raise WrongElementError(index, error) from None
                generation._add(engine_id, stream)
                if sinks is not None:
                    sinks.begin(index, stream.prompt_ids)
            if log is not None:
                log.received(prompts, [len(stream.prompt_ids) for stream in generation._streams])
        except BaseException:
            await generation.aclose()
            raise
        return generation

    def _add(self, engine_id: str, stream: "RequestStream") -> None:
        self._streams.append(stream)
        self._engine_ids.append(engine_id)
        self._state.engine_request_ids.add(engine_id)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> PromptOutput:
        """The next output of any prompt; raises what the engine raised."""
        if len(self._streams) == 1:
            index, output = 0, await anext(self._streams[0])
        else:
            if self._merged is None:
                self._merged = _merge(self._streams)
            index, output = await anext(self._merged)
        if self._log is not None:
            self._log.add(index, output)
        return index, output

    def resume(self) -> None:
        """The sinks, one of which had refused an event, take them again."""
        for stream in self._streams:
            stream.resume()

    def close(self) -> None:
        """Abort what still runs; a reader gets to the end. Idempotent."""
        self._state.engine_request_ids.difference_update(self._engine_ids)
        for stream in self._streams:
            stream.close()

    async def aclose(self) -> None:
        """:meth:`close`, and wait until nothing is left of it."""
        self.close()
        # One that is still being read comes to its end by itself, now that its streams have.
        if inspect.isasyncgen(self._merged) and not self._merged.ag_running:
            await self._merged.aclose()

    async def collect(self, num_prompts: int, n: int) -> tuple[list[RequestOutput], list[CompletionOutput]]:
        """Read to the end.

        Returns:
            The last output of each prompt, and the samples in the order of their choice index (prompt · n + sample).

        Raises:
            RequestFailedError: The engine failed on a prompt, or let go of it.
        """
        last: dict[int, RequestOutput] = {}
        samples: dict[int, CompletionOutput] = {}
        num_read = 0
        async for index, output in self:
            last[index] = output
            samples.update((index * n + completion.index, completion) for completion in output.outputs)
            num_read += len(output.outputs)
            if num_read > _TASKS_AT_ONCE:  # outputs that are there are read without waiting
                await asyncio.sleep(0)
                num_read = 0
        if len(last) < num_prompts or len(samples) < num_prompts * n:
            raise RequestFailedError("The request ended before it produced any output.")
        return [last[index] for index in sorted(last)], [samples[index] for index in sorted(samples)]


def _check_count(num_prompts: int, params: SamplingParams | PoolingParams, most: int) -> None:
    """Refuse more requests than the queue ever takes, before any of them is begun.

    Args:
        num_prompts: Prompts of the HTTP request.
        params: Of each; samples are requests of their own.
        most: Requests that may wait, in all engines.
    """
    num_samples = params.num_samples if isinstance(params, SamplingParams) else 1
    if num_prompts > 1 and num_prompts * num_samples > most:
        samples = f" with {num_samples} samples each" if num_samples > 1 else ""
        raise InvalidRequestError(
            f"the request has {num_prompts} prompts{samples}, but at most {most} may wait (max_num_queued_reqs): send "
            "fewer at a time",
            "prompt",
        )


async def _merge(streams: Sequence["RequestStream"]) -> AsyncGenerator[PromptOutput, None]:
    """Outputs of all streams in order of arrival; the first error ends the merge."""
    queue: asyncio.Queue[PromptOutput | Exception | None] = asyncio.Queue()

    async def forward(index: int, stream: "RequestStream") -> None:
        try:
            async for output in stream:
                queue.put_nowait((index, output))
        except Exception as exc:  # noqa: BLE001 -- raised again by the reader
            queue.put_nowait(exc)
        else:
            queue.put_nowait(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(forward(index, stream)))
            if len(tasks) % _TASKS_AT_ONCE == 0:
                await asyncio.sleep(0)
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        waiting = [task for task in tasks if not task.done()]
        for first in range(0, len(waiting), _TASKS_AT_ONCE):
            some = waiting[first : first + _TASKS_AT_ONCE]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away first.

    Raises:
        ClientDisconnectedError: The client went away.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def unless_left(request: Request, work: Awaitable[T], *, takes_long: bool = False) -> T:
    """The result of ``work`` with the whole body; given up when the client goes away, if the body is large.

    What waits for a thread, to be tokenised or to be rendered then loses its place: no client would read it.

    Args:
        request: Its body was read.
        work: What is done.
        takes_long: It is given up however small the body is.

    Raises:
        ClientDisconnectedError: The client went away.
    """
    if takes_long or is_large(request):
        return await until_disconnect(request.receive, work)
    return await work  # over before a client could leave, so that watching it would only cost time


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
