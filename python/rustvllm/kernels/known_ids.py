"""Fills in a step's input ids that the previous step sampled, which only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS

_BLOCK = 256


def known_ids(input_ids: Tensor, rows: Tensor, last_token_ids: Tensor) -> Tensor:
    """Replace each negative id with the last id of its request.

    Args:
        input_ids: int32 ``[n]``.
        rows: int32 ``[n]``, the row of each token's request.
        last_token_ids: int32 ``[num_rows]``.

    Returns:
        int32 ``[n]``, in new memory.
    """
    num_ids = input_ids.shape[0]
    out = torch.empty(num_ids, dtype=torch.int32, device=input_ids.device)
    if num_ids:
        _known_ids_kernel[(triton.cdiv(num_ids, _BLOCK),)](
            out, input_ids, rows, last_token_ids, num_ids, BLOCK=_BLOCK, num_warps=4, **LAUNCH_OPTIONS
        )
    return out


@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["id_ptr", "row_ptr"])
def _known_ids_kernel(out_ptr, id_ptr, row_ptr, last_ptr, num_ids, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_id = index < num_ids
    token = tl.load(id_ptr + index, mask=is_id, other=0)
    row = tl.load(row_ptr + index, mask=is_id, other=0)
    last = tl.load(last_ptr + row, mask=is_id & (token < 0), other=0)
    tl.store(out_ptr + index, tl.where(token < 0, last, token), mask=is_id)
