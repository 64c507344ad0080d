"""The blocks of a decoder as data, for code that runs all of them in one call instead of module by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from rustvllm import _core
from rustvllm.layers.activation import Activation
from rustvllm.layers.linear import Linear
from rustvllm.layers.rotary import RotaryEmbedding
from rustvllm.layers.router import Router


@dataclass(frozen=True, slots=True)
class DenseMLPParts:
    """An MLP that computes every token.

    Attributes:
        up: Maps the stream to the MLP's features; if these are gated, to the gates and then to the features.
        activation: Applied to the features, or to the gates.
        down: Maps the features to the stream.
        is_gated: Whether the activation's result multiplies each feature.
    """

    up: Linear
    activation: Activation
    down: Linear
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class SharedMLPParts:
    """A gated MLP next to experts, which computes every token.

    Attributes:
        mlp: The MLP, of any size.
        gate: Maps the stream to one logit, whose sigmoid is the weight of the result; None: the weight is 1.
    """

    mlp: DenseMLPParts
    gate: Linear | None


@dataclass(frozen=True, slots=True)
class ExpertMLPParts:
    """Several gated MLPs of one size, of which a router chooses a few for each token.

    Attributes:
        router: Maps the stream to a logit per expert, and says what these mean.
        experts: The MLPs.
        shared: Computes every token besides; None if nothing does.
    """

    router: Router
    experts: tuple[DenseMLPParts, ...]
    shared: SharedMLPParts | None


@dataclass(frozen=True, slots=True)
class PreNormBlock:
    """Causal attention and an MLP: each reads the stream, most often normed, and adds its result to the stream.

    Without a norm before attention or the MLP there are ``post_norms``. The norm before the MLP reads the stream with
    attention added or, with ``is_parallel``, the one that attention read.

    Attributes:
        attention_norm: The norm before attention; None: it reads the stream as it is.
        qkv: Computes query, key and value of all heads, one after the other.
        scale: Factor on the products of queries and keys.
        out: Maps the heads to the stream.
        mlp_norm: The norm before the MLP; None: it reads the stream as it is.
        mlp: The MLP.
        head_norms: Norms of each query head and of each key head, or of all query heads and of all key heads together,
            before they are rotated; None if there are none.
        rotary: Index of the decoder's turns that rotate queries and keys; None if positions are added to the stream.
        sliding_window: How many tokens a query sees, including itself; None: all.
        soft_cap: See ``AttentionPlan.forward``.
        sinks: likewise.
        is_by_head: Whether ``qkv`` computes query, key and value of one head after the other.
        is_parallel: See above.
        post_norms: Norms of the results of attention and MLP, before they are added; None if there are none.
    """

    attention_norm: nn.Module | None
    qkv: Linear
    scale: float
    out: Linear
    mlp_norm: nn.Module | None
    mlp: DenseMLPParts | ExpertMLPParts
    head_norms: tuple[nn.Module, nn.Module] | None = None
    rotary: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    is_by_head: bool = False
    is_parallel: bool = False
    post_norms: tuple[nn.Module, nn.Module] | None = None

    @property
    def has_halves(self) -> bool:
        """Whether attention and MLP can run separately, with only the stream between them."""
        return not self.is_parallel and self.post_norms is None


@dataclass(frozen=True, slots=True)
class PreNormDecoder:
    """All blocks that a rank has, and what follows them.

    Attributes:
        blocks: The blocks in order.
        last_norm: The norm at the model's end; None if another stage has it.
        turns: The rotations of heads that blocks use.
        ends_in_head: Whether the head follows the norm.
    """

    blocks: tuple[PreNormBlock, ...]
    last_norm: nn.Module | None
    turns: tuple[RotaryEmbedding, ...] = ()
    ends_in_head: bool = True


@dataclass(frozen=True, slots=True)
class AddedRows:
    """What is added to the stream of some tokens between blocks.

    Attributes:
        places: int64 ``[n]``, indices of the step's tokens, each once.
        rows: ``[n, hidden_size]`` each: added after the first block, after the second, and so on.
    """

    places: Tensor
    rows: tuple[Tensor, ...]

    def add(self, block: int, hidden: Tensor) -> None:
        """Add to the stream, ``[num_tokens, hidden_size]``, what follows the block with this number."""
        if block < len(self.rows):
            hidden.index_add_(0, self.places, self.rows[block].to(hidden.dtype))


@dataclass(frozen=True, slots=True)
class DecoderLogits:
    """The result of a decoder that includes the head.

    Attributes:
        logits: ``[num_rows, vocab_size]``.
        ids: int32 ``[num_rows]``, the id of each row's largest logit, the first of equals; negative if a logit is NaN,
            or if all are minus infinity. None if the caller did not ask for ids.
    """

    logits: Tensor
    ids: Tensor | None


class DecoderAdapters(Protocol):
    """The adapters that a decoder kernel adds to its layers' products."""

    def of_step(self) -> Sequence[tuple[_core.CpuAdapter, Sequence[int]]] | None:
        """Those of the step that runs, each with its tokens in ascending order; None if the kernel cannot add one."""
        ...


class DecoderKernel(Protocol):
    """Runs a ``PreNormDecoder`` in one call, with the same results as its modules.

    Attributes:
        adapters: What it adds; None if the model serves no adapters.
    """

    adapters: DecoderAdapters | None

    def takes(self, num_tokens: int, attention: object) -> bool:
        """Whether it can run a step of ``num_tokens`` tokens with this attention plan and the step's adapters.

        If it cannot, the modules run the step.
        """
        ...

    def takes_head(self, num_rows: int) -> bool:
        """Whether it also computes ``num_rows`` rows of logits; else something else computes them."""
        ...

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        attention: object,
        added: AddedRows | None = None,
    ) -> Tensor:
        """Run all blocks, and the last norm if there is one.

        Args:
            hidden: ``[num_tokens, hidden_size]``, the embedded tokens; may be overwritten.
            positions: int32 ``[num_tokens]``, the position of each token in its own sequence, or ``[3, num_tokens]``
                where positions have three parts.
            kv_caches: One per block, read and written.
            attention: The step's plan.
            added: What is added to the stream between blocks, if something is.

        Returns:
            ``[num_tokens, hidden_size]``, normalized if there is a norm.
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
        """Run all blocks, the last norm and the head, if ``takes`` and ``takes_head`` allow it.

        Args:
            hidden: See ``forward``.
            positions: See ``forward``.
            kv_caches: See ``forward``.
            attention: See ``forward``.
            places: int32 ``[num_rows]``, the tokens whose logits are wanted, each once; None: all, in order.
            chooses: Whether the ids of the largest logits are wanted.
        """
        ...

    def make_adapter(self, deltas: Mapping[int, _core.CpuLayerDelta]) -> _core.CpuAdapter | None:
        """Make an adapter of the blocks.

        Args:
            deltas: The adapter's changes by the ``id`` of their layers.

        Returns:
            None if the kernel cannot change one of the layers.
        """
        ...
