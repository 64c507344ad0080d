"""The front end's half of the engine: which requests run, what came out of them, in :class:`RequestTable`.

``LLMEngine`` and ``AsyncLLM`` share it; they differ only in how a caller waits.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic_ns
from typing import Any

from rustvllm import _core
from rustvllm.engine.core_client.interface import EngineCoreClient
from rustvllm.engine.front_tracer import FrontTracer, debug_front_tracer
from rustvllm.engine.request.core_request import EngineCoreRequest
from rustvllm.engine.request.state import BestOf, EventSink, RequestState
from rustvllm.exceptions import InvalidRequestError, QueueFullError
from rustvllm.logprobs import PromptLogprobs, PromptTokenLogprobs
from rustvllm.observe.trace.tracer import is_debugging
from rustvllm.parameter_checks import is_valid_unicode, shown
from rustvllm.sampling_params import RequestOutputKind
from rustvllm.sampling_params.table import SAMPLING_NUMBERS

SAMPLES_AT_ONCE = 64
"""Samples that are expected in one go: a millisecond of work."""
MAX_IMAGE_BYTES = 1 << 30
"""Most bytes of pixels that the requests of a server's process have together; one request alone may have more."""


class RequestTable:
    """Requests under way, by the caller's id and by the engine's key. Not thread-safe: one thread owns it.

    Args:
        client: The engine.
        tokenizer: Makes text of tokens; None makes none.
        tracer: Follows the requests; None: while the level of the log is DEBUG, for the log.
        component: Whose table it is, by the field's name: for that log.
        stream_interval: Tokens of each streamed output of a request that does not ask for more.
        max_image_bytes: Most bytes of pixels of all requests under way; None: any number.
    """

    def __init__(
        self,
        client: EngineCoreClient,
        tokenizer: _core.Tokenizer | None,
        tracer: FrontTracer | None = None,
        component: str = "AsyncLLM",
        stream_interval: int = 1,
        max_image_bytes: int | None = None,
    ) -> None:
        self._client = client
        self._max_image_bytes = max_image_bytes
        self._tracer = tracer
        self._debug_tracer: FrontTracer | None = None
        self._component = component
        self._stream_interval = stream_interval
        self._output_processor = _core.OutputProcessor(tokenizer)
        self._tokenizer = tokenizer
        self._by_id: dict[str, RequestState] = {}
        self._by_key: dict[int, RequestState] = {}
        self._engine_ids: set[str] = set()
        self._image_bytes: dict[str, int] = {}
        self._unread: deque[tuple[_core.RequestDelta, str | None]] = deque()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    @property
    def num_samples(self) -> int:
        """Samples of all requests that have not ended."""
        return len(self._by_key)

    def states(self) -> list[RequestState]:
        """Every request under way."""
        return list(self._by_id.values())

    def adapters_in_use(self) -> set[int]:
        """Numbers of the adapters that requests under way need; 0 stands for none."""
        return {state.adapter for state in self._by_id.values()}

    def _check_id(self, request_id: object) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id must be a non-empty string, got {request_id!r}", "request_id")
        if not (request_id.isascii() or is_valid_unicode(request_id)):
            raise InvalidRequestError(f"request_id must be valid Unicode, got {shown(request_id)}", "request_id")
        if request_id in self._by_id or request_id in self._engine_ids:
            raise InvalidRequestError(
                f"request_id {request_id!r} belongs to a request that is still running", "request_id"
            )

    def _check_room_for_images(self, num_bytes: int) -> None:
        """Refuse pixels that take too much memory together with those of the requests under way."""
        if not num_bytes or not self._image_bytes or self._max_image_bytes is None:
            return
        taken = sum(self._image_bytes.values())
        if taken + num_bytes > self._max_image_bytes:
            raise QueueFullError(
                f"the images of {len(self._image_bytes)} requests under way take {taken} bytes; {num_bytes} more would "
                f"exceed the limit of {self._max_image_bytes}: try again later"
            )

    def add(
        self,
        request_id: str,
        request: EngineCoreRequest,
        sink: EventSink | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestState:
        """Hand a request to the engine, once per sample; ``sink`` takes new text as events.

        ``trace_headers`` are the W3C trace context of the client.

        Raises:
            InvalidRequestError: The id is taken, or the engine refuses the request.
            QueueFullError: The engine takes no more; nothing of this request remains.
        """
        state = self.begin(request_id, request, sink, trace_headers)
        try:
            for _ in self.expecting(state, request):
                pass
            self.hand_in(state, request)
        except BaseException:
            self.forget(state, abort=True)
            raise
        return state

    def begin(
        self,
        request_id: str,
        request: EngineCoreRequest,
        sink: EventSink | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestState:
        """:meth:`add` in three steps, for requests of many samples: take the id, :meth:`expecting`, :meth:`hand_in`.

        A caller whose later steps fail has to :meth:`forget` the request.
        """
        self._check_id(request_id)
        self._check_room_for_images(request.num_image_bytes)
        params = request.params
        state = RequestState(
            request_id,
            request.prompt,
            request.prompt_token_ids,
            params.output_kind,
            (),
            request.hidden_stop_ids,
            sink,
            arrival_time=request.arrival_ns * 1e-9,
            with_logprobs=request.num_logprobs >= 0,
            flat_logprobs=params.flat_logprobs,
            lists_tokens=bool(params.logprob_token_ids),
            choice=BestOf(params.n, shows_logprobs=params.num_logprobs is not None, is_sorted=params.use_beam_search)
            if params.use_beam_search or params.best_of is not None
            else None,
            prompt_logprobs=self._prompt_logprobs(request),
            prompt_token_logprobs=None
            if params.prompt_logprob_token_ids is None
            else PromptTokenLogprobs(params.prompt_logprob_start or 0, *params.prompt_logprob_token_ids.shape),
            prompt_progress=params.prompt_progress,
            adapter=request.adapter,
            lora_request=request.lora_request,
            pooling=params.pooling,
        )
        self._by_id[request_id] = state
        if num_bytes := request.num_image_bytes:
            self._image_bytes[request_id] = num_bytes
        if self._tracer is self._debug_tracer and is_debugging() is (self._tracer is None):  # the level has changed
            self._debug_tracer = self._tracer = None if self._tracer else debug_front_tracer(self._component)
        if self._tracer is not None:
            self._tracer.taken(request_id, request, trace_headers)
        return state

    def expecting(self, state: RequestState, request: EngineCoreRequest) -> Iterator[None]:
        """Expect the outputs of a request's samples, some at a time: between two of them others may have their turn."""
        num_samples, request_id, sink = request.params.num_samples, state.request_id, state.sink
        for first in range(0, num_samples, SAMPLES_AT_ONCE):
            samples = []
            for index in range(first, min(first + SAMPLES_AT_ONCE, num_samples)):
                engine_id = request_id if num_samples == 1 else f"{index}_{request_id}"
                if engine_id in self._engine_ids:
                    raise InvalidRequestError(
                        f"request_id {engine_id!r} belongs to a request that is still running", "request_id"
                    )
                samples.append((self._client.handle.new_key(), engine_id))
            state.expect(samples)
            for index, (key, engine_id) in enumerate(samples, first):
                self._by_key[key] = state
                self._engine_ids.add(engine_id)
                self._expect_outputs(key, request, sink, index)
            yield

    def _expect_outputs(self, key: int, request: EngineCoreRequest, sink: EventSink | None, sample: int) -> None:
        params = request.params
        self._output_processor.add_request(
            key,
            request.prompt_token_ids,
            detokenize=params.detokenize and self._tokenizer is not None,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=request.stop or (),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            at_the_end=params.output_kind is RequestOutputKind.FINAL_ONLY,
            event_template=None if sink is None or sink.response_events is not None else sink.templates[sample],
            turn_reading=None if sink is None else sink.turn_reading,
            response_events=None if sink is None else sink.response_events,
            ends_after_call=request.ends_after_call,
            stream_interval=max(self._stream_interval, params.stream_interval or 1),
            logprobs=request.num_logprobs >= 0,
            prompt_logprobs=request.num_prompt_logprobs >= 0,
        )

    def _prompt_logprobs(self, request: EngineCoreRequest) -> PromptLogprobs | None:
        params = request.params
        if params.prompt_logprobs is None:
            return None
        has_text = params.detokenize and self._tokenizer is not None
        token_bytes = self._tokenizer.token_bytes if has_text and self._tokenizer is not None else None
        return PromptLogprobs(token_bytes, params.num_prompt_token_ids)

    def hand_in(self, state: RequestState, request: EngineCoreRequest) -> None:
        """All samples at once: the first computes the prompt, the others fork it. May run in any thread."""
        params = request.params
        (key, engine_id), *others = ((sample.key, sample.request_id) for sample in state.samples)
        self._client.handle.add_request(
            key,
            engine_id,
            request.prompt_token_ids,
            max_tokens=request.max_tokens,
            # A prompt near the limit may leave less room than min_tokens asks for.
            min_tokens=min(params.min_tokens, request.max_tokens),
            eos_token_id=request.eos_token_id,
            stop_token_ids=request.stop_token_ids,
            repetition_detection=params.repetition_numbers,
            **{name: getattr(params, name) for name in SAMPLING_NUMBERS},
            seed=request.seed_of(0),
            num_logprobs=request.num_logprobs,
            beam_width=params.n if params.use_beam_search else 0,
            length_penalty=params.length_penalty,
            num_prompt_logprobs=request.num_prompt_logprobs,
            pooling=int(params.pooling is not None),
            reports_prompt_progress=params.prompt_progress,
            skip_reading_prefix_cache=params.skip_reading_prefix_cache is True,
            has_stop_strings=bool(params.stop_strings),
            sampling_extras=request.sampling_extras,
            grammar=request.grammar,
            priority=request.priority,
            payer=None if request.tenant is None else request.tenant.payer,
            cache_salt=request.cache_salt,
            prediction=request.prediction,
            adapter=request.adapter,
            multimodal=request.multimodal,
            lora_name=str(request.adapter) if request.adapter else None,
            arrival_ns=request.arrival_ns,
            samples=[(other, other_id, request.seed_of(index)) for index, (other, other_id) in enumerate(others, 1)],
        )

    @property
    def has_unread(self) -> bool:
        """Whether a bounded :meth:`poll` has left something for the next."""
        return bool(self._unread)

    def poll(self, most: int | None = None) -> list[RequestState]:
        """Drain the engine's outputs: events go to their sinks.

        Args:
            most: News of samples to look at now; None: all. What is left is looked at by the next call.

        Returns:
            The other requests that changed, each once, finished ones already taken out.
        """
        began_ns = 0 if self._tracer is None else monotonic_ns()
        events, deltas = self._output_processor.poll(self._client.handle)
        by_key = self._by_key
        if self._tracer is not None and (events or deltas):
            self._tracer.polled(began_ns, by_key, events, deltas)
        for key, event in events:
            state = by_key.get(key)
            if state is not None and state.sink is not None and not state.sink.write(event):
                self._output_processor.hold(state.keys())
        # What an engine says of a failed step is over before the outputs are there that it explains.
        unread, step_error = self._unread, self._client.last_step_error if deltas else None
        unread.extend((delta, step_error) for delta in deltas)
        changed: dict[str, RequestState] = {}
        for _ in range(len(unread) if most is None else min(most, len(unread))):
            delta, step_error = unread.popleft()
            state = by_key.get(delta.key)
            if state is None:  # the reader has gone
                continue
            state.apply(delta, step_error)
            if delta.finish_reason is not None:  # taken out here, so that the end of many samples is not one long piece
                by_key.pop(delta.key, None)
                self._engine_ids.discard(state.engine_id(delta.key))
            changed[state.request_id] = state
        for state in changed.values():
            if state.finished:
                self.forget(state, abort=False)
        return list(changed.values())

    def flush(self) -> None:
        """Let the next :meth:`poll` bring all tokens, also those that wait for others of their interval."""
        self._output_processor.flush()

    def resume(self, state: RequestState) -> bool:
        """Its sink takes events again; whether there are some, which the next :meth:`poll` brings."""
        return self._output_processor.release(state.keys())

    def abort(self, request_id: str | Iterable[str]) -> None:
        """Ask the engine to end requests; each gives one last output. Unknown ids are ignored.

        Raises:
            InvalidRequestError: It is neither a string nor several; nothing was ended.
        """
        given: Any = request_id
        every = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
        if strangers := [each for each in every if not isinstance(each, str)]:
            raise InvalidRequestError(
                f"request_id must be a string or several strings, got {shown(strangers[0])}", "request_id"
            )
        ids = [
            engine_id
            for request_id in every
            if (state := self._by_id.get(request_id)) is not None
            for engine_id in state.unfinished_ids()
        ]
        if ids:
            self._client.handle.abort_requests(ids)

    def forget(self, state: RequestState, *, abort: bool) -> None:
        """Take out a request whose caller no longer waits.

        Args:
            state: The request; one that is not in the table is left alone.
            abort: End what still runs of it in the engine.
        """
        if self._by_id.get(state.request_id) is not state:
            return
        del self._by_id[state.request_id]
        if self._image_bytes:
            self._image_bytes.pop(state.request_id, None)
        if self._tracer is not None:
            self._tracer.ended(state, is_abandoned=abort and not state.finished)
        if abort:
            self._client.handle.abort_requests(state.unfinished_ids())
        for sample in [sample for sample in state.samples if sample.key in self._by_key]:
            del self._by_key[sample.key]
            self._engine_ids.discard(sample.request_id)
            if sample.finish_reason is None:
                self._output_processor.discard(sample.key)
