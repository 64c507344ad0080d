"""What a step sampled, on its way from the device: known to the host when an event says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rustvllm.worker.step_output import LogprobsTuple, ModelRunnerOutput, make_output

if TYPE_CHECKING:
    from rustvllm.worker.streams import DeviceStreams, Event


@dataclass(frozen=True, slots=True)
class DeviceStepOutput:
    """See ``AsyncModelRunnerOutput``.

    Attributes:
        token_ids: int32 ``[num_sampled]``, pinned; filled when ``arrived`` is done, and read before its set of step
            buffers is used again.
        on_device: what is copied there. It is held until then: memory that nobody holds is another tensor's at once.
        arrived: behind the copy.
        logprobs: as the host knows them already; see ``ModelRunnerOutput``.
        row_errors: why rows have no token.
    """

    token_ids: Tensor
    on_device: Tensor
    arrived: Event
    logprobs: LogprobsTuple | None
    row_errors: tuple[str, ...]

    def is_done(self) -> bool:
        """Whether ``get_output`` would return at once."""
        return self.arrived.query()

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy; what the device failed at, in this step or one before, is raised here."""
        self.arrived.synchronize()
        return make_output(self.token_ids.numpy(), self.logprobs, self.row_errors)


def bring_to_host(
    token_ids: Tensor,
    to: Tensor,
    streams: DeviceStreams,
    logprobs: LogprobsTuple | None,
    row_errors: tuple[str, ...],
) -> tuple[DeviceStepOutput, Event]:
    """Launch the copy of what was sampled, beside whatever is computed next.

    Args:
        token_ids: int32 ``[num_sampled]`` on the device.
        to: int32 ``[num_sampled]``, pinned.
        streams: of the device.
        logprobs: of the step, in host memory.
        row_errors: why rows have no token.

    Returns:
        The step, and the event behind everything that it computed.
    """
    computed = streams.compute.record_event()
    with streams.use(streams.outputs):
        streams.outputs.wait_event(computed)
        to.copy_(token_ids, non_blocking=True)
        arrived = streams.outputs.record_event()
    return DeviceStepOutput(to, token_ids, arrived, logprobs, row_errors), computed
