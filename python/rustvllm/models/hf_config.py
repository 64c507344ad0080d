"""Reads ``config.json`` key by key, with a clear error for what is missing, of the wrong kind or out of range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rustvllm.exceptions import ModelLoadError

MAX_DIMENSION = 1 << 24
"""No size in a configuration is larger; a file that says otherwise is broken, and must not take the memory."""

_REQUIRED = object()


class HFConfig:
    """Typed access to a Hugging Face configuration.

    Args:
        values: the parsed ``config.json``.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def positive_int(self, *names: str, default: object = _REQUIRED) -> int:
        """The first of ``names`` that is set, else ``default``.

        Raises:
            ModelLoadError: none is set and there is no default, or the value is no integer in ``[1, 2²⁴]``.
        """
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIMENSION:
            raise ModelLoadError(f"config.json: {name!r} must be an integer from 1 to {MAX_DIMENSION}, got {value!r}")
        return value

    def positive_float(self, name: str, default: float) -> float:
        """A positive finite number, e.g. a norm's epsilon."""
        _, value = self._first((name,), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelLoadError(f"config.json: {name!r} must be a positive number, got {value!r}")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """A JSON boolean."""
        _, value = self._first((name,), default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"config.json: {name!r} must be true or false, got {value!r}")
        return value

    def string(self, name: str, default: str) -> str:
        """A JSON string."""
        _, value = self._first((name,), default)
        if not isinstance(value, str):
            raise ModelLoadError(f"config.json: {name!r} must be a string, got {value!r}")
        return value

    def refuse_unless(self, name: str, supported: object) -> None:
        """Refuse a setting that changes the computation in a way that is not built.

        Raises:
            ModelLoadError: ``name`` is set to something else than ``supported``.
        """
        value = self._values.get(name)
        if value is not None and value != supported:
            raise ModelLoadError(f"config.json: {name!r} = {value!r} is not supported; supported: {supported!r}")

    def _first(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        for name in names:
            if self._values.get(name) is not None:
                return name, self._values[name]
        if default is _REQUIRED:
            present = ", ".join(sorted(self._values)) or "nothing"
            raise ModelLoadError(
                f"config.json: required key {' or '.join(map(repr, names))} is missing (has: {present})"
            )
        return names[0], default
