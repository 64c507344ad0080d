"""Captures CUDA graphs: what is captured and replayed, who captures it, and what must not be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """A captured forward pass."""

    result: Tensor
    """Where it leaves its result, ``[size, width]``; overwritten by the next replay of any graph."""

    def replay(self) -> None:
        """Launch it in the current stream."""
        ...


class GraphRecorder(Protocol):
    """Captures graphs that share one pool of memory: they are replayed one after another."""

    def capture(self, forward: Callable[[], Tensor]) -> Graph:
        """Run ``forward`` as it is, so that everything it uses is set up, then capture it.

        Raises:
            CannotCaptureError: It waits for the device or has memory copied by the host, which no graph holds; nothing
                was captured, and everything goes on without.
            WarmUpMemoryError: There is no memory to run it; what runs next goes on.
            RuntimeError: It failed while it was captured; what the device does afterwards is not to be relied on.
        """
        ...


class CannotCaptureError(RuntimeError):
    """A forward pass does what no CUDA graph can hold; the message says what."""


class WarmUpMemoryError(torch.OutOfMemoryError):
    """There is no memory for a forward pass that was to be captured: no capture was begun."""


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
        try:
            with torch.cuda.stream(self._stream):
                forward()  # compiles, sends what is sent once
                _check(forward)
        except torch.OutOfMemoryError as error:
            raise WarmUpMemoryError(str(error)) from error
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process may use CUDA meanwhile; what they launch is not ours to capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = forward()
        finally:
            torch.cuda.set_stream(current)  # where a capture breaks, torch may leave its own current
        current.wait_stream(self._stream)
        return _CapturedGraph(graph, result)


def _check(forward: Callable[[], Tensor]) -> None:
    """Run a forward pass in which whatever waits for the device raises: begun, such a capture could not be ended.

    Raises:
        CannotCaptureError: It waits.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        raise CannotCaptureError(str(error).splitlines()[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _CapturedGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph = graph
        self.result = result

    def replay(self) -> None:
        self._graph.replay()


def make_graph_recorder(device: torch.device) -> GraphRecorder | None:
    """The recorder of a CUDA device; None elsewhere."""
    return CUDAGraphRecorder(device) if device.type == "cuda" else None
