"""Token counts of an answer, as the ``usage`` object."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rustvllm.outputs import RequestOutput
from rustvllm.server.answers.nulls import USAGE


@dataclass
class UsageCounter:
    """Counts tokens of one HTTP request: each prompt once whatever ``n`` is, completion tokens summed.

    What ``best_of`` drew and did not return was generated all the same, and counts.

    Attributes:
        show_cached: Add ``prompt_tokens_details`` with the prompt tokens found in the prefix cache.
        count_reasoning: Tokens of thoughts so far, for ``completion_tokens_details``; None: they are not counted.
        show_predicted: Add to it the tokens of the request's prediction that were accepted and rejected.
    """

    show_cached: bool = False
    count_reasoning: Callable[[], int] | None = None
    show_predicted: bool = False
    completion_tokens: int = 0
    _prompt_tokens: dict[int, int] = field(default_factory=dict)
    _cached_tokens: dict[int, int] = field(default_factory=dict)
    _accepted_tokens: int = 0
    _rejected_tokens: int = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count an output (a delta, or the only one)."""
        self._prompt_tokens[prompt_index] = len(output.prompt_ids)
        self._cached_tokens[prompt_index] = output.num_cached_tokens
        if self.show_predicted:  # a chat request has one prompt
            self._accepted_tokens = output.num_accepted_prediction_tokens
            self._rejected_tokens = output.num_rejected_prediction_tokens
        self.completion_tokens += output.num_unreturned_tokens
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    def as_dict(self) -> dict[str, Any]:
        """The ``usage`` object of an event."""
        prompt_tokens = sum(self._prompt_tokens.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
        }
        if self.show_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached_tokens.values())}
        details: dict[str, int] = {}
        if self.count_reasoning is not None:
            details["reasoning_tokens"] = self.count_reasoning()
        if self.show_predicted:
            details["accepted_prediction_tokens"] = self._accepted_tokens
            details["rejected_prediction_tokens"] = self._rejected_tokens
        if details:
            usage["completion_tokens_details"] = details
        return usage

    def of_whole_answer(self) -> dict[str, Any]:
        """The ``usage`` object of an answer in one piece."""
        return {**USAGE, **self.as_dict()}
