"""``OutputHandler``: reads what an engine that runs by itself has made, on the event loop, and wakes the readers.

The loop is woken once per engine step, by an eventfd; whatever arrived for a request while its reader was busy is
merged into one output.
"""

import asyncio
import time
import weakref
from collections.abc import Callable

from rustvllm.engine.core_client.interface import AsyncEngineClient
from rustvllm.engine.loop_calls import call_if_alive, call_in_loop, remove_reader_soon
from rustvllm.engine.request.state import RequestState
from rustvllm.engine.request.stream import RequestStream
from rustvllm.engine.request_table import RequestTable
from rustvllm.exceptions import EngineDeadError, RustVLLMError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

_NEWS_AT_ONCE = 256
"""News of samples that are read in one go: a millisecond of work."""
_LOOK_SECONDS = 0.005
"""How often a shutdown looks whether requests are left."""


class OutputHandler:
    """See the module. Belongs to one event loop; its owner keeps it alive, and it does not keep its owner.

    It is made before the engine, which may die while it loads; :meth:`start` says what it reads.

    Attributes:
        broken: Why the engine is of no use here, whether it lives or not; None while it is.
    """

    _client: AsyncEngineClient
    _requests: RequestTable

    def __init__(self) -> None:
        self.broken: EngineDeadError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, RequestStream] = {}

    def start(self, client: AsyncEngineClient, requests: RequestTable) -> None:
        """Serve an engine that is ready, and the requests that are handed to it."""
        self._client, self._requests = client, requests

    def check_health(self) -> None:
        """Do nothing while the engine lives and can be read.

        Raises:
            EngineDeadError: It has died, was shut down, or is ``broken``.
        """
        self._client.check_alive()
        if self.broken is not None:
            raise EngineDeadError(str(self.broken)) from self.broken

    @property
    def is_running(self) -> bool:
        """Whether :meth:`check_health` finds nothing."""
        try:
            self.check_health()
        except EngineDeadError:
            return False
        return True

    def attach(self) -> None:
        """Listen to the engine on the running loop, from the first request on.

        Raises:
            RuntimeError: It listens on another loop, which is open.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise RuntimeError("this AsyncLLM belongs to another event loop; make one per loop, or share one loop")
            # asyncio.run, twice: the first loop's requests have no reader any more.
            for state in self._requests.states():
                self._requests.forget(state, abort=True)
            self._streams.clear()
        self._loop = loop
        # The loop may outlive the engine and must not keep it alive.
        handle = self._client.handle
        loop.add_reader(handle.output_fd, call_if_alive, weakref.WeakMethod(self._on_some_outputs))
        weakref.finalize(self, remove_reader_soon, loop, handle).atexit = False

    def open(self, state: RequestState, with_advice: Callable[[RustVLLMError], RustVLLMError]) -> RequestStream:
        """The outputs of a request that was handed in; ``with_advice`` as for :class:`RequestStream`."""
        stream = RequestStream(state, self._resume, self._forget, with_advice)
        self._streams[id(state)] = stream
        return stream

    def _resume(self, state: RequestState) -> None:
        if self._requests.resume(state):
            self._on_outputs()

    def _forget(self, state: RequestState) -> None:
        self._streams.pop(id(state), None)
        self._requests.forget(state, abort=True)

    def _on_some_outputs(self) -> None:
        """Outputs are there; many of them are read in turns with the other callbacks of the loop."""
        self._on_outputs(_NEWS_AT_ONCE)
        if self._requests.has_unread and self._loop is not None:
            self._loop.call_soon(call_if_alive, weakref.WeakMethod(self._on_some_outputs))

    def _on_outputs(self, most: int | None = None) -> None:
        """Outputs of the engine are there; ``most`` as in :meth:`RequestTable.poll`."""
        try:
            changed = self._requests.poll(most)
        except Exception as error:
            logger.critical("cannot read the engine's outputs", exc_info=error)
            self.broken = EngineDeadError(f"cannot read the engine's outputs: {type(error).__name__}: {error}")
            self.broken.__cause__ = error
            self._stop_listening()  # they stay there, and would wake the loop for ever
            self._fail_all(self.broken)
            return
        for state in changed:
            stream = self._streams.get(id(state))
            if stream is not None:
                if state.finished:
                    del self._streams[id(state)]
                if state.ready:
                    stream.wake()

    def on_engine_death(self) -> None:
        """In the engine's thread: let the event loop fail what is open."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            call_in_loop(loop, self._fail_open)

    def wait_for_requests(self, seconds: float) -> None:
        """Wait until no request is under way, however the outputs are read: by a loop that runs, or else from here."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        give_up = time.monotonic() + seconds
        is_reader = not loop.is_running() or self._is_on_its_loop()
        while self._requests and self.is_running and time.monotonic() < give_up:
            if is_reader:
                self._on_outputs()
            time.sleep(_LOOK_SECONDS)

    def leave_loop(self) -> None:
        """Listen no more, and fail what is open if the engine has ended; from any thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        if self._is_on_its_loop():
            self._detach()
        else:
            call_in_loop(loop, self._detach)

    def _detach(self) -> None:
        self._stop_listening()
        self._fail_open()

    def _is_on_its_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _fail_open(self) -> None:
        try:
            self.check_health()
        except EngineDeadError as error:
            self._requests.flush()
            self._on_outputs()  # what was made before the end is still delivered
            self._fail_all(error)

    def _fail_all(self, error: EngineDeadError) -> None:
        for stream in list(self._streams.values()):
            stream.wake(error)
        self._streams.clear()
        for state in self._requests.states():
            self._requests.forget(state, abort=True)

    def _stop_listening(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._client.handle.output_fd)
