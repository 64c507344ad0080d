"""What happens to a request for text, whichever API it came by: read, checked, generated for, answered.

:func:`respond` is the whole of it. What differs between the APIs is the request's :class:`Face`: how its fields become
prompts and sampling parameters on the way in, and what its samples look like on the way out, streamed or whole.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from rustvllm.exceptions import InvalidRequestError
from rustvllm.outputs import CompletionOutput, PromptIds, RequestOutput
from rustvllm.sampling_params import SamplingParams
from rustvllm.server.answers.large_answers import json_response
from rustvllm.server.answers.logprobs import LogprobsRenderer, num_prompt_logprobs
from rustvllm.server.answers.timings import Timings
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.endpoints.sampling import build_sampling_params, check_num_choices, check_stream_options
from rustvllm.server.endpoints.structured import unenforced_header
from rustvllm.server.http.front_door import ARRIVAL_NS, TENANT
from rustvllm.server.schemas.protocol import GenerationRequest
from rustvllm.server.schemas.refusals import Refusals
from rustvllm.server.schemas.request_body import at_size, read_request, refuse_unbuilt
from rustvllm.server.state import ServedModel, ServerState
from rustvllm.server.stream.chunks import ChunkRenderer, ChunkStream
from rustvllm.server.stream.generation import Generation, new_request_id, unless_left, until_disconnect
from rustvllm.server.stream.sse import EventStreamResponse
from rustvllm.tenant import Tenant
from rustvllm.text.turn_formats import CoreTurnReading

if TYPE_CHECKING:
    from rustvllm.engine.request.prompts import TextPrompt, TokensPrompt

R = TypeVar("R", bound=GenerationRequest)
C = TypeVar("C", bound=ChunkRenderer)
Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs what takes long with a large body: on the event loop if the body is small, else in a thread."""


class Face(ABC, Generic[R]):
    """One request as its API sees it; what is wrong with it is raised as ``InvalidRequestError``.

    Attributes:
        shape: Of the body.
        is_translated: The body is of another API, and :meth:`translate` makes the request of it.
        refusals: Fields that ask for what is not built.
        id_prefix: Of the answer's id.
        kind: ``object`` of an answer.
        chunk_kind: ``object`` of an event.
        text_frame: What stands before and after the text in a chunk's choice.
        chunk_nulls: Members of a chunk's choice, with their leading commas, that are null where it has a text.
        answer_nulls: Members of a whole answer that are null unless something fills them.
        choice_nulls: The same of its choices.
        request: The body, or what it was translated to.
        state: Of the server.
        model: What answers.
        params: The sampling parameters, once the fields are read.
        logprobs: Renders a sample's log-probabilities; None: they are not asked for.
        ends_after_call: How answers are read that end behind their first call of a tool, once the prompts are known;
            None: they do not.
    """

    shape: ClassVar[type[BaseModel]]
    is_translated: ClassVar[bool] = False
    refusals: ClassVar[Refusals]
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    text_frame: ClassVar[tuple[bytes, bytes]]
    chunk_nulls: ClassVar[bytes]
    answer_nulls: ClassVar[dict[str, Any]]
    choice_nulls: ClassVar[dict[str, Any]]
    params: SamplingParams
    logprobs: LogprobsRenderer | None = None
    ends_after_call: CoreTurnReading | None = None

    def __init__(self, request: R, state: ServerState, model: ServedModel) -> None:
        self.request = request
        self.state = state
        self.model = model

    # -- the way in -----------------------------------------------------------------------------------------------

    @classmethod
    def translate(cls, body: Any) -> R:
        """The request that asks for the same as a body of another API; may run in a thread.

        Raises:
            InvalidRequestError: In the words of the body.
        """
        raise NotImplementedError(f"{cls.__name__} takes the body as it is: {type(body).__name__}")

    @property
    def num_prompts(self) -> int:
        """Prompts of the request."""
        return 1

    @abstractmethod
    def max_tokens(self) -> tuple[int | None, str]:
        """Most tokens to generate (None: as many as fit), and the field that says so."""

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Candidates to show for each token (None: not even its own); sets :attr:`logprobs`."""

    def echoed_logprobs(self) -> int | None:
        """Candidates to show for each place of a prompt that the answer repeats; None if the answer repeats none."""
        return None

    def check(self) -> None:
        """What else can be wrong with the fields, once :attr:`params` are known."""

    @abstractmethod
    async def prompts(self, run: Run) -> Sequence["TextPrompt | TokensPrompt"]:
        """The prompts for the engine, which checks them against its limits."""

    def read_fields(self) -> None:
        """Check what the request's fields ask for, and make :attr:`params` of them; may run in a thread."""
        request = self.request
        if self.state.settings.return_tokens_as_token_ids:
            self.state.settings.complete(request)
        refuse_unbuilt(request, self.refusals)
        check_stream_options(request)
        max_tokens, param = self.max_tokens()
        num_logprobs, echoed = self.num_logprobs(), self.echoed_logprobs()
        asks_of_prompt = request.prompt_logprobs is not None or echoed is not None
        self.params = build_sampling_params(
            request,
            self.model,
            max_tokens=max_tokens,
            param=param,
            logprobs=num_logprobs,
            prompt_logprobs=num_prompt_logprobs(request, echoed) if asks_of_prompt else None,
        )
        check_num_choices(self.num_prompts, self.params)
        self.check()

    def as_sent(self, error: InvalidRequestError) -> InvalidRequestError:
        """An error in the words of the request: about the fields that parameters and prompts were made of."""
        return error

    # -- the way out ----------------------------------------------------------------------------------------------

    @property
    def num_echoed_bytes(self) -> int:
        """JSON of the request that a whole answer repeats, besides the prompts; asked once those are known."""
        return 0

    @abstractmethod
    def opening(self, chunks: ChunkRenderer, prompt_index: int, prompt_ids: PromptIds) -> bytes:
        """The chunks that a prompt's choices begin with."""

    def look_at(self, prompt_index: int, output: RequestOutput) -> None:
        """Note what an output says of its prompt, before anything is made of the output."""

    def chunk_renderer(self, header: dict[str, Any], usage: UsageCounter) -> ChunkRenderer:
        """What makes the chunks of a stream."""
        return self.make_renderer(ChunkRenderer, header, usage)

    def make_renderer(self, kind: type[C], header: dict[str, Any], usage: UsageCounter) -> C:
        """A renderer of a kind, for this request."""
        force_usage = self.state.settings.enable_force_include_usage
        return kind(
            header, *self.text_frame, self.chunk_nulls, self.request, usage, self.logprobs, force_usage=force_usage
        )

    def new_usage(self) -> UsageCounter:
        """A counter for the answer."""
        return UsageCounter(show_cached=self.state.settings.enable_prompt_tokens_details)

    @abstractmethod
    def choice(self, prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """What a sample said, as members of its choice in a whole answer; ``output`` is its prompt's."""

    def finish_reason(self, sample: CompletionOutput) -> str | None:
        """Why a sample of a whole answer ended; asked once :meth:`choice` has said what it is."""
        return sample.finish_reason

    def whole(
        self,
        header: dict[str, Any],
        usage: UsageCounter,
        outputs: Sequence[RequestOutput],
        samples: Sequence[CompletionOutput],
    ) -> dict[str, Any]:
        """The answer in one piece.

        Args:
            header: What it begins with.
            usage: Counts it.
            outputs: The last of each prompt.
            samples: All, prompt by prompt.
        """
        request, n = self.request, self.params.n
        timings = Timings(self.params.num_samples) if request.timings or request.timings_per_token else None
        for index, output in enumerate(outputs):
            usage.add(index, output)
            self.look_at(index, output)
            if timings is not None:
                timings.add(index, output)
        choices = []
        for index, sample in enumerate(samples):
            choice = {
                **self.choice_nulls,
                "index": index,
                **self.choice(index // n, outputs[index // n], sample),
                "finish_reason": self.finish_reason(sample),
                "stop_reason": sample.stop_reason,
            }
            if request.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        answer: dict[str, Any] = {**header, **self.answer_nulls, "choices": choices, "usage": usage.of_whole_answer()}
        self.add_prompt_facts(answer, outputs)
        if timings is not None:
            answer["timings"] = timings.as_dict()
        return answer

    @abstractmethod
    def add_prompt_facts(self, answer: dict[str, Any], outputs: Sequence[RequestOutput]) -> None:
        """Put the prompts' ids and log-probabilities into a whole answer, where they are asked for."""


async def respond(raw_request: Request, face_type: type[Face[R]]) -> Response:
    """Answer a request for text.

    Raises:
        RustVLLMError: The request is wrong, or the engine failed.
        ServerError: The request cannot be read.
    """
    state: ServerState = raw_request.app.state.server
    run = partial(at_size, raw_request)
    request: Any = await read_request(raw_request, face_type.shape)
    if face_type.is_translated:
        request = await run(partial(face_type.translate, request))
    model = state.model
    await model.refresh_adapters(request.model)
    name = model.resolve_name(request.model)
    if not model.generates:
        model.check_task("generate")
    face = face_type(request, state, model)
    try:
        await run(face.read_fields)
        request_id = new_request_id(face.id_prefix, raw_request, request.request_id)
        prompts = await unless_left(raw_request, face.prompts(run))
    except InvalidRequestError as error:
        raise face.as_sent(error) from None
    header = {
        "id": request_id,
        "object": face.chunk_kind if request.stream else face.kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": model.fingerprint,
    }
    usage = face.new_usage()
    stream = _stream(face, header, usage) if request.stream else None
    try:
        starting = Generation.start(
            state,
            model,
            prompts,
            face.params,
            request_id,
            request.priority or 0,
            sinks=stream,
            arrival_ns=raw_request.scope[ARRIVAL_NS],
            tenant=tenant_of(raw_request, request.user),
            lora_request=model.adapter_request(name),
            ends_after_call=face.ends_after_call,
        )
        has_images = any("multi_modal_data" in prompt for prompt in prompts)
        generation = await unless_left(raw_request, starting, takes_long=has_images)
    except InvalidRequestError as error:
        raise face.as_sent(error) from None
    if stream is not None:
        events = EventStreamResponse(stream, generation, request_id, state.settings.sse_keep_alive_interval)
        return _with_unenforced(events, face)
    async with aclosing(generation):
        outputs, samples = await until_disconnect(
            raw_request.receive, generation.collect(face.num_prompts, face.params.n)
        )
    whole = partial(face.whole, header, usage, outputs, samples)
    answer = await json_response(outputs, samples, whole, face.num_echoed_bytes)
    return _with_unenforced(answer, face)


def _with_unenforced(response: Response, face: Face[Any]) -> Response:
    """The response with a header for what its schema asked for and nothing enforces; that is known by now."""
    if face.params.structured_outputs is not None:
        header = unenforced_header(face.params.structured_outputs)
        if header is not None:
            response.raw_headers.append(header)
    return response


def tenant_of(raw_request: Request, user: str | None) -> Tenant | None:
    """Who is charged for a request: the tenant whose key it has, and the user that it names."""
    of_key: Tenant | None = raw_request.scope.get(TENANT)
    if not user:
        return of_key
    return Tenant(user=user) if of_key is None else replace(of_key, user=user)


def _stream(face: Face[Any], header: dict[str, Any], usage: UsageCounter) -> ChunkStream:
    """The answer event by event."""
    chunks = face.chunk_renderer(header, usage)
    return ChunkStream(chunks, usage, face.params.n, face.num_prompts, partial(face.opening, chunks), face.look_at)
