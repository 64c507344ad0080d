"""The sampled tokens of a step on their way from the device; an event tells the host when they have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rustvllm.exceptions import DeviceFailedError, DeviceMemoryError
from rustvllm.worker.step_output import ModelRunnerOutput

if TYPE_CHECKING:
    from rustvllm.worker.streams import DeviceStreams, Event

_OUT_OF_MEMORY = 2
"""CUDA's number for the only error after which a device can continue."""


@dataclass(frozen=True, slots=True)
class DeviceStepOutput:
    """See ``AsyncModelRunnerOutput``.

    Attributes:
        token_ids: int32 ``[num_sampled, c]``, pinned; valid once ``arrived`` is done, and read before the step's buffer
            set is used again.
        on_device: The tensors that are copied to the host. They are referenced until then, because the allocator reuses
            unreferenced memory at once.
        arrived: Event recorded after the copies.
        rest: Makes the other results of the step, once the copies have arrived.
    """

    token_ids: Tensor
    on_device: Sequence[Tensor]
    arrived: Event
    rest: Callable[[], ModelRunnerOutput]

    def is_done(self) -> bool:
        """Whether ``get_output`` would return or raise at once."""
        try:
            return self.arrived.query()
        except RuntimeError:  # a failed device raises here, too; waiting for the step reports it
            return True

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copies. Errors of the device, from this step or an earlier one, are raised here.

        Raises:
            DeviceFailedError: The device failed, so nothing launched from now on would run.
            DeviceMemoryError: A library ran out of memory on the device.
        """
        try:
            self.arrived.synchronize()
        except torch.AcceleratorError as error:
            raise device_failed(error) from error
        return self.rest().with_tokens(self.token_ids.numpy())


def device_failed(error: torch.AcceleratorError) -> DeviceFailedError | DeviceMemoryError:
    """Turn a device's error, such as an illegal access or a failed assertion, into one that says what it means."""
    if getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return DeviceMemoryError(f"the GPU is out of memory ({str(error).splitlines()[0]}); lower max_num_seqs")
    return DeviceFailedError(
        f"the GPU failed ({str(error).splitlines()[0]}) and cannot be used by this process any more: restart the "
        "engine (--restart-engine does so); CUDA_LAUNCH_BLOCKING=1 shows the operation that failed"
    )


def bring_to_host(
    tensors: Sequence[Tensor], to: Sequence[Tensor], streams: DeviceStreams, rest: Callable[[], ModelRunnerOutput]
) -> tuple[DeviceStepOutput, Event]:
    """Launch the copies of a step's results; they overlap with the next computation.

    Args:
        tensors: On the device; the first are the int32 ``[num_sampled, c]`` token ids.
        to: Pinned memory of the same shapes.
        streams: The device's streams.
        rest: Makes the other results of the step, once the copies have arrived.

    Returns:
        The step's output, and an event recorded after everything that the step computed.
    """
    computed = streams.compute.record_event()
    with streams.use(streams.outputs):
        streams.outputs.wait_event(computed)
        for source, target in zip(tensors, to, strict=True):
            target.copy_(source, non_blocking=True)
        arrived = streams.outputs.record_event()
    return DeviceStepOutput(to[0], tuple(tensors), arrived, rest), computed
