"""Types of a front end's outputs in ``rustvllm._core``, where they are found; there is no module of this name."""

from collections.abc import Sequence
from typing import Literal, Self, final

from rustvllm._core import EngineClient, EngineHandle
from rustvllm._core._tokenizer import TokenIds, Tokenizer
from rustvllm._core._turn import ResponseEvents, TurnReading

@final
class RequestDelta:
    """What is new for one request since the last poll."""

    key: int
    new_text: str
    new_token_ids: list[int]
    new_logprobs: list[tuple[int, list[tuple[int, float, int, bytes | None]]]]
    """For each token the characters before it and its candidates, the sampled one first: id, log-probability, rank and
    bytes (None without text). Empty unless asked for."""
    new_prompt_logprobs: list[tuple[int, int, bytes, bytes, bytes]]
    """Places of the prompt: the first, candidates each, ids (int32), values (float32), ranks (uint32); or empty."""
    pooled: bytes | None
    """The vector of a request that ends with one (float32)."""
    num_calls: int
    """Calls of tools in an answer whose events were rendered by a ``turn_reading``, with its end; else 0."""
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"] | None
    stop_reason: int | str | None
    """The stop token, the stop string, or ``repetition_detected``."""
    error: str | None
    error_kind: (
        Literal["invalid", "refused", "queue_full", "queue_timeout", "grammars_full", "engine_dead", "failed"] | None
    )
    """``invalid``, ``queue_full``: another process's engine refused it; ``queue_timeout``: it waited too long."""
    is_step_error: bool
    """Whether what a step raised last says why: the step failed, or a logits processor of this request."""
    error_param: str | None
    """The parameter to blame for an ``invalid`` error."""
    num_computed_prompt_tokens: int
    """Prompt tokens that are computed, where that is news and was asked for (``reports_prompt_progress``); else 0."""
    num_cached_tokens: int
    num_accepted_prediction_tokens: int
    """Drafts out of the request's own prediction that were kept, so far."""
    num_rejected_prediction_tokens: int
    """Those that were run in vain, so far."""
    first_scheduled_ts: float
    """Monotonic seconds (``time.monotonic``); 0.0 while unknown."""
    first_token_ts: float
    last_token_ts: float

@final
class StopStrings:
    """The stop strings of a request, ready to be looked for; its samples share them."""

    def __new__(cls, texts: Sequence[str]) -> StopStrings: ...

@final
class OutputProcessor:
    """Tokens to text: detokenises incrementally and finds stop strings; one per engine front end."""

    def __new__(cls, tokenizer: Tokenizer | None = None) -> Self: ...
    def add_request(
        self,
        key: int,
        prompt_token_ids: Sequence[int] | TokenIds,
        *,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] | StopStrings | None = None,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        at_the_end: bool = False,
        event_template: tuple[bytes, bytes] | None = None,
        turn_reading: TurnReading | None = None,
        response_events: ResponseEvents | None = None,
        ends_after_call: TurnReading | None = None,
        stream_interval: int = 1,
        logprobs: bool = False,
        prompt_logprobs: bool = False,
    ) -> None:
        """Expect outputs for ``key``; call it before ``EngineHandle.add_request``.

        Its news are deltas. With ``at_the_end`` there is one, when it has ended; with ``event_template`` new text comes
        as events, the template's bytes around the text as a JSON string, and everything else with the end. With
        ``turn_reading`` as well the text is read, to its end, and the template's bytes stand around ``,"delta":{…}``
        of what it says, thinks and calls; the first event of a request may be empty. ``response_events``, in place of
        a template, read the text to its end, too; the end of the response is the caller's. With ``ends_after_call`` the
        request ends behind the first call in its text, which is read like this. Tokens go out ``stream_interval`` at a
        time; the first goes out alone, and the last with the end. ``logprobs`` says that its tokens come with
        log-probabilities, ``prompt_logprobs`` that its prompt has (not with events).
        """
    def discard(self, key: int) -> None:
        """Forget a request whose reader has gone; its later outputs are dropped."""
    def hold(self, keys: Sequence[int]) -> None:
        """Keep the news of requests, merged, until :meth:`release`: their reader is busy."""
    def release(self, keys: Sequence[int]) -> bool:
        """End :meth:`hold`; whether there is news, which the next :meth:`poll` gives."""
    def flush(self) -> None:
        """Let tokens go out with the next :meth:`poll` that wait for others of their interval: none may follow."""
    def poll(self, engine: EngineHandle | EngineClient) -> tuple[list[tuple[int, bytes]], list[RequestDelta]]:
        """Drain what the engine emitted: rendered events with their keys, and one delta per other request that changed.

        A stop string that is found sends its abort from here.
        """
    def __len__(self) -> int: ...
