"""``RequestSpans``: one OpenTelemetry span for each request that has ended, with vLLM's names and attributes.

The SDK is optional (``pip install 'rustvllm[otel]'``). Its batch processor sends spans in its own thread, and drops
those that a collector does not take in time, so that no request waits. The SDK itself reads ``OTEL_SERVICE_NAME``,
``OTEL_EXPORTER_OTLP_HEADERS`` and its other variables.
"""

import atexit
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from rustvllm.exceptions import ConfigError

SPAN_NAME: Final = "llm_request"
TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""Headers of the W3C trace context."""
GRPC_PORT: Final = 4317
"""Port where collectors expect gRPC; for others it is HTTP, unless ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` is set."""
CLOSE_SECONDS: Final = 0.3
"""How long the end of a server waits for the last spans to be sent."""
EXIT_SECONDS: Final = 5.0
"""How long a program with an ``LLM`` waits at its end for the last spans to be sent."""


class RequestSpans:
    """Makes spans and sends them to a collector.

    Args:
        endpoint: The collector's URL.
        exporter: Takes the spans instead; for tests.

    Raises:
        ConfigError: The SDK is not installed.
    """

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise _not_installed(error) from error
        name = os.environ.get("OTEL_SERVICE_NAME") or "rustvllm"
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(exporter or _make_exporter(endpoint))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("rustvllm")
        self._propagator = TraceContextTextMapPropagator()
        self._server = trace.SpanKind.SERVER
        self._error = trace.StatusCode.ERROR
        self._is_closed = False
        atexit.register(self.close, EXIT_SECONDS)

    def write(
        self,
        attributes: Mapping[str, Any],
        arrival: float,
        finished: float,
        trace_headers: Mapping[str, str],
        error: str | None = None,
    ) -> None:
        """Make the span of a request that has ended.

        Args:
            attributes: The request's attributes, by OpenTelemetry's names; values that are None are left out.
            arrival: When it began, in seconds of ``time.monotonic``.
            finished: When it ended, in seconds of ``time.monotonic``.
            trace_headers: The span's parent, as sent by the client.
            error: Why it failed.
        """
        # Spans need wall-clock times; that clock may have been set meanwhile, so all times are computed back from now.
        offset = time.time() - time.monotonic()
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(dict(trace_headers)),
            kind=self._server,
            start_time=int((arrival + offset) * 1e9),
            attributes={name: value for name, value in attributes.items() if value is not None},
        )
        if error is not None:
            span.set_status(self._error, error)
        span.end(int((finished + offset) * 1e9))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Send the waiting spans, for at most ``timeout`` seconds; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        # In a thread that may be abandoned, because the SDK's own limits do not end a transfer that has begun.
        sender = threading.Thread(target=self._processor.force_flush, name="rustvllm-spans", daemon=True)
        sender.start()
        sender.join(timeout)


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """The W3C trace context in a request's headers (names in lower case)."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


def _make_exporter(endpoint: str) -> Any:
    url = urlsplit(endpoint)
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    is_grpc = url.scheme == "grpc" or (protocol == "grpc" if protocol else url.port == GRPC_PORT)
    try:
        if is_grpc:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(endpoint=endpoint, insecure=url.scheme != "https")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        if url.path in ("", "/"):
            endpoint = url._replace(path="/v1/traces").geturl()
        return OTLPSpanExporter(endpoint=endpoint)
    except ImportError as error:
        raise _not_installed(error) from error


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        f"otlp_traces_endpoint needs OpenTelemetry's SDK and exporter, which cannot be imported ({error}): pip install "
        "'rustvllm[otel]', or leave the endpoint out"
    )
