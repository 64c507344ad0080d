"""``PromptQueue``: the checked requests of an ``LLM``, numbered, fed to its engine and run to their end."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rustvllm.engine.llm_engine import LLMEngine
from rustvllm.engine.request.core_request import EngineCoreRequest
from rustvllm.exceptions import QueueFullError, RequestFailedError
from rustvllm.observe.prompt_progress import PromptProgress
from rustvllm.outputs import RequestOutput
from rustvllm.process.deferred_interrupt import DeferredInterrupt
from rustvllm.process.one_caller import OneCaller


class PromptQueue:
    """Requests wait here until the engine's own queue has room for them; one caller at a time runs them.

    Attributes:
        caller: Whose turn it is.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.caller = OneCaller()
        self._engine = engine
        self._num_requests = 0
        self._waiting: deque[tuple[str, EngineCoreRequest]] = deque()
        engine.adapters_of_waiting = partial(_adapters_of, self._waiting)
        self._enqueued: dict[str, RequestOutput | None] = {}  # what is to be waited for, with what has ended of it

    def check_turn(self) -> None:
        """Do nothing if the caller may run the engine.

        Raises:
            EngineDeadError: The engine was shut down or is broken.
            SchedulerStateError: A call is under way, or this is another thread (WrongThreadError).
        """
        self._engine.engine_core.check_alive()
        self.caller.check()

    def enqueue(self, requests: list[EngineCoreRequest]) -> list[str]:
        """Number checked requests, for :meth:`run_enqueued` to run; their ids."""
        ids = self._number(requests)
        self._enqueued.update(dict.fromkeys(ids))
        self._feed()
        return ids

    def run(self, requests: list[EngineCoreRequest], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Run checked requests, and whatever else waits, to their end.

        Raises:
            RequestFailedError: The engine failed on some of them; its ``outputs`` holds all.
        """
        outputs: dict[str, RequestOutput | None] = dict.fromkeys(self._number(requests))
        self._finish(len(outputs), outputs, use_tqdm)
        return _without_failures([output for output in outputs.values() if output is not None])

    def run_enqueued(self, use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Run what :meth:`enqueue` took since the last call to its end.

        Raises:
            RequestFailedError: The engine failed on some of them; its ``outputs`` holds all.
        """
        self._finish(sum(output is None for output in self._enqueued.values()), {}, use_tqdm)
        outputs, self._enqueued = self._enqueued, {}
        return _without_failures([output for output in outputs.values() if output is not None])

    def _number(self, requests: list[EngineCoreRequest]) -> list[str]:
        """Number checked requests and let them wait for the engine; their ids."""
        first = self._num_requests
        self._num_requests += len(requests)
        ids = [str(first + index) for index in range(len(requests))]
        self._waiting.extend(zip(ids, requests, strict=True))
        return ids

    def _finish(
        self, num_shown: int, outputs: dict[str, RequestOutput | None], use_tqdm: bool | Callable[..., Any]
    ) -> None:
        """Step until nothing is left to do; last outputs go to where their ids are, ``outputs`` or ``_enqueued``."""
        with self.caller.run(), DeferredInterrupt() as interrupt:
            try:
                with PromptProgress(num_shown, use_tqdm) as progress:
                    while self._feed() or self._engine.has_unfinished_requests():
                        for output in self._engine.step():
                            self._take(output, outputs, progress)
                        interrupt.check()
            except BaseException:
                self._waiting.clear()
                self._enqueued.clear()
                self._engine.abort_all()
                raise

    def _take(self, output: RequestOutput, outputs: dict[str, RequestOutput | None], progress: PromptProgress) -> None:
        """Put a last output to where its id is."""
        if not output.finished:
            return
        wanted = outputs if output.request_id in outputs else self._enqueued
        if output.request_id in wanted:
            wanted[output.request_id] = output
            if wanted is outputs or not outputs:
                progress.add(output)

    def _feed(self) -> bool:
        """Queue what the engine's queue has room for, since any number of prompts may be given; True if it was any."""
        engine, waiting, fed = self._engine, self._waiting, False
        limit = engine.config.scheduler.max_num_queued_reqs
        while waiting and engine.num_unfinished_samples() + waiting[0][1].params.num_samples <= limit:
            try:
                engine.add_request(*waiting[0])
            except QueueFullError:  # max_num_queued_tokens: it is taken when those before it have begun
                break
            waiting.popleft()
            fed = True
        return fed


def _adapters_of(waiting: Iterable[tuple[str, EngineCoreRequest]]) -> set[int]:
    return {request.adapter for _, request in waiting}


def _without_failures(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """The outputs; raises RequestFailedError, which has them, when the engine failed on some."""
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise RequestFailedError(
            f"the engine failed on {len(failed)} of {len(outputs)} prompts, first: {failed[0].error}", outputs
        )
    return outputs
