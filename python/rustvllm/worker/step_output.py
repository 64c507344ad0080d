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
    """

    sampled_token_ids: npt.NDArray[np.int32]
