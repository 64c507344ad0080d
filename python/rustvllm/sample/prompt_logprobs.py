"""Log-probabilities of prompts: of the raw logits, computed for some rows at a time, so that the logits of a whole
prompt never exist at once.

Cost: the head over every token of the prompt, which a step otherwise does not compute. Only steps whose requests ask
have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_ROWS = 256
MAX_ELEMENTS = 1 << 24
"""At most so many rows of logits, and so many logits (64 MiB in float32), exist at a time; a single row always may."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsArrays:
    """What is said of the places that a step was asked for, in host memory, for ``Scheduler.update_from_output``.

    Attributes:
        num_columns: int32 ``[s]``, candidates per place, of each request that asks.
        token_ids: int32, of each place its token, then the likeliest ones; row after row without gaps.
        logprobs: float32, natural logarithms, as many.
        ranks: int32 ``[n]``, rank of each place's token, from 1.
    """

    num_columns: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    def as_tuple(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """In the order of the boundary."""
        return self.num_columns, self.token_ids, self.logprobs, self.ranks


def prompt_logprobs(
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    targets: Tensor,
    num_rows: npt.NDArray[np.int32],
    num_logprobs: npt.NDArray[np.int64],
) -> PromptLogprobsArrays:
    """What is to be said of the tokens that follow some others.

    Args:
        hidden: ``[n, hidden_size]``, of the tokens before those that are scored, request after request.
        compute_logits: The model's head, ``[m, hidden_size]`` → ``[m, vocab_size]``.
        vocab_size: Width of the logits.
        targets: int ``[n]``, the token that follows each of them, on the device.
        num_rows: int32 ``[s]``, how many of them each request has.
        num_logprobs: int64 ``[s]``, how many of the likeliest tokens each gets in addition to the token itself.
    """
    wanted = 1 + np.minimum(num_logprobs, vocab_size).astype(np.int32)  # [s]
    width_of_row = np.repeat(wanted, num_rows)  # [n]
    rows_at_a_time = max(1, min(MAX_ROWS, MAX_ELEMENTS // vocab_size))
    ids, values, ranks = [], [], []
    for start in range(0, len(hidden), rows_at_a_time):
        end = min(start + rows_at_a_time, len(hidden))
        widths = width_of_row[start:end]
        logprobs = compute_logits(hidden[start:end]).log_softmax(dim=-1, dtype=torch.float32)
        own_ids = targets[start:end, None].to(torch.int64)  # [m, 1]
        own = logprobs.gather(1, own_ids)
        ranks.append(((logprobs > own).sum(dim=-1) + 1).to(device="cpu", dtype=torch.int32).numpy())
        top, top_ids = logprobs.topk(int(widths.max()) - 1, dim=-1)
        is_wanted = np.arange(top.shape[1] + 1) < widths[:, None]
        ids.append(torch.cat((own_ids, top_ids), dim=1).to(device="cpu", dtype=torch.int32).numpy()[is_wanted])
        values.append(torch.cat((own, top), dim=1).to(device="cpu").numpy()[is_wanted])
    return PromptLogprobsArrays(wanted, np.concatenate(ids), np.concatenate(values), np.concatenate(ranks))
