"""Settings of the HTTP layer: who may call from a browser, certificates, limits of a request's head."""

from dataclasses import dataclass, field

DEFAULT_MAX_HEAD_BYTES = 64 << 10
DEFAULT_MAX_HEADER_COUNT = 256
DEFAULT_KEEP_ALIVE_SECONDS = 10.0


@dataclass(frozen=True)
class CorsSettings:
    """What the pages of other origins may do; without origins browsers let them do nothing."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(frozen=True)
class TlsSettings:
    """Files in PEM form, and whether clients need a certificate too (0: no, 1: may have one, 2: must)."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str | None = None
    refresh: bool = False


@dataclass(frozen=True)
class HttpSettings:
    """Everything between the socket and the endpoints; sizes in bytes."""

    cors: CorsSettings = field(default_factory=CorsSettings)
    tls: TlsSettings | None = None
    middleware: tuple[str, ...] = ()
    request_id_headers: bool = False
    max_head_bytes: int = DEFAULT_MAX_HEAD_BYTES
    max_header_count: int = DEFAULT_MAX_HEADER_COUNT
    quiet_paths: tuple[str, ...] = ()
    """Not in the access log."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names in ``Host`` that are answered besides those of the loopback; None: any."""
    keyless_paths: tuple[str, ...] = ()
    """Answered without an API key, besides the probes."""
