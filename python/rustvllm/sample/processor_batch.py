"""Tracks the requests that custom logits processors see, and applies the processors.

Requests are tracked by persistent row; a step's batch is its sampled rows in order. Only requests that a processor
looks at are tracked: all if a processor class is loaded, else those with their own callables. If a callable raises, or
returns anything but a row of logits, its request ends; so does a request whose arguments a processor class rejects. A
processor class that raises elsewhere fails the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.sample.logits_processors import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality
from rustvllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request must end.

    Attributes:
        message: The message for the client.
        is_refusal: Whether the request asked for something impossible; otherwise the processor failed.
    """

    message: str
    is_refusal: bool = False


@dataclass(eq=False, slots=True)
class FollowedRequest:
    """A request that processors look at.

    Attributes:
        params: Its parameters, as far as they are known.
        prompt_token_ids: The prompt's ids.
        output_token_ids: The ids generated so far; grows in place.
        callables: Its own processors.
        failure: Why it must end; None while it may go on.
    """

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    callables: Sequence[Callable[..., object]] = ()
    failure: Failure | None = None


@dataclass(slots=True)
class ProcessedRows:
    """The processors of one step.

    Attributes:
        before: Processor classes that may change which token is likeliest.
        after: Processor classes that never do.
        failures: Why requests ended, by sampled row; filled while the callables run.
    """

    before: Sequence[LogitsProcessor]
    after: Sequence[LogitsProcessor]
    _own: Sequence[tuple[int, FollowedRequest]]
    failures: dict[int, Failure] = field(default_factory=dict)

    def apply_before(self, logits: Tensor) -> Tensor:
        """Apply what comes before the temperature: processor classes, then the callables of single requests.

        Args:
            logits: float32 ``[n, vocab_size]``; changed in place.

        Returns:
            The logits of all rows.
        """
        for processor in self.before:
            logits = _checked(processor, processor.apply(logits), logits)
        for row, request in self._own:
            if request.failure is None:
                logits = self._apply_own(logits, row, request)
            if request.failure is not None:
                self.failures[row] = request.failure
        return logits

    def apply_after(self, logits: Tensor) -> Tensor:
        """Apply the processors that come after the temperature.

        Args:
            logits: float32 ``[n, vocab_size]``, all rows of the step; changed in place.

        Returns:
            The logits of all rows.
        """
        for processor in self.after:
            logits = _checked(processor, processor.apply(logits), logits)
        return logits

    def _apply_own(self, logits: Tensor, row: int, request: FollowedRequest) -> Tensor:
        own = logits[row].clone()  # so that a failing callable changes no logits
        for call in request.callables:
            try:
                given = (request.output_token_ids, own)
                result = call(request.prompt_token_ids, *given) if _takes_prompt(call) else call(*given)
                if not isinstance(result, Tensor) or result.shape != own.shape or not result.is_floating_point():
                    what = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else repr(result)[:80]
                    raise TypeError(f"a logits processor must return {own.shape[0]} logits, got {what}")
                own = result.to(own)
            except Exception as error:  # noqa: BLE001 -- whatever a user's function raises ends that user's request
                request.failure = Failure(f"{type(error).__name__}: {error}")
                return logits
        logits[row] = own
        return logits


class ProcessorBatch:
    """Tracks requests for processor classes and callables."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self.processors = list(processors)
        self._before = [each for each in self.processors if not each.is_argmax_invariant()]
        self._after = [each for each in self.processors if each.is_argmax_invariant()]
        self._by_row: dict[int, FollowedRequest] = {}
        self._batch: list[FollowedRequest] = []  # the batch that the processors saw last

    def admit(self, row: int, request: FollowedRequest) -> None:
        """Track a new or resumed request, if a processor looks at it."""
        if not self.processors and not request.callables and request.failure is None:
            return
        for processor in self.processors:
            try:
                processor.validate_params(request.params)
            except Exception as error:  # noqa: BLE001 -- the request ends, with the processor's own words
                # A ValueError is about the request; anything else is a mistake in the class.
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                message = f"{type(processor).__name__}: {kind}{error}"
                request.failure = Failure(message, is_refusal=isinstance(error, ValueError))
                request.params = SamplingParams()  # it keeps its place until the step is over, with default parameters
                break
        self._by_row[row] = request

    def drop(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget the requests that were in some rows."""
        if self._by_row:
            for row in rows.tolist():
                self._by_row.pop(row, None)

    def arrange(self, rows: npt.NDArray[np.int32]) -> ProcessedRows | None:
        """Tell the processors which requests are sampled in this step; None if no processor follows these rows.

        Args:
            rows: ``[n]`` persistent rows in the order of the logits.
        """
        if not self._by_row:
            return None
        followed = [(index, self._by_row.get(row)) for index, row in enumerate(rows.tolist())]
        own = [(index, each) for index, each in followed if each and (each.callables or each.failure is not None)]
        if self.processors:
            batch = [each for _, each in followed if each is not None]
            update = None if _same(batch, self._batch) else batch_update(self._batch, batch)
            self._batch = batch
            for processor in self.processors:
                processor.update_state(update)
        elif not own:
            return None
        return ProcessedRows(self._before, self._after, own)

    def append(self, rows: npt.NDArray[np.int32], token_ids: Tensor) -> None:
        """Append sampled ids to the outputs.

        Args:
            rows: ``[n]``, each once.
            token_ids: int64 ``[n]``; the host waits for them only if one of the rows is tracked.
        """
        if not self._by_row:
            return
        followed = [(index, each) for index, row in enumerate(rows.tolist()) if (each := self._by_row.get(row))]
        if followed:
            ids = token_ids.tolist()
            for index, request in followed:
                request.output_token_ids.append(ids[index])


def batch_update(old: Sequence[FollowedRequest], new: Sequence[FollowedRequest]) -> BatchUpdate:
    """The changes from one batch to another: fill holes, close the rest from the end, then exchange places."""
    place = {id(request): index for index, request in enumerate(new)}
    slots: list[FollowedRequest | None] = [request if id(request) in place else None for request in old]
    stayed = {id(request) for request in slots}
    holes = [index for index, request in enumerate(slots) if request is None]
    added: list[AddedRequest] = []
    moved: list[tuple[int, int, MoveDirectionality]] = []
    for request in new:
        if id(request) in stayed:
            continue
        if holes:
            index = holes.pop(0)
            slots[index] = request
        else:
            index = len(slots)
            slots.append(request)
        added.append((index, request.params, request.prompt_token_ids, request.output_token_ids))
    for hole in holes:
        while slots and slots[-1] is None:
            slots.pop()
        if hole < len(slots):
            moved.append((len(slots) - 1, hole, MoveDirectionality.UNIDIRECTIONAL))
            slots[hole] = slots.pop()
    for index in range(len(new)):
        while slots[index] is not new[index]:
            other = place[id(slots[index])]
            moved.append((index, other, MoveDirectionality.SWAP))
            slots[index], slots[other] = slots[other], slots[index]
    return BatchUpdate(batch_size=len(new), removed=tuple(holes), added=tuple(added), moved=tuple(moved))


def _same(one: Sequence[FollowedRequest], other: Sequence[FollowedRequest]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _checked(processor: LogitsProcessor, result: object, before: Tensor) -> Tensor:
    if isinstance(result, Tensor) and result.shape == before.shape and result.is_floating_point():
        return result.to(torch.float32)
    what = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else repr(result)[:80]
    raise TypeError(f"{type(processor).__name__}.apply must return logits of shape {list(before.shape)}, got {what}")


def _takes_prompt(call: Callable[..., object]) -> bool:
    """Whether a callable takes prompt ids, output ids and logits, and not only the last two."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # a callable that is not written in Python
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.kind in kinds and each.default is inspect.Parameter.empty]
    return len(needed) == 3
