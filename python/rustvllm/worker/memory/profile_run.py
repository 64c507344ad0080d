"""Runs the largest step there can be once, before the KV cache is allocated, so that its memory can be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.sample.metadata import SamplingMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from rustvllm.worker.model_runner import GPUModelRunner


@torch.inference_mode()
def profile_run(runner: GPUModelRunner, seq_lens: Sequence[int], dtype: torch.dtype) -> None:
    """Run prompts of given lengths and sample each.

    The run writes to a cache of its own: one layer's, which all layers share.

    Args:
        runner: Whose model, attention and sampler run.
        seq_lens: Tokens of each prompt.
        dtype: Of the cache.
    """
    model, device = runner.model, runner.device
    lens = np.asarray(seq_lens, np.int32)
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lens)
    num_blocks = -(-lens // runner.block_size)
    first_block = 1 + np.cumsum(num_blocks) - num_blocks  # after the null block
    columns = np.arange(int(num_blocks.max()), dtype=np.int32)
    block_table = (first_block[:, None] + columns).clip(max=int(num_blocks.sum())).astype(np.int32)
    slots = np.repeat(first_block, lens) * runner.block_size + positions
    spec = model.kv_cache_spec
    shape = spec.layer_shape(1 + int(num_blocks.sum()), runner.block_size, dtype)
    cache = torch.zeros(shape, dtype=dtype, device=device)

    def send(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    metadata = AttentionMetadata(runner.block_size, send(block_table), send(slots.astype(np.int32)), starts, lens)
    input_ids = torch.zeros(int(starts[-1]), dtype=torch.int32, device=device)
    caches = [cache] * spec.num_layers
    hidden = model(input_ids, send(positions), caches, runner.backend.plan(metadata))
    if not model.stage.is_last or not model.has_head:
        return
    logits = model.compute_logits(hidden[send(starts[1:] - 1)])
    if model.group.rank > 0:
        return  # the first rank samples
    runner.sampler.sample(logits, SamplingMetadata())
    ones = np.ones(lens.size, np.float32)
    rows = np.arange(lens.size)
    runner.sampler.sample(
        logits,
        SamplingMetadata(
            random_rows=send(rows),
            temperature=send(ones),
            seeds=send(rows),
            positions=send(rows),
            filters={"top_p": send(ones * np.float32(0.9999))},
        ),
    )
