"""The environment variables that rustvllm reads: one function per variable, which checks the value and has the default.

Each function reads the environment when it is called, not at import, so a test or a launcher can set variables at any
time.
"""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

from rustvllm.exceptions import ConfigError

ENGINE_SECRET = "RUSTVLLM_ENGINE_SECRET"  # noqa: S105 -- a name, not the secret
LINEAR_KERNELS = ("torch", "onednn", "core")
ACTIVATIONS = ("float", "int8")
DECODERS = ("core", "modules")
CPU_INSTRUCTIONS = ("portable", "avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16", "amx")
LOGGING_FORMATS = ("text", "json")
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
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
        raise ConfigError(f"environment variable {name} must be a number from {low:.10g} to {high:.10g}, got {text!r}")
    return value


def _flag(name: str) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text not in _YES and text not in _NO:
        raise ConfigError(f"environment variable {name} must be 1 or 0, got {text!r}")
    return text in _YES


def _path(text: str, name: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # the home of a user who is not there
        raise ConfigError(
            f"environment variable {name} is {text!r}, which cannot be used as a path: {error}"
        ) from error


def logging_level() -> str:
    """``RUSTVLLM_LOGGING_LEVEL``: level of rustvllm's log: DEBUG, INFO (default), WARNING, ERROR or CRITICAL."""
    level = os.environ.get("RUSTVLLM_LOGGING_LEVEL", "").strip().upper() or "INFO"
    if level not in _LEVELS:
        raise ConfigError(
            f"environment variable RUSTVLLM_LOGGING_LEVEL must be one of {', '.join(_LEVELS)}, got {level!r}"
        )
    return level


def logging_format() -> str:
    """``RUSTVLLM_LOGGING_FORMAT``: text (default), or json: one object per line; ``--log-format`` overrides it."""
    name = os.environ.get("RUSTVLLM_LOGGING_FORMAT", "").strip().lower() or "text"
    if name not in LOGGING_FORMATS:
        raise ConfigError(
            f"environment variable RUSTVLLM_LOGGING_FORMAT must be one of {', '.join(LOGGING_FORMATS)}, got {name!r}"
        )
    return name


def logging_config_path() -> Path | None:
    """``RUSTVLLM_LOGGING_CONFIG_PATH``: JSON file for Python's ``logging.config.dictConfig`` (default: none).

    ``--log-config-file`` overrides it.
    """
    text = os.environ.get("RUSTVLLM_LOGGING_CONFIG_PATH", "").strip()
    return _path(text, "RUSTVLLM_LOGGING_CONFIG_PATH") if text else None


def max_n() -> int:
    """``RUSTVLLM_MAX_N``: the largest ``n`` that a request may ask for (default 16384)."""
    return int(_number("RUSTVLLM_MAX_N", 16384, 1, 1 << 20))


def hub_timeout() -> float:
    """``RUSTVLLM_HUB_TIMEOUT``: seconds to wait for the model hub to answer (default 10)."""
    return _number("RUSTVLLM_HUB_TIMEOUT", 10.0, 0.1, 600.0)


def triton_interpret() -> bool:
    """``TRITON_INTERPRET=1``: run Triton kernels in an interpreter on the CPU; Triton's own variable (default off)."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in _YES


def check_invariants() -> bool:
    """``RUSTVLLM_CHECK_INVARIANTS=1``: check the scheduler's state whenever the engine goes idle (default off).

    With several ranks, also check that all ranks compute the same numbers.
    """
    return _flag("RUSTVLLM_CHECK_INVARIANTS")


def trace() -> bool:
    """``RUSTVLLM_TRACE=1``: log the journey of every request, layer by layer (default off).

    ``--trace`` and ``--no-trace`` override it.
    """
    return _flag("RUSTVLLM_TRACE")


def enable_multiprocessing() -> bool:
    """``RUSTVLLM_ENABLE_MULTIPROCESSING=1``: run the engine of an ``AsyncLLM`` in its own process (default off).

    ``rustvllm serve`` always does so, unless ``--disable-frontend-multiprocessing`` is given.
    """
    return _flag("RUSTVLLM_ENABLE_MULTIPROCESSING")


def engine_ready_timeout() -> float:
    """``RUSTVLLM_ENGINE_READY_TIMEOUT``: seconds that a front end waits for an engine it did not start (default 600).

    Such engines are named by ``--engine-address``.
    """
    return _number("RUSTVLLM_ENGINE_READY_TIMEOUT", 600.0, 0.1, 86400.0)


def log_stats_interval() -> float:
    """``RUSTVLLM_LOG_STATS_INTERVAL``: seconds between two calls of the stat loggers (default 10).

    The built-in one logs a line of statistics.
    """
    return _number("RUSTVLLM_LOG_STATS_INTERVAL", 10.0, 0.1, 86400.0)


def engine_secret() -> str | None:
    """``RUSTVLLM_ENGINE_SECRET``: secret shared by an engine on TCP and its front ends (default: none).

    All nodes of one model share it, too. ``--engine-secret-file`` overrides it.
    """
    return os.environ.get(ENGINE_SECRET) or None


def linear_kernel() -> str | None:
    """``RUSTVLLM_LINEAR_KERNEL``: kernel of dense layers on the CPU: torch, onednn or core (default: the fastest).

    For tests and comparisons: by default rustvllm measures each kernel while the model loads.
    """
    name = os.environ.get("RUSTVLLM_LINEAR_KERNEL", "").strip().lower() or None
    if name is not None and name not in LINEAR_KERNELS:
        raise ConfigError(
            f"environment variable RUSTVLLM_LINEAR_KERNEL must be one of {', '.join(LINEAR_KERNELS)}, got {name!r}"
        )
    return name


def activations() -> str | None:
    """``RUSTVLLM_ACTIVATIONS``: activations that the CPU multiplies with quantised weights: int8 (default) or float.

    int8 rounds activations to 8 bits, so that the fastest products of the processor apply; float does not round them.
    """
    name = os.environ.get("RUSTVLLM_ACTIVATIONS", "").strip().lower() or None
    if name is not None and name not in ACTIVATIONS:
        raise ConfigError(
            f"environment variable RUSTVLLM_ACTIVATIONS must be one of {', '.join(ACTIVATIONS)}, got {name!r}"
        )
    return name


def cpu_instructions() -> str | None:
    """``RUSTVLLM_CPU_INSTRUCTIONS``: highest instruction set that CPU kernels may use (default: all).

    One of portable, avx2, avx-vnni, avx512, avx512-vnni, avx512-bf16 and amx; each includes those before it. For tests
    and comparisons. The core reads the variable once, when it first chooses a kernel.
    """
    name = os.environ.get("RUSTVLLM_CPU_INSTRUCTIONS", "").strip().lower() or None
    if name is not None and name not in CPU_INSTRUCTIONS:
        raise ConfigError(
            f"environment variable RUSTVLLM_CPU_INSTRUCTIONS must be one of {', '.join(CPU_INSTRUCTIONS)}, got {name!r}"
        )
    return name


def cpu_streams() -> int | None:
    """``RUSTVLLM_CPU_STREAMS``: streams of memory in which each core reads weights: 1 or 2.

    By default AMD's processors before Zen 5 read one, others two. For comparisons, and for processors that are not
    known yet. The core reads the variable once, when it first computes a product.
    """
    text = os.environ.get("RUSTVLLM_CPU_STREAMS", "").strip()
    if text not in ("", "1", "2"):
        raise ConfigError(f"environment variable RUSTVLLM_CPU_STREAMS must be 1 or 2, got {text!r}")
    return int(text) if text else None


def decoder() -> str:
    """``RUSTVLLM_DECODER``: what runs a model's blocks on the CPU: core (default) or modules.

    core runs all blocks in one call, if the core computes every part of them; else, and with modules, torch modules
    run one after another. modules is for comparisons.
    """
    name = os.environ.get("RUSTVLLM_DECODER", "").strip().lower() or "core"
    if name not in DECODERS:
        raise ConfigError(f"environment variable RUSTVLLM_DECODER must be one of {', '.join(DECODERS)}, got {name!r}")
    return name


def cache_dir() -> Path:
    """``RUSTVLLM_CACHE``: cache folder (default: ``rustvllm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``).

    rustvllm keeps converted tokenizers there, to convert each only once.
    """
    own = os.environ.get("RUSTVLLM_CACHE", "").strip()
    if own:
        return _path(own, "RUSTVLLM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path(os.path.expanduser("~"), ".cache")) / "rustvllm"  # noqa: PTH111 -- never raises


_CHECKED: tuple[Callable[[], object], ...] = (
    logging_level, logging_format, logging_config_path, max_n, hub_timeout, check_invariants, trace,
    enable_multiprocessing, engine_ready_timeout, log_stats_interval, linear_kernel, activations, cpu_instructions,
    cpu_streams, decoder, cache_dir,
)  # fmt: skip


def check_all() -> list[str]:
    """Check every variable now, and not when its value is first needed, perhaps by a request.

    Returns:
        A message for each variable whose name is nearly one of these.

    Raises:
        ConfigError: A value is wrong.
    """
    for read in _CHECKED:
        read()
    return misspelt()


def wrong_values() -> dict[str, str]:
    """What is wrong with the value of each variable, by its name; the others are left out."""
    found = {}
    for read in _CHECKED:
        try:
            read()
        except ConfigError as error:
            found[_name_of(read)] = str(error)
    return found


def _name_of(read: Callable[[], object]) -> str:
    return "RUSTVLLM_CACHE" if read is cache_dir else f"RUSTVLLM_{read.__name__.upper()}"


def misspelt() -> list[str]:
    """A message for each variable whose name is nearly one of these."""
    known = {"RUSTVLLM_API_KEY", ENGINE_SECRET} | {_name_of(read) for read in _CHECKED}
    messages = []
    for name in sorted(os.environ):
        # Others begin alike: Kubernetes makes RUSTVLLM_PORT and more for a service called rustvllm.
        if name.startswith("RUSTVLLM_") and name not in known:
            messages += [
                f"environment variable {name} is not known; did you mean {near}?"
                for near in difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            ]
    return messages
