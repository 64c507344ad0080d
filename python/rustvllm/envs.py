"""The environment variables that rustvllm reads, each with its meaning, default and check.

They are read when asked for and not at import, so that a test or a launcher may set them at any time.
"""

import os
from pathlib import Path

from rustvllm.exceptions import ConfigError

ENGINE_SECRET = "RUSTVLLM_ENGINE_SECRET"  # noqa: S105 -- a name, not the secret
LINEAR_KERNELS = ("torch", "onednn", "core")
ACTIVATIONS = ("float", "int8")
DECODERS = ("core", "modules")
CPU_INSTRUCTIONS = ("portable", "avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16", "amx")
LOGGING_FORMATS = ("text", "json")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _number(name: str, default: float, low: float, high: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:  # false for NaN too
        raise ConfigError(f"environment variable {name} must be a number from {low:g} to {high:g}, got {text!r}")
    return value


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}


def logging_level() -> str:
    """``RUSTVLLM_LOGGING_LEVEL``: DEBUG, INFO (default), WARNING, ERROR or CRITICAL."""
    level = os.environ.get("RUSTVLLM_LOGGING_LEVEL", "").strip().upper() or "INFO"
    if level not in _LEVELS:
        raise ConfigError(
            f"environment variable RUSTVLLM_LOGGING_LEVEL must be one of {', '.join(_LEVELS)}, got {level!r}"
        )
    return level


def logging_format() -> str:
    """``RUSTVLLM_LOGGING_FORMAT``: text (default), or json for an object per line; ``--log-format`` sets it."""
    name = os.environ.get("RUSTVLLM_LOGGING_FORMAT", "").strip().lower() or "text"
    if name not in LOGGING_FORMATS:
        raise ConfigError(
            f"environment variable RUSTVLLM_LOGGING_FORMAT must be one of {', '.join(LOGGING_FORMATS)}, got {name!r}"
        )
    return name


def logging_config_path() -> Path | None:
    """``RUSTVLLM_LOGGING_CONFIG_PATH``: JSON file for Python's ``logging.config.dictConfig`` (default: none).

    ``--log-config-file`` sets it.
    """
    text = os.environ.get("RUSTVLLM_LOGGING_CONFIG_PATH", "").strip()
    return Path(text).expanduser() if text else None


def max_n() -> int:
    """``RUSTVLLM_MAX_N``: the most samples one request may ask for (default 16384)."""
    return int(_number("RUSTVLLM_MAX_N", 16384, 1, 1 << 20))


def hub_timeout() -> float:
    """``RUSTVLLM_HUB_TIMEOUT``: seconds to wait for the first answer of the model hub (default 10)."""
    return _number("RUSTVLLM_HUB_TIMEOUT", 10.0, 0.1, 600.0)


def triton_interpret() -> bool:
    """``TRITON_INTERPRET=1``: Triton's own variable; its kernels run in an interpreter on the CPU (default off)."""
    return _flag("TRITON_INTERPRET")


def check_invariants() -> bool:
    """``RUSTVLLM_CHECK_INVARIANTS=1``: the scheduler checks itself whenever the engine goes idle (default off)."""
    return _flag("RUSTVLLM_CHECK_INVARIANTS")


def trace() -> bool:
    """``RUSTVLLM_TRACE=1``: the journey of every request is logged, layer by layer (default off)."""
    return _flag("RUSTVLLM_TRACE")


def enable_multiprocessing() -> bool:
    """``RUSTVLLM_ENABLE_MULTIPROCESSING=1``: the engine of an ``AsyncLLM`` runs in a process of its own (default off).

    ``rustvllm serve`` does so in any case, unless ``--disable-frontend-multiprocessing`` says otherwise.
    """
    return _flag("RUSTVLLM_ENABLE_MULTIPROCESSING")


def engine_ready_timeout() -> float:
    """``RUSTVLLM_ENGINE_READY_TIMEOUT``: seconds that a front end waits for engines it did not start (default 600)."""
    return _number("RUSTVLLM_ENGINE_READY_TIMEOUT", 600.0, 0.1, 86400.0)


def log_stats_interval() -> float:
    """``RUSTVLLM_LOG_STATS_INTERVAL``: seconds between two lines of statistics, and records of loggers (default 10)."""
    return _number("RUSTVLLM_LOG_STATS_INTERVAL", 10.0, 0.1, 86400.0)


def engine_secret() -> str | None:
    """``RUSTVLLM_ENGINE_SECRET``: what an engine on TCP and its front ends must both know (default: none)."""
    return os.environ.get(ENGINE_SECRET) or None


def linear_kernel() -> str | None:
    """``RUSTVLLM_LINEAR_KERNEL``: what computes dense layers on the CPU: torch, onednn or core (default: the fastest).

    For tests and comparisons; by default each is measured while the model loads.
    """
    name = os.environ.get("RUSTVLLM_LINEAR_KERNEL", "").strip().lower() or None
    if name is not None and name not in LINEAR_KERNELS:
        raise ConfigError(
            f"environment variable RUSTVLLM_LINEAR_KERNEL must be one of {', '.join(LINEAR_KERNELS)}, got {name!r}"
        )
    return name


def activations() -> str | None:
    """``RUSTVLLM_ACTIVATIONS``: what 8-bit weights on the CPU meet: int8, activations rounded to 8 bits, or float.

    By default int8, whose products are as fast as the processor allows.
    """
    name = os.environ.get("RUSTVLLM_ACTIVATIONS", "").strip().lower() or None
    if name is not None and name not in ACTIVATIONS:
        raise ConfigError(
            f"environment variable RUSTVLLM_ACTIVATIONS must be one of {', '.join(ACTIVATIONS)}, got {name!r}"
        )
    return name


def cpu_instructions() -> str | None:
    """``RUSTVLLM_CPU_INSTRUCTIONS``: the most that the CPU's kernels use of the processor (default: all that it has).

    portable, avx2, avx-vnni, avx512, avx512-vnni, avx512-bf16 or amx, each with those before it; for tests and
    comparisons. The core reads it when it first looks for an instruction.
    """
    name = os.environ.get("RUSTVLLM_CPU_INSTRUCTIONS", "").strip().lower() or None
    if name is not None and name not in CPU_INSTRUCTIONS:
        raise ConfigError(
            f"environment variable RUSTVLLM_CPU_INSTRUCTIONS must be one of {', '.join(CPU_INSTRUCTIONS)}, got {name!r}"
        )
    return name


def decoder() -> str:
    """``RUSTVLLM_DECODER``: what runs a model's blocks on the CPU: core (default), or modules.

    The core runs all blocks in one call where it computes every part of them; modules are for comparisons.
    """
    name = os.environ.get("RUSTVLLM_DECODER", "").strip().lower() or "core"
    if name not in DECODERS:
        raise ConfigError(f"environment variable RUSTVLLM_DECODER must be one of {', '.join(DECODERS)}, got {name!r}")
    return name


def cache_dir() -> Path:
    """``RUSTVLLM_CACHE``: what is made once (default: ``rustvllm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``)."""
    own = os.environ.get("RUSTVLLM_CACHE", "").strip()
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path(os.path.expanduser("~"), ".cache")) / "rustvllm"  # noqa: PTH111 -- never raises
