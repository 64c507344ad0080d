"""The streams of a device: which work overlaps, and the events that put it in order.

``compute`` runs the model and the sampler, in the order of the steps. What must not hold it up has a stream of its own:
``inputs`` brings a step's arrays to the device while the step before still computes, ``outputs`` brings back what was
sampled while the next step begins, ``swaps`` moves KV blocks. Streams are independent: work that reads what another
stream wrote, or writes what another one read, waits for that one's event first.
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
        """Hold the host, but not the interpreter, until everything before it is done."""
        ...


class Stream(Protocol):
    """Work in order."""

    def record_event(self) -> Event:
        """An event after everything that was launched so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Run what is launched from now on after an event; the host does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """See the module.

    Attributes:
        compute: The model's and the sampler's; the runner makes it the current one, whatever its caller's is.
        inputs: Host to device, arrays of a step.
        outputs: Device to host, what was sampled.
        swaps: KV blocks between the device and CPU memory.
        use: Makes a stream the current one within a ``with``.
        synchronize: Holds the host until every stream is idle.
    """

    compute: Stream
    inputs: Stream
    outputs: Stream
    swaps: Stream
    use: Callable[[Any], AbstractContextManager[Any]]
    synchronize: Callable[[], None]


def make_streams(device: torch.device) -> DeviceStreams | None:
    """The streams of a CUDA device; None for the CPU, which does everything in order."""
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
