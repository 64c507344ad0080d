"""What a step sampled, on its way from the device: known to the host when an event says so."""

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
"""CUDA's number for the one error after which a device goes on."""


@dataclass(frozen=True, slots=True)
class DeviceStepOutput:
    """See ``AsyncModelRunnerOutput``.

    Attributes:
        token_ids: int32 ``[num_sampled, c]``, pinned; filled when ``arrived`` is done, and read before its set of step
            buffers is used again.
        on_device: What is copied to the host. Held until then: the allocator reuses unreferenced memory at once.
        arrived: Recorded after the copies.
        rest: Says what else there is to say of the step, once they have arrived.
    """

    token_ids: Tensor
    on_device: Sequence[Tensor]
    arrived: Event
    rest: Callable[[], ModelRunnerOutput]

    def is_done(self) -> bool:
        """Whether ``get_output`` would return at once, or raise."""
        try:
            return self.arrived.query()
        except RuntimeError:  # a failed device raises here, too; waiting for the step reports it
            return True

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copies; what the device failed at, in this step or one before, is raised here.

        Raises:
            DeviceFailedError: Nothing that is launched on the device from now on would run.
            DeviceMemoryError: A library found no memory there.
        """
        try:
            self.arrived.synchronize()
        except torch.AcceleratorError as error:
            raise device_failed(error) from error
        return self.rest().with_tokens(self.token_ids.numpy())


def device_failed(error: torch.AcceleratorError) -> DeviceFailedError | DeviceMemoryError:
    """The error that says what an error of the device means, an illegal access or a failed assertion, say."""
    if getattr(error, "error_code", None) == _OUT_OF_MEMORY:
        return DeviceMemoryError(f"the GPU is out of memory ({str(error).splitlines()[0]}); lower max_num_seqs")
    return DeviceFailedError(
        f"the GPU failed ({str(error).splitlines()[0]}) and cannot be used by this process any more: restart the "
        "engine (--restart-engine does so); CUDA_LAUNCH_BLOCKING=1 shows the operation that failed"
    )


def bring_to_host(
    tensors: Sequence[Tensor], to: Sequence[Tensor], streams: DeviceStreams, rest: Callable[[], ModelRunnerOutput]
) -> tuple[DeviceStepOutput, Event]:
    """Launch the copies of what a step gives; they overlap with the next computation.

    Args:
        tensors: On the device, int32 ``[num_sampled, c]`` token ids first.
        to: Pinned memory shaped like them.
        streams: Of the device.
        rest: What else there is to say of the step, once they have arrived.

    Returns:
        The step, and an event recorded after everything that it computed.
    """
    computed = streams.compute.record_event()
    with streams.use(streams.outputs):
        streams.outputs.wait_event(computed)
        for source, target in zip(tensors, to, strict=True):
            target.copy_(source, non_blocking=True)
        arrived = streams.outputs.record_event()
    return DeviceStepOutput(to[0], tuple(tensors), arrived, rest), computed
