"""Finds the device and its memory without torch, because importing torch takes seconds."""

import ctypes
import os
import re
from importlib.machinery import PathFinder
from pathlib import Path

_CONTROL_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux; Windows' Linux


def detect_device() -> str:
    """``cuda`` if there is a usable NVIDIA GPU and torch was built with CUDA, else ``cpu``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in {"", "-1"}:
        return "cpu"
    if any(path.exists() for path in _CONTROL_DEVICES) and torch_has_cuda():
        return "cuda"
    return "cpu"


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA, as its version file says; False without torch."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None


def why_no_cuda() -> str:
    """The most likely reason why torch finds no GPU, and the remedy."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in {"", "-1"}:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU; unset it"
    if not torch_has_cuda():
        return "it was built without CUDA; install a build with CUDA (https://pytorch.org/get-started/locally)"
    if not any(path.exists() for path in _CONTROL_DEVICES):
        return (
            f"there is no NVIDIA driver ({_CONTROL_DEVICES[0]} is missing); install one, or give the container access "
            "to the GPU (docker run --gpus all)"
        )
    return "the NVIDIA driver may be older than torch's CUDA; nvidia-smi shows which CUDA it supports"


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` would name them; none when the driver cannot be asked."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in {"", "-1"}]
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        found = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        return [str(index) for index in range(count.value)] if found else []
    finally:
        nvml.nvmlShutdown()


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_memory_bytes() -> int | None:
    """Memory of the first visible GPU in bytes, from the driver's library; None when it cannot be asked."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",", maxsplit=1)[0].strip()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, memory = ctypes.c_void_p(), _NvmlMemory()
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        if visible and not visible.isdigit():
            found = nvml.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(device))
        else:
            found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(visible or 0)), ctypes.byref(device))
        if found != 0 or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
            return None
        return int(memory.total)
    finally:
        nvml.nvmlShutdown()
