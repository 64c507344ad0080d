"""The command-line flags of the server's front end. Light on purpose: ``--help`` imports this and no FastAPI."""

import argparse
import re
from pathlib import Path

from rustvllm.config import METRICS_PREFIX
from rustvllm.config.flags.refused import add_vllm_flags
from rustvllm.config.hub.adapters import is_hub_name
from rustvllm.exceptions import ConfigError
from rustvllm.server.flags.answer_args import add_answer_args
from rustvllm.server.flags.api_keys import API_KEY_VARIABLE
from rustvllm.server.flags.dashboard_args import add_dashboard_args
from rustvllm.server.flags.http_args import add_http_args
from rustvllm.server.flags.http_settings import DEFAULT_KEEP_ALIVE_SECONDS
from rustvllm.server.flags.log_args import add_log_args

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_STALL_TIMEOUT = 60.0
MAX_PROCESSES = 64
"""API processes, or engines, of one server at most."""


def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the front end and of the server's processes, each as a group."""
    _add_server_args(parser)
    _add_chat_args(parser)
    add_http_args(parser)
    add_log_args(parser)
    _add_process_args(parser)
    return parser


def add_unsupported_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what does not work yet, as flags that say so; the last to be added, after the engine's."""
    add_vllm_flags(parser)
    return parser


def _add_process_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes", "Which processes run; docs/processes.md draws them.")
    group.add_argument(
        "--api-server-count",
        "-asc",
        type=_process_count,
        metavar="N",
        help="API processes behind one listening socket; 0: none, the same as --headless (default: 1)",
    )
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=_process_count,
        metavar="N",
        help="engine processes, each with the whole model (default: 1)",
    )
    group.add_argument(
        "--disable-frontend-multiprocessing",
        action="store_true",
        help="API and engine in one process, as threads",
    )
    group.add_argument(
        "--headless", action="store_true", help="engines only; front ends connect to them with --engine-address"
    )
    group.add_argument(
        "--engine-address",
        nargs="+",
        action="extend",
        metavar="ADDRESS",
        help="unix:/path or tcp:HOST:PORT of each engine: with --headless, where engines listen (default: a private "
        "directory); without it, running engines to connect to",
    )
    group.add_argument(
        "--engine-secret-file",
        metavar="FILE",
        help="file with the secret of 16 bytes or more that TCP needs at both ends (default: $RUSTVLLM_ENGINE_SECRET)",
    )
    group.add_argument(
        "--restart-engine",
        action="store_true",
        help="restart an engine that died, at most 3 times within 5 minutes, instead of ending the server; a front "
        "end of engines that run elsewhere waits for them to come back",
    )
    group.add_argument(
        "--stall-timeout",
        type=_seconds,
        default=DEFAULT_STALL_TIMEOUT,
        metavar="SECONDS",
        help="seconds without a sign of life from an engine after which /health says 503; 0: never (default: "
        "%(default)g)",
    )
    group.add_argument(
        "--stall-action",
        choices=("report", "end"),
        default="report",
        help="what to do with an engine without a sign of life: report, /health names it; end, after twice the stall "
        "timeout its requests end with an error, it is killed, and --restart-engine starts another (default: "
        "%(default)s)",
    )


def _add_server_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server", "The HTTP front end.")
    group.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help="port to listen on; 0 takes a free one (default: %(default)s)"
    )
    group.add_argument(
        "--uds",
        metavar="PATH",
        help="listen on a Unix socket, for this user alone (mode 600), instead of host and port",
    )
    group.add_argument(
        "--root-path", type=_root_path, default="", metavar="PATH", help="path under which a proxy shows this server"
    )
    group.add_argument(
        "--lora-root",
        type=_folder,
        default=None,
        metavar="FOLDER",
        help="let clients load adapters from below this folder with POST /v1/load_lora_adapter (default: clients load "
        "none)",
    )
    group.add_argument(
        "--lora-hub",
        nargs="+",
        type=_hub_owner,
        default=[],
        metavar="OWNER",
        help="let clients have adapters of these owners downloaded from the hub with POST /v1/load_lora_adapter; "
        "OWNER/NAME allows one, * all (default: clients download none)",
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help=f"API keys, one of which clients must send as a bearer token; every user of the machine can read a "
        f"command line (default: the words in ${API_KEY_VARIABLE})",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with more API keys, one per line; a number after a key is its weight for --scheduling-policy fair "
        "(1 to 1000, default 1); # begins a comment",
    )
    group.add_argument(
        "--max-body-bytes",
        type=positive,
        default=DEFAULT_MAX_BODY_BYTES,
        metavar="BYTES",
        help="largest accepted request body (default: %(default)s)",
    )
    group.add_argument(
        "--enable-prompt-tokens-details", action="store_true", help="report cached prompt tokens in usage"
    )
    group.add_argument(
        "--enable-force-include-usage", action="store_true", help="send usage at the end of every stream"
    )
    add_dashboard_args(group)
    group.add_argument("--disable-fastapi-docs", action="store_true", help="do not serve /docs and /openapi.json")
    group.add_argument(
        "--enable-server-load-tracking",
        action="store_true",
        help="accepted without effect: /load always says how many requests are open",
    )
    group.add_argument(
        "--metrics-prefix",
        type=_metrics_prefix,
        default=METRICS_PREFIX,
        metavar="PREFIX",
        help="prefix of the names of all metrics (default: %(default)s)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="seconds that a stop waits for open requests before it aborts them (default: 0)",
    )


def _add_chat_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers", "Chat templates, tool calls, reasoning and streams.")
    add_answer_args(group)
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring their own chat templates, rendered in a process with limited time and memory",
    )
    group.add_argument(
        "--sse-keep-alive-interval",
        type=_seconds,
        default=DEFAULT_KEEP_ALIVE_SECONDS,
        metavar="SECONDS",
        help="seconds of silence after which a stream sends a comment; 0: never (default: %(default)g)",
    )


def read_chat_template(value: str | None) -> str | None:
    """The template's text: ``value`` names a file, or is the text itself when it looks like Jinja.

    Raises:
        ConfigError: No such file, and no Jinja in it either.
    """
    if value is None:
        return None
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read --chat-template {value}: {getattr(exc, 'strerror', None) or exc}") from exc


def _metrics_prefix(text: str) -> str:
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*|", text):
        raise argparse.ArgumentTypeError(
            f"must consist of letters, digits, _ and :, and not begin with a digit, got {text!r}"
        )
    return text


def _root_path(text: str) -> str:
    if text and (not text.startswith("/") or text.endswith("/") or not text.isascii() or not text.isprintable()):
        raise argparse.ArgumentTypeError(f"must begin with / and not end with /, such as /models/a, got {text!r}")
    if set(text) & set(" ?#%"):
        raise argparse.ArgumentTypeError(f"must be a path such as /models/a, without a space, ?, # and %, got {text!r}")
    return text


def _folder(text: str) -> str:
    try:
        folder = Path(text).expanduser().resolve()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from None
    if not is_folder:
        raise argparse.ArgumentTypeError(f"must be a folder, but there is no folder {folder}")
    return str(folder)


def _hub_owner(text: str) -> str:
    if text != "*" and not is_hub_name(text if "/" in text else f"{text}/name"):
        raise argparse.ArgumentTypeError(f"must be an owner on the hub, OWNER/NAME or *, got {text[:200]!r}")
    return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """A flag's whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _process_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"must be a whole number up to {MAX_PROCESSES}, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to 86400, got {text!r}")
    return seconds
