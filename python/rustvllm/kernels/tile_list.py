"""Computes which program of attention does what, on the device, from the lengths of a step's requests.

A step in a CUDA graph launches the same number of programs for any requests; arrays of a fixed size say what each of
them does. Tile ``n`` belongs to the last request ``r`` with ``starts[r] // tile_tokens + r <= n``: the tiles of two
requests never overlap, and ``T // tile_tokens + R`` tiles are enough for a batch of ``T`` tokens in ``R`` requests.
Programs without work get the last request, which is always empty.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rustvllm.kernels.tuning import LAUNCH_OPTIONS

_BLOCK = 128


def num_tiles(num_tokens: int, num_requests: int, tile_tokens: int) -> int:
    """The number of tiles of ``tile_tokens`` tokens that is enough for any batch with these numbers."""
    return num_tokens // tile_tokens + num_requests


def list_tiles(
    requests: Tensor, first_tokens: Tensor, query_start_loc: Tensor, tile_tokens: int, *, skip_decodes: bool
) -> None:
    """Cut the new tokens of all requests into tiles.

    Args:
        requests: int32 ``[num_tiles(...)]``, written: the request of each tile; the last one if there is no work.
        first_tokens: int32 ``[num_tiles(...)]``, written: a tile's first token, counted from its request's first new
            one.
        query_start_loc: int32 ``[num_requests + 1]``, ascending; the last request has no token.
        tile_tokens: Tokens of a tile.
        skip_decodes: Whether to leave requests with one new token to ``list_decodes``.
    """
    _list(requests, first_tokens, query_start_loc, tile_tokens, skip_decodes=skip_decodes, is_decodes=False)


def list_decodes(requests: Tensor, first_tokens: Tensor, query_start_loc: Tensor) -> None:
    """List one tile for each request with one new token.

    Args:
        requests: int32 ``[num_requests]``, written: the request itself if it has one new token, else the last one.
        first_tokens: int32 ``[num_requests]``, written: zeros.
        query_start_loc: int32 ``[num_requests + 1]``; the last request has no token.
    """
    _list(requests, first_tokens, query_start_loc, 1, skip_decodes=False, is_decodes=True)


def _list(
    requests: Tensor,
    first_tokens: Tensor,
    query_start_loc: Tensor,
    tile_tokens: int,
    *,
    skip_decodes: bool,
    is_decodes: bool,
) -> None:
    length, num_requests = requests.shape[0], query_start_loc.shape[0] - 1
    _list_kernel[(triton.cdiv(length, _BLOCK),)](
        requests,
        first_tokens,
        query_start_loc,
        length,
        num_requests,
        num_requests.bit_length(),
        TILE_TOKENS=tile_tokens,
        SKIP_DECODES=skip_decodes,
        IS_DECODES=is_decodes,
        BLOCK=_BLOCK,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


@triton.jit(
    do_not_specialize=["length", "num_requests", "num_halvings"],
    do_not_specialize_on_alignment=["request_ptr", "first_token_ptr", "query_start_ptr"],
)
def _list_kernel(
    request_ptr,
    first_token_ptr,
    query_start_ptr,
    length,
    num_requests,
    num_halvings,
    TILE_TOKENS: tl.constexpr,
    SKIP_DECODES: tl.constexpr,
    IS_DECODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_tile = tile < length
    if IS_DECODES:
        request = tl.minimum(tile, num_requests - 1)
    else:
        # The last request that begins at or before this tile: request 0 always does.
        request = tl.zeros((BLOCK,), tl.int32)
        end = tl.zeros((BLOCK,), tl.int32) + num_requests
        for _ in range(num_halvings):
            middle = (request + end) // 2
            begin = tl.load(query_start_ptr + middle) // TILE_TOKENS + middle
            is_before = begin <= tile
            request = tl.where(is_before, middle, request)
            end = tl.where(is_before, end, middle)
    start = tl.load(query_start_ptr + request)
    num_new = tl.load(query_start_ptr + request + 1) - start
    first_token = tl.zeros((BLOCK,), tl.int32)
    if IS_DECODES:
        has_work = num_new == 1
    else:
        first_token = (tile - (start // TILE_TOKENS + request)) * TILE_TOKENS
        has_work = first_token < num_new
        if SKIP_DECODES:
            has_work = has_work & (num_new > 1)
    tl.store(request_ptr + tile, tl.where(has_work, request, num_requests - 1), mask=is_tile)
    tl.store(first_token_ptr + tile, tl.where(has_work, first_token, 0), mask=is_tile)
