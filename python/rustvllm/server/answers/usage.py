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
    """

    show_cached: bool = False
    count_reasoning: Callable[[], int] | None = None
    completion_tokens: int = 0
    _prompt_tokens: dict[int, int] = field(default_factory=dict)
    _cached_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count an output (a delta, or the only one)."""
        self._prompt_tokens[prompt_index] = len(output.prompt_ids)
        self._cached_tokens[prompt_index] = output.num_cached_tokens
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
        if self.count_reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.count_reasoning()}
        return usage

    def of_whole_answer(self) -> dict[str, Any]:
        """The ``usage`` object of an answer in one piece."""
        return {**USAGE, **self.as_dict()}
