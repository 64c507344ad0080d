"""Reads ``config.json`` key by key, with a clear error for keys that are missing, of the wrong kind or out of range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rustvllm.config.rope import MAX_POSITIONS
from rustvllm.exceptions import ModelLoadError

MAX_DIMENSION = 1 << 24
"""The largest size that a configuration may have; a larger one means a broken file, and must not use up the memory."""

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

_REQUIRED = object()


class HFConfig:
    """Typed access to a Hugging Face configuration.

    Args:
        values: The parsed ``config.json``.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def positive_int(self, *names: str, default: object = _REQUIRED) -> int:
        """The first of ``names`` that is set, else ``default``.

        Raises:
            ModelLoadError: None is set and there is no default, or the value is not an integer from 1 to 2²⁴.
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

    def index(self, name: str, default: int) -> int:
        """An integer that may be 0, e.g. the number of a layer."""
        _, value = self._first((name,), default)
        return 0 if value == 0 else self.positive_int(name, default=default)

    def optional_positive_float(self, name: str, default: float | None = None) -> float | None:
        """A positive number; None if it is null, ``default`` if it is missing."""
        if name not in self._values:
            return default
        return None if self._values[name] is None else self.positive_float(name, 1.0)

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

    def layer_numbers(self, name: str) -> frozenset[int]:
        """Numbers of layers, from 0; none if the key is null or missing.

        Raises:
            ModelLoadError: The value is not a list of integers.
        """
        _, value = self._first((name,), [])
        if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
            raise ModelLoadError(f"config.json: {name!r} must be a list of numbers of layers, got {str(value)[:80]}")
        return frozenset(value)

    def flags(self, name: str, count: int) -> list[bool] | None:
        """A list of 0 and 1, or of JSON booleans, of which the first ``count`` are used; None if it is null or missing.

        Raises:
            ModelLoadError: It is not a list, is too short, or has another value.
        """
        _, value = self._first((name,), None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or any(flag not in (0, 1) for flag in value[:count]):
            raise ModelLoadError(
                f"config.json: {name!r} must list 0 or 1 for each of {count} layers, got {str(value)[:80]}"
            )
        return [flag == 1 for flag in value[:count]]

    def multi_head(self, size_names: Sequence[str], heads_names: Sequence[str]) -> tuple[int, int]:
        """The width of the stream and the number of heads, which divides it.

        Args:
            size_names: Keys of the width; the first that is set counts.
            heads_names: Keys of the number of heads; the first that is set counts.

        Raises:
            ModelLoadError: A value is missing or out of range, or the number of heads does not divide the width.
        """
        hidden_size, num_heads = self.positive_int(*size_names), self.positive_int(*heads_names)
        if hidden_size % num_heads:
            raise ModelLoadError(
                f"config.json: {size_names[0]} ({hidden_size}) must be a multiple of {heads_names[0]} ({num_heads})"
            )
        return hidden_size, num_heads

    def layer_types(self, num_layers: int, default: Callable[[int], str]) -> list[str]:
        """The kind of attention of each layer: from ``layer_types``, else by the architecture's rule.

        Args:
            num_layers: The number of layers.
            default: Returns a layer's type by its index, if the configuration does not list types.

        Raises:
            ModelLoadError: The list is too short, or has an unsupported type.
        """
        types = self._values.get("layer_types")
        if types is None:
            return [default(layer) for layer in range(num_layers)]
        if not isinstance(types, list) or len(types) < num_layers:
            raise ModelLoadError(
                f"config.json: 'layer_types' must list a type for each of {num_layers} layers, got {str(types)[:80]}"
            )
        for layer, layer_type in enumerate(types[:num_layers]):
            if layer_type not in (FULL_ATTENTION, SLIDING_ATTENTION):
                raise ModelLoadError(
                    f"config.json: 'layer_types'[{layer}] = {layer_type!r} is not supported; supported: "
                    f"{FULL_ATTENTION!r}, {SLIDING_ATTENTION!r}"
                )
        return types[:num_layers]

    def sliding_window(self, default: int | None = None) -> int | None:
        """How many tokens a query sees, including itself; None: all.

        Args:
            default: The window if the configuration lacks the key.

        Raises:
            ModelLoadError: The value is not null and no positive integer.
        """
        value = self._values.get("sliding_window", default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ModelLoadError(
                f"config.json: 'sliding_window' must be an integer of at least 1, or null, got {value!r:.80}"
            )
        # No sequence is longer than this: a larger window hides nothing.
        return None if value is None else min(value, MAX_POSITIONS)

    def windows(self, layer_types: Sequence[str], default: int | None = None) -> list[int | None]:
        """Each layer's ``sliding_window``; None for a layer that sees all keys.

        Args:
            layer_types: The types of all layers.
            default: The window if the configuration lacks the key.

        Raises:
            ModelLoadError: A layer needs a window, but there is none.
        """
        window = self.sliding_window(default)
        if window is None and SLIDING_ATTENTION in layer_types:
            layer = list(layer_types).index(SLIDING_ATTENTION)
            raise ModelLoadError(
                f"config.json: layer {layer} has {SLIDING_ATTENTION!r}, but 'sliding_window' is not set; it must be an "
                "integer of at least 1"
            )
        return [window if layer_type == SLIDING_ATTENTION else None for layer_type in layer_types]

    def refuse_unless(self, name: str, supported: object) -> None:
        """Refuse a setting that would change the computation in an unsupported way.

        Raises:
            ModelLoadError: ``name`` is set to something other than ``supported``.
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
