"""What a step gave, in host memory: the one thing that every executor hands back to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt


class AsyncModelRunnerOutput(Protocol):
    """A step that was launched."""

    def is_done(self) -> bool:
        """Whether ``get_output`` would return at once."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the end of the step, without holding the interpreter; whatever the step raised is raised here."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step sampled. It is its own ``AsyncModelRunnerOutput``, of a step that was over when it was launched.

    Attributes:
        sampled_token_ids: int32 ``[num_sampled, 1]``, or ``[num_sampled, 1 + d]`` in a step with at most ``d`` drafts
            for a request; C-contiguous, in the order of ``sampled_rows``. A negative number where a row has no token,
            or no more.
        logprobs: Of the tokens whose requests asked for them: places among the sampled ids (int32 ``[m]``), token ids
            (int32 ``[m, 1 + k]``, the sampled one first), log-probabilities (float32, same shape) and ranks (int32
            ``[m]``). None if no request asked.
        prompt_logprobs: Of the places of prompts that the step was asked for: candidates per place (int32, one per
            request that asks), token ids and log-probabilities (int32 and float32, row after row without gaps, each
            place's own token first) and ranks (int32, one per place). None if no request asked.
        row_error: Why rows have no token, in addition to their codes; None if the codes say all.
    """

    sampled_token_ids: npt.NDArray[np.int32]
    logprobs: LogprobsTuple | None = None
    prompt_logprobs: LogprobsTuple | None = None
    row_error: str | None = None

    def with_tokens(self, token_ids: npt.NDArray[np.int32]) -> ModelRunnerOutput:
        """The same with the step's tokens, int32 ``[num_sampled, c]``; negative ones have no log-probabilities."""
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
    logprobs: LogprobsTuple | None, row_errors: Iterable[str], prompt_logprobs: LogprobsTuple | None = None
) -> ModelRunnerOutput:
    """The results of a step in addition to its tokens.

    Args:
        logprobs: As the attribute, of any of the rows.
        row_errors: Why rows have no token.
        prompt_logprobs: As the attribute.
    """
    row_error = "; ".join(dict.fromkeys(row_errors)) or None
    return ModelRunnerOutput(np.empty((0, 1), np.int32), logprobs, prompt_logprobs, row_error)
