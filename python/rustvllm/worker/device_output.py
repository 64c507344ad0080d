"""What a step sampled, on its way from the device: known to the host when an event says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rustvllm.worker.step_output import ModelRunnerOutput

if TYPE_CHECKING:
    from rustvllm.worker.streams import DeviceStreams, Event


@dataclass(frozen=True, slots=True)
class DeviceStepOutput:
    """See ``AsyncModelRunnerOutput``.

    Attributes:
        token_ids: int32 ``[num_sampled, c]``, pinned; filled when ``arrived`` is done, and read before its set of step
            buffers is used again.
        on_device: What is copied there. Held until then: the allocator reuses unreferenced memory at once.
        arrived: Recorded after the copy.
        rest: What the host knows of the step already, without its token ids.
    """

    token_ids: Tensor
    on_device: Tensor
    arrived: Event
    rest: ModelRunnerOutput

    def is_done(self) -> bool:
        """Whether ``get_output`` would return at once, or raise."""
        try:
            return self.arrived.query()
        except RuntimeError:  # a failed device raises here, too; waiting for the step reports it
            return True

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy; what the device failed at, in this step or one before, is raised here."""
        self.arrived.synchronize()
        return self.rest.with_tokens(self.token_ids.numpy())


def bring_to_host(
    token_ids: Tensor, to: Tensor, streams: DeviceStreams, rest: ModelRunnerOutput
) -> tuple[DeviceStepOutput, Event]:
    """Launch the copy of what was sampled; it overlaps with the next computation.

    Args:
        token_ids: int32 ``[num_sampled, c]`` on the device.
        to: int32 ``[num_sampled, c]``, pinned.
        streams: Of the device.
        rest: What else there is to say of the step.

    Returns:
        The step, and an event recorded after everything that it computed.
    """
    computed = streams.compute.record_event()
    with streams.use(streams.outputs):
        streams.outputs.wait_event(computed)
        to.copy_(token_ids, non_blocking=True)
        arrived = streams.outputs.record_event()
    return DeviceStepOutput(to, token_ids, arrived, rest), computed
