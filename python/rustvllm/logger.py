"""Logging: one tree of loggers named ``rustvllm``, one handler on stderr, and no secret in any record.

The handler is attached once, unless the application has already given the ``rustvllm`` logger its own. A line is text,
or an object of JSON (``RUSTVLLM_LOGGING_FORMAT``); a file of Python's logging configuration may decide everything
(``RUSTVLLM_LOGGING_CONFIG_PATH``).
"""

import datetime
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rustvllm import envs
from rustvllm.exceptions import ConfigError
from rustvllm.redaction import redact, redact_mapping, register_secrets

__all__ = ["ACCESS_LOGGER", "init_logger", "redact", "redact_mapping", "register_secrets", "take_over"]

ACCESS_LOGGER = "rustvllm.access"
FIELDS = "fields"
"""The name in ``extra=`` of further fields for a line of JSON; their text is in the message already."""
_ROOT = "rustvllm"
_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_LARGEST_CONFIG = 1 << 20


class _RedactingFormatter(logging.Formatter):
    """Masks secrets in the finished line, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _JsonFormatter(logging.Formatter):
    """One object per line: ``time``, ``level``, ``logger``, ``process``, ``message``, ``exception`` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": redact(record.getMessage()),
        }
        for name, value in getattr(record, FIELDS, {}).items():
            line[name] = redact(value) if isinstance(value, str) else value
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


class _RedactingFilter(logging.Filter):
    """Masks secrets in the records of a handler that has a formatter of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:  # what formatters print when it is there
            record.exc_text = redact(record.exc_text)
        return True


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to whatever ``sys.stderr`` is at that moment, so that redirection after start-up works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _value: Any) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


def init_logger(name: str) -> logging.Logger:
    """The logger of a module (pass ``__name__``), with the tree set up on first use.

    Raises:
        ConfigError: ``RUSTVLLM_LOGGING_LEVEL`` is not a level, or another of the logging variables is wrong.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        _set_up(root)
    return logging.getLogger(name)


def set_up_again() -> None:
    """Set the tree up from the environment as it is now: a command line may have changed it."""
    root = logging.getLogger(_ROOT)
    for handler in list(root.handlers):
        if isinstance(handler, _StderrHandler):  # not one of an application's own
            root.removeHandler(handler)
    if not root.handlers:
        _set_up(root)


def take_over(name: str, level: int) -> None:
    """Have a library's loggers write through ours, from ``level`` on, unless a configuration file names them."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        logger.setLevel(level)
        logger.handlers = list(logging.getLogger(_ROOT).handlers)
        logger.propagate = not logger.handlers


def mask_library(name: str) -> None:
    """Have the handlers of a library's own loggers mask secrets, too."""
    for handler in logging.getLogger(name).handlers:
        if not any(isinstance(each, _RedactingFilter) for each in handler.filters):
            handler.addFilter(_RedactingFilter())


def format_line(name: str, level: int, message: str) -> str:
    """The line, without its end, that a logger of that name would write to stderr now."""
    return _make_formatter().format(logging.LogRecord(name, level, __file__, 0, message, None, None))


def _make_formatter() -> logging.Formatter:
    if envs.logging_format() == "json":
        return _JsonFormatter()
    return _RedactingFormatter(_FORMAT, datefmt="%m-%d %H:%M:%S")


def _set_up(root: logging.Logger) -> None:
    handler = _StderrHandler()
    handler.setFormatter(_make_formatter())
    level = envs.logging_level()
    path = envs.logging_config_path()
    config = None if path is None else read_logging_config(path)
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False
    if config is not None:
        _apply(config, path)


def read_logging_config(path: Path) -> dict[str, Any]:
    """A file for :func:`logging.config.dictConfig`, as JSON.

    Raises:
        ConfigError: It cannot be read, or is not a JSON object with ``version``.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_CONFIG:
            raise ConfigError(f"the logging configuration {path} has {size} bytes; the limit is {_LARGEST_CONFIG}")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the logging configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the logging configuration {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"the logging configuration {path} must be a JSON object for logging.config.dictConfig")
    return config


def _apply(config: Mapping[str, Any], path: Path | None) -> None:
    import logging.config  # takes as long as all the rest of this module

    # By default every logger that exists and is not named would fall silent.
    settings = {"version": 1, "disable_existing_loggers": False, **config}
    try:
        logging.config.dictConfig(settings)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        cause = error.__cause__ or error
        raise ConfigError(f"the logging configuration {path} is wrong: {error}: {cause}") from error
    for handler in _handlers(settings):
        handler.addFilter(_RedactingFilter())


def _handlers(settings: Mapping[str, Any]) -> Iterator[logging.Handler]:
    """Those that a configuration has made, each once."""
    seen: set[int] = set()
    for name in (None, *settings.get("loggers", {})):
        for handler in logging.getLogger(name).handlers:
            if id(handler) not in seen and not isinstance(handler, _StderrHandler):
                seen.add(id(handler))
                yield handler
