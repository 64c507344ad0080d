"""All blocks of a model in one call of the Rust core, where each of their parts is the core's already.

Module by module a step is some eighty calls, each of which Python prepares while the memory waits. The core's one call
does the same work in the same order, bit for bit but for two things that the modules let torch do: the turns of heads
and the gates of MLPs, which here are rounded once. The modules remain what runs where any part is computed by something
else, or where ``RUSTVLLM_DECODER=modules`` asks for them. Where ranks share the model, a block is two calls, after each
of which the ranks add what they have; blocks that have no halves stay with their modules there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rustvllm import _core, envs
from rustvllm.attention.cpu_backend import CPUAttentionPlan
from rustvllm.layers.cpu_linear import NUM_ROW_CLASSES, CoreLinear, LinearByRows, core_activation, row_class
from rustvllm.layers.cpu_norm import CoreNorm, NormParts
from rustvllm.layers.decoder import PreNormBlock, PreNormDecoder
from rustvllm.layers.host_array import host_array
from rustvllm.layers.linear import Linear
from rustvllm.layers.parallel import RowLinear
from rustvllm.logger import init_logger
from rustvllm.models.interface import CausalLM

if TYPE_CHECKING:
    from rustvllm._core._decoder import CoreBlock

logger = init_logger(__name__)


class CoreDecoder:
    """See ``DecoderKernel``.

    Args:
        core: The blocks.
        row_classes: Of each class of rows, whether the core computes every part.
        outline: The same blocks.

    Attributes:
        times: ns of the last step in norms, rotary positions and gates, in products, and in attention.
        adapters: See ``AdaptableDecoder``.
    """

    def __init__(self, core: _core.CpuDecoder, row_classes: Sequence[bool], outline: PreNormDecoder) -> None:
        self._core = core
        self._row_classes = tuple(row_classes)
        self._outline = outline
        self.times = (0, 0, 0)
        self.adapters: Sequence[tuple[_core.CpuAdapter, Sequence[int]]] = ()

    def takes(self, hidden: Tensor, attention: object) -> bool:
        """See ``DecoderKernel.takes``."""
        return isinstance(attention, CPUAttentionPlan) and self._row_classes[row_class(hidden.shape[0])]

    def forward(
        self,
        hidden: Tensor,
        kv_caches: Sequence[Tensor],
        attention: object,
        rotary: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """See ``DecoderKernel.forward``."""
        assert isinstance(attention, CPUAttentionPlan)
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        caches = [host_array(cache) for cache in kv_caches]
        self.times = self._core.forward(
            attention.core, host_array(hidden), caches, host_array(out), _cos_sin(rotary), self.adapters or None
        )
        return out

    def make_adapter(self, deltas: Mapping[int, _core.CpuLayerDelta]) -> _core.CpuAdapter | None:
        """See ``AdaptableDecoder``; where an activation follows in the same pass, modules add to it."""
        blocks, taken = [], set()
        for block in self._outline.blocks:
            found = [deltas.get(id(linear)) for linear in _linears(block)]
            if deltas.get(id(block.up)) is not None and not block.is_gated:
                return None
            blocks.append(found)
            taken |= set(map(id, _linears(block)))
        return _core.CpuAdapter(self._core, blocks) if taken >= deltas.keys() else None


class SharedCoreDecoder(CoreDecoder):
    """The blocks in halves, for ranks that share them; see ``CoreDecoder``.

    Args:
        core: The blocks.
        row_classes: Likewise.
        outline: The same blocks, whose maps know how to add over the ranks.

    Attributes:
        num_spans: How many halves ran so far.
    """

    def __init__(self, core: _core.CpuDecoder, row_classes: Sequence[bool], outline: PreNormDecoder) -> None:
        super().__init__(core, row_classes, outline)
        self._sums = [(_shared(block.out), _shared(block.down)) for block in outline.blocks]
        self._last_norm = outline.last_norm
        self.num_spans = 0

    def make_adapter(self, deltas: Mapping[int, _core.CpuLayerDelta]) -> _core.CpuAdapter | None:  # noqa: ARG002 -- others look
        """None: the halves add none."""
        return None

    def forward(
        self,
        hidden: Tensor,
        kv_caches: Sequence[Tensor],
        attention: object,
        rotary: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """See ``DecoderKernel.forward``."""
        assert isinstance(attention, CPUAttentionPlan)
        hidden, plan = hidden.contiguous(), attention.core
        stream = host_array(hidden)
        cos_sin = _cos_sin(rotary)
        times = []
        for index, ((out, down), cache) in enumerate(zip(self._sums, kv_caches, strict=True)):
            times.append(self._core.attend(plan, index, stream, host_array(cache), cos_sin, adds=out.adds_residual))
            out.sum_over_ranks(hidden)
            times.append(self._core.multiply(plan, index, stream, adds=down.adds_residual))
            down.sum_over_ranks(hidden)
        self.num_spans += len(times)
        norms, products, attended = (sum(part) for part in zip(*times, strict=True))
        self.times = (norms, products, attended)
        return hidden if self._last_norm is None else self._last_norm(hidden)


def use_core_decoder(model: CausalLM) -> None:
    """Let the core run a model's blocks in one call, for every number of rows for which it computes all parts."""
    outline = model.decoder_outline()
    if outline is None or envs.decoder() == "modules":
        return
    is_shared = model.group.size > 1
    if is_shared and not all(block.has_halves for block in outline.blocks):
        return
    row_classes = [_takes_all(outline, index) for index in range(NUM_ROW_CLASSES)]
    if any(row_classes):
        core = _make_core(outline, model)
        model.decoder_kernel = (
            SharedCoreDecoder(core, row_classes, outline) if is_shared else CoreDecoder(core, row_classes, outline)
        )
        logger.debug("decoder blocks in one call of the core: %s", row_classes)


def _takes_all(outline: PreNormDecoder, index: int) -> bool:
    norms = [norm for block in outline.blocks for norm in (block.attention_norm, block.mlp_norm)]
    norms += [norm for block in outline.blocks for norm in (*(block.head_norms or ()), *(block.post_norms or ()))]
    norms += [] if outline.last_norm is None else [outline.last_norm]
    if not all(isinstance(getattr(norm, "kernel", None), CoreNorm) for norm in norms):
        return False
    if any(core_activation(block.activation) is None for block in outline.blocks):
        return False
    return all(_core_linear(linear, index) is not None for block in outline.blocks for linear in _linears(block))


def _shared(linear: Linear) -> RowLinear:
    assert isinstance(linear, RowLinear)
    return linear


def _linears(block: PreNormBlock) -> tuple[Linear, ...]:
    return block.qkv, block.out, block.up, block.down


def _core_linear(linear: Linear, index: int) -> CoreLinear | None:
    """The core's kernel, if that computes this class of rows."""
    kernel = linear.kernel
    if isinstance(kernel, LinearByRows):
        kernel = kernel.kernel_of(index)
    return kernel if isinstance(kernel, CoreLinear) else None


def _make_core(outline: PreNormDecoder, model: CausalLM) -> _core.CpuDecoder:
    blocks = list(map(_core_block, outline.blocks))
    spec = model.kv_cache_spec
    num_heads = outline.blocks[0].out.weight.shape[1] // spec.head_dim
    last_norm = None if outline.last_norm is None else _norm(outline.last_norm)
    return _core.CpuDecoder(blocks, last_norm, num_heads, spec.num_kv_heads, spec.head_dim)


def _core_block(block: PreNormBlock) -> CoreBlock:
    activation = core_activation(block.activation)
    assert activation is not None
    return {
        "attention_norm": _norm(block.attention_norm),
        "qkv": _packed(block.qkv),
        "head_norms": _both(block.head_norms),
        "is_by_head": block.is_by_head,
        "rotary": block.rotary,
        "scale": block.scale,
        "sliding_window": block.sliding_window,
        "soft_cap": block.soft_cap,
        "out": _packed(block.out),
        "mlp_norm": _norm(block.mlp_norm),
        "is_parallel": block.is_parallel,
        "up": _packed(block.up),
        "is_gated": block.is_gated,
        "activation": activation,
        "down": _packed(block.down),
        "post_norms": _both(block.post_norms),
    }


_CosSin = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


def _cos_sin(rotary: Sequence[tuple[Tensor, Tensor]]) -> list[_CosSin]:
    return [(_rows(cos), _rows(sin)) for cos, sin in rotary]


def _rows(cos_or_sin: Tensor) -> npt.NDArray[np.float32]:
    """``[num_tokens, 1, features]`` as the core takes it."""
    array: npt.NDArray[np.float32] = cos_or_sin[:, 0].contiguous().numpy()
    return array


def _packed(linear: Linear) -> _core.PackedLinear:
    kernels = (_core_linear(linear, index) for index in range(NUM_ROW_CLASSES))
    return next(kernel.packed for kernel in kernels if kernel is not None)


def _both(norms: tuple[nn.Module, nn.Module] | None) -> tuple[NormParts, NormParts] | None:
    return None if norms is None else (_norm(norms[0]), _norm(norms[1]))


def _norm(norm: nn.Module) -> NormParts:
    kernel = norm.kernel
    assert isinstance(kernel, CoreNorm)
    return kernel.parts
