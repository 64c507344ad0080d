"""Runs all blocks of a model in one call of the Rust core, if the core computes all their parts.

Module by module, a step is about eighty calls, each of which Python prepares while the memory waits. The single call
does the same work in the same order. Its results are equal bit for bit, except where the modules use torch: the core
rounds the rotation of heads and the gates of MLPs only once, and computes the sines of the angles itself. If the core
has the head, the call also computes the logits, and may choose the likeliest ids. The modules still run where something
else computes any part, or with ``RUSTVLLM_DECODER=modules``. If ranks share the model, a block is two calls, and after
each the ranks add their partial sums; there, blocks that cannot be split in halves run as modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rustvllm import _core, envs
from rustvllm.attention.cpu_backend import CPUAttentionPlan
from rustvllm.layers.cpu.linear import NUM_ROW_CLASSES, CoreLinear, LinearByRows, core_activation, row_class
from rustvllm.layers.cpu.norm import CoreNorm, NormParts
from rustvllm.layers.decoder import (
    AddedRows,
    DecoderAdapters,
    DecoderLogits,
    DenseMLPParts,
    ExpertMLPParts,
    PreNormBlock,
    PreNormDecoder,
)
from rustvllm.layers.host_array import host_array
from rustvllm.layers.linear import Linear, LinearKernel
from rustvllm.layers.parallel import RowLinear
from rustvllm.logger import init_logger
from rustvllm.models.interface import CausalLM

if TYPE_CHECKING:
    from rustvllm._core._decoder import CoreBlock, CoreExperts, CoreMLP

logger = init_logger(__name__)

_ADAPTED_PARTS = 4
"""The layers of a block that adapters may change: qkv, out, up and down."""


class CoreDecoder:
    """See ``DecoderKernel``.

    Args:
        core: The blocks, and the head if the core computes it.
        row_classes: For each class of row counts, whether the core computes every part.
        head_classes: For each class of row counts, whether the core also computes the head.
        outline: The same blocks as modules.
        vocab_size: The number of logits that the head has.
        is_shared: Whether ranks share the blocks, so that their dense layers sum over the ranks after each half.

    Attributes:
        times: Time (ns) of the last step in norms, rotary positions and gates; in products; and in attention.
        adapters: See ``DecoderKernel``.
        num_shared_halves: How many halves of shared blocks ran so far.
    """

    def __init__(
        self,
        core: _core.CpuDecoder,
        row_classes: Sequence[bool],
        head_classes: Sequence[bool],
        outline: PreNormDecoder,
        vocab_size: int,
        *,
        is_shared: bool = False,
    ) -> None:
        self._core = core
        self._row_classes, self._head_classes = tuple(row_classes), tuple(head_classes)
        self._outline = outline
        self._vocab_size = vocab_size
        self._ends = [_ends_of_halves(block) for block in outline.blocks] if is_shared else None
        self._caches: tuple[Sequence[Tensor], _core.CpuCaches] | None = None
        self.times = (0, 0, 0)
        self.adapters: DecoderAdapters | None = None
        self.num_shared_halves = 0

    def takes(self, num_tokens: int, attention: object) -> bool:
        """See ``DecoderKernel.takes``."""
        if not isinstance(attention, CPUAttentionPlan) or not self._row_classes[row_class(num_tokens)]:
            return False
        return self.adapters is None or self.adapters.of_step() is not None

    def takes_head(self, num_rows: int) -> bool:
        """See ``DecoderKernel.takes_head``."""
        return self._head_classes[row_class(num_rows)]

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        attention: object,
        added: AddedRows | None = None,
    ) -> Tensor:
        """See ``DecoderKernel.forward``."""
        assert isinstance(attention, CPUAttentionPlan)
        hidden = hidden.contiguous()
        if added is not None or self._ends is not None:
            return self._forward_halves(hidden, positions, kv_caches, attention, added)
        out = torch.empty_like(hidden)
        self.times = self._core.forward(
            attention.core,
            host_array(hidden),
            _int32(positions),
            self._core_caches(kv_caches),
            host_array(out),
            self._adapters_of_step(),
        )
        return out

    def _forward_halves(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        attention: CPUAttentionPlan,
        added: AddedRows | None,
    ) -> Tensor:
        """``forward`` in two calls per block, between which ranks sum and after which rows are added.

        Without ranks that share the blocks, it gives the same bits as one call. It adds no adapters: ranks that share
        blocks make none for it, and models that add rows serve none.
        """
        assert self._adapters_of_step() is None, "halves of blocks add no adapters"
        stream, at, caches, plan = host_array(hidden), _int32(positions), self._core_caches(kv_caches), attention.core
        times = []
        for index in range(len(self._outline.blocks)):
            out, down = (None, None) if self._ends is None else self._ends[index]
            times.append(self._core.attend(plan, index, stream, at, caches, adds=out is None or out.adds_residual))
            if out is not None:
                out.sum_over_ranks(hidden)
            times.append(self._core.multiply(plan, index, stream, adds=down is None or down.adds_residual))
            if down is not None:
                down.sum_over_ranks(hidden)
            if added is not None:
                added.add(index, hidden)
        norms, products, attended = (sum(part) for part in zip(*times, strict=True))
        self.times = norms, products, attended
        self.num_shared_halves += 0 if self._ends is None else len(times)
        last_norm = self._outline.last_norm
        return hidden if last_norm is None else last_norm(hidden)

    def forward_logits(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        attention: object,
        places: Tensor | None,
        *,
        chooses: bool,
    ) -> DecoderLogits:
        """See ``DecoderKernel.forward_logits``."""
        assert isinstance(attention, CPUAttentionPlan)
        hidden = hidden.contiguous()
        num_rows = hidden.shape[0] if places is None else places.shape[0]
        logits = torch.empty((num_rows, self._vocab_size), dtype=hidden.dtype)
        ids = torch.empty(num_rows, dtype=torch.int32) if chooses else None
        self.times = self._core.forward_logits(
            attention.core,
            host_array(hidden),
            _int32(positions),
            self._core_caches(kv_caches),
            None if places is None else _int32(places),
            host_array(logits),
            None if ids is None else ids.numpy(),
            self._adapters_of_step(),
        )
        return DecoderLogits(logits, ids)

    def _core_caches(self, kv_caches: Sequence[Tensor]) -> _core.CpuCaches:
        """The caches as the core takes them; converted again only if they are not those of the last step."""
        if (
            self._caches is None
            or len(kv_caches) != len(self._caches[0])
            or not all(map(is_, kv_caches, self._caches[0]))
        ):
            self._caches = tuple(kv_caches), _core.CpuCaches([host_array(cache) for cache in kv_caches])
        return self._caches[1]

    def _adapters_of_step(self) -> Sequence[tuple[_core.CpuAdapter, Sequence[int]]] | None:
        """The adapters as the core takes them: None if the step has none."""
        return None if self.adapters is None else self.adapters.of_step() or None

    def make_adapter(self, deltas: Mapping[int, _core.CpuLayerDelta]) -> _core.CpuAdapter | None:
        """See ``DecoderKernel``; the core adds nothing in halves of blocks, nor before a fused activation."""
        if self._ends is not None:
            return None
        blocks, taken = [], set()
        for block in self._outline.blocks:
            mlp = _mlp_of_every_token(block)
            linears = [block.qkv, block.out, *(() if mlp is None else (mlp.up, mlp.down))]
            if mlp is not None and deltas.get(id(mlp.up)) is not None and not mlp.is_gated:
                return None
            found = [deltas.get(id(linear)) for linear in linears]
            blocks.append(found + [None] * (_ADAPTED_PARTS - len(found)))
            taken |= set(map(id, linears))
        return _core.CpuAdapter(self._core, blocks) if taken >= deltas.keys() else None


def use_core_decoder(model: CausalLM) -> None:
    """Let the core run a model's blocks in one call, for each class of row counts for which it computes all parts."""
    outline = model.decoder_outline()
    if outline is None or envs.decoder() == "modules":
        return
    is_shared = model.group.size > 1
    if is_shared and not all(block.has_halves for block in outline.blocks):
        return
    row_classes = [_takes_all(outline, index) for index in range(NUM_ROW_CLASSES)]
    if not any(row_classes):
        return
    heads = [None if is_shared else _head(model, outline, index) for index in range(NUM_ROW_CLASSES)]
    core = _make_core(outline, model, next((head.packed for head in heads if head is not None), None))
    model.decoder_kernel = CoreDecoder(
        core, row_classes, [head is not None for head in heads], outline, model.vocab_size, is_shared=is_shared
    )
    logger.debug("decoder blocks in one call of the core: %s", row_classes)


def _takes_all(outline: PreNormDecoder, index: int) -> bool:
    norms = [norm for block in outline.blocks for norm in (block.attention_norm, block.mlp_norm)]
    norms += [norm for block in outline.blocks for norm in (*(block.head_norms or ()), *(block.post_norms or ()))]
    norms.append(outline.last_norm)
    if not all(isinstance(getattr(norm, "kernel", None), CoreNorm) for norm in norms if norm is not None):
        return False
    parts = [part for block in outline.blocks for part in _dense_parts(block)]
    if any(core_activation(part.activation) is None for part in parts):
        return False
    return all(_core_linear(linear, index) is not None for block in outline.blocks for linear in _linears(block))


def _ends_of_halves(block: PreNormBlock) -> tuple[RowLinear, RowLinear]:
    """The last layers of attention and MLP, whose results are partial sums where ranks share a block."""
    out, down = block.out, _dense_parts(block)[0].down
    assert isinstance(out, RowLinear)
    assert isinstance(down, RowLinear)
    return out, down


def _linears(block: PreNormBlock) -> tuple[Linear, ...]:
    chosen: list[Linear] = []
    if isinstance(block.mlp, ExpertMLPParts):
        chosen.append(block.mlp.router)
        if block.mlp.shared is not None and block.mlp.shared.gate is not None:
            chosen.append(block.mlp.shared.gate)
    mlps = (linear for part in _dense_parts(block) for linear in (part.up, part.down))
    return block.qkv, block.out, *chosen, *mlps


def _dense_parts(block: PreNormBlock) -> tuple[DenseMLPParts, ...]:
    """The MLP, or the experts and then the one that computes every token."""
    if isinstance(block.mlp, DenseMLPParts):
        return (block.mlp,)
    return *block.mlp.experts, *(() if block.mlp.shared is None else (block.mlp.shared.mlp,))


def _mlp_of_every_token(block: PreNormBlock) -> DenseMLPParts | None:
    """The MLP, or the one next to the experts, which adapters may change; None if there are experts alone."""
    if isinstance(block.mlp, DenseMLPParts):
        return block.mlp
    return None if block.mlp.shared is None else block.mlp.shared.mlp


def _head(model: CausalLM, outline: PreNormDecoder, index: int) -> CoreLinear | None:
    """The head's kernel, if the head follows the blocks on this rank and the core computes this class of rows."""
    if outline.last_norm is None or not outline.ends_in_head:
        return None
    return _core_kernel(model.head_kernel if model.lm_head is None else model.lm_head.kernel, index)


def _core_linear(linear: Linear, index: int) -> CoreLinear | None:
    """The layer's kernel, if it is the core's for this class of rows."""
    return _core_kernel(linear.kernel, index)


def _core_kernel(kernel: LinearKernel | None, index: int) -> CoreLinear | None:
    if isinstance(kernel, LinearByRows):
        kernel = kernel.kernel_of(index)
    return kernel if isinstance(kernel, CoreLinear) else None


def _make_core(outline: PreNormDecoder, model: CausalLM, head: _core.PackedLinear | None) -> _core.CpuDecoder:
    blocks = list(map(_core_block, outline.blocks))
    spec = model.kv_cache_spec
    num_heads = outline.blocks[0].out.weight.shape[1] // spec.head_dim
    last_norm = _norm(outline.last_norm)
    turns = [
        (turn.inv_freq.float().numpy(), turn.attention_scaling, [] if turn.axes is None else turn.axes.tolist())
        for turn in outline.turns
    ]
    return _core.CpuDecoder(blocks, last_norm, num_heads, spec.num_kv_heads, spec.head_dim, turns=turns, head=head)


def _core_block(block: PreNormBlock) -> CoreBlock:
    return {
        "attention_norm": _norm(block.attention_norm),
        "qkv": _packed(block.qkv),
        "head_norms": _both(block.head_norms),
        "is_by_head": block.is_by_head,
        "rotary": block.rotary,
        "scale": block.scale,
        "sliding_window": block.sliding_window,
        "soft_cap": block.soft_cap,
        "sinks": None if block.sinks is None else block.sinks.float().numpy(),
        "out": _packed(block.out),
        "mlp_norm": _norm(block.mlp_norm),
        "is_parallel": block.is_parallel,
        "dense": _core_mlp(block.mlp) if isinstance(block.mlp, DenseMLPParts) else None,
        "experts": _core_experts(block.mlp) if isinstance(block.mlp, ExpertMLPParts) else None,
        "post_norms": _both(block.post_norms),
    }


def _core_mlp(mlp: DenseMLPParts) -> CoreMLP:
    activation = core_activation(mlp.activation)
    assert activation is not None
    return {
        "up": _packed(mlp.up),
        "is_gated": mlp.is_gated,
        "activation": activation,
        "down": _packed(mlp.down),
    }


def _core_experts(mlp: ExpertMLPParts) -> CoreExperts:
    routing, bias, shared = mlp.router.routing, mlp.router.e_score_correction_bias, mlp.shared
    return {
        "router": _packed(mlp.router),
        "routing": {
            "scores": routing.scores,
            "num_chosen": mlp.router.num_chosen,
            "bias": None if bias is None else bias.float().numpy(),
            "num_groups": routing.num_groups,
            "num_chosen_groups": routing.num_chosen_groups,
            "is_normed": routing.is_normed,
            "scale": routing.scale,
            "is_wide": routing.is_wide,
        },
        "experts": list(map(_core_mlp, mlp.experts)),
        "shared": None
        if shared is None
        else {"mlp": _core_mlp(shared.mlp), "gate": None if shared.gate is None else _packed(shared.gate)},
    }


def _int32(tensor: Tensor) -> npt.NDArray[np.int32]:
    array: npt.NDArray[np.int32] = tensor.to(torch.int32).contiguous().numpy()
    return array


def _packed(linear: Linear) -> _core.PackedLinear:
    kernels = (_core_linear(linear, index) for index in range(NUM_ROW_CLASSES))
    return next(kernel.packed for kernel in kernels if kernel is not None)


def _both(norms: tuple[nn.Module, nn.Module] | None) -> tuple[NormParts, NormParts] | None:
    return None if norms is None else (_parts(norms[0]), _parts(norms[1]))


def _norm(norm: nn.Module | None) -> NormParts | None:
    return None if norm is None else _parts(norm)


def _parts(norm: nn.Module) -> NormParts:
    kernel = norm.kernel
    assert isinstance(kernel, CoreNorm)
    return kernel.parts
