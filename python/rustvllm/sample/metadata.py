"""Describes how each sampled row of a step is to be sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rustvllm.sample.logprobs import LogprobsMetadata, ProcessedLogits
from rustvllm.sample.processor_batch import ProcessedRows
from rustvllm.sample.token_rules import TokenRules

GREEDY_TEMPERATURE = 1e-5
"""Lower temperatures mean greedy."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with penalties, and counts of their requests' tokens.

    Attributes:
        rows: int64 ``[p]``, indices into the sampled rows.
        slots: int64 ``[p]``, indices of their counts.
        presence: float32 ``[p]``.
        frequency: float32 ``[p]``.
        repetition: float32 ``[p]``.
        output_counts: int32 ``[capacity, vocab_size]``, how often each id was generated.
        prompt_mask: bool ``[capacity, vocab_size]``, which ids the prompt has.
    """

    rows: Tensor
    slots: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    output_counts: Tensor
    prompt_mask: Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Parameters of the ``n`` sampled rows, on the device; None for what a step does not need.

    Attributes:
        random_rows: int64 ``[m]``, the rows that are not greedy; None if all are greedy.
        temperature: float32 ``[m]``, of the random rows.
        seeds: int64 ``[m]``.
        positions: int64 ``[m]``, of the token to be sampled in its own sequence.
        filters: The values of each filter that some rows use, by its name: float32 or int64 ``[m]``.
        masked_rows: int64 ``[k]``; with ``masked_ids``, pairs that must not be sampled (min_tokens); None if none.
        masked_ids: int64 ``[k]``.
        penalties: None if no row has any.
        rules: Allowed ids, bad words and biases; None if no row has any.
        processors: Custom logits processors; None if none follows these rows.
        logprobs: None if no row asks for log-probabilities.
        processed: Where the sampler stores the logits that it draws from; None if no row needs them.
    """

    random_rows: Tensor | None = None
    temperature: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None
    filters: Mapping[str, Tensor] = field(default_factory=dict)
    masked_rows: Tensor | None = None
    masked_ids: Tensor | None = None
    penalties: Penalties | None = None
    rules: TokenRules | None = None
    processors: ProcessedRows | None = None
    logprobs: LogprobsMetadata | None = None
    processed: ProcessedLogits | None = None

    @property
    def is_plain(self) -> bool:
        """Whether each row only needs its largest logit, or a draw with a temperature."""
        more = (self.masked_rows, self.penalties, self.rules, self.processors, self.logprobs, self.processed)
        return not self.filters and all(each is None for each in more)

    @property
    def changes_logits(self) -> bool:
        """Whether the sampler has anything to do that changes logits before it chooses."""
        return any(each is not None for each in (self.masked_rows, self.penalties, self.rules, self.processors))

    @property
    def all_greedy(self) -> bool:
        """Whether an argmax is enough for every row."""
        return self.random_rows is None
