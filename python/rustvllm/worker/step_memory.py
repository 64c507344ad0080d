"""The memory of an engine on the CPU besides its weights and KV cache, as far as it is known before it has run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rustvllm.config import ModelConfig, SchedulerConfig

SPARE_BYTES = 32 << 20
"""For requests, their texts and what allocators keep, in the engine and in its front ends."""
_HIDDEN_COPIES, _INNER_COPIES, _LOGITS_COPIES = 6, 2, 3
"""Tensors that exist at a time: stream, norm, query, key, value and output of a layer; the input and the output of
its activation; logits, what the sampler makes of them, and their order."""


def step_bytes(model: ModelConfig, scheduler: SchedulerConfig, itemsize: int) -> int:
    """Memory of the largest step: as many tokens and as many requests as there may be.

    Args:
        model: For its sizes.
        scheduler: For its limits.
        itemsize: Bytes of a number.
    """
    inner = next(filter(None, map(model.hf_config.get, ("intermediate_size", "n_inner", "ffn_dim"))), None)
    width = inner if isinstance(inner, int) else 4 * model.hidden_size
    per_token = (_HIDDEN_COPIES * model.hidden_size + _INNER_COPIES * width) * itemsize
    logits = _LOGITS_COPIES * scheduler.max_num_seqs * model.vocab_size * 4
    return scheduler.max_num_batched_tokens * per_token + logits + SPARE_BYTES
