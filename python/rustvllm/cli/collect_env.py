"""``rustvllm collect-env``: what a report of a problem should say of the machine; no secret is among it."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from rustvllm import _core
from rustvllm.cli.bench.report.machine import machine
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.config.devices import detect_device, visible_gpus

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "numpy",
    "huggingface_hub",
    "fastapi",
    "uvicorn",
    "uvloop",
)
OTHER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "LD_PRELOAD", "MKL_NUM_THREADS",
    "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET",
)  # fmt: skip
SECRETS = ("KEY", "SECRET", "TOKEN", "PASSWORD")
"""A variable whose name has one of these is named, and its value is not."""
NVIDIA_SMI_SECONDS = 20


def collect_env(argv: Sequence[str], wrong: Mapping[str, str], problems: Mapping[str, str]) -> int:
    """Run ``rustvllm collect-env``.

    Args:
        argv: The arguments behind the command's name.
        wrong: Environment variables of rustvllm with wrong values, which were taken out of the environment.
        problems: What is wrong with each of them.

    Returns:
        The exit code 0.
    """
    parser = FlexibleArgumentParser(
        prog="rustvllm collect-env", description="Print versions, machine and settings, for a report of a problem."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    facts = collect(wrong)
    if problems:
        facts["problems"] = dict(problems)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for title, values in facts.items():
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
    return 0


def collect(wrong: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Everything, by title; ``wrong`` as for :func:`collect_env`."""
    environment = {**os.environ, **wrong}
    return {
        "rustvllm": {
            "version": _core.__version__,
            "build": _core.build_profile,
            "attention kernel of the CPU": _core.CpuAttention.kernel(64),
        },
        "packages": {"python": platform.python_version(), "executable": sys.executable}
        | {name: _version(name) for name in PACKAGES},
        "machine": {**machine(), "C library": " ".join(platform.libc_ver()), "memory": _memory()},
        "devices": {"chosen": detect_device(), "GPUs": ", ".join(visible_gpus()) or "none", "driver": _driver()},
        "environment": {
            name: "(set)" if any(word in name for word in SECRETS) else environment[name]
            for name in sorted(environment)
            if name.startswith("RUSTVLLM_") or name in OTHER_VARIABLES
        },
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * size / 2**30:.1f} GiB"


def _driver() -> str:
    """What NVIDIA's tool says of the first GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not there"
    command = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return done.stdout.strip() or done.stderr.strip() or f"nvidia-smi ended with {done.returncode}"
