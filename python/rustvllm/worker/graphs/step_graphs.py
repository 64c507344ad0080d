"""``StepGraphs``: the CUDA graphs of all kinds of steps, and which of them a step runs in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rustvllm.worker.graphs.context import GraphContext
from rustvllm.worker.graphs.decode_graphs import DecodeGraphs
from rustvllm.worker.graphs.draft_graphs import DraftGraphs, DraftSize
from rustvllm.worker.graphs.graph_memory import MemoryReading, graph_bytes
from rustvllm.worker.graphs.mixed_graphs import MixedGraphs
from rustvllm.worker.graphs.recorder import Graph
from rustvllm.worker.graphs.sampling import StepResult

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput
    from rustvllm.worker.step_buffers import StepBuffers

MEASURED_GRAPHS = 4
"""So many CUDA graphs of a kind are captured to see what all of them will take."""


class StepGraphs:
    """See the module.

    Args:
        decode_sizes: Numbers of requests; see ``DecodeGraphs``.
        max_mixed_tokens: See ``MixedGraphs``; 0: steps with pieces of prompts run without.
        context: What they compute over.
        draft_sizes: See ``DraftGraphs``; none: steps with drafts run as those with pieces of prompts do, and so they do
            where graphs leave hidden states.

    Attributes:
        decodes: Of steps of single tokens.
        drafts: Of steps with drafts; None: there are none.
        mixed: Of steps with pieces of prompts; None: they run without.
    """

    def __init__(
        self,
        decode_sizes: Sequence[int],
        max_mixed_tokens: int,
        context: GraphContext,
        draft_sizes: Sequence[DraftSize] = (),
    ) -> None:
        self._sampling = context.sampling
        self.decodes = DecodeGraphs(decode_sizes, context)
        self.drafts: DraftGraphs | None = None
        if draft_sizes and context.sampling is not None:
            self.drafts = DraftGraphs(list(draft_sizes), context, context.sampling)
        self.mixed = MixedGraphs(max_mixed_tokens, context) if max_mixed_tokens else None

    def size_for(self, output: SchedulerOutput) -> int:
        """Rows of the graph that a step runs in, requests of decodes or tokens; 0: it runs without one."""
        if size := self.decodes.size_for(output):
            return size
        if self.drafts is not None and (with_drafts := self.drafts.size_for(output)) is not None:
            return with_drafts.num_tokens
        mixed = None if self.mixed is None else self.mixed.size_for(output)
        return 0 if mixed is None else mixed.num_tokens

    def stage(self, output: SchedulerOutput, step: StepBuffers) -> Callable[[], StepResult] | None:
        """What runs a step in its graph and gives what that left of its tokens, to be called once the step was sent.

        Returns:
            None: the step runs without a graph.
        """
        num_tokens = output.total_num_scheduled_tokens
        if (size := self.decodes.size_for(output)) is not None:
            staged = self.decodes.stage(output, step, size)
            if (sampling := self._sampling) is None:
                return lambda: StepResult(self.decodes.run(staged)[:num_tokens])
            sampled = sampling.sampled[output.buffer_index, :num_tokens, None]
            return lambda: StepResult(None, self.decodes.run(staged)[:num_tokens], sampled)
        drafts = self.drafts
        if drafts is not None and (draft_size := drafts.size_for(output)) is not None:
            of_drafts = drafts.stage(output, step, draft_size)
            return lambda: drafts.run(of_drafts, draft_size, output)
        mixed = self.mixed
        if mixed is None or (mixed_size := mixed.size_for(output)) is None:
            return None
        inputs = mixed.stage(output, step, mixed_size)

        def run_mixed() -> StepResult:
            hidden, logits = mixed.run(inputs, mixed_size)
            if logits is None or self._sampling is None:
                return StepResult(hidden[:num_tokens])
            of_samples = slice(output.num_sampled)
            sampled = self._sampling.sampled[output.buffer_index, of_samples, None]
            return StepResult(hidden[:num_tokens], logits[of_samples], sampled, is_of_samples=True)

        return run_mixed

    def num_ahead(self) -> int:
        """Graphs that ``capture_all`` captures."""
        with_drafts = 0 if self.drafts is None else len(self.drafts.sizes)
        return len(self.decodes.sizes) + with_drafts + (0 if self.mixed is None else len(self.mixed.common_sizes()))

    def capture_all(self, on_progress: Callable[[int, int], object] = lambda _done, _all: None) -> None:
        """Capture what steps often need, the largest of each kind first: the others fit into its memory.

        Args:
            on_progress: Called after each with how many are captured, and of how many.
        """
        total, before = self.num_ahead(), 0

        def report(done: int, _of_kind: int) -> None:
            on_progress(before + done, total)

        for of_kind, num_graphs in (
            (self.mixed, 0 if self.mixed is None else len(self.mixed.common_sizes())),
            (self.drafts, 0 if self.drafts is None else len(self.drafts.sizes)),
            (self.decodes, len(self.decodes.sizes)),
        ):
            if of_kind is not None:
                of_kind.capture_all(report)
                before += num_graphs

    def measure(self, device: torch.device) -> int:
        """Bytes that all graphs will take: of each kind the largest and a few more are captured.

        Raises:
            CannotCaptureError: See ``GraphRecorder.capture``; what else it raises, likewise.
        """
        num_bytes = 0 if self._sampling is None else self._sampling.num_bytes
        if self.mixed is not None:
            num_bytes += _measure(device, self.mixed.sizes, self.mixed.capture)
        if self.drafts is not None:
            num_bytes += _measure(device, self.drafts.sizes, self.drafts.capture)
        return num_bytes + _measure(device, self.decodes.sizes, self.decodes.capture)


def _measure(device: torch.device, sizes: Sequence[object], capture: Callable[..., Graph]) -> int:
    readings = [MemoryReading.of(device)]
    for size in sizes[: -MEASURED_GRAPHS - 1 : -1]:
        capture(size)
        torch.cuda.synchronize(device)
        readings.append(MemoryReading.of(device))
    return graph_bytes(readings, len(sizes))
