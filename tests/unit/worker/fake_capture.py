"""``torch.cuda`` as far as a capture needs it, on the CPU, with what torch does when a capture breaks.

A forward pass that waits for the device (``FakeTorchCuda.wait``) invalidates the capture it runs in: its end raises,
its stream stays the current one, and the allocator, which believes that the capture goes on, refuses to free memory.
"""

from contextlib import contextmanager

import torch


class _Stream:
    def __init__(self, device=None):
        self.device = torch.device("cpu")

    def wait_stream(self, other):
        assert isinstance(other, _Stream)


class _Graph:
    """Replays what was captured: here, by running it anew."""

    def replay(self):
        raise AssertionError("a captured forward pass of these tests is run by its recorder")


class FakeTorchCuda:
    """See the module.

    Attributes:
        current: The current stream.
        default: What it was at first.
        num_captures: Captures that were begun.
        underway: Captures that the allocator believes to be under way.
    """

    def __init__(self, monkeypatch):
        self.default = self.current = _Stream()
        self.num_captures = self.underway = 0
        self._is_capturing = self._is_invalid = False
        self._sync_mode = 0
        for name in (
            "current_stream", "set_stream", "stream", "graph", "empty_cache", "get_sync_debug_mode",
            "set_sync_debug_mode",
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(torch.cuda, "Stream", _Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        for name in ("mem_get_info", "memory_reserved", "memory_allocated", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None, name=name: (8, 9) if "info" in name else 0)

    def wait(self, *, only_in_captures=False):
        """What ``.item()`` does."""
        if self._is_capturing:
            self._is_invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self._sync_mode == "error" and not only_in_captures:
            raise RuntimeError("called a synchronizing CUDA operation")

    def _current_stream(self, device=None):
        return self.current

    def _set_stream(self, stream):
        self.current = stream

    @contextmanager
    def _stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _graph(self, graph, *, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ((0, 0), "thread_local")
        self._empty_cache()
        before, self.current = self.current, stream
        self.num_captures += 1
        self.underway += 1
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False
            if self._is_invalid:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.underway -= 1
            self.current = before

    def _empty_cache(self):
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def _get_sync_debug_mode(self):
        return self._sync_mode

    def _set_sync_debug_mode(self, mode):
        self._sync_mode = mode
