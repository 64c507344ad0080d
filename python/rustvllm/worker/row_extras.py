"""Sampling parameters that few requests have: lists, and custom logits processors.

They are fetched from the core once, when a request gets a row, and split into token rules (:class:`RowRules`), tokens
whose log-probabilities are asked for (:class:`RowTokens`, :class:`RowPromptTokens`), and requests that processors
follow (:class:`ProcessorBatch`). If no row has any, a step only checks empty dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.sample.listed_tokens import RowTokens
from rustvllm.sample.logits_processors import LogitsProcessor
from rustvllm.sample.processor_batch import Failure, FollowedRequest, ProcessorBatch
from rustvllm.sample.prompt_tokens import RowPromptTokens
from rustvllm.sampling_params import SamplingParams
from rustvllm.sampling_params.table import SAMPLING_LISTS
from rustvllm.worker.row_rules import RowRules
from rustvllm.worker.token_counts import TokenIds

if TYPE_CHECKING:
    from rustvllm._core import SamplingExtras

ExtrasOfRow = Callable[[int], "SamplingExtras | None"]
"""Returns the list parameters of the request in a persistent row (``_core.Scheduler.sampling_extras``)."""


class RowExtras:
    """Extras by persistent row.

    Attributes:
        of_row: Returns the extras of a row; None until it is set.
        rules: The token rules among them.
        listed: The tokens among them whose log-probabilities are asked for.
        prompt_tokens: The same for the places of prompts.
        processors: Which logits processors follow which request.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.of_row: ExtrasOfRow | None = None
        self.rules = RowRules(num_rows, device)
        self.listed = RowTokens()
        self.prompt_tokens = RowPromptTokens()
        self.processors = ProcessorBatch()
        self._vocab_size = vocab_size

    def load(self, processors: Sequence[LogitsProcessor]) -> None:
        """Make batch-level processors see every request from now on."""
        self.processors = ProcessorBatch(processors)

    def admit(
        self,
        rows: npt.NDArray[np.int32],
        floats: Sequence[dict[str, float]],
        ints: Sequence[dict[str, int]],
        token_ids: TokenIds | None,
    ) -> None:
        """Add the extras of new or resumed requests.

        Args:
            rows: The persistent rows of the requests.
            floats: Their parameters by the column names of ``sampling_float``.
            ints: Their parameters by the column names of ``sampling_int``.
            token_ids: Returns the ids of a row.
        """
        if self.of_row is None or token_ids is None:
            raise RuntimeError("extras of a request need its lists and token ids: call bind_token_ids first")
        for row, own_floats, own_ints in zip(rows.tolist(), floats, ints, strict=True):
            extras = self.of_row(row) if own_ints["has_extras"] else None
            ids = token_ids(row)
            num_prompt_tokens = own_ints["num_prompt_tokens"]
            prompt, output = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
            failure = None if extras is None else self._what_is_wrong(extras)
            if extras is not None and failure is None:
                self.rules.admit(row, extras, output)
                self.listed.admit(row, extras["logprob_token_ids"])
                self.prompt_tokens.admit(row, extras.prompt_tokens)
            request = FollowedRequest(
                SamplingParams() if failure is not None else _params(own_floats, own_ints, extras),
                prompt,
                output,
                () if extras is None else extras.attachment or (),
                failure,
            )
            self.processors.admit(row, request)

    def drop(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget the requests that were in some rows."""
        self.rules.drop(rows)
        self.listed.drop(rows)
        self.prompt_tokens.drop(rows)
        self.processors.drop(rows)

    def append(self, rows: npt.NDArray[np.int32], token_ids: Tensor) -> None:
        """Remember sampled tokens: ``[n]`` rows, int64 ``[n]`` ids on the device."""
        self.rules.append(rows, token_ids)
        self.processors.append(rows, token_ids)

    def append_accepted(self, rows: npt.NDArray[np.int32], ids: Tensor) -> None:
        """Remember the tokens of a step with drafts: ``[r]`` rows, each once, int32 ``[r, c]`` ids on the device."""
        self.rules.append_accepted(rows, ids)
        # A request that a processor follows has no drafts, so it was given one token.
        self.processors.append(rows, ids[:, 0].clamp(min=0))

    def _what_is_wrong(self, extras: SamplingExtras) -> Failure | None:
        """Check ids against the vocabulary: the front end does so, but one of another release may not have."""
        if (outside := extras.outside_vocabulary(self._vocab_size)) is not None:
            name, token_id = outside
            message = f"{name} holds the token id {token_id}, the vocabulary is 0 to {self._vocab_size - 1}"
            return Failure(message, is_refusal=True)
        return None


def _params(floats: dict[str, float], ints: dict[str, int], extras: SamplingExtras | None) -> SamplingParams:
    """A request's parameters as far as the worker has them, for processors."""
    known: dict[str, Any] = {
        name: value for name, value in floats.items() if name in SamplingParams.__dataclass_fields__
    }
    more: dict[str, Any] = {}
    if extras is not None:
        for name, row in SAMPLING_LISTS.items():
            if row.kind != "words":  # the worker has their token ids, but not their texts
                more[name] = (dict(extras[name]) if row.kind == "biases" else extras[name]) or None
        more |= {
            "extra_args": None if extras.arguments is None else json.loads(extras.arguments),
            "logits_processors": extras.attachment,
        }
    return SamplingParams(
        **known,
        top_k=ints["top_k"],
        seed=ints["seed"],
        min_tokens=ints["min_tokens"],
        max_tokens=None,
        **more,
    )
