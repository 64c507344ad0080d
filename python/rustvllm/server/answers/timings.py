"""Times of an answer on request: ``timings`` and ``prompt_progress``, in the shapes of llama.cpp's server."""

from dataclasses import dataclass, field
from typing import Any

from rustvllm.outputs import RequestMetrics, RequestOutput


@dataclass
class Timings:
    """The ``timings`` object of one HTTP request: over all its prompts and samples, first to last.

    Counts are exact. Times are those of the engine's steps, so what the network and the client take is not in them. The
    first token of a sample comes with the prompt, so ``predicted_ms`` and its rates are of those behind it.

    Attributes:
        num_samples: Samples per prompt.
    """

    num_samples: int
    _prompts: dict[int, tuple[int, int, RequestMetrics]] = field(default_factory=dict)
    _num_generated: int = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Look at an output (a delta, or the only one)."""
        if output.metrics is not None:
            self._prompts[prompt_index] = (len(output.prompt_ids), output.num_cached_tokens, output.metrics)
        self._num_generated += output.num_unreturned_tokens
        self._num_generated += sum(len(completion.token_ids) for completion in output.outputs)

    def as_dict(self) -> dict[str, Any]:
        """The object, in milliseconds and tokens per second; a rate over no time at all is null."""
        all_metrics = [metrics for _, _, metrics in self._prompts.values()]
        arrived = min((metrics.arrival_time for metrics in all_metrics), default=0.0)
        begun = min(_known(metrics.first_scheduled_time for metrics in all_metrics), default=arrived)
        first_tokens = _known(metrics.first_token_time for metrics in all_metrics)
        first, computed = min(first_tokens, default=begun), max(first_tokens, default=begun)
        last = max(_known(metrics.last_token_time for metrics in all_metrics), default=first)
        cached = sum(num_cached for _, num_cached, _ in self._prompts.values())
        prompt = sum(num_tokens for num_tokens, _, _ in self._prompts.values()) - cached
        behind_first = max(self._num_generated - self.num_samples * len(self._prompts), 0)
        prompt_ms, predicted_ms = _ms(computed - begun), _ms(last - first)
        return {
            "cache_n": cached,
            "prompt_n": prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": _per(prompt_ms, prompt),
            "prompt_per_second": _per(1000.0 * prompt, prompt_ms),
            "predicted_n": self._num_generated,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": _per(predicted_ms, behind_first),
            "predicted_per_second": _per(1000.0 * behind_first, predicted_ms),
            "queue_ms": _ms(begun - arrived),
        }


def prompt_progress(output: RequestOutput) -> dict[str, Any] | None:
    """The ``prompt_progress`` object of an output; None when it says nothing new of its prompt."""
    if output.num_computed_prompt_tokens is None:
        return None
    metrics, time = output.metrics, output.prompt_progress_time
    begun = None if metrics is None else metrics.first_scheduled_time
    return {
        "total": len(output.prompt_ids),
        "cache": output.num_cached_tokens,
        "processed": output.num_computed_prompt_tokens,
        "time_ms": 0.0 if begun is None or time is None else _ms(time - begun),
    }


def _known(times: Any) -> list[float]:
    return [time for time in times if time is not None]


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000.0, 3)


def _per(amount: float, of: float) -> float | None:
    return round(amount / of, 3) if of else None
