"""``TokenizerPool``: lets coroutines wait for the threads of ``_core.TokenizerPool``, which tokenise long texts.

These are Rust threads that never take the GIL. The event loop continues meanwhile; a descriptor wakes it when a text is
done.
"""

import asyncio

from rustvllm import _core


class TokenizerPool:
    """Tokenises texts off the event loop.

    One pool serves one event loop at a time. It listens only while a caller waits, so a loop keeps no reference to a
    pool that is no longer used.
    """

    def __init__(self, tokenizer: _core.Tokenizer) -> None:
        """Make the pool; threads start with the first text.

        Raises:
            OSError: No descriptor is left.
        """
        self._core = _core.TokenizerPool(tokenizer)
        self._waiting: dict[int, asyncio.Future[_core.TokenIds]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_waiting_bytes(self) -> int:
        """Total bytes of the texts that are waiting or being tokenised."""
        return self._core.num_waiting_bytes

    async def encode(self, text: str, add_special_tokens: bool = True) -> _core.TokenIds:
        """Turn text into token ids. Cancelling the wait removes the text from the pool.

        Raises:
            InvalidRequestError: ``text`` is not valid Unicode, or the tokenizer cannot encode it.
            QueueFullError: Too much text waits already.
            OSError: No thread can be started.
            RuntimeError: Another event loop is waiting for this pool.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop and self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("another event loop is waiting for this tokenizer; make one engine per loop")
        job = self._core.submit(text, add_special_tokens)
        future: asyncio.Future[_core.TokenIds] = loop.create_future()
        if self._loop is not loop:
            self._waiting.clear()  # their event loop was closed while they waited
            self._loop = loop
            loop.add_reader(self._core.fd, self._on_done)
        self._waiting[job] = future
        try:
            return await future
        finally:
            if self._waiting.pop(job, None) is not None:
                self._core.cancel(job)
            self._rest()

    def _on_done(self) -> None:
        for job, result in self._core.take():
            future = self._waiting.pop(job, None)
            if future is None or future.done():  # cancelled in this iteration of the loop
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        self._rest()

    def _rest(self) -> None:
        """Stop listening when no caller waits."""
        if self._waiting or self._loop is None:
            return
        self._loop.remove_reader(self._core.fd)
        self._loop = None
