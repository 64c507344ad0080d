"""Captures CUDA graphs, and checks first that a forward pass can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """A captured forward pass."""

    result: Tensor
    """Where the graph leaves its result, ``[size, width]``; overwritten by the next replay of any graph."""

    def replay(self) -> None:
        """Launch the graph in the current stream."""
        ...


class GraphRecorder(Protocol):
    """Captures graphs that share one pool of memory, so they are replayed one after another."""

    def capture(self, forward: Callable[[], Tensor]) -> Graph:
        """Run ``forward`` normally, so that everything it uses is set up, then capture it.

        Raises:
            CannotCaptureError: ``forward`` waits for the device or has the host copy memory, which no graph can do;
                nothing was captured, and steps can run without a graph.
            WarmUpMemoryError: There is no memory to run ``forward``; later work is not affected.
            RuntimeError: The capture failed; the device may not work correctly afterwards.
        """
        ...


class CannotCaptureError(RuntimeError):
    """A forward pass does something that no CUDA graph can do; the message says what."""


class WarmUpMemoryError(torch.OutOfMemoryError):
    """There is no memory for a forward pass that was to be captured; no capture was begun."""


class CUDAGraphRecorder:
    """See ``GraphRecorder``.

    Args:
        device: The device whose work is captured.
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
                forward()  # compiles kernels, and makes the transfers that happen only once
                _check(forward)
        except torch.OutOfMemoryError as error:
            raise WarmUpMemoryError(str(error)) from error
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process may use CUDA meanwhile; their launches must not be captured.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = forward()
        finally:
            torch.cuda.set_stream(current)  # if a capture fails, torch may leave its own stream current
        current.wait_stream(self._stream)
        return _CapturedGraph(graph, result)


def _check(forward: Callable[[], Tensor]) -> None:
    """Run a forward pass and raise if it waits for the device: a capture of it could not be ended once begun.

    Raises:
        CannotCaptureError: The forward pass waits.
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
    """The recorder of a CUDA device; None for other devices."""
    return CUDAGraphRecorder(device) if device.type == "cuda" else None
