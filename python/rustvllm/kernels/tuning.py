"""Tile sizes of the kernels per device, and how they are launched: fixed tables, nothing is tried out at run time.

The tables for Hopper (compute capability 9.0) are reasoned: tiles that fill its matrix instructions (64 rows per four
warps), and pipelines that fit its 227 KiB of shared memory. Every other device takes sizes that fit the 99 KiB of
the smallest one served, and is called untuned in the log, once.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

import torch
import triton
from triton import knobs

from rustvllm.exceptions import ModelLoadError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, on the CPU."""
LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Said to every launch: Triton's own default is about to change, and a warning would come with each compilation."""
HOPPER = (9, 0)
FP8_INSTRUCTIONS_SINCE = (8, 9)
"""From this compute capability on a GPU itself turns fp8 into wider numbers."""
MIN_CAPABILITY = (8, 0)
"""Triton's oldest GPU for which it has bfloat16 and asynchronous copies."""
INTERPRETER_PROGRAMS = 8
"""What counts as filling the interpreter: few, so that tests see long sequences split and short ones not."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one kernel is cut.

    Attributes:
        rows: Of a tile: queries (tokens times the heads that share a KV head), or rows of a product.
        columns: Of a tile: keys per step of the loop, or columns of a product.
        num_warps: Of 32 threads.
        num_stages: Loads in flight ahead of the arithmetic.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


_AttentionTable = tuple[tuple[tuple[int, int], TileConfig, TileConfig], ...]
# (bytes of an element, head size up to) -> sizes for prompts, sizes for decodes. Attention finds its keys through the
# block table, and Triton halves the stages of loads that wait for loads: 5 stages keep two tiles of keys in flight.
_HOPPER_ATTENTION: _AttentionTable = (
    ((2, 64), TileConfig(128, 64, 8, 5), TileConfig(16, 128, 4, 5)),
    ((2, 128), TileConfig(128, 64, 8, 5), TileConfig(16, 64, 4, 5)),
    ((2, 256), TileConfig(64, 64, 8, 3), TileConfig(16, 32, 4, 5)),
    ((4, 64), TileConfig(32, 32, 4, 3), TileConfig(16, 32, 4, 3)),
    ((4, 128), TileConfig(32, 32, 8, 3), TileConfig(16, 32, 8, 3)),
    ((4, 256), TileConfig(16, 32, 8, 3), TileConfig(16, 16, 4, 3)),
)
_SAFE_ATTENTION: _AttentionTable = (
    ((2, 64), TileConfig(64, 32, 4, 2), TileConfig(16, 64, 4, 2)),
    ((2, 128), TileConfig(64, 32, 4, 2), TileConfig(16, 32, 4, 2)),
    ((2, 256), TileConfig(32, 32, 4, 2), TileConfig(16, 16, 4, 2)),
    ((4, 64), TileConfig(16, 32, 4, 2), TileConfig(16, 32, 4, 2)),
    ((4, 128), TileConfig(16, 32, 4, 2), TileConfig(16, 16, 4, 2)),
    ((4, 256), TileConfig(16, 16, 4, 1), TileConfig(16, 16, 4, 1)),
)
_INTERPRETER_ATTENTION: _AttentionTable = (((4, 256), TileConfig(16, 16, 1, 1), TileConfig(16, 16, 1, 1)),)


def attention_config(device: torch.device, itemsize: int, head_dim: int, *, decode: bool) -> TileConfig:
    """Sizes for paged attention.

    Args:
        device: That computes.
        itemsize: bytes of an element of the queries.
        head_dim: Features per head, 256 at most.
        decode: One query per sequence, rather than many.
    """
    table = _INTERPRETER_ATTENTION
    if not INTERPRETED:
        table = _HOPPER_ATTENTION if is_tuned(device) else _SAFE_ATTENTION
    for (size, largest), prompts, decodes in table:
        if itemsize <= size and head_dim <= largest:
            return decodes if decode else prompts
    raise ModelLoadError(f"the Triton kernels support heads of at most 256 features, but the model's have {head_dim}")


def matmul_config(device: torch.device, itemsize: int, num_columns: int) -> TileConfig:
    """Sizes for a product; they depend on the weight alone, never on the number of rows that are multiplied.

    Args:
        device: That computes.
        itemsize: bytes of an element.
        num_columns: Of the result.
    """
    if INTERPRETED:
        return TileConfig(16, 16, 1, 1)
    if itemsize == 4:
        return TileConfig(32, 32, 4, 2)
    if not is_tuned(device):
        return TileConfig(32, 32, 4, 2)
    # Enough tiles for every multiprocessor when the rows fill one tile only, as in a decode.
    columns = next((size for size in (128, 64) if num_columns >= size * num_processors(device)), 32)
    return TileConfig(64, columns, 4, 4)


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """How the products of adapters are cut.

    Attributes:
        features: Inputs that are multiplied at once, on the way to the ranks.
        split_features: Inputs that a program takes, a multiple of ``features``: a few rows have few ranks, so that
            there would be little to compute side by side.
        columns: Outputs of a tile.
        num_warps: Of 32 threads.
        num_stages: Loads in flight ahead of the arithmetic.
    """

    features: int
    split_features: int
    columns: int
    num_warps: int
    num_stages: int


def lora_config(device: torch.device, itemsize: int) -> LoRAConfig:
    """Sizes for adapters; they depend neither on the rows nor on the ranks.

    Args:
        device: That computes.
        itemsize: bytes of an element.
    """
    if INTERPRETED:
        return LoRAConfig(16, 32, 16, 1, 1)
    if itemsize == 4:
        return LoRAConfig(64, 512, 64, 4, 2)
    return LoRAConfig(128, 512, 128, 4, 3 if is_tuned(device) else 2)


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """How a product with weights of 4 or 8 bits is cut.

    Attributes:
        rows: Of a tile.
        columns: Outputs of a tile.
        features: Inputs whose numbers of 4 bits are read at once; a multiple of 64. Half are one product, as of 8
            bits.
        split_features: Inputs that a program takes at least where few rows are split among several.
        num_warps: Of 32 threads.
        num_stages: Loads in flight ahead of the arithmetic.
    """

    rows: int
    columns: int
    features: int
    split_features: int
    num_warps: int
    num_stages: int


def quantized_config(device: torch.device, itemsize: int, *, many: bool) -> QuantizedConfig:
    """Sizes for a product with weights of 4 or 8 bits.

    Args:
        device: That computes.
        itemsize: bytes of an element of the activations.
        many: There are more rows than fill a tile for few.
    """
    rows = 64 if many else 16
    if INTERPRETED:
        return QuantizedConfig(rows // 2 if many else rows, 16, 64, 64, 1, 1)
    if itemsize == 4:
        return QuantizedConfig(32 if many else 16, 32, 64, 256, 4, 2)
    return QuantizedConfig(rows, 64, 64, 512, 4 if many else 2, 4 if is_tuned(device) else 2)


@functools.cache
def is_tuned(device: torch.device) -> bool:
    """Whether the sizes were chosen for this device; one that has none of its own is named in the log."""
    if INTERPRETED or device.type != "cuda":
        return False
    if capability(device) == HOPPER:
        return True
    name = torch.cuda.get_device_name(device)
    logger.warning("the Triton kernels are not tuned for %s: using sizes that work on every device", name)
    return False


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for the interpreter."""
    return (0, 0) if INTERPRETED or device.type != "cuda" else torch.cuda.get_device_capability(device)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Programs that run side by side at least."""
    if INTERPRETED or device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def why_no_toolchain() -> str | None:
    """Why Triton cannot launch anything here, and what would mend it; None if it can.

    The first launch on a machine builds a small library with the C compiler against Python's headers. Asked for once,
    here, because slim images have neither; what it built is kept in Triton's cache.
    """
    if INTERPRETED:
        return None
    try:
        triton.runtime.driver.active.utils  # noqa: B018 -- looking at it builds and loads the library
    except Exception as error:  # noqa: BLE001 -- no compiler, no headers, no driver: each raises something else
        said = (str(error).strip().splitlines() or [""])[0][:200]
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"Triton cannot build what it launches kernels with ({type(error).__name__}: {said}): it needs a C "
            f"compiler and the headers of Python {python} (Debian, Ubuntu: apt-get install gcc python{python}-dev)"
        )
    return None


def has_fp8_instructions(device: torch.device) -> bool:
    """Whether fp8 is decoded by the device's own instructions rather than by shifting bits."""
    return capability(device) >= FP8_INSTRUCTIONS_SINCE


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
