"""Steps with drafts as CUDA graphs: one launch for the forward pass, the samples, and the check of the drafts.

A size is a number of requests and the most tokens of each: the newest token and its drafts. A step that only decodes
and samples behind every token is padded to the next size. Its tokens lie side by side, as in any other step. Padding
tokens behind them belong to no request and write to no slot (−1); padding requests have no token and length 0. The
graph samples behind each token, and the device keeps the drafts that are right (``kernels.verify``). The host gets the
tokens that each request is given, and the newest token of each stays on the device for the next step.

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

from rustvllm.attention.static_batch import StaticDraftBatch
from rustvllm.worker.graphs.captures import Captures
from rustvllm.worker.graphs.context import GraphContext
from rustvllm.worker.graphs.recorder import Graph
from rustvllm.worker.graphs.sampling import GraphSampling, StepResult
from rustvllm.worker.graphs.static_inputs import StaticInputs

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput
    from rustvllm.attention.backend import AttentionPlan
    from rustvllm.worker.step_buffers import StepBuffers

MAX_REQUESTS, MAX_WIDTH, MAX_TOKENS = 64, 32, 512
"""Limits of the largest graph: larger steps run as steps with pieces of prompts do."""
MOST_PADDING = 4
"""A graph has room for at most this many times the tokens of the step: if few of many requests have drafts, a graph of
mixed steps fits better."""
_INPUT_IDS, _POSITIONS, _SLOTS, _TOKEN_ROWS, _DRAWN_POSITIONS, _TEMPERATURES, _SEEDS, _UPPER_SEEDS = range(8)
_STARTS, _SEQ_LENS, _ROWS, _SET = range(4)


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What a graph has room for.

    Attributes:
        num_reqs: Requests.
        width: The most tokens of each.
    """

    num_reqs: int
    width: int

    @property
    def num_tokens(self) -> int:
        """All tokens that there is room for."""
        return self.num_reqs * self.width

    @property
    def inputs(self) -> StaticInputs:
        """The layout of the static inputs; one entry more than requests, for the end of the last one."""
        return StaticInputs(8, self.num_tokens, 4, self.num_reqs + 1)

    def __str__(self) -> str:
        return f"{self.num_reqs} requests with up to {self.width - 1} drafts"


def draft_sizes(max_num_seqs: int, num_speculative_tokens: int) -> list[DraftSize]:
    """1, 2, 4, … requests with 2, 4, … tokens up to the most drafts and one more; ordered by tokens, ascending.

    Empty without speculation.
    """
    if not num_speculative_tokens:
        return []
    most_reqs, most_width = min(max_num_seqs, MAX_REQUESTS), min(1 + num_speculative_tokens, MAX_WIDTH)
    reqs = {1 << power for power in range(most_reqs.bit_length())} | {most_reqs}
    widths = {width for width in (2, 4, 8) if width < most_width} | {most_width}
    sizes = [DraftSize(count, width) for count in reqs for width in widths if count * width <= MAX_TOKENS]
    return sorted(sizes, key=lambda size: (size.num_tokens, size.width))


class DraftGraphs:
    """The graphs of one model over one KV cache.

    Args:
        sizes: The sizes that may be captured, ascending; see ``draft_sizes``.
        context: What the graphs compute over.
        sampling: Computes logits and tokens, with room for the largest size.

    Attributes:
        sizes: As given.
    """

    def __init__(self, sizes: list[DraftSize], context: GraphContext, sampling: GraphSampling) -> None:
        self.sizes = sizes
        self._known = set(sizes)
        self._requests = sorted({size.num_reqs for size in sizes})
        self._widths = sorted({size.width for size in sizes})
        self._context, self._sampling = context, sampling
        self._captures = Captures(context.recorder, self._prepare, str)
        device = context.block_table.device
        most = max(size.inputs.size for size in sizes)
        self._inputs = torch.zeros(most, dtype=torch.int32, device=device)
        self._last = context.last_token_ids
        if self._last is None:  # steps do not overlap, so it is never read
            self._last = torch.zeros(context.null_row + 1, dtype=torch.int32, device=device)

    def size_for(self, output: SchedulerOutput) -> DraftSize | None:
        """The graph for a step; None if it must run in another kind of graph, or without one."""
        width, num_tokens, num_reqs = (
            output.max_num_scheduled_tokens, output.total_num_scheduled_tokens, output.num_reqs
        )  # fmt: skip
        # A step that only decodes samples behind each of its tokens.
        if self._captures.has_failed or width == 1 or output.num_logits != num_tokens:
            return None
        if width > self._widths[-1] or num_reqs > self._requests[-1] or output.num_prompt_logprobs:
            return None
        size = DraftSize(
            self._requests[bisect_left(self._requests, num_reqs)], self._widths[bisect_left(self._widths, width)]
        )
        return size if size in self._known and size.num_tokens <= MOST_PADDING * num_tokens else None

    def stage(self, output: SchedulerOutput, step: StepBuffers, size: DraftSize) -> Tensor:
        """The inputs of a step, int32 ``[n]``, padded to ``size``; valid once the step has been sent."""
        num_tokens, num_reqs = output.total_num_scheduled_tokens, output.num_reqs
        inputs = _padding(size, num_tokens, self._context.null_row)
        of_tokens, of_requests = size.inputs.views(inputs)
        rows = step.int32("idx_mapping", num_reqs)
        starts = step.int32("query_start_loc", num_reqs + 1)
        counts = np.diff(starts)
        positions = step.int32("positions", num_tokens)
        of_tokens[_INPUT_IDS, :num_tokens] = step.int32("input_ids", num_tokens)
        of_tokens[_POSITIONS, :num_tokens] = positions
        of_tokens[_SLOTS, :num_tokens] = step.int32("slot_mapping", num_tokens)
        of_tokens[_TOKEN_ROWS, :num_tokens] = np.repeat(rows, counts)
        of_tokens[_DRAWN_POSITIONS, :num_tokens] = positions + 1
        temperatures, seeds = self._sampling.parameters(rows)
        of_tokens[_TEMPERATURES, :num_tokens] = np.repeat(temperatures, counts)
        of_tokens[_SEEDS : _UPPER_SEEDS + 1, :num_tokens] = np.repeat(seeds, counts, axis=1)
        of_requests[_STARTS, : num_reqs + 1] = starts
        of_requests[_SEQ_LENS, :num_reqs] = step.int32("seq_lens", num_reqs)
        of_requests[_ROWS, :num_reqs] = rows
        of_requests[_SET] = output.buffer_index
        return step.stage(inputs)

    def run(self, staged: Tensor, size: DraftSize, output: SchedulerOutput) -> StepResult:
        """Logits behind each token of a step, and the tokens that its requests are given.

        Args:
            staged: What ``stage`` returned.
            size: The size given to ``stage``.
            output: The step.
        """
        graph = self._captures.of(size)
        self._inputs[: staged.shape[0]].copy_(staged)
        graph.replay()
        given = self._sampling.sampled[output.buffer_index, : output.num_reqs * size.width]
        logits = graph.result[: output.total_num_scheduled_tokens]
        return StepResult(None, logits, given.view(output.num_reqs, size.width))

    def common_sizes(self) -> list[DraftSize]:
        """The sizes that are captured ahead, descending."""
        return self.sizes[::-1]

    def capture_all(self, on_progress: Callable[[int, int], object] = lambda _done, _all: None) -> None:
        """Capture every size, the largest first; see ``Captures.capture_all``."""
        self._captures.capture_all(self.common_sizes(), on_progress)

    def capture(self, size: DraftSize) -> Graph:
        """Capture the graph of one size; see ``Captures.capture``."""
        return self._captures.capture(size)

    def _prepare(self, size: DraftSize) -> Callable[[], Tensor]:
        inputs = _padding(size, 0, self._context.null_row)
        self._inputs[: inputs.shape[0]].copy_(torch.from_numpy(inputs))
        of_tokens, of_requests = size.inputs.views(self._inputs[: inputs.shape[0]])
        plan = self._context.backend.plan_static_drafts(
            StaticDraftBatch(
                block_size=self._context.block_size,
                block_table=self._context.block_table,
                table_rows=of_requests[_ROWS, : size.num_reqs],
                slot_mapping=of_tokens[_SLOTS],
                query_start_loc=of_requests[_STARTS, : size.num_reqs + 1],
                seq_lens=of_requests[_SEQ_LENS, : size.num_reqs],
                max_seq_len=self._context.max_seq_len,
                width=size.width,
            )
        )
        return partial(self._forward, size, of_tokens, of_requests, plan)

    def _forward(self, size: DraftSize, of_tokens: Tensor, of_requests: Tensor, plan: AttentionPlan) -> Tensor:
        """What a graph runs: everything after the static inputs are written."""
        from rustvllm.kernels.draw import StaticDraws

        context, sampling = self._context, self._sampling
        input_ids = context.known_ids(of_tokens[_INPUT_IDS], of_tokens[_TOKEN_ROWS])
        hidden: Tensor = context.model(input_ids, of_tokens[_POSITIONS], context.kv_caches, plan)
        draws = StaticDraws(
            temperatures=of_tokens[_TEMPERATURES].view(torch.float32),
            seeds=of_tokens[_SEEDS : _UPPER_SEEDS + 1],
            positions=of_tokens[_DRAWN_POSITIONS],
            rows=of_tokens[_TOKEN_ROWS],
            which=of_requests[_STARTS],  # its first entry is always 0: ``drawn`` has only row 0
            sampled=sampling.drawn,
            last_token_ids=None,
            counters=sampling.counters,
        )
        logits = sampling.forward(context.model, hidden, draws)
        if not sampling.chooses:
            return logits
        sampling.verify(
            sampling.drawn[0],
            input_ids,
            of_requests[_STARTS, : size.num_reqs + 1],
            size.width,
            sampling.sampled,
            self._last,
            which=of_requests[_SET],
            rows=of_requests[_ROWS, : size.num_reqs],
        )
        return logits


def _padding(size: DraftSize, num_tokens: int, null_row: int) -> npt.NDArray[np.int32]:
    """Static inputs of padding only, which begins behind ``num_tokens`` tokens."""
    inputs = np.zeros(size.inputs.size, np.int32)
    of_tokens, of_requests = size.inputs.views(inputs)
    of_tokens[_SLOTS] = -1
    of_tokens[_TOKEN_ROWS] = null_row
    of_requests[_STARTS] = num_tokens
    of_requests[_ROWS] = null_row
    return inputs
