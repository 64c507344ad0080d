"""The CUDA graphs of one kind of step: captured ahead or when one is needed, and no more of them after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rustvllm.exceptions import DeviceFailedError
from rustvllm.logger import init_logger
from rustvllm.worker.graphs.recorder import CannotCaptureError, Graph, GraphRecorder, WarmUpMemoryError

logger = init_logger(__name__)

Size = TypeVar("Size")


class _Uncaptured:
    """A forward pass that runs anew at each replay."""

    result: Tensor

    def __init__(self, forward: Callable[[], Tensor]) -> None:
        self._forward = forward

    def replay(self) -> None:
        self.result = self._forward()


class Captures(Generic[Size]):
    """See the module.

    Args:
        recorder: captures.
        prepare: Fills the static inputs of a size with padding alone and gives the forward pass over them. What runs
            before a capture must not write to any request's slot.
        describe: A size in words, for the log.

    Attributes:
        has_failed: One could not be captured: no other is tried, and steps run without graphs.
    """

    def __init__(
        self, recorder: GraphRecorder, prepare: Callable[[Size], Callable[[], Tensor]], describe: Callable[[Size], str]
    ) -> None:
        self.has_failed = False
        self._describe = describe
        self._recorder = recorder
        self._prepare = prepare
        self._graphs: dict[Size, Graph] = {}
        self._forwards: list[Callable[[], Tensor]] = []  # they own memory that the graphs read

    def __contains__(self, size: Size) -> bool:
        return size in self._graphs

    def of(self, size: Size) -> Graph:
        """The graph that a step needs; what runs in its place where it cannot be captured.

        Raises:
            DeviceFailedError: It failed while it was captured.
            WarmUpMemoryError: There is no memory for the step.
        """
        if (graph := self._graphs.get(size)) is not None:
            return graph
        try:
            return self.capture(size)
        except CannotCaptureError:
            return _Uncaptured(self._prepare(size))
        except WarmUpMemoryError:
            raise
        except RuntimeError as error:
            raise DeviceFailedError(
                f"a CUDA graph of {self._describe(size)} could not be captured ({str(error).splitlines()[0]}), and the "
                "device may no longer work correctly: set enforce_eager"
            ) from error

    def capture_all(self, sizes: Sequence[Size], on_progress: Callable[[int, int], object]) -> None:
        """Capture what is not captured yet, in this order.

        Args:
            sizes: Descending, so that the others fit into the memory of the largest.
            on_progress: Called after each with how many are captured, and of how many.
        """
        for done, size in enumerate(sizes, 1):
            if size not in self._graphs:
                self.capture(size)
            on_progress(done, len(sizes))

    @torch.inference_mode()
    def capture(self, size: Size) -> Graph:
        """Capture the graph of one size; one that fails is the last that is tried.

        Raises:
            CannotCaptureError: See ``GraphRecorder.capture``; what else it raises, likewise.
        """
        forward = self._prepare(size)
        try:
            graph = self._recorder.capture(forward)
        except BaseException as error:
            self.has_failed = True
            logger.warning("CUDA graphs: the graph of %s could not be captured (%s)", self._describe(size), error)
            raise
        self._forwards.append(forward)
        self._graphs[size] = graph
        return graph
