"""A request as its front end sees it: n samples whose deltas are gathered into one :class:`RequestOutput`."""

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from rustvllm import _core
from rustvllm.engine.request.pooling import FilledPooling, finished_vector
from rustvllm.exceptions import (
    EngineDeadError,
    GrammarsFullError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    RequestFailedError,
    RustVLLMError,
)
from rustvllm.logprobs import FlatLogprobs, Logprob, PromptLogprobs, PromptTokenLogprobs
from rustvllm.lora.request import LoRARequest
from rustvllm.outputs import CompletionOutput, PromptIds, RequestMetrics, RequestOutput
from rustvllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class EventSink(Protocol):
    """Takes the new text of a streaming request as events that the core has rendered, on the reader's own thread."""

    @property
    def templates(self) -> Sequence[tuple[bytes, bytes]]:
        """Of each sample, what stands before and after the text (a JSON string) in its events."""

    @property
    def turn_reading(self) -> _core.TurnReading | None:
        """How the text is read for thoughts and calls, if it is: then what the templates stand around is a delta."""

    @property
    def response_events(self) -> _core.ResponseEvents | None:
        """What makes the events of its one sample in place of templates; the reader makes those at the end."""

    def write(self, event: bytes) -> bool:
        """Take an event. False: the reader is busy; what follows is held back, merged, until its stream resumes."""

    def note_calls(self, sample: int, num_calls: int) -> None:
        """A sample that was read has ended, with so many calls of tools; not where it has none."""


FEW_PARTS = 128
"""Samples, or places with log-probabilities, of which :meth:`RequestState.take` makes objects in well under 5 ms."""


@dataclass(slots=True)
class SampleState:
    """One sample: everything so far, and how much of it was handed out already."""

    key: int
    request_id: str
    text_parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    lists_tokens: bool = False
    text_offsets: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    unread: deque[_core.RequestDelta] = field(default_factory=deque)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    parts_taken: int = 0
    tokens_taken: int = 0

    def read_logprobs(self, most: int | None = None) -> int:
        """Make objects of what came with the tokens of the ``unread`` deltas, in their order.

        Args:
            most: Stop after so many tokens; None: after all.

        Returns:
            How many more might have been read.
        """
        left = sys.maxsize if most is None else most
        while self.unread and left > 0:
            delta = self.unread.popleft()
            self._add_logprobs(delta)
            left -= len(delta.new_token_ids)
        return left

    def _add_logprobs(self, delta: _core.RequestDelta) -> None:
        """Add the log-probabilities that came with the tokens of a delta."""
        assert self.logprobs is not None
        for text_offset, candidates in delta.new_logprobs:
            position: dict[int, Logprob] = {}
            for token_id, logprob, rank, raw in candidates:
                text = None if raw is None else raw.decode(errors="replace")
                known_rank = None if self.lists_tokens and position else rank  # the others are in the caller's order
                position.setdefault(token_id, Logprob(logprob, known_rank, text, raw))
            if candidates:
                self.cumulative_logprob += candidates[0][1]
            self.logprobs.append(position)
            self.text_offsets.append(text_offset)


@dataclass(frozen=True, slots=True)
class BestOf:
    """``best_of``: of the samples that were drawn, those with the highest cumulative log-probability are returned.

    The beams of a search are all returned, and in the order in which they come.

    Attributes:
        n: How many are returned.
        shows_logprobs: Whether the caller asked for log-probabilities; else they are known for the choice alone.
        is_sorted: They come best first.
    """

    n: int
    shows_logprobs: bool
    is_sorted: bool = False

    def choose(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """The best, numbered in their order; equal ones in the order in which they were drawn."""
        best = outputs[: self.n]
        if not self.is_sorted:
            best = sorted(outputs, key=lambda output: -(output.cumulative_logprob or 0.0))[: self.n]
        for index, output in enumerate(best):
            output.index = index
            if not self.shows_logprobs:
                output.logprobs = output.text_offsets = None
        return best


class RequestState:
    """Gathers the outputs of one request until its caller takes them.

    Deltas that arrive while the reader is busy are merged: :meth:`take` gives one output, however many steps it spans.

    Attributes:
        sink: Takes new text as events; what comes here then is each sample's end.
        adapter: Number of the adapter that it needs; 0: none.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: PromptIds,
        output_kind: RequestOutputKind,
        samples: Sequence[tuple[int, str]],
        hidden_stop_ids: frozenset[int],
        sink: EventSink | None = None,
        *,
        arrival_time: float | None = None,
        with_logprobs: bool = False,
        flat_logprobs: bool = False,
        lists_tokens: bool = False,
        choice: BestOf | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        prompt_token_logprobs: PromptTokenLogprobs | None = None,
        prompt_progress: bool = False,
        adapter: int = 0,
        lora_request: LoRARequest | None = None,
        pooling: FilledPooling | None = None,
    ) -> None:
        """Start with nothing generated.

        Args:
            request_id: Name the caller gave.
            prompt: Prompt text, None when it came as token ids.
            prompt_ids: Token ids of the prompt.
            output_kind: What each output holds.
            samples: Key and engine-side request id of each sample.
            hidden_stop_ids: Stop ids that stand for EOS, so that ``stop_reason`` stays None for them.
            sink: Takes new text as events, None: it comes in the outputs.
            arrival_time: When it came in, in seconds of ``time.monotonic``; None: now.
            with_logprobs: Tokens come with log-probabilities.
            flat_logprobs: Outputs have them in a few lists of numbers.
            lists_tokens: They are of tokens that the request named, not of the likeliest.
            choice: Which samples are returned; None: all.
            prompt_logprobs: Takes those of the prompt; None if the request asks for none.
            prompt_token_logprobs: Takes those of tokens that are named for its places; None if none are.
            prompt_progress: How far the prompt is, is news.
            adapter: Number of the adapter that it needs.
            lora_request: That adapter, as the caller asked for it.
            pooling: What its vector should be; None: it ends without one.
        """
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.output_kind = output_kind
        self.samples: list[SampleState] = []
        self._index_of_key: dict[int, int] = {}
        self._changed: dict[int, None] = {}  # indices of the samples with news, in the order in which it came
        self._num_running = 0
        self._with_logprobs, self._flat_logprobs = with_logprobs, flat_logprobs
        self._lists_tokens = lists_tokens
        self.expect(samples)
        self.metrics = RequestMetrics(arrival_time=time.monotonic() if arrival_time is None else arrival_time)
        self.num_cached_tokens = 0
        self._predicted: dict[int, tuple[int, int]] = {}  # by sample: tokens of its prediction accepted, rejected
        self.error: str | None = None
        self.sink = sink
        self.adapter = adapter
        self._lora_request = lora_request
        self._pooling, self._pooled = pooling, b""
        self._choice = choice
        self._prompt_logprobs, self._prompt_token_logprobs = prompt_logprobs, prompt_token_logprobs
        self._unread: list[_core.RequestDelta] = []  # their log-probabilities of the prompt
        self._tells_progress = prompt_progress
        self._progress: tuple[int, float] | None = None  # news of the prompt: tokens computed, and when
        self._hidden_stop_ids = hidden_stop_ids
        self._failure: RustVLLMError | None = None

    def expect(self, samples: Sequence[tuple[int, str]]) -> None:
        """Further samples: key and engine-side request id of each."""
        for key, sample_id in samples:
            self._index_of_key[key] = len(self.samples)
            logprobs: list[dict[int, Logprob]] | FlatLogprobs = FlatLogprobs() if self._flat_logprobs else []
            kept = logprobs if self._with_logprobs else None
            self.samples.append(SampleState(key, sample_id, logprobs=kept, lists_tokens=self._lists_tokens))
        self._num_running += len(samples)

    @property
    def takes_long(self) -> bool:
        """Whether :meth:`take` makes so many objects that its place is a thread: only of a request that has ended."""
        num_parts = len(self.samples)
        if self._with_logprobs:
            num_parts += sum(len(sample.token_ids) for sample in self.samples[:FEW_PARTS])
        if self._prompt_logprobs is not None:
            num_parts += len(self.prompt_ids)
        return num_parts > FEW_PARTS and self.finished and self.output_kind is RequestOutputKind.FINAL_ONLY

    def read_some(self) -> bool:
        """Read some of the log-probabilities that :meth:`take` would read all at once; whether more are left."""
        left = FEW_PARTS
        for index in self._changed if self._with_logprobs else ():
            left = self.samples[index].read_logprobs(left)
            if left <= 0:
                return True
        return False

    @property
    def finished(self) -> bool:
        """True when every sample has ended."""
        return self._num_running == 0

    @property
    def ready(self) -> bool:
        """True when :meth:`take` has something to give."""
        if self.output_kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return False
        return self._progress is not None or bool(self._changed)

    @property
    def has_untaken_tokens(self) -> bool:
        """Whether a reader of more than the end has not had all tokens yet."""
        if self.sink is not None or self.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        return any(sample.tokens_taken < len(sample.token_ids) for sample in self.samples)

    def failure(self) -> RustVLLMError:
        """Why it failed, to be raised."""
        return self._failure or RequestFailedError(self.error or "the engine failed")

    def keys(self) -> list[int]:
        """Keys of its samples."""
        return [sample.key for sample in self.samples]

    def engine_id(self, key: int) -> str:
        """Engine-side id of the sample with a key."""
        return self.samples[self._index_of_key[key]].request_id

    def unfinished_ids(self) -> list[str]:
        """Engine-side ids of the samples that still run."""
        return [sample.request_id for sample in self.samples if sample.finish_reason is None]

    def apply(self, delta: _core.RequestDelta, step_error: str | None = None) -> None:
        """Add what is new for one sample.

        Args:
            delta: News of a sample of this request.
            step_error: What the last failed step raised, to explain an ``error`` end that came of it.
        """
        index = self._index_of_key.get(delta.key)
        if index is None or self.samples[index].finish_reason is not None:  # what comes after the end is dropped
            return
        sample = self.samples[index]
        metrics = self.metrics
        if delta.first_scheduled_ts and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = delta.first_scheduled_ts
        if self._tells_progress:
            self._note_progress(delta)
        if delta.pooled is not None:
            self._pooled = delta.pooled
        if delta.new_token_ids:
            if metrics.first_token_time is None:
                metrics.first_token_time = delta.first_token_ts or time.monotonic()
            last_token_time = delta.last_token_ts or time.monotonic()
            metrics.last_token_time = max(metrics.last_token_time or 0.0, last_token_time)  # of all samples
            sample.token_ids.extend(delta.new_token_ids)
            if sample.logprobs is not None:
                sample.unread.append(delta)
        if delta.new_text:
            sample.text_parts.append(delta.new_text)
        if self._prompt_logprobs is not None or self._prompt_token_logprobs is not None:
            self._unread.append(delta)  # they come with the first sample
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if (predicted := (delta.num_accepted_prediction_tokens, delta.num_rejected_prediction_tokens)) != (0, 0):
            self._predicted[index] = predicted
        is_progress_alone = delta.num_computed_prompt_tokens and not delta.new_token_ids and not delta.finish_reason
        if not is_progress_alone:
            self._changed[index] = None
        if delta.finish_reason is not None:
            sample.finish_reason = delta.finish_reason
            self._num_running -= 1
            if delta.num_calls and self.sink is not None:
                self.sink.note_calls(index, delta.num_calls)
            sample.stop_reason = None if delta.stop_reason in self._hidden_stop_ids else delta.stop_reason
            if delta.finish_reason == "error":
                # Of every other end it may be an older step's error.
                told = (delta.error, step_error if delta.is_step_error else None)
                self.error = "; ".join(reason for reason in told if reason) or "the engine failed"
                self._failure = _failure(delta, self.error)
            if self.finished:
                metrics.finished_time = time.monotonic()

    def _note_progress(self, delta: _core.RequestDelta) -> None:
        if delta.new_token_ids:  # the prompt is done, and this is the last news of it
            self._tells_progress = False
            self._progress = len(self.prompt_ids), delta.first_token_ts
        elif delta.num_computed_prompt_tokens:
            self._progress = delta.num_computed_prompt_tokens, delta.last_token_ts

    def abort(self) -> None:
        """End every sample that still runs with ``abort``; the caller aborts it in the engine."""
        for index, sample in enumerate(self.samples):
            if sample.finish_reason is None:
                sample.finish_reason = "abort"
                self._changed[index] = None
        self._num_running = 0
        self.metrics.finished_time = self.metrics.finished_time or time.monotonic()

    def _read_prompt_logprobs(self) -> None:
        unread, self._unread = self._unread, []
        takers = [each for each in (self._prompt_logprobs, self._prompt_token_logprobs) if each is not None]
        for delta in unread if takers else ():
            for places in delta.new_prompt_logprobs:
                for taker in takers:
                    taker.extend(*places)

    def take(self, most: int | None = None) -> RequestOutput:
        """The present output; afterwards nothing is new.

        Args:
            most: If each output holds only what is new: the samples to take now, others stay new; None: all.
        """
        delta = self.output_kind is RequestOutputKind.DELTA
        self._read_prompt_logprobs()
        indices = sorted(islice(self._changed, most)) if delta else range(len(self.samples))
        outputs = [self._output_of(index, is_delta=delta) for index in indices]
        num_unreturned = 0
        if self._choice is not None:
            num_all = sum(len(output.token_ids) for output in outputs)
            outputs = self._choice.choose(outputs)
            num_unreturned = num_all - sum(len(output.token_ids) for output in outputs)
        if self.output_kind is RequestOutputKind.FINAL_ONLY and self.finished:
            # Nothing is asked of them again. One by one: this may be a thread, which should not hold up the others.
            while self.samples:
                self.samples.pop()
            self._index_of_key.clear()
        progress, self._progress = self._progress, None
        prompt_logprobs, named = self._take_prompt_logprobs(is_delta=delta, has_outputs=bool(outputs))
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            prompt_logprobs=prompt_logprobs,
            prompt_token_id_logprobs=named,
            outputs=outputs,
            finished=self.finished and not self._changed,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            num_accepted_prediction_tokens=sum(accepted for accepted, _ in self._predicted.values()),
            num_rejected_prediction_tokens=sum(rejected for _, rejected in self._predicted.values()),
            num_unreturned_tokens=num_unreturned,
            num_computed_prompt_tokens=None if progress is None else progress[0],
            prompt_progress_time=None if progress is None else progress[1],
            error=self.error,
            lora_request=self._lora_request,
            pooled=finished_vector(self._pooled, self._pooling) if self._pooling and self._pooled else None,
        )

    def _output_of(self, index: int, *, is_delta: bool) -> CompletionOutput:
        """The present output of a sample, or only what is new of it; afterwards nothing is new."""
        self._changed.pop(index, None)
        sample = self.samples[index]
        sample.read_logprobs()
        if len(sample.text_parts) > 1 and not is_delta:
            # Joined once per take, so that a long cumulative stream does not re-join thousands of parts.
            sample.text_parts = ["".join(sample.text_parts)]
        output = CompletionOutput(
            index=index,
            text="".join(sample.text_parts[sample.parts_taken :] if is_delta else sample.text_parts),
            token_ids=sample.token_ids[sample.tokens_taken if is_delta else 0 :],
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            lora_request=self._lora_request,
        )
        if sample.logprobs is not None:
            start = sample.tokens_taken if is_delta else 0
            output.logprobs = sample.logprobs[start:]
            output.text_offsets = sample.text_offsets[start:]
            output.cumulative_logprob = sample.cumulative_logprob
        sample.parts_taken = len(sample.text_parts)
        sample.tokens_taken = len(sample.token_ids)
        return output

    def _take_prompt_logprobs(
        self, *, is_delta: bool, has_outputs: bool
    ) -> "tuple[PromptLogprobs | FlatLogprobs | None, npt.NDArray[np.float32] | None]":
        """Those of the prompt, and those of the tokens that the request names; streams give them out once."""
        if is_delta and not has_outputs:
            return None, None  # they may not be whole before the first token
        prompt_logprobs: PromptLogprobs | FlatLogprobs | None = self._prompt_logprobs
        named = None if self._prompt_token_logprobs is None else self._prompt_token_logprobs.whole()
        if is_delta:
            self._prompt_logprobs = self._prompt_token_logprobs = None
        if prompt_logprobs is not None and self._flat_logprobs:
            prompt_logprobs = FlatLogprobs.of(prompt_logprobs)
        return prompt_logprobs, named


def _failure(delta: _core.RequestDelta, message: str) -> RustVLLMError:
    """What a request that failed raises: an engine in another process refuses in its answer."""
    match delta.error_kind:
        case "invalid" | "refused":
            return InvalidRequestError(message, delta.error_param)
        case "queue_full":
            return QueueFullError(message)
        case "queue_timeout":
            return QueueTimeoutError(message)
        case "grammars_full":
            return GrammarsFullError(message)
        case "engine_dead":
            return EngineDeadError(message)
        case _:
            return RequestFailedError(message)
