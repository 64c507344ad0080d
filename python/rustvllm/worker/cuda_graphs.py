"""Decode steps as CUDA graphs: one launch for a whole forward pass, for batches of a few sizes.

A graph computes over memory that stays where it is. A step of only single tokens is padded to the next size: its
numbers go into the static inputs, its graph is replayed, and the hidden states of its requests are the first rows of
what that left. Steps with a piece of a prompt, and batches beyond the largest size, run without a graph.

Static inputs are written in the stream that replays, so a write waits for the replay that last read them, and a replay
for the write. A padding row writes to no slot (−1) and reads one slot of the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.attention.static_batch import StaticAttentionBackend, StaticDecodeBatch
from rustvllm.logger import init_logger

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput
    from rustvllm.attention.backend import AttentionPlan
    from rustvllm.models.interface import CausalLM
    from rustvllm.worker.step_buffers import StepBuffers

logger = init_logger(__name__)

MAX_DEFAULT_SIZE = 512
"""The largest size that is captured by default."""
_INPUT_IDS, _POSITIONS, _SLOTS, _SEQ_LENS, _ROWS = range(5)


class Graph(Protocol):
    """A captured forward pass."""

    hidden: Tensor
    """Where it leaves its result, ``[size, hidden_size]``; overwritten by the next replay of any graph."""

    def replay(self) -> None:
        """Launch it in the current stream."""
        ...


class GraphRecorder(Protocol):
    """Captures graphs that share one pool of memory: they are replayed one after another."""

    def capture(self, forward: Callable[[], Tensor]) -> Graph:
        """Run ``forward`` once as it is, so that everything it uses is set up, then capture it."""
        ...


class CUDAGraphRecorder:
    """See ``GraphRecorder``.

    Args:
        device: Whose work is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, forward: Callable[[], Tensor]) -> Graph:
        """See ``GraphRecorder.capture``."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            forward()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use CUDA meanwhile; what they launch is not ours to capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            hidden = forward()
        current.wait_stream(self._stream)
        return _CapturedGraph(graph, hidden)


class _CapturedGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, hidden: Tensor) -> None:
        self._graph = graph
        self.hidden = hidden

    def replay(self) -> None:
        self._graph.replay()


def make_graph_recorder(device: torch.device) -> GraphRecorder | None:
    """The recorder of a CUDA device; None elsewhere."""
    return CUDAGraphRecorder(device) if device.type == "cuda" else None


def default_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every eighth up to 256, every sixteenth up to ``MAX_DEFAULT_SIZE``; ``max_num_seqs`` bounds them.

    The bound is among them, so that up to ``MAX_DEFAULT_SIZE`` requests every decode step has a graph.
    """
    largest = min(max_num_seqs, MAX_DEFAULT_SIZE)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, MAX_DEFAULT_SIZE + 1, 16), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


class DecodeGraphs:
    """The graphs of one model over one KV cache.

    Args:
        sizes: Numbers of requests to capture, each captured when it is first needed or by ``capture_all``.
        recorder: captures.
        model: filled.
        backend: Computes attention, over a static batch.
        kv_caches: One per layer.
        block_table: int32 ``[max_num_seqs + 1, max_blocks]`` of the persistent rows; the last names the null block.
        last_token_ids: int32 ``[max_num_seqs + 1]``, what was sampled last in each row: it stands in for a −1 among the
            input ids. None when there are no such.
        block_size: Tokens per KV block.

    Attributes:
        sizes: ascending.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        recorder: GraphRecorder,
        model: CausalLM,
        backend: StaticAttentionBackend,
        kv_caches: Sequence[Tensor],
        *,
        block_table: Tensor,
        last_token_ids: Tensor | None,
        block_size: int,
    ) -> None:
        self.sizes = sorted(sizes)
        self._recorder = recorder
        self._model = model
        self._backend = backend
        self._kv_caches = kv_caches
        self._block_table = block_table
        self._last_token_ids = last_token_ids
        self._block_size = block_size
        self._null_row = block_table.shape[0] - 1
        largest = self.sizes[-1]
        # Rows of a multiple of 16 numbers: kernels read whole lines of what begins on one.
        device, width = block_table.device, -(-largest // 16) * 16
        self._inputs = torch.zeros((5, width), dtype=torch.int32, device=device)
        self._tables = torch.zeros((largest, block_table.shape[1]), dtype=torch.int32, device=device)
        self._graphs: dict[int, Graph] = {}
        self._has_failed = False
        self._plans: list[AttentionPlan] = []  # they own memory that the graphs read

    def size_for(self, output: SchedulerOutput) -> int | None:
        """Requests of the graph that a step may run in; None if it must run without one."""
        if self._has_failed or output.max_num_scheduled_tokens != 1 or output.num_reqs > self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, output.num_reqs)]

    def stage(self, output: SchedulerOutput, step: StepBuffers, size: int) -> Tensor:
        """The inputs of a step, padded to ``size`` requests: int32 ``[5, size]``, to be looked at once it was sent."""
        inputs = self._padding(size)
        num_reqs = output.num_reqs
        inputs[_INPUT_IDS, :num_reqs] = step.int32("input_ids", num_reqs)
        inputs[_POSITIONS, :num_reqs] = step.int32("positions", num_reqs)
        inputs[_SLOTS, :num_reqs] = step.int32("slot_mapping", num_reqs)
        inputs[_SEQ_LENS, :num_reqs] = step.int32("seq_lens", num_reqs)
        inputs[_ROWS, :num_reqs] = step.int32("idx_mapping", num_reqs)
        return step.stage(inputs)

    def run(self, staged: Tensor) -> Tensor:
        """The hidden states of a step, ``[size, hidden_size]``; they last until the next step.

        Args:
            staged: What ``stage`` gave.
        """
        size = staged.shape[1]
        graph = self._graphs.get(size) or self.capture(size)
        self._inputs[:, :size].copy_(staged)
        graph.replay()
        return graph.hidden

    @torch.inference_mode()
    def capture_all(self, on_progress: Callable[[int, int], object] = lambda _done, _all: None) -> None:
        """Capture every size, the largest first: the others fit into its memory.

        Args:
            on_progress: Called after each with how many are captured, and of how many.
        """
        for done, size in enumerate(reversed(self.sizes), 1):
            if size not in self._graphs:
                self.capture(size)
            on_progress(done, len(self.sizes))

    @torch.inference_mode()
    def capture(self, size: int) -> Graph:
        """Capture the graph of one size; one that fails is the last that is tried."""
        # Only padding: what runs before the capture must not write to any request's slot.
        self._inputs[:, :size].copy_(torch.from_numpy(self._padding(size)))
        batch = StaticDecodeBatch(
            block_size=self._block_size,
            block_table=self._tables[:size],
            slot_mapping=self._inputs[_SLOTS, :size],
            seq_lens=self._inputs[_SEQ_LENS, :size],
            max_seq_len=self._tables.shape[1] * self._block_size,
        )
        plan = self._backend.plan_static(batch)
        try:
            graph = self._recorder.capture(lambda: self._forward(size, plan))
        except BaseException:
            self._has_failed = True
            logger.warning(
                "a CUDA graph of %d requests could not be captured: steps run without graphs from now on", size
            )
            raise
        self._plans.append(plan)
        self._graphs[size] = graph
        return graph

    def _forward(self, size: int, plan: AttentionPlan) -> Tensor:
        """What a graph does, from the static inputs on."""
        input_ids, positions, rows = (self._inputs[part, :size] for part in (_INPUT_IDS, _POSITIONS, _ROWS))
        if self._last_token_ids is not None:
            known = self._last_token_ids.index_select(0, rows)
            input_ids = torch.where(input_ids < 0, known, input_ids)
        torch.index_select(self._block_table, 0, rows, out=self._tables[:size])
        hidden: Tensor = self._model(input_ids, positions, self._kv_caches, plan)
        return hidden

    def _padding(self, size: int) -> npt.NDArray[np.int32]:
        inputs = np.zeros((5, size), np.int32)
        inputs[_SLOTS] = -1
        inputs[_SEQ_LENS] = 1
        inputs[_ROWS] = self._null_row
        return inputs
