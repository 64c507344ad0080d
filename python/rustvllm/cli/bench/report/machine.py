"""What a figure is published with: machine, versions, build."""

import os
import platform
from pathlib import Path

from rustvllm import _core
from rustvllm.exceptions import ConfigError

PROCESSORS = Path("/proc/cpuinfo")


def machine() -> dict[str, str | int]:
    """The processor's name, the cores that this process may use, and the system."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of what a measurement depends on."""
    return {"rustvllm": _core.__version__, "python": platform.python_version()}


def require_release_build() -> None:
    """Refuse to measure what is not optimised.

    Raises:
        ConfigError: The core is a debug build.
    """
    if _core.build_profile != "release":
        raise ConfigError(
            f"the core is a {_core.build_profile} build, whose times are meaningless; make a release build with: make "
            "setup"
        )


def _processor() -> str:
    try:
        lines = PROCESSORS.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
