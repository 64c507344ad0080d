"""Types of the attention kernels in ``rustvllm._core``, where they are found; there is no module of this name."""

from collections.abc import Sequence
from typing import Any, Literal, Self, final

import numpy as np
import numpy.typing as npt

from rustvllm._core._linear import CpuThreads

@final
class CpuAttention:
    """Paged attention on the CPU: makes the plans of an engine's steps, and owns the threads that compute them."""

    def __new__(cls, threads: CpuThreads | int) -> Self:
        """Threads shared with others, or how many to start for this alone.

        Raises ``ValueError`` outside 1 to 1024, ``OSError`` when the system starts no more threads.
        """
    @property
    def num_threads(self) -> int: ...
    @staticmethod
    def kernel(head_dim: int) -> Literal["avx512", "avx2", "portable", "scalar"]:
        """Which kernel computes heads of ``head_dim`` features on this machine."""
    def plan(
        self,
        block_size: int,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        slot_mapping: npt.NDArray[np.int32],
        table_rows: npt.NDArray[np.int32] | None = None,
        visible: npt.NDArray[np.int32] | None = None,
    ) -> CpuAttentionPlan:
        """Check and copy a step: arrays as in ``AttentionMetadata``, on the host.

        With ``table_rows`` the block table has rows of other requests, too, and is contiguous. ``slot_mapping`` may
        have more tokens than the requests: padding. ``visible`` says how many tokens of its sequence each token sees;
        None: those up to itself. Raises ``TypeError`` for another dtype, ``ValueError`` naming the
        value and the limit.
        """

@final
class CpuAttentionPlan:
    """One step; made by ``CpuAttention.plan``."""

    def forward(
        self,
        query: npt.NDArray[Any],
        key: npt.NDArray[Any],
        value: npt.NDArray[Any],
        kv_cache: npt.NDArray[Any],
        out: npt.NDArray[Any],
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sinks: Sequence[float] | None = None,
    ) -> None:
        """Write the step's keys and values into a layer's cache, then attend causally over it.

        All arrays are float32, or all bfloat16 seen as uint16; ``kv_cache`` may be bfloat16 where the others are
        float32, and takes the nearest numbers then, or int8: a head is its features, whole numbers, and the four bytes
        of a float32 that they are multiplied by (``head_dim + 4`` in all). ``query`` and ``out`` are ``[num_tokens,
        num_heads, head_dim]``, ``key`` and ``value`` ``[num_tokens, num_kv_heads, head_dim]``; tokens of what is read
        may lie apart.
        ``kv_cache`` is ``[2, num_blocks, block_size, num_kv_heads, head_dim]``. It and ``out`` are contiguous and share
        memory with nothing else. Padding gets zeros. Releases the interpreter when there is much to compute.

        Raises ``TypeError`` for another dtype, ``ValueError`` naming the value and the limit.
        """
