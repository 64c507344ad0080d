"""Rope settings of a configuration: their numbers, checked, and how many positions they let a model tell apart."""

import math
from collections.abc import Mapping
from typing import Any, Final

from rustvllm.exceptions import ModelLoadError

MAX_POSITIONS: Final = 2**31 - 1
"""Limit of positions, which are numbers of 32 bits in the core; also of each number of a scaling."""
_KEYS: Final = ("rope_parameters", "rope_scaling")
"""Newer configurations say ``rope_parameters`` for what older ones call ``rope_scaling``."""
_SCALED: Final = ("linear", "dynamic", "llama3", "yarn", "longrope")
_WITH_TRAINED_LENGTH: Final = ("llama3", "yarn", "longrope")
_TRAINED: Final = "original_max_position_embeddings"


def check_rope(config: Mapping[str, Any], file: object = "config.json", positions: int | None = None) -> None:
    """Refuse rope settings with a number that is none or out of range. A type that is not known here passes.

    Args:
        config: The parsed ``config.json``; its settings may be one set, or one for each type of layer.
        file: Where it was read from, for messages.
        positions: What the configuration says without a scaling, where ``max_position_embeddings`` is not its name.

    Raises:
        ModelLoadError: Names the key, the value and what would be right.
    """
    for key in _KEYS:
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise ModelLoadError(f"{file}: {key} must be an object or null, got {config[key]!r:.80}")
    newer, older = (config.get(key) or {} for key in _KEYS)
    of_types = [value for value in newer.values() if isinstance(value, Mapping)]
    for settings in of_types or [newer]:
        _check_set({**older, **settings}, {"max_position_embeddings": positions, **config}, file)


def longest_sequence(config: Mapping[str, Any], positions: int) -> int:
    """How many positions the model can tell apart, with the scaling of its rotary embedding.

    Args:
        config: The parsed ``config.json``, which passed :func:`check_rope`.
        positions: What the configuration says without a scaling.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    # Gemma 3 scales some of its layers only, and counts it already.
    if not scaling or str(config.get("model_type")).startswith("gemma3"):
        return positions
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or factor is None or factor <= 1:
        return positions  # llama3 and longrope: max_position_embeddings counts the scaling already
    if kind == "yarn":
        trained = scaling.get(_TRAINED)
        return positions if trained is None else int(trained * float(factor))
    return int(positions * float(factor))


def scaling_number(scaling: Mapping[str, Any], key: str, rope_type: str, file: object = "config.json") -> float:
    """A positive number of a set of rope settings.

    Raises:
        ModelLoadError: It is missing or no such number.
    """
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        got = "is missing" if value is None else f"is {value!r:.80}"
        raise ModelLoadError(f"{file}: rope type {rope_type!r} needs a positive number {key!r}, which {got}")
    return float(value)


def _check_set(scaling: Mapping[str, Any], config: Mapping[str, Any], file: object) -> None:
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind not in _SCALED:
        return
    assert isinstance(kind, str)

    def number(key: str, values: Mapping[str, Any] = scaling) -> float:
        value = scaling_number(values, key, kind, file)
        if value > MAX_POSITIONS:
            raise ModelLoadError(f"{file}: rope type {kind!r} has the {key} {value:g}; the limit is {MAX_POSITIONS}")
        return value

    def optional_number(key: str, default: float) -> float:
        """A number, of which null and 0 select the default, as in transformers."""
        return number(key) if scaling.get(key) else default

    longest = config.get("max_position_embeddings")
    trained = longest
    if kind in _WITH_TRAINED_LENGTH:
        lengths = [number(_TRAINED, values) for values in (config, scaling) if values.get(_TRAINED) is not None]
        trained = lengths[0] if lengths else longest
    is_computed = kind in _WITH_TRAINED_LENGTH and scaling.get("factor") is None and longest is not None
    factor = 1.0 if is_computed else scaling_number(scaling, "factor", kind, file)
    if isinstance(trained, int | float) and trained * factor > MAX_POSITIONS:
        raise ModelLoadError(
            f"{file}: the rope scaling factor {factor:g} turns {trained:g} positions into {trained * factor:g}, but "
            f"the limit is {MAX_POSITIONS}"
        )
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ModelLoadError(
                f"{file}: rope type 'llama3' needs high_freq_factor ({high:g}) above low_freq_factor ({low:g})"
            )
    elif kind == "yarn":
        fast, slow = optional_number("beta_fast", 32.0), optional_number("beta_slow", 1.0)
        if fast < slow:
            raise ModelLoadError(
                f"{file}: rope type 'yarn' needs beta_fast ({fast:g}) of at least beta_slow ({slow:g})"
            )
        if not isinstance(scaling.get("truncate"), bool | None):
            raise ModelLoadError(
                f"{file}: truncate of rope type 'yarn' must be true or false, got {scaling['truncate']!r:.80}"
            )
        for key in ("mscale", "mscale_all_dim", "attention_factor"):
            optional_number(key, 1.0)
    elif kind == "longrope":
        if scaling.get("attention_factor") is not None:
            number("attention_factor")
        for key in ("short_factor", "long_factor"):
            for index, value in enumerate(scaling[key] if isinstance(scaling.get(key), list) else ()):
                number(f"{key}[{index}]", {f"{key}[{index}]": value})
