"""Checks a step's drafts against the sampled tokens: returns the tokens that each request gets, and its newest token.

A request's tokens in the step are contiguous: its newest known token, then its drafts. Behind each of them, a token was
sampled as if the request had decoded up to there. A draft is kept as long as it equals the token sampled behind the
previous one. The request's last token is the first sample that differs, or the one behind the last draft.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS, power_of_two

_BLOCK = 512
"""The most tokens of one program, which handles as many whole requests as fit."""


def verify(
    sampled: Tensor,
    input_ids: Tensor,
    query_start_loc: Tensor,
    width: int,
    out: Tensor,
    last_token_ids: Tensor,
    *,
    which: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """Keep the drafts that are right.

    Args:
        sampled: int32 ``[n]``, the id sampled behind each token; −1 if there is none.
        input_ids: int32 ``[n]``, the tokens; those after the first of a request are its drafts.
        query_start_loc: int32 ``[num_reqs + 1]``, where each request's tokens begin, and the end of the last; a request
            may have none.
        width: The most tokens of a request.
        out: int32, written from its beginning, or from the beginning of its row ``which[0]``: ``width`` ids for each
            request, with −1 after the last that it gets.
        last_token_ids: int32, written: the last id that each request gets, 0 if there is none.
        which: int32 ``[1]`` or more; None if ``out`` has no rows to choose from.
        rows: int32 ``[num_reqs]``, each request's index in ``last_token_ids``; None if they are in order.
    """
    num_reqs = query_start_loc.shape[0] - 1
    if not num_reqs:
        return
    columns = power_of_two(width)
    requests = max(1, _BLOCK // columns)
    _verify_kernel[(triton.cdiv(num_reqs, requests),)](
        out,
        last_token_ids,
        sampled,
        input_ids,
        query_start_loc,
        query_start_loc if which is None else which,
        query_start_loc if rows is None else rows,
        num_reqs,
        width,
        0 if which is None else out.stride(0),
        HAS_ROWS=rows is not None,
        HAS_SETS=which is not None,
        REQUESTS=requests,
        COLUMNS=columns,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


@triton.jit(
    do_not_specialize=["num_reqs", "width", "out_stride"],
    do_not_specialize_on_alignment=[
        "out_ptr",
        "last_ptr",
        "sampled_ptr",
        "id_ptr",
        "start_ptr",
        "which_ptr",
        "row_ptr",
    ],
)
def _verify_kernel(
    out_ptr,
    last_ptr,
    sampled_ptr,
    id_ptr,
    start_ptr,
    which_ptr,
    row_ptr,
    num_reqs,
    width,
    out_stride,
    HAS_ROWS: tl.constexpr,
    HAS_SETS: tl.constexpr,
    REQUESTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    is_request = request < num_reqs
    start = tl.load(start_ptr + request, mask=is_request, other=0)
    num_tokens = tl.load(start_ptr + request + 1, mask=is_request, other=0) - start
    column = tl.arange(0, COLUMNS)[None, :]
    place = start[:, None] + column
    sampled = tl.load(sampled_ptr + place, mask=column < num_tokens[:, None], other=-1)
    # Behind the last token there is no draft: no sampled id equals −2.
    draft = tl.load(id_ptr + place + 1, mask=column + 1 < num_tokens[:, None], other=-2)
    num_right = tl.min(tl.where(sampled == draft, COLUMNS, column), 1)
    given = tl.where(column <= num_right[:, None], sampled, -1)
    # A negative sample ends the request's tokens, because a draft is never −1.
    last_column = tl.max(tl.where(given >= 0, column, -1), 1)
    last = tl.sum(tl.where(column == last_column[:, None], given, 0), 1)
    target = out_ptr
    if HAS_SETS:
        target += tl.load(which_ptr).to(tl.int64) * out_stride
    is_written = is_request[:, None] & (column < width)
    tl.store(target + request[:, None].to(tl.int64) * width + column, given, mask=is_written)
    row = request
    if HAS_ROWS:
        row = tl.load(row_ptr + request, mask=is_request, other=0)
    tl.store(last_ptr + row, last, mask=is_request)
