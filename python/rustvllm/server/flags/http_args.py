"""The flags of the HTTP layer: browsers, TLS, middleware, request ids and limits. Light: ``--help`` imports it."""

import argparse
import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from rustvllm.exceptions import ConfigError
from rustvllm.server.flags.host_names import ANY_HOST
from rustvllm.server.flags.http_settings import (
    DEFAULT_MAX_HEAD_BYTES,
    DEFAULT_MAX_HEADER_COUNT,
    CorsSettings,
    HttpSettings,
    TlsSettings,
)

MIN_HEAD_BYTES = 1024
MAX_HEAD_BYTES = 64 << 20
MAX_HEADER_COUNT = 10_000
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_-][A-Za-z0-9._-]*")
_CERT_REQS = {"0": 0, "none": 0, "1": 1, "optional": 1, "2": 2, "required": 2}


def add_http_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags, as the groups ``browsers``, ``TLS`` and ``HTTP``."""
    _add_browser_args(parser.add_argument_group("browsers", "What pages in browsers may do."))
    _add_tls_args(parser.add_argument_group("TLS", "HTTPS instead of HTTP."))
    _add_layer_args(parser.add_argument_group("HTTP", "Layers between the socket and the endpoints."))


def _add_browser_args(group: Any) -> None:
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        action=_Words,
        check=_host,
        metavar="HOST",
        help="host names that this server answers to, such as llm.example.com or *.example.com, on any port, in "
        "addition to localhost and loopback addresses; other names get a 403; *: any (default: none on a loopback "
        "address without a key, else *)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="*",
        action=_Words,
        check=_origin,
        default=(),
        metavar="ORIGIN",
        help="origins whose pages may call this server (CORS), such as https://chat.example.com, as words or one JSON "
        "list; *: any (default: none)",
    )
    group.add_argument(
        "--allowed-methods",
        nargs="+",
        action=_Words,
        check=_method,
        default=("*",),
        metavar="METHOD",
        help="methods that these pages may use (default: *, all)",
    )
    group.add_argument(
        "--allowed-headers",
        nargs="+",
        action=_Words,
        check=_header,
        default=("*",),
        metavar="HEADER",
        help="headers that these pages may send (default: *, all)",
    )
    group.add_argument(
        "--allow-credentials", action="store_true", help="let these pages send cookies and client certificates"
    )


def _add_tls_args(group: Any) -> None:
    group.add_argument("--ssl-keyfile", metavar="FILE", help="private key, PEM, not encrypted")
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate and those that signed it, PEM")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="authorities of clients' certificates, PEM")
    group.add_argument(
        "--ssl-cert-reqs",
        type=_cert_reqs,
        default=0,
        metavar="{0,1,2}",
        help="clients need a certificate: 0 (none): no, 1 (optional): checked if there is one, 2 (required): yes; both "
        "need --ssl-ca-certs (default: %(default)s)",
    )
    group.add_argument("--ssl-ciphers", metavar="LIST", help="ciphers of TLS 1.2 in OpenSSL's form (default: its own)")
    group.add_argument(
        "--enable-ssl-refresh", action="store_true", help="read certificate and key again when their files change"
    )


def _add_layer_args(group: Any) -> None:
    group.add_argument(
        "--middleware",
        action="append",
        type=_import_path,
        metavar="MODULE.NAME",
        help="ASGI middleware class, or coroutine function of request and call_next, around every endpoint; repeat it "
        "for several, the last is the outermost",
    )
    group.add_argument(
        "--enable-request-id-headers",
        action="store_true",
        help="answer with X-Request-Id: the client's own, or the one in the answer's id",
    )
    group.add_argument(
        "--h11-max-incomplete-event-size",
        type=_number(MIN_HEAD_BYTES, MAX_HEAD_BYTES),
        default=DEFAULT_MAX_HEAD_BYTES,
        metavar="BYTES",
        help="largest head of a request (its first line with the URL, and its headers); larger ones are answered 431 "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--h11-max-header-count",
        type=_number(1, MAX_HEADER_COUNT),
        default=DEFAULT_MAX_HEADER_COUNT,
        metavar="N",
        help="most headers of a request; more are answered 431 (default: %(default)s)",
    )
    group.add_argument(
        "--api-key-exempt",
        nargs="+",
        action=_Words,
        check=_path,
        default=(),
        metavar="PATH",
        help="paths that need no key, such as /metrics, besides /health, /ping and /version",
    )


def http_settings(args: argparse.Namespace, quiet_paths: Sequence[str] = ()) -> HttpSettings:
    """The settings of a command line.

    Raises:
        ConfigError: Flags of TLS or of CORS that do not go together.
    """
    return HttpSettings(
        cors=_cors_settings(args),
        allowed_hosts=None if args.allowed_hosts is None else tuple(args.allowed_hosts),
        tls=_tls_settings(args),
        middleware=tuple(args.middleware or ()),
        request_id_headers=args.enable_request_id_headers,
        max_head_bytes=args.h11_max_incomplete_event_size,
        max_header_count=args.h11_max_header_count,
        quiet_paths=tuple(quiet_paths),
        keyless_paths=tuple(args.api_key_exempt),
    )


def _cors_settings(args: argparse.Namespace) -> CorsSettings:
    settings = CorsSettings(
        origins=tuple(args.allowed_origins),
        methods=tuple(args.allowed_methods),
        headers=tuple(args.allowed_headers),
        credentials=args.allow_credentials,
    )
    if not settings.origins:
        others = {
            "--allowed-methods": settings.methods != ("*",),
            "--allowed-headers": settings.headers != ("*",),
            "--allow-credentials": settings.credentials,
        }
        for flag, is_given in others.items():
            if is_given:
                raise ConfigError(f"{flag} needs --allowed-origins: without it, no web page may call this server")
    return settings


def _tls_settings(args: argparse.Namespace) -> TlsSettings | None:
    if args.ssl_certfile is None:
        others = {
            "--ssl-keyfile": args.ssl_keyfile,
            "--ssl-ca-certs": args.ssl_ca_certs,
            "--ssl-cert-reqs": args.ssl_cert_reqs,
            "--ssl-ciphers": args.ssl_ciphers,
            "--enable-ssl-refresh": args.enable_ssl_refresh,
        }
        for flag, value in others.items():
            if value:
                raise ConfigError(f"{flag} needs --ssl-certfile: TLS needs a certificate")
        return None
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        raise ConfigError(
            f"--ssl-cert-reqs {args.ssl_cert_reqs} needs --ssl-ca-certs, which verify the clients' certificates"
        )
    return TlsSettings(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        ca_certs=args.ssl_ca_certs,
        cert_reqs=args.ssl_cert_reqs,
        ciphers=args.ssl_ciphers,
        refresh=args.enable_ssl_refresh,
    )


class _Words(argparse.Action):
    """Takes words, or one JSON list of them, and checks each."""

    def __init__(self, *args: Any, check: Callable[[str], str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check = check

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        words: Any = list(values)
        if len(words) == 1 and words[0].lstrip().startswith("["):
            try:
                words = json.loads(words[0])
            except (ValueError, RecursionError) as error:
                parser.error(f"argument {option_string}: not a JSON list: {values[0]!r}: {error}")
        try:
            setattr(namespace, self.dest, tuple(self._check(word) for word in words))
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument {option_string}: {error}")


def _host(text: Any) -> str:
    if isinstance(text, str):
        if text == ANY_HOST or _HOST.fullmatch(text):
            return text
        try:
            return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
        except ValueError:
            pass
    raise argparse.ArgumentTypeError(
        "a host must be a name such as llm.example.com or *.example.com, or an address, both without scheme and port, "
        f"or *, got {text!r}"
    )


def _origin(text: Any) -> str:
    if text in ("*", "null"):
        return str(text)
    if isinstance(text, str) and text.isprintable():
        try:
            parts = urlsplit(text)
            _ = parts.port  # checked when it is asked for
        except ValueError:
            parts = urlsplit("")
        if parts.scheme and parts.netloc and f"{parts.scheme}://{parts.netloc}" == text and "@" not in text:
            return text
    raise argparse.ArgumentTypeError(
        f"an origin must be scheme://host or scheme://host:port, without a path, or *, got {text!r}"
    )


def _method(text: Any) -> str:
    if isinstance(text, str) and (text == "*" or (_TOKEN.fullmatch(text) and text == text.upper())):
        return text
    raise argparse.ArgumentTypeError(f"must be a method such as POST, or *, got {text!r}")


def _header(text: Any) -> str:
    if isinstance(text, str) and _TOKEN.fullmatch(text):  # * is a token too
        return text
    raise argparse.ArgumentTypeError(f"must be the name of a header, or *, got {text!r}")


def _path(text: Any) -> str:
    if isinstance(text, str) and text.startswith("/") and text.isprintable() and "*" not in text:
        return text
    raise argparse.ArgumentTypeError(f"must be a path such as /metrics, got {text!r}")


def _import_path(text: str) -> str:
    if all(part.isidentifier() for part in text.split(".")) and "." in text:
        return text
    raise argparse.ArgumentTypeError(f"must name a class or a function as module.name, got {text!r}")


def _cert_reqs(text: str) -> int:
    if (value := _CERT_REQS.get(text.lower())) is not None:
        return value
    raise argparse.ArgumentTypeError(f"must be 0 (none), 1 (optional) or 2 (required), got {text!r}")


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text[:20]) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text[:40]!r}")
        return int(text)

    return parse
