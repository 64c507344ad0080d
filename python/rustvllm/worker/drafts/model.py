"""A second model that guesses what the first will sample, so that one step can verify several tokens.

It has its own KV cache, under the same block tables. A step's plan has placeholders in the rows that are to get
guesses. They are filled before the first model runs: the second model computes the tokens it has not seen, then guesses
greedily, one token after another. If a row runs without guesses, the second model catches up later, several tokens at a
time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.attention.selector import make_attention_backend
from rustvllm.layers.cpu.norm import use_core_norms
from rustvllm.model_loader import load_model
from rustvllm.worker.cpu_decoder import use_core_decoder
from rustvllm.worker.dense_layers import make_linear_packer

if TYPE_CHECKING:
    from rustvllm._core import CpuThreads, SchedulerOutput
    from rustvllm.attention.backend import AttentionBackend
    from rustvllm.config import EngineConfig, ModelConfig
    from rustvllm.layers.cpu.packer import LinearPacker
    from rustvllm.models.interface import CausalLM
    from rustvllm.worker.step_buffers import StepBuffers

_MOST_UNSEEN: Final = 32
"""The most tokens of a request that the second model may lag behind, so that it never has to catch up on many."""

_Ints = npt.NDArray[np.int32]


class DraftModel:
    """The second model, and how far it has followed each row.

    Args:
        model: Loaded, on the CPU, with the first model's vocabulary.
        backend: Computes its attention.
        max_num_seqs: Rows of the persistent batch.
        max_model_len: The most tokens of a request.
        block_size: Tokens per KV block.

    Attributes:
        model: As given.
        kv_caches: One per layer, with as many blocks as the first model's; set when the memory is allocated.
    """

    def __init__(
        self, model: CausalLM, backend: AttentionBackend, *, max_num_seqs: int, max_model_len: int, block_size: int
    ) -> None:
        self.model = model
        self.kv_caches: list[Tensor] = []
        self._backend = backend
        self._block_size = block_size
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._num_seen = np.zeros(max_num_seqs, np.int32)  # tokens whose keys and values its cache has

    def guess(self, output: SchedulerOutput, step: StepBuffers, block_table: Tensor) -> None:
        """Fill the placeholders of a step.

        Args:
            output: The step.
            step: Its arrays; each −1 in ``input_ids`` is filled.
            block_table: int32 ``[max_num_seqs + 1, max_blocks_per_seq]``, including this step's blocks.
        """
        rows = step.int32("idx_mapping", output.num_reqs)
        starts = step.int32("query_start_loc", output.num_reqs + 1)
        ids = step.int32("input_ids", output.total_num_scheduled_tokens)
        positions = step.int32("positions", output.total_num_scheduled_tokens)
        counts = np.diff(starts)
        is_known = ids >= 0
        self._token_ids[np.repeat(rows, counts)[is_known], positions[is_known]] = ids[is_known]
        begins = positions[starts[:-1]]
        if output.num_new_reqs:
            is_new = np.isin(rows, step.int32("new_rows", output.num_new_reqs))
            self._num_seen[rows[is_new]] = begins[is_new]  # cached tokens are in the caches of both models
        # Rejected drafts, and tokens of steps that failed, are computed again.
        self._num_seen[rows] = np.minimum(self._num_seen[rows], begins)
        num_drafts = step.arrays["num_draft_tokens"][: output.num_reqs].astype(np.int32)
        ends = begins + counts - num_drafts
        num_guesses = np.add.reduceat(~is_known, starts[:-1], dtype=np.int32)
        num_unseen = ends - self._num_seen[rows]
        runs = np.flatnonzero((num_guesses > 0) | (counts - num_drafts > 1) | (num_unseen >= _MOST_UNSEEN))
        if not runs.size:
            return
        blocks = block_table.numpy()
        rows, ends, num_guesses = rows[runs], ends[runs], num_guesses[runs]
        drawn = self._take_in(rows, self._num_seen[rows], ends, num_guesses > 0, blocks)
        self._num_seen[rows] = ends
        guesses = np.full((rows.size, max(1, int(num_guesses.max()))), -1, np.int32)
        guesses[num_guesses > 0, 0] = drawn
        for depth in range(1, int(num_guesses.max())):
            goes_on = num_guesses > depth
            deeper, places = rows[goes_on], ends[goes_on] + depth - 1
            self._token_ids[deeper, places] = guesses[goes_on, depth - 1]
            every = np.ones(deeper.size, np.bool_)
            guesses[goes_on, depth] = self._take_in(deeper, places, places + 1, every, blocks)
            self._num_seen[deeper] = places + 1
        is_guess = np.arange(guesses.shape[1]) < num_guesses[:, None]
        ids[~is_known] = guesses[is_guess]
        # The last guess of each row has not run here; if it is accepted, it is computed next time.
        last = num_guesses > 0
        self._token_ids[rows[last], ends[last] + num_guesses[last] - 1] = guesses[last, num_guesses[last] - 1]

    def _take_in(
        self, rows: _Ints, begins: _Ints, ends: _Ints, is_drawn: npt.NDArray[np.bool_], blocks: npt.NDArray[Any]
    ) -> _Ints:
        """Run tokens of some rows through the second model.

        Args:
            rows: int32 ``[r]``, rows of the persistent batch.
            begins: int32 ``[r]``, the position of each row's first token.
            ends: int32 ``[r]``, one past the position of the last.
            is_drawn: ``[r]``, whether the likeliest next id of the row is wanted.
            blocks: int32 ``[max_num_seqs + 1, max_blocks_per_seq]``.

        Returns:
            Those ids, int32, one for each true ``is_drawn``.
        """
        counts = ends - begins
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        of_tokens = np.repeat(rows, counts)
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(begins - starts[:-1], counts)
        slots = blocks[of_tokens, positions // self._block_size] * self._block_size + positions % self._block_size
        num_columns = -(-int(ends.max()) // self._block_size)
        metadata = AttentionMetadata(
            self._block_size,
            torch.from_numpy(np.ascontiguousarray(blocks[rows, :num_columns])),
            torch.from_numpy(slots.astype(np.int32)),
            starts,
            ends.astype(np.int32),
        )
        input_ids = torch.from_numpy(self._token_ids[of_tokens, positions])
        plan = self._backend.plan(metadata)
        at = torch.from_numpy(positions.astype(np.int32))
        last = torch.from_numpy((starts[1:] - 1)[is_drawn])
        if is_drawn.any():
            found = self.model.forward_logits(input_ids, at, self.kv_caches, plan, last, chooses=True)
            if found is not None and found.ids is not None:
                return _ints(found.ids.clamp_(min=0))  # negative without a valid logit: then any id will do
        hidden = self.model(input_ids, at, self.kv_caches, plan)
        if not is_drawn.any():
            return np.zeros(0, np.int32)
        return _ints(self.model.compute_logits(hidden[last]).argmax(dim=-1).to(torch.int32))


def _ints(tensor: Tensor) -> _Ints:
    array: _Ints = tensor.numpy()
    return array


def load_draft_model(
    config: EngineConfig,
    draft: ModelConfig,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    available_memory: int,
    threads: CpuThreads,
) -> DraftModel:
    """Load the second model, on the CPU.

    Args:
        config: The engine's configuration.
        draft: The second model's configuration.
        dtype: The dtype of both models.
        cache_dtype: The dtype of both KV caches.
        available_memory: Free memory in bytes.
        threads: The threads that compute both models.

    Raises:
        ModelLoadError: See ``model_loader.load_model``.
    """
    longest, block_size = config.model.max_model_len, config.cache.block_size
    alone = replace(
        config,
        model=replace(draft, max_model_len=longest),
        load=replace(config.load, quantization=None, merge_lora=()),
        lora=None,
        speculation=None,
        draft_model=None,
    )

    def make_packer(outline: CausalLM) -> LinearPacker:
        return make_linear_packer(alone, outline, dtype, threads)

    device = torch.device("cpu")
    model = load_model(alone.model, alone.load, dtype, device, available_memory, make_packer)
    use_core_norms(model, threads)
    use_core_decoder(model)
    backend = make_attention_backend(
        config.device.attention_backend,
        model.kv_cache_spec,
        dtype,
        device,
        threads,
        batch_invariant=config.device.batch_invariant,
        cache_dtype=cache_dtype,
    )
    return DraftModel(
        model, backend, max_num_seqs=config.scheduler.max_num_seqs, max_model_len=longest, block_size=block_size
    )
