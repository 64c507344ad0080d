"""``StepGraphs``: the CUDA graphs of all kinds of steps, and which of them a step runs in."""

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
"""So many CUDA graphs of a kind are captured to see what all of them will take."""


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Graphs of steps that all have adapters, or all have none.

    Attributes:
        decodes: Of steps of single tokens.
        drafts: Of steps with drafts; None: these run as those with pieces of prompts do.
        mixed: Of steps with pieces of prompts; None: they run without.
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
        """In the order in which they are captured ahead."""
        return [each for each in (self.mixed, self.drafts, self.decodes) if each is not None]


class StepGraphs:
    """See the module.

    Steps with adapters have graphs of their own, so that others do not pay for what adapters launch.

    Args:
        decode_sizes: Numbers of requests; see ``DecodeGraphs``.
        max_mixed_tokens: See ``MixedGraphs``; 0: steps with pieces of prompts run without.
        context: What they compute over.
        draft_sizes: See ``DraftGraphs``; none: steps with drafts run as those with pieces of prompts do, and so they do
            where graphs leave hidden states, and where they have adapters.

    Attributes:
        decodes: Of steps of single tokens without adapters.
        drafts: Of steps with drafts, likewise; None: there are none.
        mixed: Of steps with pieces of prompts, likewise; None: they run without.
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
        """Rows of the graph that a step runs in, requests of decodes or tokens; 0: it runs without one."""
        if size := self.decodes.size_for(output):
            return size
        if self.drafts is not None and (with_drafts := self.drafts.size_for(output)) is not None:
            return with_drafts.num_tokens
        mixed = None if self.mixed is None else self.mixed.size_for(output)
        return 0 if mixed is None else mixed.num_tokens

    def stage(
        self, output: SchedulerOutput, step: StepBuffers, *, has_adapters: bool = False
    ) -> Callable[[], StepResult] | None:
        """What runs a step in its graph and gives what that left of its tokens, to be called once the step was sent.

        Args:
            output: The step.
            step: Its arrays.
            has_adapters: Whether some of its requests have adapters.

        Returns:
            None: the step runs without a graph.
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
        """Graphs that ``capture_all`` captures."""
        return sum(len(graphs.common_sizes()) for graphs in self._all())

    def capture_all(self, on_progress: Callable[[int, int], object] = lambda _done, _all: None) -> None:
        """Capture what steps often need, the largest of each kind first: the others fit into its memory.

        Args:
            on_progress: Called after each with how many are captured, and of how many.
        """
        total, before = self.num_ahead(), 0

        def report(done: int, _of_kind: int) -> None:
            on_progress(before + done, total)

        for graphs in self._all():
            graphs.capture_all(report)
            before += len(graphs.common_sizes())

    def measure(self, device: torch.device) -> int:
        """Bytes that all graphs will take: of each kind the largest and a few more are captured.

        Raises:
            CannotCaptureError: See ``GraphRecorder.capture``; what else it raises, likewise.
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
