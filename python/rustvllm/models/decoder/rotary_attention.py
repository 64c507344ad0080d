"""Grouped-query attention with rotary positions, as in most architectures since Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan, HeadNorms, rotary_plan
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.linear import empty_parameter
from rustvllm.layers.norm import GemmaRMSNorm, RMSNorm
from rustvllm.layers.parallel import RowLinear, Shard, building_group, head_parts, qkv_linear
from rustvllm.layers.rotary import RotaryAngles, apply_rotary
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.interface import linear_parts


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of attention.

    Attributes:
        hidden_size: Width of the residual stream.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads, and of value heads; it divides ``num_heads``.
        head_dim: Features per head, an even number.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_config(cls, config: HFConfig, *, head_dim: int | None = None) -> HeadSizes:
        """Read the sizes under the keys that these architectures share.

        Args:
            config: The model's configuration.
            head_dim: Used if the configuration has none; None: ``hidden_size / num_attention_heads``.

        Raises:
            ModelLoadError: A size is missing, or sizes do not match.
        """
        hidden_size = config.positive_int("hidden_size")
        num_heads = config.positive_int("num_attention_heads")
        num_kv_heads = config.positive_int("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                f"({num_kv_heads})"
            )
        head_dim = config.positive_int("head_dim", default=head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise ModelLoadError(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
        return cls(hidden_size, num_heads, num_kv_heads, head_dim)

    def of_rank(self) -> HeadSizes:
        """The sizes with the heads that a rank of the building group has.

        Raises:
            ModelLoadError: The ranks cannot share them evenly.
        """
        query, key = head_parts(self.num_heads, self.num_kv_heads)
        return replace(self, num_heads=query.count, num_kv_heads=key.count)


class RotaryAttention(nn.Module):
    """Attention with one projection for query, key and value; see the module.

    Args:
        sizes: The sizes with the heads of all ranks; the attribute has this rank's heads.
        qkv_bias: Whether that projection has a bias.
        out_bias: Whether the output projection has a bias.
        scale: Factor on the products of queries and keys; None: ``head_dim ** -0.5``.
        sliding_window: How many tokens a query sees, including itself; None: all.
        soft_cap: See ``AttentionPlan.forward``.
        has_sinks: Whether each query head has a sink, see ``AttentionPlan.forward``.
        rotary: Index of the model's rotation that rotates queries and keys; None if they are not rotated.
        head_norm: Makes the norm of each query and key head, applied before the rotation; None if there is none.
        stored_fused: Whether checkpoints store the fused projection (``qkv_proj``) or its three parts.
    """

    def __init__(
        self,
        sizes: HeadSizes,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        rotary: int | None = 0,
        head_norm: Callable[[], nn.Module] | None = None,
        stored_fused: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = sizes.of_rank()
        self.scale = sizes.head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.rotary = rotary
        self.stored_fused = stored_fused
        self.sinks = empty_parameter(self.sizes.num_heads) if has_sinks else None
        if has_sinks and building_group().size > 1:
            self.shards: Mapping[str, Shard] = {
                "sinks": Shard(0, (head_parts(sizes.num_heads, sizes.num_kv_heads)[0],))
            }
        self.qkv_proj = qkv_linear(
            sizes.hidden_size, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, bias=qkv_bias
        )
        self.o_proj = RowLinear(sizes.num_heads * sizes.head_dim, sizes.hidden_size, bias=out_bias)
        self.q_norm = head_norm() if head_norm else None
        self.k_norm = head_norm() if head_norm else None

    def forward(
        self,
        hidden: Tensor,
        angles: RotaryAngles | None,
        kv_cache: Tensor,
        attention: AttentionPlan,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Apply attention and the output projection.

        Args:
            hidden: ``[num_tokens, hidden_size]``, what the projection reads.
            angles: Of the step's tokens; None if heads are not rotated.
            kv_cache: See ``AttentionPlan.forward``.
            attention: The step's plan.
            residual: Added to the result, and may be overwritten.
        """
        qkv = self.project(hidden)
        plan, table = rotary_plan(attention), None if angles is None else angles.table
        if angles is None or plan is None or table is None:
            out = self._attend(qkv, None if angles is None else angles.cos_sin, kv_cache, attention)
        else:
            out = plan.forward_rotary(
                qkv,
                self.sizes.num_heads,
                angles.positions,
                table,
                kv_cache,
                self.scale,
                head_norms=self._head_norms(),
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                sinks=self.sinks,
            )
        projected: Tensor = self.o_proj(out.flatten(1), residual=residual, in_place=True)
        return projected

    def project(self, hidden: Tensor) -> Tensor:
        """Queries, keys and values: ``[num_tokens, num_heads + 2 · num_kv_heads, head_dim]``."""
        qkv: Tensor = self.qkv_proj(hidden).unflatten(-1, (-1, self.sizes.head_dim))
        return qkv

    @property
    def head_norms(self) -> tuple[nn.Module, nn.Module] | None:
        """The norms of each query head and of each key head; None if heads are not normed one by one."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)

    def _head_norms(self) -> HeadNorms | None:
        query, key = self.head_norms or (None, None)
        if not isinstance(query, RMSNorm | GemmaRMSNorm) or not isinstance(key, RMSNorm | GemmaRMSNorm):
            return None
        return HeadNorms(query.weight, key.weight, query.eps, query.weight_offset)

    def _attend(
        self, qkv: Tensor, cos_sin: tuple[Tensor, Tensor] | None, kv_cache: Tensor, attention: AttentionPlan
    ) -> Tensor:
        num_heads, num_kv_heads = self.sizes.num_heads, self.sizes.num_kv_heads
        query_key, value = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        if (norms := self.head_norms) is not None:
            query_key = torch.cat((norms[0](query_key[:, :num_heads]), norms[1](query_key[:, num_heads:])), 1)
        turned = query_key if cos_sin is None else apply_rotary(query_key, *cos_sin)
        return attention.forward(
            turned[:, :num_heads],
            turned[:, num_heads:],
            value,
            kv_cache,
            self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Names within the layer; see ``CausalLM.checkpoint_tensors``."""
        head_dim, kv_rows = self.sizes.head_dim, self.sizes.num_kv_heads * self.sizes.head_dim
        tensors = {name: tensor for name, tensor in self.named_parameters() if not name.startswith("qkv_proj.")}
        parts = {"q_proj": self.sizes.num_heads * head_dim, "k_proj": kv_rows, "v_proj": kv_rows}
        return tensors | linear_parts(self.qkv_proj, {"qkv_proj": sum(parts.values())} if self.stored_fused else parts)
