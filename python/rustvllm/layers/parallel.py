"""Layers that the ranks of a group share: the part of each parameter that a rank holds, and where ranks exchange data.

With pipeline stages, a model is built within one stage and has only the layers of that stage.

A ``ColumnLinear`` computes a part of its outputs on each rank. The ``RowLinear`` after it takes this part as inputs,
and the sum over the ranks is the layer's result. A model is built within ``shared_by``; layers built outside of it are
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rustvllm.distributed.rank_group import ALONE, RankGroup
from rustvllm.distributed.stages import WHOLE, Stage
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import Activation
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.layers.norm import RMSNorm

VOCABULARY_UNIT = 64
"""Each rank has a multiple of this many rows of the embedding and the head; rows beyond the vocabulary are zeros."""
LARGEST_WHOLE = 127.0
"""The value of a row's largest magnitude in 8 bits."""
_MOST_NAMED = 12

_group: ContextVar[RankGroup] = ContextVar("the group of the model that is being built", default=ALONE)
_stage: ContextVar[Stage] = ContextVar("the stage of the model that is being built", default=WHOLE)


@contextmanager
def shared_by(group: RankGroup, stage: Stage = WHOLE) -> Iterator[None]:
    """Build layers that the ranks of a group share, and only those of a stage.

    Other threads are not affected.
    """
    token, of_stage = _group.set(group), _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(of_stage)
        _group.reset(token)


def building_group() -> RankGroup:
    """The group of the innermost ``shared_by``; ``ALONE`` outside."""
    return _group.get()


def building_stage() -> Stage:
    """The stage of the innermost ``shared_by``; ``WHOLE`` outside."""
    return _stage.get()


class StageLayers(nn.ModuleList):
    """The layers of the building stage, under the numbers that they have in the whole model.

    Args:
        make: Makes the layer with a given number.
        num_layers: The number of layers of the whole model.

    Raises:
        ModelLoadError: There are more stages than layers.
    """

    def __init__(self, make: Callable[[int], nn.Module], num_layers: int) -> None:
        super().__init__()
        for number in building_stage().own(num_layers):
            self.add_module(str(number), make(number))


class NoEmbedding(nn.Module):
    """Takes the place of an embedding that another stage has."""

    def forward(self, ids: Tensor) -> Tensor:
        """See ``Embedding.forward``.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"{ids.numel()} tokens came to a stage that has no embedding")


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of one stored tensor, in rows or columns.

    Attributes:
        count: How many the rank has.
        first: The index of the first one in the whole tensor.
        whole: How many the whole tensor has; the rank's rows or columns beyond it are zeros.
    """

    count: int
    first: int
    whole: int

    @property
    def num_stored(self) -> int:
        """How many of the rank's rows or columns are in the whole tensor."""
        return max(0, min(self.count, self.whole - self.first))


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of one parameter.

    Attributes:
        dim: 0: rows; 1: columns.
        parts: Several if layers are fused, in the order in which they lie in the rank's and in the whole parameter.
    """

    dim: int
    parts: tuple[Part, ...]

    @property
    def whole(self) -> int:
        """The size of the whole parameter in this dimension."""
        return sum(part.whole for part in self.parts)

    def take(self, whole: Tensor) -> Tensor:
        """The rank's part of a whole parameter, in new memory."""
        pieces, begin = [], 0
        for part in self.parts:
            stored = whole.narrow(self.dim, begin + min(part.first, part.whole), part.num_stored)
            missing = list(whole.shape)
            missing[self.dim] = part.count - part.num_stored
            pieces += [stored, whole.new_zeros(missing)]
            begin += part.whole
        return torch.cat(pieces, self.dim)


def even_part(group: RankGroup, whole: int, what: str) -> Part:
    """An equal part for each rank.

    Args:
        group: The ranks.
        whole: How many there are to share.
        what: What they are, for the message.

    Raises:
        ModelLoadError: The ranks cannot share them evenly.
    """
    if whole % group.size:
        fitting = [str(size) for size in range(1, whole + 1) if whole % size == 0][:_MOST_NAMED]
        raise ModelLoadError(
            f"--tensor-parallel-size {group.size} does not divide the {whole} {what}; {', '.join(fitting)} would"
        )
    count = whole // group.size
    return Part(count, group.rank * count, whole)


def kv_head_part(group: RankGroup, num_kv_heads: int) -> Part:
    """A rank's key and value heads: an equal part, or one head if there are fewer heads than ranks.

    Raises:
        ModelLoadError: Neither number divides the other.
    """
    if num_kv_heads >= group.size or group.size % num_kv_heads:
        return even_part(group, num_kv_heads, "heads of keys and values")
    return Part(1, group.rank // (group.size // num_kv_heads), num_kv_heads)


def vocabulary_part(group: RankGroup, vocab_size: int) -> Part:
    """A rank's part of the vocabulary: each rank has the same number of rows, and the last may be beyond its end."""
    if group.size == 1:
        return Part(vocab_size, 0, vocab_size)
    unit = VOCABULARY_UNIT * group.size
    count = -(-vocab_size // unit) * VOCABULARY_UNIT
    return Part(count, group.rank * count, vocab_size)


def shard_of(module: nn.Module, name: str) -> Shard | None:
    """A rank's part of a module's own parameter; None if it has the whole parameter."""
    shards: Mapping[str, Shard] | None = getattr(module, "shards", None)
    return None if shards is None else shards.get(name)


class ColumnLinear(Linear):
    """A dense layer of which each rank computes a part of the outputs.

    Args:
        in_features: The number of inputs, which every rank has.
        parts: The rank's outputs; of fused layers, one part after the other.
        bias: Whether there is a bias; it is shared in the same way.

    Attributes:
        shards: The rank's parts of the parameters.
    """

    def __init__(self, in_features: int, parts: Sequence[Part], *, bias: bool) -> None:
        super().__init__(in_features, sum(part.count for part in parts), bias=bias)
        shard = Shard(0, tuple(parts))
        self.shards: Mapping[str, Shard] = {"weight": shard, "bias": shard} if building_group().size > 1 else {}


def column_linear(in_features: int, *widths: int, bias: bool) -> ColumnLinear:
    """A dense layer whose outputs are shared evenly; with several widths, it fuses several layers.

    Raises:
        ModelLoadError: The ranks cannot share a width evenly.
    """
    group = building_group()
    return ColumnLinear(in_features, [even_part(group, width, "features") for width in widths], bias=bias)


def qkv_linear(in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool) -> ColumnLinear:
    """The fused layer for queries, keys and values; ranks share the heads, and replicate key and value heads if few.

    Raises:
        ModelLoadError: The ranks cannot share the heads evenly.
    """
    query, key = head_parts(num_heads, num_kv_heads)
    features = [Part(part.count * head_dim, part.first * head_dim, part.whole * head_dim) for part in (query, key, key)]
    return ColumnLinear(in_features, features, bias=bias)


def head_parts(num_heads: int, num_kv_heads: int) -> tuple[Part, Part]:
    """A rank's query heads, and its key and value heads, in the building group.

    Raises:
        ModelLoadError: The ranks cannot share them evenly.
    """
    group = building_group()
    return even_part(group, num_heads, "attention heads"), kv_head_part(group, num_kv_heads)


class RowLinear(Linear):
    """A dense layer of which each rank takes a part of the inputs; the sum over the ranks is the result.

    Only the first rank adds the bias and the residual; the others have zeros as bias.

    Args:
        in_features: The inputs of all ranks together.
        out_features: The number of outputs, which every rank has.
        bias: Whether there is a bias.

    Attributes:
        group: The ranks.
        layer: The number of the model's layer, from 0, once ``number_layers`` was called; -1 before.
        shards: This rank's parts of the parameters.

    Raises:
        ModelLoadError: The ranks cannot share the inputs evenly.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        group = building_group()
        part = even_part(group, in_features, "features")
        super().__init__(part.count, out_features, bias=bias)
        self.group = group
        self.layer = -1
        self.shards: Mapping[str, Shard] = {}
        if self.group.size > 1:
            has_bias = self.group.rank == 0
            of_bias = Part(out_features, 0 if has_bias else out_features, out_features)
            self.shards = {"weight": Shard(1, (part,)), "bias": Shard(0, (of_bias,))}

    @property
    def adds_residual(self) -> bool:
        """Whether this rank adds the residual to its product, before the ranks sum their products."""
        return self.group.rank == 0

    def forward(
        self,
        x: Tensor,
        *,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        in_place: bool = False,
    ) -> Tensor:
        """See ``Linear.forward``; with several ranks an activation is not allowed."""
        if self.group.size == 1:
            return super().forward(x, activation=activation, residual=residual, in_place=in_place)
        if activation is not None:
            raise ValueError("a map whose inputs are shared has no activation: that of a part is none of the sum")
        own = super().forward(x, residual=residual if self.adds_residual else None, in_place=in_place)
        return self.sum_over_ranks(own)

    def whole_numbers(self) -> tuple[Tensor, Tensor]:
        """The weight as integers of 8 bits with one scale per output, which is the same on all ranks.

        Returns:
            int8 ``[out_features, in_features]`` and float32 ``[out_features, 1]``.

        Raises:
            ModelLoadError: A number is not finite.
        """
        weight = self.weight.detach().to(torch.float32)
        largest = self.group.all_gather(weight.abs().amax(1, keepdim=True)).amax(0)
        if not bool(largest.isfinite().all()):
            out_features, in_features = weight.shape
            raise ModelLoadError(f"a weight of {out_features} x {in_features} has numbers that are not finite")
        scales = largest / LARGEST_WHOLE
        return (weight / scales).nan_to_num_(0.0).round_().to(torch.int8), scales

    def sum_over_ranks(self, product: Tensor) -> Tensor:
        """The layer's result: the ranks' products, summed into ``product``, ``[..., out_features]``."""
        return self.group.all_reduce(product, self.layer)


class HeadsNorm(RMSNorm):
    """An ``RMSNorm`` of the features of all heads together, of which each rank has some.

    Args:
        heads: The rank's heads.
        head_dim: Features of a head.
        eps: Added to the mean of the squares.

    Attributes:
        group: The ranks.
        layer: See ``RowLinear``.
        shards: This rank's part of the weight.
    """

    def __init__(self, heads: Part, head_dim: int, eps: float) -> None:
        super().__init__(heads.count * head_dim, eps)
        self.group = building_group()
        self.layer = -1
        part = Part(heads.count * head_dim, heads.first * head_dim, heads.whole * head_dim)
        # Ranks that have the same head each add its squares.
        self._divisor = part.whole * (heads.count * self.group.size // heads.whole)
        self.shards: Mapping[str, Shard] = {"weight": Shard(0, (part,))} if self.group.size > 1 else {}

    def mean_part(self, x: Tensor) -> Tensor:
        """What this rank adds to the mean of the squares, ``[num_tokens]``.

        Args:
            x: float32 ``[num_tokens, features of the rank's heads]``.
        """
        return x.square().sum(-1) / self._divisor

    @staticmethod
    def norm_both(queries: HeadsNorm, keys: HeadsNorm, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Norm queries and keys; ranks exchange their sums once.

        Args:
            queries: The norm of queries.
            keys: The norm of keys.
            query: ``[num_tokens, features of the rank's query heads]``.
            key: ``[num_tokens, features of the rank's key heads]``.
        """
        group = queries.group
        if group.size == 1:
            return queries(query.contiguous()), keys(key.contiguous())
        both = [(norm, x.to(torch.float32)) for norm, x in ((queries, query), (keys, key))]
        means = group.all_reduce(torch.stack([norm.mean_part(x) for norm, x in both]), queries.layer)
        normed = [
            norm.weight * (x * torch.rsqrt(mean[:, None] + norm.eps)).to(query.dtype)
            for (norm, x), mean in zip(both, means, strict=True)
        ]
        return normed[0], normed[1]


def number_layers(model: nn.Module) -> None:
    """Set the layer number of each module that ranks meet in, from its name in the checkpoint."""
    for name, module in model.named_modules():
        numbers = [part for part in name.split(".") if part.isdecimal()]
        if isinstance(module, RowLinear | HeadsNorm) and numbers:
            module.layer = int(numbers[0])


class VocabEmbedding(Embedding):
    """A table of vectors of which each rank has some rows.

    Args:
        num_embeddings: The rows of all ranks together.
        embedding_dim: Features of a vector.

    Attributes:
        group: The ranks.
        shards: This rank's parts of the parameters.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        group = building_group()
        part = vocabulary_part(group, num_embeddings)
        super().__init__(part.count, embedding_dim)
        self.group, self._part = group, part
        self.shards: Mapping[str, Shard] = {"weight": Shard(0, (part,))} if group.size > 1 else {}

    def forward(self, ids: Tensor) -> Tensor:  # [...] int32 or int64 -> [..., embedding_dim]
        if self.group.size == 1:
            return super().forward(ids)
        own = ids - self._part.first
        outside = (own < 0) | (own >= self._part.count)
        vectors = super().forward(own.masked_fill_(outside, 0))
        return self.group.all_reduce(vectors.masked_fill_(outside[..., None], 0))


class VocabHead(Linear):
    """The head, of which each rank computes some logits; ``whole_logits`` puts them together.

    Args:
        in_features: The width of the stream.
        vocab_size: The vocabulary size of all ranks together.

    Attributes:
        shards: This rank's parts of the parameters.
    """

    def __init__(self, in_features: int, vocab_size: int) -> None:
        group = building_group()
        part = vocabulary_part(group, vocab_size)
        super().__init__(in_features, part.count, bias=False)
        self.shards: Mapping[str, Shard] = {"weight": Shard(0, (part,))} if group.size > 1 else {}


def whole_logits(group: RankGroup, own: Tensor, vocab_size: int) -> Tensor:
    """Put the logits of all ranks together, without padding.

    Args:
        group: The ranks.
        own: ``[num_rows, n]``, the logits of this rank's part of the vocabulary.
        vocab_size: The size of the whole vocabulary.

    Returns:
        ``[num_rows, vocab_size]`` on the first rank. On the others the values are undefined.
    """
    if group.size == 1:
        return own
    parts = group.gather(own)  # [size, num_rows, n]
    if parts is None:
        return own.new_zeros(()).expand(own.shape[0], vocab_size)  # a single number, because this rank never reads it
    count = own.shape[1]
    return torch.cat([part[:, : max(vocab_size - rank * count, 0)] for rank, part in enumerate(parts)], 1)
