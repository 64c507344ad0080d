"""The CUDA graphs of one kind of step, captured ahead or when one is first needed; after a failure, no more of them."""

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
    """Stands in for a graph: each replay runs the forward pass again."""

    result: Tensor

    def __init__(self, forward: Callable[[], Tensor]) -> None:
        self._forward = forward

    def replay(self) -> None:
        self.result = self._forward()


class Captures(Generic[Size]):
    """See the module.

    Args:
        recorder: Captures the graphs.
        prepare: Fills the static inputs of a size with padding only and returns the forward pass over them. A run
            before the capture must not write to any request's slot.
        describe: Describes a size, for the log.

    Attributes:
        has_failed: A capture failed, so no other is tried and steps run without graphs.
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
        """The graph of a size, captured if need be; if it cannot be captured, a stand-in that runs without a graph.

        Raises:
            DeviceFailedError: The device failed during the capture.
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
        """Capture the sizes that are not captured yet, in the given order.

        Args:
            sizes: Descending, so that the later ones fit into the memory of the largest.
            on_progress: Called after each size with the number done and the total.
        """
        for done, size in enumerate(sizes, 1):
            if size not in self._graphs:
                self.capture(size)
            on_progress(done, len(sizes))

    @torch.inference_mode()
    def capture(self, size: Size) -> Graph:
        """Capture the graph of one size; after a failure, no other is tried.

        Raises:
            CannotCaptureError: See ``GraphRecorder.capture``, also for its other errors.
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
