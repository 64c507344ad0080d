"""Decode steps as CUDA graphs: one launch for a whole forward pass, for batches of several sizes.

A graph computes over memory with fixed addresses. A step in which every request has a single token is padded to the
next size: its numbers go into the static inputs, the graph is replayed, and its first rows are the hidden states of the
step's requests, or with ``sampling`` the logits and the tokens. Steps with a piece of a prompt run in ``mixed_graphs``;
batches larger than the largest size run without a graph.

Static inputs are written in the stream that replays, so a write waits for the replay that last read them, and a replay
waits for the write. A padding row writes to no slot (−1) and reads one slot of the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.attention.static_batch import StaticDecodeBatch
from rustvllm.worker.graphs.captures import Captures
from rustvllm.worker.graphs.context import GraphContext
from rustvllm.worker.graphs.recorder import Graph
from rustvllm.worker.graphs.staged_inputs import StagedInputs

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput
    from rustvllm.attention.backend import AttentionPlan
    from rustvllm.worker.step_buffers import StepBuffers

MAX_DEFAULT_SIZE = 512
"""The largest size captured by default."""
_INPUT_IDS, _POSITIONS, _SLOTS, _SEQ_LENS, _ROWS, _TEMPERATURES, _SEEDS, _UPPER_SEEDS, _SET = range(9)
_NUM_WITHOUT_SAMPLING = _TEMPERATURES


def default_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, the multiples of 8 up to 256, and those of 16 up to ``MAX_DEFAULT_SIZE``, limited by ``max_num_seqs``.

    The limit itself is one of them, so every decode step of up to ``MAX_DEFAULT_SIZE`` requests has a graph.
    """
    largest = min(max_num_seqs, MAX_DEFAULT_SIZE)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, MAX_DEFAULT_SIZE + 1, 16), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


class DecodeGraphs:
    """The graphs of one model over one KV cache.

    Args:
        sizes: Numbers of requests; each is captured when it is first needed, or by ``capture_all``.
        context: What the graphs compute over.

    Attributes:
        sizes: Ascending.
    """

    def __init__(self, sizes: Sequence[int], context: GraphContext) -> None:
        self.sizes = sorted(sizes)
        self._context = context
        self._captures = Captures(context.recorder, self._prepare, "{} requests".format)
        block_table = context.block_table
        largest = self.sizes[-1]
        # The length of a row is a multiple of 16 numbers, so that each row begins on a cache line.
        device, width = block_table.device, -(-largest // 16) * 16
        self._num_inputs = _NUM_WITHOUT_SAMPLING if context.sampling is None else _SET + 1
        self._inputs = torch.zeros((self._num_inputs, width), dtype=torch.int32, device=device)
        self._adapters = context.adapters_of(largest)

    def size_for(self, output: SchedulerOutput) -> int | None:
        """The number of requests of the graph for a step; None if the step must run without a graph."""
        if self._captures.has_failed or output.max_num_scheduled_tokens != 1 or output.num_reqs > self.sizes[-1]:
            return None
        if self._context.sampling is not None and output.num_prompt_logprobs:
            return None  # prompt log-probabilities need hidden states
        return self.sizes[bisect_left(self.sizes, output.num_reqs)]

    def stage(self, output: SchedulerOutput, step: StepBuffers, size: int) -> StagedInputs | None:
        """The inputs of a step, int32 ``[n, size]``, padded to ``size`` requests; valid once the step has been sent.

        Returns:
            None if the step has too many adapters.
        """
        of_adapters = None
        if self._adapters is not None and (of_adapters := self._adapters.stage(size, step.stage)) is None:
            return None
        inputs = self._padding(size)
        num_reqs = output.num_reqs
        inputs[_INPUT_IDS, :num_reqs] = step.int32("input_ids", num_reqs)
        inputs[_POSITIONS, :num_reqs] = step.int32("positions", num_reqs)
        inputs[_SLOTS, :num_reqs] = step.int32("slot_mapping", num_reqs)
        inputs[_SEQ_LENS, :num_reqs] = step.int32("seq_lens", num_reqs)
        rows = inputs[_ROWS, :num_reqs] = step.int32("idx_mapping", num_reqs)
        if self._context.sampling is not None:
            temperatures, seeds = self._context.sampling.parameters(rows)
            inputs[_TEMPERATURES, :num_reqs] = temperatures
            inputs[_SEEDS : _UPPER_SEEDS + 1, :num_reqs] = seeds
            inputs[_SET] = output.buffer_index
        return StagedInputs(step.stage(inputs), of_adapters)

    def run(self, staged: StagedInputs) -> Tensor:
        """The hidden states of a step, or its logits, ``[size, width]``; valid until the next step.

        Args:
            staged: What ``stage`` returned.
        """
        size = staged.inputs.shape[1]
        graph = self._captures.of(size)
        self._inputs[:, :size].copy_(staged.inputs)
        staged.fill(self._adapters)
        graph.replay()
        return graph.result

    def common_sizes(self) -> list[int]:
        """The sizes that are captured ahead, descending."""
        return self.sizes[::-1]

    def capture_all(self, on_progress: Callable[[int, int], object] = lambda _done, _all: None) -> None:
        """Capture every size, the largest first; see ``Captures.capture_all``."""
        self._captures.capture_all(self.common_sizes(), on_progress)

    def capture(self, size: int) -> Graph:
        """Capture the graph of one size; see ``Captures.capture``."""
        return self._captures.capture(size)

    def _prepare(self, size: int) -> Callable[[], Tensor]:
        self._inputs[:, :size].copy_(torch.from_numpy(self._padding(size)))
        forward = partial(self._forward, size, self._plan(size))
        return forward if self._adapters is None else self._adapters.over(size, forward)

    def _plan(self, size: int) -> AttentionPlan:
        return self._context.backend.plan_static(
            StaticDecodeBatch(
                block_size=self._context.block_size,
                block_table=self._context.block_table,
                table_rows=self._inputs[_ROWS, :size],
                slot_mapping=self._inputs[_SLOTS, :size],
                seq_lens=self._inputs[_SEQ_LENS, :size],
                max_seq_len=self._context.max_seq_len,
            )
        )

    def _forward(self, size: int, plan: AttentionPlan) -> Tensor:
        """What a graph runs: everything after the static inputs are written."""
        input_ids, positions, rows = (self._inputs[part, :size] for part in (_INPUT_IDS, _POSITIONS, _ROWS))
        input_ids = self._context.known_ids(input_ids, rows)
        hidden: Tensor = self._context.model(input_ids, positions, self._context.kv_caches, plan)
        if (sampling := self._context.sampling) is None:
            return hidden
        from rustvllm.kernels.draw import StaticDraws

        draws = StaticDraws(
            temperatures=self._inputs[_TEMPERATURES, :size].view(torch.float32),
            seeds=self._inputs[_SEEDS : _UPPER_SEEDS + 1, :size],
            positions=self._inputs[_SEQ_LENS, :size],
            rows=rows,
            which=self._inputs[_SET],
            sampled=sampling.sampled,
            last_token_ids=self._context.last_token_ids,
            counters=sampling.counters,
        )
        return sampling.forward(self._context.model, hidden, draws)

    def _padding(self, size: int) -> npt.NDArray[np.int32]:
        inputs = np.zeros((self._num_inputs, size), np.int32)
        inputs[_SLOTS] = -1
        inputs[_SEQ_LENS] = 1
        inputs[_ROWS] = self._context.null_row
        return inputs
