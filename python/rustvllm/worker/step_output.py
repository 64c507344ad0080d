"""What a step gave, in host memory: the one thing that every executor hands back to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class AsyncModelRunnerOutput(Protocol):
    """A step that was launched."""

    def is_done(self) -> bool:
        """Whether ``get_output`` would return at once."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the end of the step, without holding the interpreter; whatever the step raised is raised here."""


LogprobArrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step sampled. It is its own ``AsyncModelRunnerOutput``, of a step that was over when it was launched.

    Attributes:
        sampled_token_ids: int32 ``[num_sampled, 1]``, C-contiguous, in the order of ``sampled_rows``.
        logprobs: Of the tokens whose requests asked for them: places among the sampled ids (int32 ``[m]``), token ids
            (int32 ``[m, 1 + k]``, the sampled one first), log-probabilities (float32, as many) and ranks (int32
            ``[m]``). None when nobody asked.
        prompt_logprobs: Of the places of prompts that the step was asked for: candidates per place (int32, one per request
            that asks), token ids and log-probabilities (int32 and float32, row after row without gaps, each place's own
            token first) and ranks (int32, one per place). None when nobody asked.
    """

    sampled_token_ids: npt.NDArray[np.int32]
    logprobs: LogprobArrays | None = None
    prompt_logprobs: LogprobArrays | None = None

    def is_done(self) -> bool:
        """See ``AsyncModelRunnerOutput``."""
        return True

    def get_output(self) -> ModelRunnerOutput:
        """See ``AsyncModelRunnerOutput``."""
        return self
