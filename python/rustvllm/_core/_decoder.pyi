"""Types of the decoder in ``rustvllm._core``, where it is found; there is no module of this name."""

from collections.abc import Sequence
from typing import Any, Self, TypeAlias, TypedDict, final

import numpy as np
import numpy.typing as npt

from rustvllm._core._attention import CpuAttentionPlan
from rustvllm._core._linear import CpuThreads, PackedLinear

_Norm: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None, float]

class CoreBlock(TypedDict):
    """A block's parts, by the names of ``PreNormBlock``; a norm is its weight, bias (None: an RMS norm) and eps.

    The MLP is either ``dense`` or of ``experts``; the other one is None.
    """

    attention_norm: _Norm | None
    qkv: PackedLinear
    is_by_head: bool
    head_norms: tuple[_Norm, _Norm] | None
    rotary: int | None
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: npt.NDArray[np.float32] | None
    out: PackedLinear
    mlp_norm: _Norm | None
    is_parallel: bool
    dense: CoreMLP | None
    experts: CoreExperts | None
    post_norms: tuple[_Norm, _Norm] | None

class CoreMLP(TypedDict):
    """An MLP's parts, by the names of ``DenseMLPParts``."""

    up: PackedLinear
    is_gated: bool
    activation: str
    down: PackedLinear

class CoreRouting(TypedDict):
    """What a router's logits mean, by the names of ``Routing``; ``bias`` is added to scores when experts are chosen."""

    scores: str
    num_chosen: int
    bias: npt.NDArray[np.float32] | None
    num_groups: int
    num_chosen_groups: int
    is_normed: bool
    scale: float
    is_wide: bool

class CoreShared(TypedDict):
    """The MLP next to experts, by the names of ``SharedMLPParts``."""

    mlp: CoreMLP
    gate: PackedLinear | None

class CoreExperts(TypedDict):
    """The experts of a block, by the names of ``ExpertMLPParts``; all have the same sizes and gates."""

    router: PackedLinear
    routing: CoreRouting
    experts: list[CoreMLP]
    shared: CoreShared | None

@final
class CpuAdapter:
    """What an adapter adds to the layers of a decoder's blocks, ``up (down x)`` for stretches of their outputs."""

    def __new__(cls, decoder: CpuDecoder, blocks: Sequence[Sequence[CpuLayerDelta | None]]) -> Self:
        """Of each block what is added to qkv, out, up and down, or None.

        Raises ``ValueError`` for sizes that do not fit, and for ``up`` where an activation follows it in one pass.
        """

@final
class CpuLayerDelta:
    """What an adapter adds to a layer, ``up (down x)`` for stretches of its outputs.

    A row's bits depend neither on the rows that are computed with it nor on the threads.
    """

    def __new__(
        cls,
        threads: CpuThreads,
        down: npt.NDArray[Any],
        ups: Sequence[tuple[int, npt.NDArray[Any], npt.NDArray[Any] | None]],
        rounds: bool = False,
    ) -> Self:
        """Pack the matrices, float32 and contiguous; numbers that 16 bits hold are kept in 16, with ``rounds`` all are.

        ``down`` is ``[ranks, inputs]``; ``ups`` are of each stretch of outputs the first, ``[outputs, rank]``, and the
        gains ``[outputs]`` that a decoder multiplies the layer's own product by, or None; the ranks of the stretches
        lie one after the other.

        Raises ``TypeError`` for another dtype, ``ValueError`` for sizes that do not fit and stretches that overlap,
        ``MemoryError`` saying how much is needed.
        """
    @property
    def nbytes(self) -> int:
        """Of the packed matrices."""
    def add(self, x: npt.NDArray[Any], out: npt.NDArray[Any], rows: Sequence[int]) -> None:
        """Add to some rows of a layer's outputs, which have the gains already; rows are contiguous.

        Both are float32, or bfloat16 seen as uint16. ``x`` is ``[num_rows, inputs]``, ``out`` ``[num_rows, outputs]``;
        ``rows`` ascend. Releases the interpreter.

        Raises ``TypeError`` for another dtype, ``ValueError`` naming what does not fit; nothing is written then.
        """

@final
class CpuCaches:
    """The KV caches of a decoder's blocks, checked once for all steps."""

    def __new__(cls, kv_caches: Sequence[npt.NDArray[Any]]) -> Self:
        """A cache for each block is as in ``CpuAttentionPlan.forward``; blocks may have the same one, in turns.

        All are float32, or all bfloat16 seen as uint16, of one shape, writable, contiguous, and overlap nowhere else.
        Those of bfloat16 serve a stream of float32, too, and those of int8 both.
        Raises ``TypeError`` for another dtype, ``ValueError`` saying what is wrong.
        """

@final
class CpuDecoder:
    """Blocks of a model, and the norm at its end if they are the last ones, computed in one call.

    It gives what ``layer_norm``, ``rms_norm``, ``PackedLinear.forward`` and ``CpuAttentionPlan.forward`` give one after
    the other, bit for bit.
    """

    def __new__(
        cls,
        blocks: Sequence[CoreBlock],
        last_norm: _Norm | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        turns: Sequence[tuple[npt.NDArray[np.float32], float, Sequence[int]]] = (),
        head: PackedLinear | None = None,
    ) -> Self:
        """Parts that stay as they are from now on: their layers can no more be packed anew (``RuntimeError``).

        A norm is its weight, its bias (None: an RMS norm) and eps. A block is a dictionary; its keys are those of
        ``PreNormBlock``, with the activation by name. Without a last norm ``forward`` gives the stream as it is.
        ``turns`` are the frequencies of pairs of features, in radians per position, the factor on what was turned, and
        which part of a position turns each pair (empty: the first), of each kind that a block names by its number.
        With a ``head``, which takes the normed stream, there is ``forward_logits``.

        Raises ``ValueError`` for sizes that do not fit, ``TypeError`` for norms that are not float32.
        """
    def forward(
        self,
        plan: CpuAttentionPlan,
        hidden: npt.NDArray[Any],
        positions: npt.NDArray[np.int32],
        kv_caches: CpuCaches,
        out: npt.NDArray[Any],
        adapters: Sequence[tuple[CpuAdapter, Sequence[int]]] | None = None,
    ) -> tuple[int, int, int]:
        """Run a step's tokens through all blocks, by the threads of the plan.

        Returns the ns in norms, rotary positions and gates; in products; and in attention.

        ``hidden``, which is overwritten, and ``out`` are ``[num_tokens, hidden_size]``, ``positions`` the tokens' own,
        ``[num_tokens]`` or ``[parts, num_tokens]``.
        All are of the caches' type, float32 or bfloat16 seen as uint16, contiguous, and share memory with nothing else.
        ``adapters`` add to the layers for their tokens, which are given in ascending order. Releases the interpreter.

        Raises ``TypeError`` for another dtype, ``ValueError`` naming the value and the limit, ``MemoryError`` saying
        how much is needed.
        """
    def forward_logits(
        self,
        plan: CpuAttentionPlan,
        hidden: npt.NDArray[Any],
        positions: npt.NDArray[np.int32],
        kv_caches: CpuCaches,
        places: npt.NDArray[np.int32] | None,
        logits: npt.NDArray[Any],
        ids: npt.NDArray[np.int32] | None = None,
        adapters: Sequence[tuple[CpuAdapter, Sequence[int]]] | None = None,
    ) -> tuple[int, int, int]:
        """As ``forward``, and on to the logits of the tokens at ``places`` (None: of all), ``[places, vocab_size]``.

        ``ids`` becomes the id of the largest logit of each row, the first of equals; −1 where one is NaN, or all are
        minus infinity. Raises ``ValueError`` for a decoder without a head, too.
        """
    def attend(
        self,
        plan: CpuAttentionPlan,
        block: int,
        hidden: npt.NDArray[Any],
        positions: npt.NDArray[np.int32],
        kv_caches: CpuCaches,
        *,
        adds: bool = True,
    ) -> tuple[int, int, int]:
        """Run the first half of a block, attention, for a stream that others add to between the halves.

        ``hidden`` is the stream before and after it; without ``adds`` the result takes the stream's place, so that it
        may be added to another's. Arrays, times and errors are those of ``forward``.
        Raises ``ValueError`` for a block whose MLP reads what attention read, and for one with norms after its parts.
        """
    def multiply(
        self, plan: CpuAttentionPlan, block: int, hidden: npt.NDArray[Any], *, adds: bool = True
    ) -> tuple[int, int, int]:
        """Run the second half of a block, the MLP; see ``attend``."""
