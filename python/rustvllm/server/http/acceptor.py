""":class:`Acceptor`: takes connections from the listening socket for as long as there are descriptors for them.

An event loop's own accepting goes on until the kernel refuses, and then closes what it has taken without a word. Here
the last connections that there is room for are answered with 503, and while there is none, clients wait in the kernel's
queue.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rustvllm.logger import init_logger
from rustvllm.process.open_files import WHAT_WOULD_WORK, OpenFiles, next_number
from rustvllm.server.error_bodies import path_of
from rustvllm.server.errors import UnavailableError, error_response

logger = init_logger(__name__)

AT_ONCE = 32
"""Connections taken in one turn of the event loop, which has others to serve."""
PAUSE_SECONDS = 0.05
"""While no descriptor is left, between two looks."""
IDLE_SECONDS = 5.0
"""How long a connection that there is no room for may take to send the head of a request."""
_COMPLAINT_SECONDS = 60.0
_MOST_READ, _READ_SECONDS = 1 << 20, 2.0

ProtocolFactory = Callable[[], Any]


class Acceptor:
    """Accepts on the event loop from :meth:`start` to :meth:`close`.

    Args:
        listener: Listens already; other processes may accept from it too.
        make_protocol: uvicorn's protocol of one connection.
        app: The application that such a protocol calls.
        context: For TLS.
        always_answered: Paths that are answered even on a connection that there is no room for.
        files: How many descriptors there are; None: as the kernel says.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: ProtocolFactory,
        app: ASGIApp,
        context: ssl.SSLContext | None,
        always_answered: Collection[str],
        files: OpenFiles | None = None,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._files = files or OpenFiles.of_this_process()
        self._full_house = FullHouse(app, self._files, always_answered)
        self._has_delay = listener.family in (socket.AF_INET, socket.AF_INET6)
        self._tasks: set[asyncio.Task[None]] = set()
        self._complained = -_COMPLAINT_SECONDS
        self._resuming: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more; what was accepted stays."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                if next_number(self._listener.fileno()) > self._files.last_accepted:
                    self._pause("all descriptors for connections are taken")
                    return
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # the system's limit, or memory: what is open must go on
                self._pause(str(error))
                return
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if self._has_delay:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_served = connection.fileno() <= self._files.last_served
        if not is_served:
            self._complain("a connection is answered with 503")
        task = self._loop.create_task(self._open(connection, is_served=is_served))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, connection: socket.socket, *, is_served: bool) -> None:
        protocol = self._make_protocol()
        if not is_served:
            protocol.app = self._full_house
            self._loop.call_later(IDLE_SECONDS, _close_if_idle, protocol)
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None or is_served else IDLE_SECONDS,
            )
        except OSError as error:  # no TLS, or gone already
            connection.close()
            logger.debug("a new connection failed: %s", error)

    def _pause(self, why: str) -> None:
        self._complain(f"no connection is accepted until others end: {why}")
        self._loop.remove_reader(self._listener.fileno())
        self._resuming = self._loop.call_later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _complain(self, what: str) -> None:
        now = time.monotonic()
        if now - self._complained >= _COMPLAINT_SECONDS:
            self._complained = now
            logger.warning(
                "%s: this process may have %d files open (RLIMIT_NOFILE), %s",
                what,
                self._files.limit,
                WHAT_WOULD_WORK,
            )


class FullHouse:
    """The application of connections that there is no room for: answers 503, except to probes.

    Args:
        app: Answers the probes.
        files: What the message names.
        always_answered: The paths of the probes.
    """

    def __init__(self, app: ASGIApp, files: OpenFiles, always_answered: Collection[str]) -> None:
        self._app = app
        self._always_answered = frozenset(always_answered)
        self._message = (
            f"This process has no room for another connection: it may have {files.limit} files open (RLIMIT_NOFILE), "
            f"of which about {files.num_connections} may be connections. Try again later; the operator can "
            f"{WHAT_WOULD_WORK}."
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (the ASGI entry point), and close."""

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if path_of(scope) in self._always_answered:
            await self._app(scope, receive, send_and_close)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_SECONDS):
                await _read(receive)
        error = UnavailableError(self._message, retry_after=1)
        await error_response(error, path_of(scope))(scope, receive, send_and_close)


async def _read(receive: Receive) -> None:
    """Take a body of bounded length: a connection that is closed over unread bytes loses the answer too."""
    num_bytes = 0
    while num_bytes <= _MOST_READ:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


def _close_if_idle(protocol: Any) -> None:
    if protocol.cycle is None and protocol.transport is not None:
        protocol.transport.close()
