"""Tile sizes of the kernels for each device, and launch options: fixed tables, without trials at run time.

The tables for Hopper (compute capability 9.0) are derived: tiles that fill its matrix instructions (64 rows per four
warps), and pipelines that fit its 227 KiB of shared memory. All other devices use sizes that fit the 99 KiB of the
smallest supported one, and the log says once that they are not tuned.
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
"""Options of every launch: Triton's default will change, and without this each compilation would warn about it."""
HOPPER = (9, 0)
FP8_INSTRUCTIONS_SINCE = (8, 9)
"""From this compute capability on, a GPU has instructions that convert fp8 to wider numbers."""
MIN_CAPABILITY = (8, 0)
"""The oldest GPUs for which Triton has bfloat16 and asynchronous copies."""
INTERPRETER_PROGRAMS = 8
"""How many programs fill the interpreter: few, so that tests see long sequences split and short ones not."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tile sizes of one kernel.

    Attributes:
        rows: Rows of a tile: queries (tokens times the heads that share a KV head), or rows of a product.
        columns: Columns of a tile: keys per iteration of the loop, or columns of a product.
        num_warps: Warps of 32 threads.
        num_stages: Loads in flight ahead of the arithmetic.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


_AttentionTable = tuple[tuple[tuple[int, int], TileConfig, TileConfig], ...]
# (bytes of an element, largest head size) -> sizes for prompts, sizes for decodes. Attention finds its keys through the
# block table, and Triton halves the stages of loads that depend on loads: 5 stages keep two tiles of keys in flight.
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
        device: The device that computes.
        itemsize: Bytes of an element of the queries.
        head_dim: Features per head, at most 256.
        decode: Whether there is one query per sequence, and not many.
    """
    table = _INTERPRETER_ATTENTION
    if not INTERPRETED:
        table = _HOPPER_ATTENTION if is_tuned(device) else _SAFE_ATTENTION
    for (size, largest), prompts, decodes in table:
        if itemsize <= size and head_dim <= largest:
            return decodes if decode else prompts
    raise ModelLoadError(f"the Triton kernels support heads of at most 256 features, but the model's have {head_dim}")


def matmul_config(device: torch.device, itemsize: int, num_columns: int) -> TileConfig:
    """Sizes for a product; they depend only on the weight, never on the number of rows.

    Args:
        device: The device that computes.
        itemsize: Bytes of an element.
        num_columns: Columns of the result.
    """
    if INTERPRETED:
        return TileConfig(16, 16, 1, 1)
    if itemsize == 4:
        return TileConfig(32, 32, 4, 2)
    if not is_tuned(device):
        return TileConfig(32, 32, 4, 2)
    # Enough tiles for every multiprocessor even if the rows fill only one tile, as in a decode.
    columns = next((size for size in (128, 64) if num_columns >= size * num_processors(device)), 32)
    return TileConfig(64, columns, 4, 4)


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """The tile sizes for the products of adapters.

    Attributes:
        features: Inputs that are multiplied at once, on the way to the ranks.
        split_features: Inputs of one program, a multiple of ``features``; a few rows have few ranks, so without this
            split there would be little parallel work.
        columns: Outputs of a tile.
        num_warps: Warps of 32 threads.
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
        device: The device that computes.
        itemsize: Bytes of an element.
    """
    if INTERPRETED:
        return LoRAConfig(16, 32, 16, 1, 1)
    if itemsize == 4:
        return LoRAConfig(64, 512, 64, 4, 2)
    return LoRAConfig(128, 512, 128, 4, 3 if is_tuned(device) else 2)


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """The tile sizes for a product with weights of 4 or 8 bits.

    Attributes:
        rows: Rows of a tile.
        columns: Outputs of a tile.
        features: Inputs whose 4-bit numbers are read at once; a multiple of 64. One product takes half of them, which
            is also the number of 8-bit inputs read at once.
        split_features: The fewest inputs of a program if few rows are split among several programs.
        num_warps: Warps of 32 threads.
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
        device: The device that computes.
        itemsize: Bytes of an element of the activations.
        many: Whether there are more rows than a tile for few rows has.
    """
    rows = 64 if many else 16
    if INTERPRETED:
        return QuantizedConfig(rows // 2 if many else rows, 16, 64, 64, 1, 1)
    if itemsize == 4:
        return QuantizedConfig(32 if many else 16, 32, 64, 256, 4, 2)
    return QuantizedConfig(rows, 64, 64, 512, 4 if many else 2, 4 if is_tuned(device) else 2)


@functools.cache
def is_tuned(device: torch.device) -> bool:
    """Whether the sizes were chosen for this device; if not, a warning names the device."""
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
    """The least number of programs that run in parallel."""
    if INTERPRETED or device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def why_no_toolchain() -> str | None:
    """Why Triton cannot launch kernels here, and how to fix it; None if it can.

    The first launch on a machine builds a small library with the C compiler and Python's headers, which slim images
    lack. So this is checked once, here; Triton keeps the library in its cache.
    """
    if INTERPRETED:
        return None
    try:
        triton.runtime.driver.active.utils  # noqa: B018 -- reading this builds and loads the library
    except Exception as error:  # noqa: BLE001 -- a missing compiler, header or driver each raise something else
        said = (str(error).strip().splitlines() or [""])[0][:200]
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"Triton cannot build what it launches kernels with ({type(error).__name__}: {said}): it needs a C "
            f"compiler and the headers of Python {python} (Debian, Ubuntu: apt-get install gcc python{python}-dev)"
        )
    return None


def has_fp8_instructions(device: torch.device) -> bool:
    """Whether the device has instructions that decode fp8; else shifting bits does it."""
    return capability(device) >= FP8_INSTRUCTIONS_SINCE


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``, which must be positive."""
    return 1 << (number - 1).bit_length()
