"""What a step gave, in host memory: the one thing that every executor hands back to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step sampled.

    Attributes:
        sampled_token_ids: int32 ``[num_sampled, 1]``, C-contiguous, in the order of ``sampled_rows``.
        logprobs: Of the tokens whose requests asked for them: places among the sampled ids (int32 ``[m]``), token ids
            (int32 ``[m, 1 + k]``, the sampled one first), log-probabilities (float32, as many) and ranks (int32
            ``[m]``). None when nobody asked.
    """

    sampled_token_ids: npt.NDArray[np.int32]
    logprobs: (
        tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]] | None
    ) = None
