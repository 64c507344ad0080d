"""What must never be read in a log: keys, tokens and passwords, found by their shape, their name or their value."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

MASK = "***"
_SHORTEST_SECRET = 4
"""Masking a shorter value would mangle ordinary words."""
_SECRET_VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "RUSTVLLM_API_KEY",
    "RUSTVLLM_ENGINE_SECRET",
    "OPENAI_API_KEY",
)
_HEADER_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
"""Lists of ``name=value``, of which the values are secret."""
_SECRET_NAMES = (
    "token",
    "api_key",
    "api-key",
    "apikey",
    "password",
    "passwd",
    "secret",
    "authorization",
    "otlp_headers",
)
_SHAPES = (
    # Hub tokens, and keys of the form that OpenAI's have.
    re.compile(r"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{16,}"),
    # What follows the scheme in a header.
    re.compile(r"(?<=\bBearer )[^\s'\",]+|(?<=\bBasic )[A-Za-z0-9+/=]{4,}", re.IGNORECASE),
    # A header with a key of its own, as text or in a printed mapping.
    re.compile(r"(?<=\bx-api-key)(['\"]?\s*[:=]\s*b?['\"]?)[^\s'\",&]+", re.IGNORECASE),
    # Name and password of a URL.
    re.compile(r"(?<=://)[^\s/@'\"]+(?=@)"),
    # A parameter of a URL.
    re.compile(r"([?&](?:api[_-]?key|key|token|access_token|password|secret)=)[^\s&'\"#]+", re.IGNORECASE),
    # What signs a URL: with it any client may read what the URL leads to.
    re.compile(
        r"([?&](?:x-amz-(?:signature|security-token)|x-goog-signature|signature|sig)=)[^\s&'\"#]+", re.IGNORECASE
    ),
)
_registered: set[str] = set()


def register_secrets(values: Iterable[str]) -> None:
    """Have these values masked wherever they turn up in what this process logs."""
    _registered.update(value for value in values if len(value) >= _SHORTEST_SECRET)


def redact(text: str) -> str:
    """``text`` with everything masked that looks like a secret, or is one that this process knows."""
    for value in sorted(_known(), key=len, reverse=True):  # one may begin with another
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, MASK)
    for shape in _SHAPES:
        text = shape.sub(lambda found: f"{found.group(1) if found.re.groups else ''}{MASK}", text)
    return text


def _known() -> set[str]:
    """The secrets that this process has registered or has in its environment."""
    values = set(_registered)
    for variable in _SECRET_VARIABLES:
        value = os.environ.get(variable, "")
        values.update((value, *value.split()))
    for variable in _HEADER_VARIABLES:
        for header in os.environ.get(variable, "").split(","):
            values.add(unquote(header.partition("=")[2]).strip())
    return values


def redact_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``values`` fit for a log: what is named like a secret is masked when it is set."""

    def is_secret(name: str) -> bool:
        return any(part in name.lower() for part in _SECRET_NAMES) and not name.lower().endswith("tokens")

    return {name: MASK if value and is_secret(name) else value for name, value in values.items()}
