"""``StepGraphs``: the CUDA graphs of all kinds of steps, and the choice of one for a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rustvllm.worker.graphs.context import GraphContext
from rustvllm.worker.graphs.decode_graphs import DecodeGraphs
from rustvllm.worker.graphs.draft_graphs import DraftGraphs, DraftSize
from rustvllm.worker.graphs.memory import MemoryReading, graph_bytes
from rustvllm.worker.graphs.mixed_graphs import MixedGraphs
from rustvllm.worker.graphs.recorder import Graph
from rustvllm.worker.graphs.sampling import StepResult

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput
    from rustvllm.worker.step_buffers import StepBuffers

MEASURED_GRAPHS = 4
"""How many CUDA graphs of each kind are captured to estimate the memory of all."""


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The graphs of steps with adapters, or of steps without.

    Attributes:
        decodes: Graphs of steps of single tokens.
        drafts: Graphs of steps with drafts; None if these run as steps with pieces of prompts do.
        mixed: Graphs of steps with pieces of prompts; None if these run without a graph.
    """

    decodes: DecodeGraphs
    drafts: DraftGraphs | None
    mixed: MixedGraphs | None

    @classmethod
    def over(
        cls,
        decode_sizes: Sequence[int],
        max_mixed_tokens: int,
        context: GraphContext,
        draft_sizes: Sequence[DraftSize] = (),
    ) -> _Kinds:
        decodes, drafts = DecodeGraphs(decode_sizes, context), None
        if draft_sizes and context.sampling is not None:
            drafts = DraftGraphs(list(draft_sizes), context, context.sampling)
        return cls(decodes, drafts, MixedGraphs(max_mixed_tokens, context) if max_mixed_tokens else None)

    def all(self) -> list[DecodeGraphs | DraftGraphs | MixedGraphs]:
        """The kinds of graphs, in the order in which they are captured ahead."""
        return [each for each in (self.mixed, self.drafts, self.decodes) if each is not None]


class StepGraphs:
    """See the module.

    Steps with adapters have their own graphs, so that other steps do not pay for the launches that adapters need.

    Args:
        decode_sizes: Numbers of requests; see ``DecodeGraphs``.
        max_mixed_tokens: See ``MixedGraphs``; 0: steps with pieces of prompts run without a graph.
        context: What the graphs compute over.
        draft_sizes: See ``DraftGraphs``. Steps with drafts run as steps with pieces of prompts do if this is empty, if
            graphs end with the hidden states, or if the step has adapters.

    Attributes:
        decodes: Graphs of steps of single tokens without adapters.
        drafts: Graphs of steps with drafts without adapters; None if there are none.
        mixed: Graphs of steps with pieces of prompts without adapters; None if these run without a graph.
    """

    def __init__(
        self,
        decode_sizes: Sequence[int],
        max_mixed_tokens: int,
        context: GraphContext,
        draft_sizes: Sequence[DraftSize] = (),
    ) -> None:
        self._sampling = context.sampling
        plain = replace(context, make_adapters=None)
        self._plain = _Kinds.over(decode_sizes, max_mixed_tokens, plain, draft_sizes)
        self._adapted = None
        if context.make_adapters is not None:
            self._adapted = _Kinds.over(decode_sizes, max_mixed_tokens, context)
        self.decodes, self.drafts, self.mixed = self._plain.decodes, self._plain.drafts, self._plain.mixed

    def size_for(self, output: SchedulerOutput) -> int:
        """Rows of the graph that a step runs in (requests of decodes, else tokens); 0 if it runs without a graph."""
        if size := self.decodes.size_for(output):
            return size
        if self.drafts is not None and (with_drafts := self.drafts.size_for(output)) is not None:
            return with_drafts.num_tokens
        mixed = None if self.mixed is None else self.mixed.size_for(output)
        return 0 if mixed is None else mixed.num_tokens

    def stage(
        self, output: SchedulerOutput, step: StepBuffers, *, has_adapters: bool = False
    ) -> Callable[[], StepResult] | None:
        """Stage a step's inputs for its graph; the function it returns runs the graph, once the step has been sent.

        Args:
            output: The step.
            step: Its arrays.
            has_adapters: Whether some of its requests have adapters.

        Returns:
            A function that returns the step's result; None if the step runs without a graph.
        """
        if (kinds := self._adapted if has_adapters else self._plain) is None:
            return None
        num_tokens = output.total_num_scheduled_tokens
        decodes, drafts, mixed = kinds.decodes, kinds.drafts, kinds.mixed
        if (size := decodes.size_for(output)) is not None:
            if (staged := decodes.stage(output, step, size)) is None:
                return None
            if (sampling := self._sampling) is None:
                return lambda: StepResult(decodes.run(staged)[:num_tokens])
            sampled = sampling.sampled[output.buffer_index, :num_tokens, None]
            return lambda: StepResult(None, decodes.run(staged)[:num_tokens], sampled)
        if drafts is not None and (draft_size := drafts.size_for(output)) is not None:
            of_drafts = drafts.stage(output, step, draft_size)
            return lambda: drafts.run(of_drafts, draft_size, output)
        if mixed is None or (mixed_size := mixed.size_for(output)) is None:
            return None
        if (inputs := mixed.stage(output, step, mixed_size)) is None:
            return None

        def run_mixed() -> StepResult:
            hidden, logits = mixed.run(inputs, mixed_size)
            if logits is None or self._sampling is None:
                return StepResult(hidden[:num_tokens])
            of_samples = slice(output.num_sampled)
            sampled = self._sampling.sampled[output.buffer_index, of_samples, None]
            return StepResult(hidden[:num_tokens], logits[of_samples], sampled, is_of_samples=True)

        return run_mixed

    def num_ahead(self) -> int:
        """Number of graphs that ``capture_all`` captures."""
        return sum(len(graphs.common_sizes()) for graphs in self._all())

    def capture_all(self, on_progress: Callable[[int, int], object] = lambda _done, _all: None) -> None:
        """Capture the graphs that steps often need, the largest of each kind first: the others fit into its memory.

        Args:
            on_progress: Called after each graph with the number done and the total.
        """
        total, before = self.num_ahead(), 0

        def report(done: int, _of_kind: int) -> None:
            on_progress(before + done, total)

        for graphs in self._all():
            graphs.capture_all(report)
            before += len(graphs.common_sizes())

    def measure(self, device: torch.device) -> int:
        """Estimate the bytes that all graphs will take: capture the largest of each kind and a few more.

        Raises:
            CannotCaptureError: See ``GraphRecorder.capture``, also for its other errors.
        """
        num_bytes = 0 if self._sampling is None else self._sampling.num_bytes
        return num_bytes + sum(_measure(device, graphs.sizes, graphs.capture) for graphs in self._all())

    def _all(self) -> list[DecodeGraphs | DraftGraphs | MixedGraphs]:
        return self._plain.all() + ([] if self._adapted is None else self._adapted.all())


def _measure(device: torch.device, sizes: Sequence[object], capture: Callable[..., Graph]) -> int:
    readings = [MemoryReading.of(device)]
    for size in sizes[: -MEASURED_GRAPHS - 1 : -1]:
        capture(size)
        torch.cuda.synchronize(device)
        readings.append(MemoryReading.of(device))
    return graph_bytes(readings, len(sizes))
