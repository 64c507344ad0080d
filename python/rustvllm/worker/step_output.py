"""The results of a step in host memory, which every executor returns to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

POOLED: Final = -9
"""Stands for the token of a request that ends with its vector."""


class AsyncModelRunnerOutput(Protocol):
    """A launched step."""

    def is_done(self) -> bool:
        """Whether ``get_output`` would return at once."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the end of the step without holding the GIL; an error of the step is raised here."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The results of a step. It is its own ``AsyncModelRunnerOutput``, for steps that are over once launched.

    Attributes:
        sampled_token_ids: int32 ``[num_sampled, 1]``, or ``[num_sampled, 1 + d]`` in a step with at most ``d`` drafts
            for a request; C-contiguous, in the order of ``sampled_rows``. Negative where a row has no token, or no
            more.
        logprobs: Of the tokens whose requests asked for them: flat indices into the sampled ids (int32 ``[m]``), token
            ids (int32 ``[m, 1 + k]``, the sampled one first), log-probabilities (float32, same shape) and ranks (int32
            ``[m]``). None if no request asked.
        prompt_logprobs: Of the step's prompt tokens whose requests asked for them: candidates per token (int32, one
            per request that asks), token ids and log-probabilities (int32 and float32, row after row without gaps, the
            prompt's own token first in each) and ranks (int32, one per token). None if no request asked.
        pooled: float32 ``[num_sampled, width]``, the vectors of pooled requests; None if the model generates.
        row_error: Why rows have no token, in addition to their codes; None if the codes are enough.
    """

    sampled_token_ids: npt.NDArray[np.int32]
    logprobs: LogprobsTuple | None = None
    prompt_logprobs: LogprobsTuple | None = None
    row_error: str | None = None
    pooled: npt.NDArray[np.float32] | None = None

    def with_tokens(self, token_ids: npt.NDArray[np.int32]) -> ModelRunnerOutput:
        """The same with the step's token ids, int32 ``[num_sampled, c]``; negative ids lose their log-probabilities."""
        logprobs = self.logprobs
        if logprobs is not None and (token_ids < 0).any():
            places, ids, values, ranks = logprobs
            kept = token_ids.reshape(-1)[places] >= 0
            logprobs = (places[kept], ids[kept], values[kept], ranks[kept]) if kept.any() else None
        return replace(self, sampled_token_ids=token_ids, logprobs=logprobs)

    def is_done(self) -> bool:
        """See ``AsyncModelRunnerOutput``."""
        return True

    def get_output(self) -> ModelRunnerOutput:
        """See ``AsyncModelRunnerOutput``."""
        return self


LogprobsTuple = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]


def make_output(
    logprobs: LogprobsTuple | None,
    row_errors: Iterable[str],
    prompt_logprobs: LogprobsTuple | None = None,
    pooled: npt.NDArray[np.float32] | None = None,
) -> ModelRunnerOutput:
    """The results of a step other than its tokens.

    Args:
        logprobs: See the attribute; rows may turn out to have no token.
        row_errors: Why rows have no token.
        prompt_logprobs: See the attribute.
        pooled: See the attribute.
    """
    row_error = "; ".join(dict.fromkeys(row_errors)) or None
    return ModelRunnerOutput(np.empty((0, 1), np.int32), logprobs, prompt_logprobs, row_error, pooled)
