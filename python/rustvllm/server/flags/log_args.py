"""The flags of logging, and how they reach every process of a server: by the environment. Light as ``serve_args``."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from rustvllm.envs import LOGGING_FORMATS
from rustvllm.exceptions import ConfigError
from rustvllm.logger import read_logging_config, set_up_again


@dataclass(frozen=True)
class RequestLogSettings:
    """What the log says of each request; ``max_len`` characters or token ids of a text at most, None: all."""

    requests: bool = False
    outputs: bool = False
    max_len: int | None = None


def add_log_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags as the group ``logging``."""
    group = parser.add_argument_group("logging", "Logs on stderr; RUSTVLLM_LOGGING_LEVEL sets their level.")
    group.add_argument(
        "--log-format",
        choices=LOGGING_FORMATS,
        help="text, or json: one object per line, start-up messages included (default: $RUSTVLLM_LOGGING_FORMAT, else "
        "text)",
    )
    group.add_argument(
        "--log-config-file",
        metavar="FILE",
        help="JSON for Python's logging.config.dictConfig, used in every process; secrets are still masked (default: "
        "$RUSTVLLM_LOGGING_CONFIG_PATH)",
    )
    group.add_argument(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log each request's id, sizes and sampling parameters; its prompt at level DEBUG only (default: no)",
    )
    group.add_argument(
        "--disable-log-requests",
        dest="enable_log_requests",
        action="store_false",
        help="the same as --no-enable-log-requests",
    )
    group.add_argument(
        "--enable-log-outputs", action="store_true", help="also log generated text; needs --enable-log-requests"
    )
    group.add_argument(
        "--max-log-len",
        type=_length,
        metavar="N",
        help="most characters, or token ids, of a prompt or an output in the log (default: all)",
    )
    group.add_argument("--enable-access-log", action="store_true", help="log one line per HTTP request")
    group.add_argument(
        "--disable-uvicorn-access-log",
        dest="enable_access_log",
        action="store_false",
        help="do not log a line per HTTP request, which is the default",
    )
    group.add_argument(
        "--disable-access-log-for-endpoints",
        type=_paths,
        default=(),
        metavar="PATHS",
        help="paths that the access log leaves out, such as /health,/metrics",
    )
    group.add_argument(
        "--uvicorn-log-level",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        default="warning",
        help="log level of the HTTP layer (default: %(default)s)",
    )


def configure_logging(args: argparse.Namespace) -> None:
    """Have this process and all that it starts log as the command line says.

    Raises:
        ConfigError: The configuration file cannot be used.
    """
    if args.log_format is not None:
        os.environ["RUSTVLLM_LOGGING_FORMAT"] = args.log_format
    if args.log_config_file is not None:
        path = Path(args.log_config_file).expanduser()
        read_logging_config(path)
        os.environ["RUSTVLLM_LOGGING_CONFIG_PATH"] = str(path.absolute())
    set_up_again()


def request_log_settings(args: argparse.Namespace) -> RequestLogSettings:
    """What to log of requests.

    Raises:
        ConfigError: Outputs without requests.
    """
    if args.enable_log_outputs and not args.enable_log_requests:
        raise ConfigError(
            "--enable-log-outputs needs --enable-log-requests: a logged output refers to its logged request"
        )
    return RequestLogSettings(args.enable_log_requests, args.enable_log_outputs, args.max_log_len)


def _length(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text[:40]!r}")
    return int(text)


def _paths(text: str) -> tuple[str, ...]:
    paths = tuple(part.strip() for part in text.split(",") if part.strip())
    wrong = next((path for path in paths if not path.startswith("/")), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"must be paths such as /health,/metrics, got {wrong!r}")
    return paths
