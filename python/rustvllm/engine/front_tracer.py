"""``FrontTracer``: what a front end does with each request, as records of a tracer and as OpenTelemetry spans."""

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic_ns

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.engine.request.core_request import EngineCoreRequest
from rustvllm.engine.request.state import RequestState
from rustvllm.observe.trace.request_spans import CLOSE_SECONDS, RequestSpans
from rustvllm.observe.trace.tracer import LogSink, Tracer, TraceRecord


@dataclass(slots=True)
class Entry:
    """How a request came in over HTTP.

    Attributes:
        began_ns: When its head was there, in nanoseconds of ``time.monotonic_ns``.
        name: Method and path.
        trace_headers: W3C trace context of the client, by the names of the headers.
        request_ids: What the engine calls the requests that it became.
    """

    began_ns: int
    name: str
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)


current_entry: ContextVar[Entry | None] = ContextVar("rustvllm_entry", default=None)
"""What the running task serves; None without HTTP, or while nothing is traced."""


class FrontTracer:
    """Follows the requests of one front end, in its thread.

    Args:
        tracer: Takes records; None disables them.
        spans: Takes requests that have ended; None disables spans.
        model_name: For the spans.
        component: What takes the requests in, by the field's name.
    """

    def __init__(
        self, tracer: Tracer | None, spans: RequestSpans | None, model_name: str, component: str = "AsyncLLM"
    ) -> None:
        self.tracer = tracer or Tracer()
        self._spans = spans
        self._model_name = model_name
        self._component = component
        self._asked: dict[str, tuple[EngineCoreRequest, Mapping[str, str]]] = {}

    def taken(
        self, request_id: str, request: EngineCoreRequest, trace_headers: Mapping[str, str] | None = None
    ) -> None:
        """A request was checked and is about to be handed to the engine."""
        entry = current_entry.get()
        if entry is not None:
            entry.request_ids.append(request_id)
            trace_headers = trace_headers or entry.trace_headers
        if self._spans is not None:
            self._asked[request_id] = request, trace_headers or {}
        params = request.params
        arrival_ns = min(request.arrival_ns, request.began_ns) if entry is None else entry.began_ns
        name, component = ("generate", self._component) if entry is None else (entry.name, "APIServer")
        self.tracer.write(TraceRecord(arrival_ns, "entry", name, request_id, component=component))
        self.tracer.write(
            TraceRecord(
                request.began_ns,
                "input_processing",
                "checked",
                request_id,
                duration_ns=request.processed_ns - request.began_ns,
                extras={
                    "num_chars": None if request.prompt is None else len(request.prompt),
                    "num_prompt_tokens": len(request.prompt_token_ids),
                    "max_tokens": request.max_tokens,
                    "n": params.n,
                    "temperature": params.temperature,
                }
                | ({} if request.lora_request is None else {"adapter": request.lora_request.lora_name}),
            )
        )

    def polled(
        self,
        began_ns: int,
        requests: Mapping[int, RequestState],
        events: Sequence[tuple[int, bytes]],
        deltas: Sequence[_core.RequestDelta],
    ) -> None:
        """What the engine gave was turned into text: ``events`` are for streams, ``deltas`` for outputs."""
        now = monotonic_ns()
        self.tracer.write(
            TraceRecord(
                began_ns,
                "detokenise",
                "polled",
                duration_ns=now - began_ns,
                extras={"num_events": len(events), "num_deltas": len(deltas)},
            )
        )
        for key, event in events:
            if (state := requests.get(key)) is not None:
                extras = {"num_bytes": len(event)}
                self.tracer.write(TraceRecord(now, "detokenise", "event", state.request_id, extras=extras))
        for delta in deltas:
            if (state := requests.get(delta.key)) is not None:
                extras = {"num_new_tokens": len(delta.new_token_ids), "num_new_chars": len(delta.new_text)}
                self.tracer.write(TraceRecord(now, "detokenise", "text", state.request_id, extras=extras))

    def ended(self, state: RequestState, *, is_abandoned: bool = False) -> None:
        """A request has given its last output, or its caller has left."""
        now, metrics = monotonic_ns(), state.metrics
        extras: dict[str, object] = {
            "finish_reason": "abort" if is_abandoned else [sample.finish_reason for sample in state.samples],
            "num_output_tokens": sum(len(sample.token_ids) for sample in state.samples),
            "num_cached_tokens": state.num_cached_tokens,
            "e2e_ms": now / 1e6 - metrics.arrival_time * 1e3,
        }
        for name, at in (("queue_ms", metrics.first_scheduled_time), ("first_token_ms", metrics.first_token_time)):
            if at is not None:
                extras[name] = (at - metrics.arrival_time) * 1e3
        event = "abandoned" if is_abandoned else "finished"
        self.tracer.write(
            TraceRecord(now, "response", event, state.request_id, extras=extras, component=self._component)
        )
        asked = self._asked.pop(state.request_id, None)
        if self._spans is not None and asked is not None:
            finished = metrics.finished_time or now / 1e9
            attributes = _span_attributes(state, asked[0], finished, self._model_name)
            self._spans.write(attributes, metrics.arrival_time, finished, asked[1], state.error)

    def close(self, span_seconds: float = CLOSE_SECONDS) -> None:
        """Nothing more comes: write what waits, and send spans for so many seconds at most."""
        self.tracer.close()
        if self._spans is not None:
            self._spans.close(span_seconds)


def make_front_tracer(tracer: Tracer | None, config: EngineConfig, component: str = "AsyncLLM") -> FrontTracer | None:
    """The tracer of a front end's requests; None if the configuration asks for none.

    Args:
        tracer: Takes records.
        config: Of its engine, with the endpoint for spans.
        component: What takes the requests in, by the field's name.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    endpoint = config.tracing.otlp_endpoint
    spans = None if endpoint is None else RequestSpans(endpoint)
    if tracer is None and spans is None:
        return None
    model = config.model
    name = model.served_model_name[0] if model.served_model_name else model.model
    return FrontTracer(tracer, spans, name, component)


def debug_front_tracer(component: str) -> FrontTracer:
    """A tracer of a front end's requests for the log at level DEBUG, and for nothing else."""
    return FrontTracer(Tracer([LogSink(logging.DEBUG)]), None, "", component)


def _span_attributes(
    state: RequestState, request: EngineCoreRequest, finished: float, model_name: str
) -> dict[str, str | int | float | None]:
    """What vLLM's span of a request has, under its names; times in seconds, None while unknown."""
    metrics, params = state.metrics, request.params
    scheduled, first = metrics.first_scheduled_time, metrics.first_token_time
    return {
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": state.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": len(state.samples),
        "gen_ai.usage.prompt_tokens": len(state.prompt_ids),
        "gen_ai.usage.completion_tokens": sum(len(sample.token_ids) for sample in state.samples),
        "gen_ai.latency.time_in_queue": _between(metrics.arrival_time, scheduled),
        "gen_ai.latency.time_to_first_token": _between(metrics.arrival_time, first),
        "gen_ai.latency.e2e": finished - metrics.arrival_time,
        "gen_ai.latency.time_in_model_prefill": _between(scheduled, first),
        "gen_ai.latency.time_in_model_decode": _between(first, finished),
        "gen_ai.latency.time_in_model_inference": _between(scheduled, finished),
    }


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)
