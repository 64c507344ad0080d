"""The blocks of a decoder as parts, for what can run all of them in one call instead of module by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from rustvllm import _core
from rustvllm.layers.activation import Activation
from rustvllm.layers.linear import Linear
from rustvllm.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class PreNormBlock:
    """Causal attention and an MLP, each on the normed stream and added to it.

    The norm before the MLP is of the stream with attention added, or (``is_parallel``) of the one that attention read.

    Attributes:
        attention_norm: Before attention.
        qkv: Query, key and value of all heads, one after the other.
        scale: Factor on the products of queries and keys.
        out: From the heads to the stream.
        mlp_norm: Before the MLP.
        up: From the stream to the MLP's features; where these are gated, to the gates and then to them.
        activation: Of the features, or of the gates.
        down: From the features to the stream.
        head_norms: Of each query's head and of each key's, before they are turned; None: there are none.
        rotary: Which of the decoder's turns queries and keys are turned by; None: positions are in the stream.
        sliding_window: Tokens that a query sees, itself included; None: all.
        soft_cap: See ``AttentionPlan.forward``.
        is_gated: Whether the activation's result is a factor of each feature.
        is_by_head: Whether ``qkv`` gives query, key and value of one head after the other.
        is_parallel: See above.
        post_norms: Of what attention and what the MLP give, before it is added; None: it is added as it is.
    """

    attention_norm: nn.Module
    qkv: Linear
    scale: float
    out: Linear
    mlp_norm: nn.Module
    up: Linear
    activation: Activation
    down: Linear
    head_norms: tuple[nn.Module, nn.Module] | None = None
    rotary: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    is_gated: bool = False
    is_by_head: bool = False
    is_parallel: bool = False
    post_norms: tuple[nn.Module, nn.Module] | None = None

    @property
    def has_halves(self) -> bool:
        """Whether attention and MLP can run apart, with nothing but the stream between them."""
        return not self.is_parallel and self.post_norms is None


@dataclass(frozen=True, slots=True)
class PreNormDecoder:
    """All blocks that a rank has, and what follows them.

    Attributes:
        blocks: One after the other.
        last_norm: At the model's end; None: another stage has that.
        turns: What blocks turn heads by.
        ends_in_head: Whether the head takes what the norm gives.
    """

    blocks: tuple[PreNormBlock, ...]
    last_norm: nn.Module | None
    turns: tuple[RotaryEmbedding, ...] = ()
    ends_in_head: bool = True


@dataclass(frozen=True, slots=True)
class DecoderLogits:
    """What a decoder with a head leaves.

    Attributes:
        logits: ``[num_rows, vocab_size]``.
        ids: int32 ``[num_rows]``, of the largest logit of each row, the first of equals; negative where one is NaN, or
            all are minus infinity. None if the caller did not ask.
    """

    logits: Tensor
    ids: Tensor | None


class DecoderKernel(Protocol):
    """Runs a ``PreNormDecoder`` in one call; it computes what the modules compute."""

    def takes(self, num_tokens: int, attention: object) -> bool:
        """Whether it runs a step of so many tokens, whose attention was planned so; else the modules do."""
        ...

    def takes_head(self, num_rows: int) -> bool:
        """Whether it goes on to so many rows of logits; else something else computes them."""
        ...

    def forward(self, hidden: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: object) -> Tensor:
        """All blocks and the last norm, if there is one.

        Args:
            hidden: ``[num_tokens, hidden_size]``, the embedded tokens; it may be overwritten.
            positions: int32 ``[num_tokens]``, of each token in its own sequence.
            kv_caches: Of each block, written and read.
            attention: The step's plan.

        Returns:
            ``[num_tokens, hidden_size]``, normalised if there is a norm.
        """
        ...

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
        """All blocks, the last norm and the head, of a kernel that takes both; see ``forward``.

        Args:
            hidden: As for ``forward``, and so are the next three.
            positions: Likewise.
            kv_caches: Likewise.
            attention: Likewise.
            places: int32 ``[num_rows]``, the tokens whose logits are wanted, each once; None: all, in order.
            chooses: Whether the largest logits are asked for.
        """
        ...


@runtime_checkable
class AdaptableDecoder(DecoderKernel, Protocol):
    """A decoder whose one call may add adapters' products.

    Attributes:
        adapters: Of the next step, each with its tokens in ascending order.
    """

    adapters: Sequence[tuple[_core.CpuAdapter, Sequence[int]]]

    def make_adapter(self, deltas: Mapping[int, _core.CpuLayerDelta]) -> _core.CpuAdapter | None:
        """An adapter of the blocks.

        Args:
            deltas: By the ``id`` of their layers.

        Returns:
            None if one of the layers is none that the call can add to.
        """
        ...
