"""Logging: one tree of loggers named ``rustvllm``, one handler on stderr, and no secret in any record.

The handler is attached once, unless the application has already given the ``rustvllm`` logger its own.
"""

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from rustvllm import envs

_ROOT = "rustvllm"
_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_MASK = "***"
# Hub tokens, and whatever follows "Bearer" in a quoted header.
_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}|(?<=Bearer )[^\s'\",]+", re.IGNORECASE)
_SECRET_NAMES = ("token", "api_key", "apikey", "password", "secret")
_SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RUSTVLLM_API_KEY", "RUSTVLLM_ENGINE_SECRET")


def redact(text: str) -> str:
    """``text`` with hub tokens, bearer tokens and the values of the secret environment variables masked."""
    for variable in _SECRET_VARIABLES:
        value = os.environ.get(variable, "")
        if len(value) >= 4:  # masking a shorter one would mangle ordinary words
            text = text.replace(value, _MASK)
    return _SECRET.sub(_MASK, text)


def redact_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``values`` fit for a log: what is named like a secret is masked when it is set."""

    def is_secret(name: str) -> bool:
        return any(part in name.lower() for part in _SECRET_NAMES) and not name.lower().endswith("tokens")

    return {name: _MASK if value and is_secret(name) else value for name, value in values.items()}


class _RedactingFormatter(logging.Formatter):
    """Masks secrets in the finished line, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


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
        ConfigError: ``RUSTVLLM_LOGGING_LEVEL`` is no level.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        handler = _StderrHandler()
        handler.setFormatter(_RedactingFormatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(envs.logging_level())
        root.propagate = False
    return logging.getLogger(name)
