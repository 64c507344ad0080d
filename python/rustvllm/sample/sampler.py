"""Samples one token id per row of logits.

The order is: float32 → allowed ids → bad words → min_tokens mask → logit bias → penalties → custom processors that may
change the argmax → temperature → other processors → top_n_sigma → min_p → top_k → top_p → draw. Greedy rows take the
argmax before the temperature. A draw inverts the cumulative distribution, in the order of the vocabulary, at one
uniform number that depends only on (seed, position). Every operation works row by row, so a row's token depends on its
own logits and parameters, not on other rows. The inversion first finds a block of ids, and then the id in it: summing
whole blocks is vectorized, a running sum over the vocabulary is not.

A row without a valid choice gives ``NO_TOKEN`` (its logits contain NaN) or ``NOTHING_LEFT`` (all are minus infinity),
and does not affect other rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rustvllm.layers.fused import runs_fused
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.grammar import apply_bitmask
from rustvllm.sample.metadata import Penalties, SamplingMetadata
from rustvllm.sample.penalties import apply_penalties
from rustvllm.sample.random import counter_uniform
from rustvllm.sample.token_rules import add_bias, ban_tokens

NO_TOKEN = -1
"""Replaces an id: the row's logits are not numbers."""
NOTHING_LEFT = -8
"""Replaces an id: all logits of the row are minus infinity, because the request's parameters exclude every id."""
PROCESSOR_FAILED = -3
"""Replaces an id: a logits processor of the row's request failed."""
PROCESSOR_REFUSED = -4
"""Replaces an id: a logits processor refused the arguments of the row's request."""

TOP_P_CANDIDATES = 1024
"""top_p first considers this many of the largest logits, and sorts the vocabulary only if they are not enough."""


BLOCK_SIZE = 64
"""Probabilities of this many ids are summed as one block before the search enters a block."""


class Sampler:
    """Stateless; see the module.

    Args:
        cpu_draw: Masks, penalizes and draws on the CPU; None: torch does this.
    """

    def __init__(self, cpu_draw: CpuDraw | None = None) -> None:
        self._cpu_draw = cpu_draw

    def mask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Make ids that some rows may not take impossible, in place; see ``apply_bitmask``."""
        if self._cpu_draw is not None and logits.dtype == torch.float32 and logits.is_contiguous():
            self._cpu_draw.mask(logits, bitmask, rows)
        else:
            apply_bitmask(logits, bitmask, rows)

    def _penalize(self, logits: Tensor, penalties: Penalties) -> None:
        if self._cpu_draw is not None and logits.is_contiguous():
            self._cpu_draw.penalize(logits, penalties)
        else:
            apply_penalties(logits, penalties)

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Sample one id per row.

        Args:
            logits: float ``[n, vocab_size]``; may be overwritten.
            metadata: The parameters of the rows.

        Returns:
            int64 ``[n]``, each in ``[0, vocab_size)``, or ``NO_TOKEN``, ``NOTHING_LEFT``, ``PROCESSOR_FAILED`` or
                ``PROCESSOR_REFUSED``.
        """
        if metadata.all_greedy and metadata.is_plain and runs_fused(logits) and logits.is_contiguous():
            return argmax(logits)
        logits = logits.to(torch.float32)
        if metadata.rules is not None:
            ban_tokens(logits, metadata.rules)
        if metadata.masked_rows is not None and metadata.masked_ids is not None:
            logits[metadata.masked_rows, metadata.masked_ids] = -torch.inf
        if metadata.rules is not None:
            add_bias(logits, metadata.rules)
        if metadata.penalties is not None:
            self._penalize(logits, metadata.penalties)
        if metadata.processors is not None:
            logits = metadata.processors.apply_before(logits)
        if metadata.processed is not None:
            metadata.processed.keep(logits)
        token_ids = self._choose(logits, metadata)
        if metadata.processors is not None:
            for row, failure in metadata.processors.failures.items():
                token_ids[row] = PROCESSOR_REFUSED if failure.is_refusal else PROCESSOR_FAILED
        return token_ids

    def _choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """An id for each row, after all changes that also concern greedy rows."""
        rows = metadata.random_rows
        if rows is None:
            return argmax(logits)
        token_ids = None if rows.shape[0] == logits.shape[0] else argmax(logits)
        shows_draw = metadata.processed is not None  # which the core cannot do
        if self._cpu_draw is not None and not shows_draw and logits.is_contiguous():
            drawn = _draw_by_core(logits, rows, metadata, self._cpu_draw)
        else:
            drawn = _draw(_tempered(logits, logits if token_ids is None else logits[rows], metadata), metadata)
        if token_ids is None:
            return drawn
        token_ids[rows] = drawn
        return token_ids


def argmax(logits: Tensor) -> Tensor:
    """The id of the largest logit of each row, the first of equals.

    Args:
        logits: float32 ``[n, vocab_size]``; any floating-point dtype where Triton kernels run.

    Returns:
        int64 ``[n]``; ``NO_TOKEN`` if a logit is NaN, which counts as the largest, and ``NOTHING_LEFT`` if the largest
        is minus infinity.
    """
    if runs_fused(logits) and logits.is_contiguous():
        from rustvllm.kernels import draw

        return draw.argmax(logits)
    if logits.device.type == "cpu":
        values = logits.numpy()
        ids = values.argmax(-1)  # ten times as fast as torch's
        chosen = values[np.arange(len(ids)), ids]
        is_number = chosen > -np.inf
        if not is_number.all():
            ids = np.where(is_number, ids, np.where(np.isnan(chosen), NO_TOKEN, NOTHING_LEFT))
        return torch.from_numpy(ids)
    largest, device_ids = logits.max(dim=-1)
    device_ids = torch.where(largest > -torch.inf, device_ids, NOTHING_LEFT)
    return torch.where(largest.isnan(), NO_TOKEN, device_ids)


def _draw_by_core(logits: Tensor, rows: Tensor, metadata: SamplingMetadata, cpu_draw: CpuDraw) -> Tensor:
    """An id for each random row; overwrites these rows."""
    assert metadata.temperature is not None
    temperature = metadata.temperature
    if metadata.processors is not None and metadata.processors.after:
        logits = _tempered(logits, logits[rows], metadata).contiguous()
        rows, temperature = torch.arange(len(rows)), torch.ones_like(temperature)
    drawn = cpu_draw.draw(logits, rows, temperature, metadata)
    # A row without a finite distribution (NaN, infinite logits) falls back on its argmax.
    return drawn if bool((drawn >= 0).all()) else torch.where(drawn >= 0, drawn, argmax(logits[rows]))


def _tempered(logits: Tensor, chosen: Tensor, metadata: SamplingMetadata) -> Tensor:
    """The random rows of the logits after the temperature and the processors that come after it."""
    assert metadata.random_rows is not None
    assert metadata.temperature is not None
    chosen.div_(metadata.temperature[:, None])
    if metadata.processors is None or not metadata.processors.after:
        return chosen
    if chosen is not logits:  # because processors see all rows
        logits[metadata.random_rows] = chosen
    return metadata.processors.apply_after(logits)[metadata.random_rows]


def _draw(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """An id for each random row; may overwrite the logits."""
    assert metadata.seeds is not None
    assert metadata.positions is not None
    filters = metadata.filters
    if "top_n_sigma" in filters:
        apply_top_n_sigma(logits, filters["top_n_sigma"])
    if "min_p" in filters:
        apply_min_p(logits, filters["min_p"])
    if "top_k" in filters or "top_p" in filters:
        apply_top_k_top_p(logits, filters.get("top_k"), filters.get("top_p"))
    if metadata.processed is not None and metadata.random_rows is not None:
        metadata.processed.keep_random(metadata.random_rows, logits)
    if runs_fused(logits):
        from rustvllm.kernels.draw import draw

        return draw(logits.contiguous(), metadata.seeds, metadata.positions)
    drawn, is_drawn = _invert(logits.softmax(dim=-1), counter_uniform(metadata.seeds, metadata.positions))
    # A row without a finite distribution (NaN, infinite logits) falls back on its argmax.
    if logits.device.type == "cpu" and bool(is_drawn.all()):
        return drawn
    return torch.where(is_drawn, drawn, argmax(logits))


def _invert(probabilities: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first id of each row at which the running sum of probabilities exceeds a share of their total.

    Args:
        probabilities: float32 ``[m, vocab_size]``.
        uniforms: float64 ``[m]`` in ``[0, 1)``, the shares.

    Returns:
        int64 ``[m]`` ids, and bool ``[m]``, whether there is an id.
    """
    vocab_size = probabilities.shape[-1]
    whole = vocab_size - vocab_size % BLOCK_SIZE
    blocks = probabilities[:, :whole].reshape(len(probabilities), whole // BLOCK_SIZE, BLOCK_SIZE)
    block_sums = blocks.sum(dim=-1)
    if whole < vocab_size:
        block_sums = torch.cat((block_sums, probabilities[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    sums = block_sums.to(torch.float64)
    running = sums.cumsum(dim=-1)
    target = uniforms[:, None] * running[:, -1:]
    block = (running <= target).sum(dim=-1, keepdim=True).clamp_(max=sums.shape[-1] - 1)
    is_drawn = (target < running[:, -1:])[:, 0]

    offsets = torch.arange(BLOCK_SIZE, device=probabilities.device)
    ids = block * BLOCK_SIZE + offsets  # [m, BLOCK_SIZE]
    inside = probabilities.gather(1, ids.clamp(max=vocab_size - 1)).to(torch.float64)
    if whole < vocab_size:
        inside.masked_fill_(ids >= vocab_size, 0.0)
    before = running.gather(1, block) - sums.gather(1, block)
    offset = (before + inside.cumsum(dim=-1) <= target).sum(dim=-1)
    # Blocks and ids are summed separately; if rounding passes the last id with a probability, that id is taken.
    last = torch.where(inside > 0, offsets, 0).amax(dim=-1)
    return block[:, 0] * BLOCK_SIZE + torch.minimum(offset, last), is_drawn


def apply_top_n_sigma(logits: Tensor, top_n_sigma: Tensor) -> None:
    """Drop, in place, logits that are more than ``top_n_sigma`` standard deviations below the largest one.

    The deviation is that of all logits of the row that are not minus infinity, as in llama.cpp. The result does not
    depend on the temperature, which scales both (Tang et al., "Top-nσ: Not All Logits Are You Need", 2024).

    Args:
        logits: float32 ``[m, vocab_size]``.
        top_n_sigma: float32 ``[m]``; 0 or less drops nothing.
    """
    if runs_fused(logits) and logits.is_contiguous():
        from rustvllm.kernels import truncation

        truncation.apply_top_n_sigma(logits, top_n_sigma)
        return
    largest = logits.amax(dim=-1).double()
    is_finite = logits > -torch.inf
    below = torch.where(is_finite, logits.double() - largest[:, None], 0.0)  # [m, vocab_size]
    count = is_finite.sum(dim=-1)
    mean = _row_sums(below) / count
    deviation = (_row_sums(below.square()) / count - mean.square()).clamp(min=0).sqrt()
    threshold = torch.where(top_n_sigma > 0, largest - top_n_sigma.double() * deviation, -torch.inf)
    logits.masked_fill_(logits < threshold.float()[:, None], -torch.inf)


def _row_sums(values: Tensor) -> Tensor:
    """Sums of rows, ``[m, n]`` to ``[m]``, in blocks of a fixed size, so that threads do not divide a single row."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % BLOCK_SIZE))
    return padded.view(len(values), padded.shape[-1] // BLOCK_SIZE, BLOCK_SIZE).sum(dim=-1).sum(dim=-1)


def apply_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Drop, in place, ids that are less than ``min_p`` times as likely as the likeliest.

    Args:
        logits: float32 ``[m, vocab_size]``.
        min_p: float32 ``[m]``; 0 drops nothing.
    """
    threshold = logits.amax(dim=-1) + min_p.log()
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Keep, in place, the ``top_k`` largest logits, and of these the fewest whose probabilities reach ``top_p``.

    Logits that equal the smallest kept one are kept, too, so the order of equal logits never matters.

    Args:
        logits: float32 ``[m, vocab_size]``.
        top_k: int64 ``[m]``; 0 or less disables it.
        top_p: float32 ``[m]``; 1 or more disables it.
    """
    if runs_fused(logits) and logits.is_contiguous():
        from rustvllm.kernels import truncation

        truncation.apply_top_k_top_p(logits, top_k, top_p)
        return
    vocab_size = logits.shape[-1]
    num_rows = logits.shape[0]
    k = logits.new_full((num_rows,), vocab_size, dtype=torch.int64)
    if top_k is not None:
        k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    p = logits.new_ones(num_rows) if top_p is None else top_p
    by_k = torch.nonzero(k < vocab_size)[:, 0]
    by_p = torch.nonzero((k == vocab_size) & (p < 1))[:, 0]
    if by_k.numel():
        _truncate(logits, by_k, k[by_k], p[by_k], int(k[by_k].max()))
    if by_p.numel() and vocab_size > TOP_P_CANDIDATES:
        by_p = by_p[~_truncate(logits, by_p, k[by_p], p[by_p], TOP_P_CANDIDATES)]
    if by_p.numel():
        _truncate(logits, by_p, k[by_p], p[by_p], vocab_size)


def _truncate(logits: Tensor, rows: Tensor, k: Tensor, p: Tensor, num_candidates: int) -> Tensor:
    """Truncate rows whose cut is among their ``num_candidates`` largest logits; returns which rows were (bool)."""
    chosen = logits[rows]
    if num_candidates == logits.shape[-1]:
        largest = chosen.sort(dim=-1, descending=True).values
    else:
        largest = chosen.topk(num_candidates, dim=-1).values
    in_k = torch.arange(num_candidates, device=logits.device)[None, :] < k[:, None]
    # top_p is a share of this total: the k largest, or everything if top_k is off (the candidates may be fewer).
    kept_by_k = largest.masked_fill(~in_k, -torch.inf)
    all_kept = torch.where(k < logits.shape[-1], kept_by_k.double().logsumexp(-1), chosen.double().logsumexp(-1))
    probabilities = (kept_by_k.double() - all_kept[:, None]).exp()
    cumulative = probabilities.cumsum(dim=-1)
    before = cumulative - probabilities
    kept = in_k & ((before < p[:, None]) | (p >= 1)[:, None])
    num_kept = kept.sum(dim=-1).clamp(min=1)
    smallest = largest.gather(1, num_kept[:, None] - 1)
    complete = (num_kept < num_candidates) | (num_candidates >= k) | (cumulative[:, -1] >= p)
    logits[rows] = torch.where((chosen < smallest) & complete[:, None], -torch.inf, chosen)
    return complete
