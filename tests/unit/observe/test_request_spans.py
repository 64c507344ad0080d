"""Spans of requests: what the SDK gets, and that a slow collector delays no request."""

import threading
import time

import pytest

from rustvllm.config.engine_args import EngineArgs
from rustvllm.exceptions import ConfigError
from rustvllm.observe.trace.request_spans import RequestSpans, trace_context

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def sdk():
    return pytest.importorskip("opentelemetry.sdk.trace.export", reason="needs rustvllm[otel]")


def test_a_span_has_its_parent_its_times_and_no_holes(sdk):
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    spans = RequestSpans("http://nowhere.invalid", exporter)
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
    now = time.monotonic()
    spans.write({"gen_ai.request.id": "a", "gen_ai.latency.time_in_queue": None}, now - 2.5, now, headers)
    spans.write({"gen_ai.request.id": "b"}, now - 1, now, {}, error="out of luck")
    spans.write({"gen_ai.request.id": "c"}, now - 1, now, {"traceparent": "no such thing"})
    spans.close(30)
    first, second, third = exporter.get_finished_spans()
    assert first.context.trace_id == int(TRACE_ID, 16)
    assert first.parent.span_id == int(PARENT_ID, 16)
    assert first.context.trace_state["vendor"] == "1"
    assert (first.end_time - first.start_time) / 1e9 == pytest.approx(2.5, abs=1e-3)
    assert abs(first.end_time / 1e9 - time.time()) < 60
    assert dict(first.attributes) == {"gen_ai.request.id": "a"}
    assert first.status.is_unset
    assert second.parent is None
    assert second.status.description == "out of luck"
    assert third.parent is None, "a header that is none makes a trace of its own"


def test_a_collector_that_hangs_holds_no_request_up(sdk):
    released, began = threading.Event(), threading.Event()

    class Stuck(sdk.SpanExporter):
        def export(self, _spans):
            began.set()
            released.wait(60)
            return sdk.SpanExportResult.SUCCESS

        def shutdown(self):
            pass

    spans = RequestSpans("http://nowhere.invalid", Stuck())
    try:
        for _ in range(600):  # more than one batch
            spans.write({}, time.monotonic(), time.monotonic(), {})
        assert began.wait(30)
        spans.write({}, time.monotonic(), time.monotonic(), {})
        spans.close(0.05)
        spans.close(60)
    finally:
        released.set()


def test_the_context_is_taken_out_of_the_headers():
    assert trace_context({"traceparent": "x", "authorization": "secret"}) == {"traceparent": "x"}
    assert trace_context({}) == {}


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("localhost:4318", "must be a URL such as http://localhost:4318/v1/traces, got 'localhost:4318'"),
        ("ftp://host", "must be a URL"),
        ("http://[", "must be a URL"),
        (7, "must be a URL"),
        ("http://user:hidden@host:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_an_endpoint_that_is_none_is_refused(endpoint, message):
    with pytest.raises(ConfigError) as caught:
        EngineArgs(otlp_traces_endpoint=endpoint).create_engine_config()
    assert message in str(caught.value)
    assert "hidden" not in str(caught.value)
