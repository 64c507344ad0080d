"""Steps with pieces of prompts as CUDA graphs: one launch for a whole forward pass, for batches of several sizes.

A size is a number of tokens and a number of requests. A step is padded to the next size: its numbers go into the static
inputs in one copy, the graph is replayed, and its first rows are the hidden states of the step's tokens. The device
works out which program of the attention kernel computes what (``StaticMixedPlan.begin_step``). With ``sampling``,
graphs of few requests also compute the logits and tokens of the requests that get one.

A padding token belongs to no request and writes to no slot (−1). A padding request begins where the step's tokens end,
and has no token and length 0, so its block table is not read. One request is always padding, because programs without
work are assigned to it.

Static inputs are written in the stream that replays, so a write waits for the replay that last read them, and a replay
waits for the write.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.attention.static_batch import StaticMixedBatch, StaticMixedPlan
from rustvllm.worker.graphs.captures import Captures
from rustvllm.worker.graphs.context import GraphContext
from rustvllm.worker.graphs.recorder import Graph
from rustvllm.worker.graphs.staged_inputs import StagedInputs
from rustvllm.worker.graphs.static_inputs import StaticInputs

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput
    from rustvllm.worker.graphs.sampling import GraphSampling
    from rustvllm.worker.step_buffers import StepBuffers

SMALLEST, FEW_REQUESTS = 16, 8
"""Tokens of the smallest graph, and requests of the graphs that are captured ahead."""
_INPUT_IDS, _POSITIONS, _SLOTS, _TOKEN_ROWS = range(4)
_STARTS, _SEQ_LENS, _ROWS = range(3)
_PLACES, _SAMPLED_ROWS, _NEXT_POSITIONS, _TEMPERATURES, _SEEDS, _UPPER_SEEDS, _SET = range(3, 10)
MAX_SAMPLED = 64
"""Requests of the largest graphs that also sample: beyond that, logits of padding rows cost more than launches do."""


@dataclass(frozen=True, order=True, slots=True)
class MixedSize:
    """What a graph has room for."""

    num_tokens: int
    num_reqs: int

    @property
    def inputs(self) -> StaticInputs:
        """The layout of the static inputs: one request more for padding, and one entry more for where it ends."""
        return StaticInputs(4, self.num_tokens, _SET + 1, self.num_reqs + 2)

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens of {self.num_reqs} requests"


class MixedGraphs:
    """The mixed graphs of one model over one KV cache.

    Args:
        max_tokens: Steps with more tokens run without a graph.
        context: What the graphs compute over.

    Attributes:
        sizes: The sizes that may be captured, ascending.
    """

    def __init__(self, max_tokens: int, context: GraphContext) -> None:
        self._tokens = _multiples(SMALLEST, max_tokens, 2)
        self._requests = _multiples(FEW_REQUESTS, context.null_row, 8)
        self.sizes = [MixedSize(tokens, reqs) for tokens in self._tokens for reqs in self._requests]
        self._context = context
        self._captures = Captures(context.recorder, self._prepare, str)
        self._logits: dict[MixedSize, Tensor] = {}  # where the graphs that also sample leave their logits
        device = context.block_table.device
        self._inputs = torch.zeros(self.sizes[-1].inputs.size, dtype=torch.int32, device=device)
        self._adapters = context.adapters_of(max_tokens)

    def size_for(self, output: SchedulerOutput) -> MixedSize | None:
        """The graph for a step; None if it must run without one, or in a graph of decodes."""
        num_tokens, num_reqs = output.total_num_scheduled_tokens, output.num_reqs
        is_mixed = output.max_num_scheduled_tokens > 1
        if self._captures.has_failed or not is_mixed or num_tokens > self._tokens[-1] or num_reqs > self._requests[-1]:
            return None
        return MixedSize(
            self._tokens[bisect_left(self._tokens, num_tokens)], self._requests[bisect_left(self._requests, num_reqs)]
        )

    def stage(self, output: SchedulerOutput, step: StepBuffers, size: MixedSize) -> StagedInputs | None:
        """The inputs of a step, int32 ``[n]``, padded to ``size``; valid once the step has been sent.

        Returns:
            None if the step has too many adapters.
        """
        of_adapters = None
        if self._adapters is not None and (of_adapters := self._adapters.stage(size.num_tokens, step.stage)) is None:
            return None
        inputs = _padding(size, output.total_num_scheduled_tokens, self._context.null_row)
        of_tokens, of_requests = size.inputs.views(inputs)
        num_tokens, num_reqs = output.total_num_scheduled_tokens, output.num_reqs
        rows = step.int32("idx_mapping", num_reqs)
        starts = step.int32("query_start_loc", num_reqs + 1)
        of_tokens[_INPUT_IDS, :num_tokens] = step.int32("input_ids", num_tokens)
        of_tokens[_POSITIONS, :num_tokens] = step.int32("positions", num_tokens)
        of_tokens[_SLOTS, :num_tokens] = step.int32("slot_mapping", num_tokens)
        of_tokens[_TOKEN_ROWS, :num_tokens] = np.repeat(rows, np.diff(starts))
        of_requests[_STARTS, : num_reqs + 1] = starts
        of_requests[_SEQ_LENS, :num_reqs] = step.int32("seq_lens", num_reqs)
        of_requests[_ROWS, :num_reqs] = rows
        sampling, num_sampled = self._sampling_of(size), output.num_sampled
        if sampling is not None and output.num_logits == num_sampled:  # else there are drafts
            rows, places = step.int32("sampled_rows", num_sampled), step.int32("logits_indices", num_sampled)
            temperatures, seeds = sampling.parameters(rows)
            of_requests[_PLACES, :num_sampled] = places
            of_requests[_SAMPLED_ROWS, :num_sampled] = rows
            of_requests[_NEXT_POSITIONS, :num_sampled] = step.arrays["positions"][places] + 1
            of_requests[_TEMPERATURES, :num_sampled] = temperatures
            of_requests[_SEEDS : _UPPER_SEEDS + 1, :num_sampled] = seeds
            of_requests[_SET] = output.buffer_index
        return StagedInputs(step.stage(inputs), of_adapters)

    def run(self, staged: StagedInputs, size: MixedSize) -> tuple[Tensor, Tensor | None]:
        """The hidden states of a step, ``[size.num_tokens, hidden_size]``; valid until the next step.

        Args:
            staged: What ``stage`` returned.
            size: The size given to ``stage``.

        Returns:
            The hidden states, and the logits of the step's samples, ``[size.num_reqs, vocab_size]``; None if the graph
            ends with the hidden states.
        """
        graph = self._captures.of(size)
        self._inputs[: staged.inputs.shape[0]].copy_(staged.inputs)
        staged.fill(self._adapters)
        graph.replay()
        return graph.result, self._logits.get(size)

    def common_sizes(self) -> list[MixedSize]:
        """The sizes that are captured ahead, descending."""
        return [size for size in reversed(self.sizes) if size.num_reqs == self._requests[0]]

    def capture_all(self, on_progress: Callable[[int, int], object] = lambda _done, _all: None) -> None:
        """Capture the graphs of few requests, the largest first; the others are captured when a step needs one."""
        self._captures.capture_all(self.common_sizes(), on_progress)

    def capture(self, size: MixedSize) -> Graph:
        """Capture the graph of one size; see ``Captures.capture``."""
        return self._captures.capture(size)

    def _sampling_of(self, size: MixedSize) -> GraphSampling | None:
        sampling = self._context.sampling
        return sampling if sampling is not None and size.num_reqs <= min(MAX_SAMPLED, sampling.max_rows) else None

    def _prepare(self, size: MixedSize) -> Callable[[], Tensor]:
        inputs = _padding(size, 0, self._context.null_row)
        self._inputs[: inputs.shape[0]].copy_(torch.from_numpy(inputs))
        of_tokens, of_requests = size.inputs.views(self._inputs[: inputs.shape[0]])
        num_rows = size.num_reqs + 1
        plan = self._context.backend.plan_static_mixed(
            StaticMixedBatch(
                block_size=self._context.block_size,
                block_table=self._context.block_table,
                table_rows=of_requests[_ROWS, :num_rows],
                slot_mapping=of_tokens[_SLOTS],
                query_start_loc=of_requests[_STARTS, : num_rows + 1],
                seq_lens=of_requests[_SEQ_LENS, :num_rows],
                max_seq_len=self._context.max_seq_len,
            )
        )
        forward = partial(self._forward, size, of_tokens, of_requests, plan)
        return forward if self._adapters is None else self._adapters.over(size.num_tokens, forward)

    def _forward(self, size: MixedSize, of_tokens: Tensor, of_requests: Tensor, plan: StaticMixedPlan) -> Tensor:
        """What a graph runs: everything after the static inputs are written."""
        input_ids = self._context.known_ids(of_tokens[_INPUT_IDS], of_tokens[_TOKEN_ROWS])
        plan.begin_step()
        hidden: Tensor = self._context.model(input_ids, of_tokens[_POSITIONS], self._context.kv_caches, plan)
        if (sampling := self._sampling_of(size)) is None:
            return hidden
        from rustvllm.kernels.draw import StaticDraws

        of_samples = of_requests[:, : size.num_reqs]
        draws = StaticDraws(
            temperatures=of_samples[_TEMPERATURES].view(torch.float32),
            seeds=of_samples[_SEEDS : _UPPER_SEEDS + 1],
            positions=of_samples[_NEXT_POSITIONS],
            rows=of_samples[_SAMPLED_ROWS],
            which=of_samples[_SET],
            sampled=sampling.sampled,
            last_token_ids=self._context.last_token_ids,
            counters=sampling.counters,
        )
        last = hidden.index_select(0, of_samples[_PLACES])
        self._logits[size] = sampling.forward(self._context.model, last, draws)
        return hidden


def _multiples(smallest: int, largest: int, factor: int) -> list[int]:
    """``smallest``, then ``factor`` times as much each time while below ``largest``, and ``largest`` itself."""
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return [*sizes, largest]


def _padding(size: MixedSize, num_tokens: int, null_row: int) -> npt.NDArray[np.int32]:
    """Static inputs of padding only, which begins behind ``num_tokens`` tokens."""
    inputs = np.zeros(size.inputs.size, np.int32)
    of_tokens, of_requests = size.inputs.views(inputs)
    of_tokens[_SLOTS] = -1
    of_tokens[_TOKEN_ROWS] = null_row
    of_requests[_STARTS] = num_tokens
    of_requests[_ROWS] = of_requests[_SAMPLED_ROWS] = null_row
    return inputs
