"""The arrays of one step, shared with the Rust core: memory that torch and numpy both see, and its copy on a device.

A buffer set is one block of memory, pinned for a GPU. First come the arrays that the device needs, then room for what
the host computes from the others (``stage``), then the rest. So a single copy brings the whole step to the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.worker.streams import DeviceStreams, Event

BufferSpec = Sequence[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of every array of a set, as ``_core.step_buffer_spec`` returns them."""

ON_DEVICE = (
    "idx_mapping",
    "query_start_loc",
    "seq_lens",
    "logits_indices",
    "sampled_rows",
    "input_ids",
    "positions",
    "slot_mapping",
)
"""Arrays that the device reads exactly as the core wrote them."""

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
_ALIGNMENT = 64
_STAGED_BYTES_PER_REQUEST = 160
_STAGED_BYTES_PER_TOKEN = 24
"""For the inputs of a graph with pieces of prompts, and the adapter of each token."""


class StepBuffers:
    """One buffer set. The core writes it in ``schedule``, and the runner reads it until ``update_from_output``.

    With ``streams`` the set has a mirror on the device. Call ``begin``, ``stage`` for each additional array, ``send``,
    launch the work that reads it, and then ``release``. Without, the device is the CPU, which reads the set itself.

    Args:
        spec: The arrays.
        device: Where the mirror lies.
        streams: The device's streams.

    Attributes:
        tensors: The arrays on the host, as tensors.
        arrays: The same memory as numpy arrays.
    """

    def __init__(
        self, spec: BufferSpec, *, device: torch.device | None = None, streams: DeviceStreams | None = None
    ) -> None:
        self._streams = streams
        places: dict[str, int] = {}
        end = 0
        for name, dtype, shape in spec:
            if name in ON_DEVICE:
                places[name] = end
                end = _aligned(end + _num_bytes(dtype, shape))
        self._first_staged = end
        self._end_staged = end = end if streams is None else end + _staged_bytes(spec)
        for name, dtype, shape in spec:
            if name not in ON_DEVICE:
                places[name] = end
                end = _aligned(end + _num_bytes(dtype, shape))
        is_cuda = device is not None and device.type == "cuda"
        block = torch.zeros(end, dtype=torch.uint8, device="cpu", pin_memory=is_cuda)
        self.tensors: dict[str, Tensor] = {
            name: _view(block, places[name], dtype, shape) for name, dtype, shape in spec
        }
        self.arrays: dict[str, npt.NDArray[Any]] = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self._block = block
        self._block_array = block.numpy()
        self._next_staged = self._first_staged
        self._is_sent = False
        self._mirror: Tensor | None = None
        self._mirror_read: Event | None = None  # recorded after the last computation with it
        self._on_device = self.tensors
        if streams is not None:
            self._mirror = torch.zeros(self._end_staged, dtype=torch.uint8, device=device)
            self._on_device = {
                name: _view(self._mirror, places[name], dtype, shape)
                for name, dtype, shape in spec
                if name in ON_DEVICE
            }

    def int32(self, name: str, length: int) -> npt.NDArray[np.int32]:
        """The first entries of an int32 array, on the host."""
        return self.arrays[name][:length]

    def on_device(self, name: str, length: int) -> Tensor:
        """The first entries of one of the ``ON_DEVICE`` arrays, on the device; valid once the step has been sent."""
        return self._on_device[name][:length]

    def begin(self) -> None:
        """Forget the arrays staged before: the step that read them is over."""
        self._next_staged = self._first_staged
        self._is_sent = False

    def stage(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Put a host array on the device; valid after ``send``, and until the set is used again.

        Raises:
            RuntimeError: The step has already been sent.
        """
        array = np.ascontiguousarray(array)
        if self._mirror is None or self._streams is None:
            return torch.from_numpy(array)
        if self._is_sent:
            raise RuntimeError("the step's arrays were sent already: stage everything before")
        start = self._next_staged
        end = start + array.nbytes
        if end > self._end_staged:
            return send_array(array, self._mirror.device)  # more than expected: allocate and copy it separately
        self._block_array[start:end] = array.reshape(-1).view(np.uint8)
        self._next_staged = _aligned(end)
        return self._mirror[start:end].view(torch.from_numpy(array).dtype).view(array.shape)

    def send(self) -> None:
        """Copy the step to the device in one piece; computation launched later waits for it, the host does not."""
        if self._mirror is None or self._streams is None:
            return
        self._is_sent = True
        inputs = self._streams.inputs
        with self._streams.use(inputs):
            if self._mirror_read is not None:
                inputs.wait_event(self._mirror_read)
            end = self._next_staged
            self._mirror[:end].copy_(self._block[:end], non_blocking=True)
            arrived = inputs.record_event()
        self._streams.compute.wait_event(arrived)

    def release(self, computed: Event) -> None:
        """Set the event after which the mirror may be overwritten."""
        self._mirror_read = computed


def send_array(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to new memory on a device, in the order of the current stream; the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    # torch reuses pinned memory only after the copies launched from it are done.
    return tensor.pin_memory().to(device, non_blocking=True)


def _staged_bytes(spec: BufferSpec) -> int:
    """Room for a step's block-table entries, each with its index (8 bytes) and value (4), and for the rest."""
    sizes = {name: math.prod(shape) for name, _, shape in spec}
    entries, requests, tokens = (sizes.get(name, 0) for name in ("bt_block_ids", "idx_mapping", "input_ids"))
    per_token = _STAGED_BYTES_PER_TOKEN * tokens
    return _aligned(12 * entries + _STAGED_BYTES_PER_REQUEST * requests + per_token + 16 * _ALIGNMENT)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _DTYPES[dtype].itemsize


def _view(block: Tensor, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return block[start : start + _num_bytes(dtype, shape)].view(_DTYPES[dtype]).view(shape)
