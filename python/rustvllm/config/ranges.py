"""Checks of configuration values, whose errors name the argument, the value and the limits."""

import math

from rustvllm.exceptions import ConfigError


def require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse ``value`` unless it is an int (not a bool) in ``[low, high]``.

    Raises:
        ConfigError: Names the argument, the value and the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise ConfigError(f"{name} must be at most {high}, got {value}")


def require_fraction(name: str, value: object) -> None:
    """Refuse ``value`` unless it is a number in ``(0, 1]``.

    Raises:
        ConfigError: Names the argument, the value and the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not (math.isfinite(value) and 0.0 < value <= 1.0):
        raise ConfigError(f"{name} must be greater than 0 and at most 1, got {value}")


def require_number(name: str, value: object, low: float, below: float) -> None:
    """Refuse ``value`` unless it is a number in ``[low, below)``.

    Raises:
        ConfigError: Names the argument, the value and the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not low <= value < below:  # not a number is nowhere
        raise ConfigError(f"{name} must be at least {low:g} and less than {below:g}, got {value}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse ``value`` unless it is one of ``choices``.

    Raises:
        ConfigError: Names the argument, the value and what is allowed.
    """
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
