"""Types of the decoder in ``rustvllm._core``, where it is found; there is no module of this name."""

from collections.abc import Sequence
from typing import Any, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt

from rustvllm._core_attention import CpuAttentionPlan
from rustvllm._core_linear import PackedLinear

_Norm: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None, float]
_Block: TypeAlias = tuple[_Norm, PackedLinear, float, PackedLinear, _Norm, PackedLinear, str, PackedLinear]

@final
class CpuDecoder:
    """The blocks of a model and the norm at their end, computed in one call.

    It gives what ``layer_norm``, ``rms_norm``, ``PackedLinear.forward`` and ``CpuAttentionPlan.forward`` give one after
    the other, bit for bit.
    """

    def __new__(
        cls, blocks: Sequence[_Block], last_norm: _Norm, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> Self:
        """Parts that stay as they are from now on: their layers can no more be packed anew (``RuntimeError``).

        A norm is its weight, its bias (None: an RMS norm) and eps. A block is the norm before attention, the layer for
        query, key and value, the factor on products of queries and keys, the layer behind attention; then the norm
        before the MLP, its first layer, the activation by name, and its second layer. Raises ``ValueError`` for sizes
        that do not fit, ``TypeError`` for norms that are not float32.
        """
    def forward(
        self,
        plan: CpuAttentionPlan,
        hidden: npt.NDArray[Any],
        kv_caches: Sequence[npt.NDArray[Any]],
        out: npt.NDArray[Any],
    ) -> tuple[int, int, int]:
        """Run a step's tokens through all blocks, by the threads of the plan; the ns in norms, products and attention.

        ``hidden``, which is overwritten, and ``out`` are ``[num_tokens, hidden_size]``; a cache for each block is as in
        ``CpuAttentionPlan.forward``; blocks may have the same one, in turns. All are float32, or all bfloat16 seen as
        uint16, contiguous, and share memory with nothing else. Releases the interpreter.

        Raises ``TypeError`` for another dtype, ``ValueError`` naming the value and the limit, ``MemoryError`` saying
        how much is needed.
        """
