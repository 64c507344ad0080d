"""``TracingConfig``: where records of requests go, and how it is made from arguments and the environment."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from rustvllm import envs
from rustvllm.exceptions import ConfigError


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Where records of requests go.

    Attributes:
        log: The logger ``rustvllm.trace``.
        file: A file in the format of Chrome and Perfetto, which the process that begins it has made.
        otlp_endpoint: A collector of OpenTelemetry spans, as a URL.
    """

    log: bool = False
    file: Path | None = None
    otlp_endpoint: str | None = None


def make_tracing_config(trace: bool | None, trace_file: str | None, otlp_traces_endpoint: str | None) -> TracingConfig:
    """Where records of requests go, for an engine or for a front end without one.

    Raises:
        ConfigError: The endpoint is not a URL, or contains a password; or OpenTelemetry is not installed.
    """
    if otlp_traces_endpoint is not None:
        _check_endpoint(otlp_traces_endpoint)
        _check_opentelemetry()
    return TracingConfig(
        log=envs.trace() if trace is None else trace,
        file=None if trace_file is None else Path(trace_file).expanduser().absolute(),
        otlp_endpoint=otlp_traces_endpoint,
    )


def _check_opentelemetry() -> None:
    """Refuse an endpoint when the SDK that sends spans is not installed; its exporter is looked for when it is made."""
    try:
        is_installed = find_spec("opentelemetry.sdk") is not None
    except ImportError:  # not even its parent package
        is_installed = False
    if not is_installed:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry's SDK and exporter, which are not installed: "
            "pip install 'rustvllm[otel]', or leave the endpoint out"
        )


def _check_endpoint(endpoint: object) -> None:
    try:
        url = urlsplit(endpoint if isinstance(endpoint, str) else "")
        is_url = url.scheme in ("http", "https", "grpc") and bool(url.hostname)
        has_password = "@" in str(endpoint)
    except ValueError:
        is_url = has_password = False
    if has_password:
        raise ConfigError(
            "otlp_traces_endpoint must not contain a user or a password: put them into OTEL_EXPORTER_OTLP_HEADERS"
        )
    if not is_url:
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces, got {endpoint!r:.200}"
        )
