"""Logs which products a model's dense layers use on the CPU, where the processor decides this."""

from __future__ import annotations

from collections.abc import Sequence

from rustvllm import _core
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.linear import LinearKernel
from rustvllm.logger import init_logger

logger = init_logger(__name__)


def log_narrow_products(kernels: Sequence[LinearKernel | None]) -> None:
    """Log which instructions multiply bfloat16 by bfloat16, if any layer does so."""
    count = sum(isinstance(kernel, CoreLinear) and kernel.packed.kind == "bf16" for kernel in kernels)
    if not count:
        return
    name, is_refused = _core.PackedLinear.bf16_kernel()
    logger.debug("bfloat16 weights: %s products with bfloat16 rows in %d layers", name, count)
    if is_refused:
        logger.warning(
            "bfloat16 weights: not using the avx512-bf16 products, because their sums are wrong on this processor"
        )


def log_rounding(kernels: Sequence[LinearKernel | None]) -> None:
    """Log how many layers round their activations, and which instructions compute them."""
    kinds = ("w8a8", "w6a8", "w4a8")
    rounding = [kernel for kernel in kernels if isinstance(kernel, CoreLinear) and kernel.packed.kind in kinds]
    if not rounding:
        return
    names, refused = _core.PackedLinear.w8a8_kernels()
    logger.info(
        "weights of 8 and 4 bits: activations are rounded to 8 bits in %d layers, for %s products "
        "(RUSTVLLM_ACTIVATIONS=float turns this off)",
        len(rounding),
        " and ".join(dict.fromkeys(names)),
    )
    if refused:
        logger.warning(
            "weights of 8 and 4 bits: not using the %s products, because their results differ from plain code on this "
            "processor",
            ", ".join(refused),
        )
