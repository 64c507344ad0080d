"""The streams of a device: which work overlaps, and the events that order it.

``compute`` runs the model and the sampler, in the order of the steps. Work that must not delay it has its own stream:
``inputs`` brings a step's arrays to the device while the previous step still computes, ``outputs`` brings sampled
tokens back while the next step begins, and ``swaps`` moves KV blocks. Streams are independent: work that reads what
another stream wrote, or overwrites what another stream read, first waits for that stream's event.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""
        ...

    def synchronize(self) -> None:
        """Make the host wait, without holding the GIL, until everything before it is done."""
        ...


class Stream(Protocol):
    """A queue of work that runs in order."""

    def record_event(self) -> Event:
        """An event after everything launched so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Make work launched from now on wait for an event; the host does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """See the module.

    Attributes:
        compute: For the model and the sampler; the runner makes it the current stream, whatever the caller's is.
        inputs: Host to device, for the arrays of a step.
        outputs: Device to host, for sampled tokens.
        swaps: For KV blocks between the device and CPU memory.
        use: Makes a stream the current one within a ``with`` block.
        synchronize: Makes the host wait until every stream is idle.
    """

    compute: Stream
    inputs: Stream
    outputs: Stream
    swaps: Stream
    use: Callable[[Any], AbstractContextManager[Any]]
    synchronize: Callable[[], None]


def make_streams(device: torch.device) -> DeviceStreams | None:
    """The streams of a CUDA device; None for other devices, which do everything in order."""
    if device.type != "cuda":
        return None
    inputs, outputs, swaps = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
    return DeviceStreams(
        compute=torch.cuda.default_stream(device),
        inputs=inputs,
        outputs=outputs,
        swaps=swaps,
        use=torch.cuda.stream,
        synchronize=lambda: torch.cuda.synchronize(device),
    )
