"""The outputs of one request, as an asynchronous iterator. Closing it early aborts the request."""

import asyncio
from collections.abc import Callable

from rustvllm.engine.request.state import FEW_PARTS, RequestState
from rustvllm.exceptions import RustVLLMError
from rustvllm.outputs import PromptIds, RequestOutput


class RequestStream:
    """See the module.

    Args:
        state: What has come of the request so far.
        resume: Reads what a sink had refused.
        forget: Ends the request, whose reader has gone.
        with_advice: Adds to the error of a request that failed what helps its caller.
    """

    def __init__(
        self,
        state: RequestState,
        resume: Callable[[RequestState], None],
        forget: Callable[[RequestState], None],
        with_advice: Callable[[RustVLLMError], RustVLLMError],
    ) -> None:
        self._state = state
        self._resume = resume
        self._forget = forget
        self._with_advice = with_advice
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._done = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            RequestFailedError: The engine failed on this request.
            InvalidRequestError: An engine in another process refuses it.
            QueueFullError: That engine has too many.
            QueueTimeoutError: The request waited longer than ``queue_timeout``.
            EngineDeadError: The engine died or was shut down.
        """
        if self._done:
            raise StopAsyncIteration
        while not self._state.ready:
            if self._error is not None:
                self._done = True
                raise self._error
            self._news.clear()
            await self._news.wait()
            if self._done:  # closed meanwhile
                raise StopAsyncIteration
        has_tokens = self._state.error is not None and self._state.has_untaken_tokens
        if self._state.takes_long:
            output = await asyncio.to_thread(self._state.take)
        else:
            for _ in iter(self._state.read_some, False):  # much has come while the reader was busy
                await asyncio.sleep(0)
            output = self._state.take(FEW_PARTS)
        if output.error is not None:
            failure = self._with_advice(self._state.failure())
            if not has_tokens:
                self.close()
                raise failure
            self._forget(self._state)
            self._error = failure  # behind the tokens that came before it
            return _unfinished(output)
        self._done = output.finished
        return output

    @property
    def prompt_ids(self) -> PromptIds:
        """Token ids of the prompt, with the special tokens that were added, after truncation."""
        return self._state.prompt_ids

    def resume(self) -> None:
        """The request's sink, which had refused an event, takes them again."""
        self._resume(self._state)

    def close(self) -> None:
        """Stop reading; what still runs is aborted, and a reader that waits gets the end. Idempotent."""
        if self._done:  # at its end nothing is left of it
            return
        self._done = True
        self._news.set()
        self._forget(self._state)

    async def aclose(self) -> None:
        """The same as :meth:`close`, for ``contextlib.aclosing``."""
        self.close()

    def wake(self, error: BaseException | None = None) -> None:
        """Something has come for the reader.

        Args:
            error: Ends the outputs once those that are there are read.
        """
        self._error = self._error or error
        self._news.set()


def _unfinished(output: RequestOutput) -> RequestOutput:
    """An output of a request that failed, without the end that the next one raises."""
    output.error, output.finished = None, False
    for sample in output.outputs:
        if sample.finish_reason == "error":
            sample.finish_reason = None
    return output
