"""The interface of models that the runner and the loader use."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.layers.decoder import AddedRows, DecoderKernel, DecoderLogits, PreNormDecoder
from rustvllm.layers.linear import Embedding, Linear, LinearKernel, plain_linear
from rustvllm.layers.parallel import (
    NoEmbedding,
    VocabEmbedding,
    VocabHead,
    building_group,
    building_stage,
    shared_by,
    whole_logits,
)

_OF_POWERS_OF_TWO: Final = 0.5
"""The significand of every power of two, as ``math.frexp`` gives it."""


class CausalLM(nn.Module, ABC):
    """A decoder that predicts the next token.

    Attributes:
        group: The ranks that share its layers.
        stage: Which layers this rank has; the first stage has the embedding, the last the head.
        hidden_size: Width of the stream between layers.
        kv_cache_spec: The shape of this rank's KV cache.
        vocab_size: Width of the logits.
        max_positions: The longest sequence that the position encoding supports, in tokens; None if unlimited.
        prefixes: Prefixes that checkpoints may put before the names of ``checkpoint_tensors``.
        embed_tokens: The embedding, which is also the head if they are tied.
        lm_head: The separate head; None if it is tied, and in all stages but the last.
        is_tied: Whether the embedding is also the head, unless there is a separate one.
        has_head: False if nothing is wanted but hidden states: there is no head then, neither separate nor tied.
        head_kernel: Computes a head that is the embedding; None: torch does.
        decoder_kernel: Runs all blocks in one call; None: the modules run one after the other.
        head_name: The checkpoint's name of the head's weight, after the prefix.
        has_parameters_alone: Whether all its tensors that depend on a device are parameters, so that a model built
            without memory can be given memory later.
        given_rows: Embeddings that replace those of some tokens of the next step: the tokens' indices, int64 ``[n]``,
            and the rows, ``[n, hidden_size]``; None if there are none. Wider rows, ``[n, (1 + k) · hidden_size]``, also
            have what is added to the stream after each of the first k layers.
        logit_scale: Multiplies the logits.
        logit_cap: Replaces logits by ``cap · tanh(logits / cap)``, once they are scaled; None disables this.
    """

    hidden_size: int
    kv_cache_spec: KVCacheSpec
    vocab_size: int
    max_positions: int | None
    prefixes: tuple[str, ...] = ()
    embed_tokens: Embedding
    embed_tokens_name: str
    lm_head: Linear | None
    is_tied: bool = True
    has_head: bool = True
    head_kernel: LinearKernel | None = None
    decoder_kernel: DecoderKernel | None = None
    head_name: str = "lm_head.weight"
    logit_scale: float = 1.0
    logit_cap: float | None = None
    given_rows: tuple[Tensor, Tensor] | None = None
    has_parameters_alone: bool = True

    @abstractmethod
    def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
        """Allocate the parameters in torch's default dtype and device.

        Raises:
            ModelLoadError: The configuration lacks a key, or has an unsupported setting.
        """
        super().__init__()
        self.group = building_group()
        self.stage = building_stage()
        self._stream_dtype = torch.get_default_dtype()

    def make_embedding(self, width: int, *, tied: bool) -> Embedding:
        """The embedding, in stages that need it: the first, and the last if it is also the head."""
        is_needed = self.stage.is_first or (tied and self.stage.is_last)
        # A stage without an embedding never uses it; an optional type would burden every model.
        return VocabEmbedding(self.vocab_size, width) if is_needed else cast("Embedding", NoEmbedding())

    def make_head(self, width: int, *, tied: bool) -> VocabHead | None:
        """The separate head, in the last stage; None if the embedding is the head."""
        self.is_tied = tied
        return VocabHead(width, self.vocab_size) if self.stage.is_last and not tied else None

    def drop_head(self) -> None:
        """Make it a model without a head; a checkpoint's head is not read then."""
        self.lm_head, self.is_tied, self.has_head = None, False, False

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """Run the decoder over the flattened tokens of one step.

        Args:
            input_ids: int ``[num_tokens]``.
            positions: int ``[num_tokens]``, the position of each token in its own sequence, or ``[3, num_tokens]`` for
                a model whose positions have three parts.
            kv_caches: One per layer, ``[2, num_blocks, block_size, num_kv_heads, head_dim]``; written and read.
            attention: The step's plan.

        Returns:
            ``[num_tokens, hidden_size]``, normalized for ``compute_logits``. In all stages but the last, the input of
            the next stage, which has been sent to it.
        """
        if self.stage.is_first:
            hidden = self._embedded(input_ids, positions)
        else:
            hidden = self.stage.receive(input_ids.shape[0], self.hidden_size, self._stream_dtype)
        hidden = self.run_layers(hidden, positions, kv_caches, attention)
        self.stage.hand_on(hidden)
        return hidden

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer, ``[num_tokens, hidden_size]``; only called in the first stage."""
        raise NotImplementedError(f"{type(self).__name__} has a forward of its own")

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """What ``embed`` returns, with ``given_rows`` in their places."""
        hidden = self.embed(input_ids, positions)
        if self.given_rows is None:
            return hidden
        places, rows = self.given_rows
        return hidden.index_copy(0, places, rows[:, : self.hidden_size].to(hidden.dtype))

    @property
    def added_rows(self) -> AddedRows | None:
        """What is added to the stream between layers in the next step, if something is."""
        if self.given_rows is None or self.given_rows[1].shape[1] == self.hidden_size:
            return None
        _, *rows = torch.split(self.given_rows[1], self.hidden_size, dim=1)
        return AddedRows(self.given_rows[0], tuple(rows))

    def run_layers(
        self, hidden: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """Run this stage's layers and, in the last stage, the final norm; see ``forward``.

        Args:
            hidden: ``[num_tokens, hidden_size]``; may be overwritten.
            positions: See ``forward``.
            kv_caches: The caches of these layers.
            attention: See ``forward``.
        """
        raise NotImplementedError(f"{type(self).__name__} has a forward of its own")

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes.

        By default these are the parameters under their modules' names; a module that is stored differently has its own
        ``checkpoint_tensors``.

        Returns:
            Name in a checkpoint, without prefix, → a view of a parameter with the shape that the checkpoint stores. The
            head is not included: see ``lm_head``.
        """
        return {name: tensor for name, tensor in _stored(self).items() if not name.startswith("lm_head.")}

    @property
    def tied_embedding(self) -> Tensor | None:
        """The embedding's weight, if it is also the head."""
        return self.embed_tokens.weight if self.lm_head is None and self.is_tied and self.stage.is_last else None

    def tied_tensors(self) -> dict[str, str]:
        """Names (without prefix) that a checkpoint may have in addition to, or instead of, another name of a tensor."""
        is_there = self.stage.is_first or self.stage.is_last
        is_tied = self.lm_head is None and self.is_tied and is_there
        return {"lm_head.weight": self.embed_tokens_name} if is_tied else {}

    def untie(self, name: str) -> Tensor:
        """Give a tied tensor its own memory, because a checkpoint has separate values for it."""
        assert name == "lm_head.weight", f"{name} is not tied"
        return self.untie_head().weight

    def checkpoint_name(self, name: str) -> str:
        """The name in ``checkpoint_tensors``, with a prefix, for a tensor that a checkpoint calls ``name``."""
        return name

    def decoder_outline(self) -> PreNormDecoder | None:
        """The blocks as data, if ``forward`` can use ``decoder_kernel``; None if their structure is different."""
        return None

    def check_filled(self) -> None:
        """Check the model once it is filled, before it serves a request.

        Raises:
            ModelLoadError: It does not compute correctly.
        """

    def is_ignored(self, name: str) -> bool:
        """Whether the model does not need a checkpoint's tensor of this name (without prefix)."""
        del name
        return False

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of some rows: ``[num_rows, hidden_size]`` → ``[num_rows, vocab_size]``.

        Every rank must call it; the result is valid on the first rank and undefined on the others.

        Args:
            hidden: The result of ``forward``.
            out: Memory that may be used for the result; the caller uses the returned tensor.
        """
        return whole_logits(self.group, self.own_logits(hidden, out), self.vocab_size)

    def own_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The logits of this rank's part of the vocabulary."""
        return self._finish_logits(self._project(hidden, out))

    def _finish_logits(self, logits: Tensor) -> Tensor:
        """Scale and cap logits, in place."""
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        return cap_logits(logits, self.logit_cap)

    def forward_logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        attention: AttentionPlan,
        places: Tensor | None,
        *,
        chooses: bool,
    ) -> DecoderLogits | None:
        """Compute the logits of a step in one call; None, without computing, if ``decoder_kernel`` cannot do that.

        Args:
            input_ids: See ``forward``.
            positions: See ``forward``.
            kv_caches: See ``forward``.
            attention: See ``forward``.
            places: int32 ``[num_rows]``, the tokens whose logits are wanted, each once; None: all, in order.
            chooses: Whether the ids of the largest logits are wanted.
        """
        kernel, num_tokens = self.decoder_kernel, input_ids.shape[0]
        if kernel is None or not (self.stage.is_first and self.stage.is_last) or self.added_rows is not None:
            return None
        num_rows = num_tokens if places is None else places.shape[0]
        if not kernel.takes(num_tokens, attention) or not kernel.takes_head(num_rows):
            return None
        hidden = self._embedded(input_ids, positions)
        # Logits that differ may become equal when they are capped, or when their scale is not a power of two: the first
        # of the largest must be found after that.
        chooses = chooses and self.logit_cap is None and math.frexp(self.logit_scale)[0] == _OF_POWERS_OF_TWO
        result = kernel.forward_logits(hidden, positions, kv_caches, attention, places, chooses=chooses)
        self._finish_logits(result.logits)
        return result

    def _project(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        if out is not None and self.group.size == 1 and (weight := self._plain_head()) is not None:
            return torch.mm(hidden, weight.t(), out=out)
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(hidden)
            return logits
        if self.head_kernel is not None:
            return self.head_kernel.forward(hidden, None, None)
        return plain_linear(hidden, self.embed_tokens.weight)

    def _plain_head(self) -> Tensor | None:
        """The head's weight, if the head is only a product with it."""
        if self.lm_head is None:
            return self.embed_tokens.weight if self.head_kernel is None else None
        is_plain = self.lm_head.kernel is None and self.lm_head.adapters is None and self.lm_head.bias is None
        return self.lm_head.weight if is_plain else None

    def untie_head(self) -> Linear:
        """Give the model a separate head, because a checkpoint has a head that differs from the embedding."""
        weight = self.embed_tokens.weight
        with shared_by(self.group):
            head = VocabHead(weight.shape[1], self.vocab_size).to(device=weight.device, dtype=weight.dtype)
        self.lm_head = head
        return head


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """``cap · tanh(logits / cap)``, in place."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _stored(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    for child_name, child in module.named_children():
        own = getattr(child, "checkpoint_tensors", None)
        stored = own() if callable(own) else _stored(child)
        tensors |= {f"{child_name}.{name}": tensor for name, tensor in stored.items()}
    return tensors


def linear_parts(linear: Linear, parts: Mapping[str, int]) -> dict[str, Tensor]:
    """The rows of a fused layer, under the names of the layers that a checkpoint stores instead.

    Args:
        linear: The fused layer.
        parts: Name of each part, in order, → its number of rows.
    """
    tensors: dict[str, Tensor] = {}
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            split = fused.split_with_sizes(list(parts.values()))
            tensors |= {f"{name}.{kind}": part for name, part in zip(parts, split, strict=True)}
    return tensors
