""":class:`Linger`: drops what a client goes on sending after its answer, for a while, so that the answer arrives.

A connection that is closed with bytes unread is reset, and to a client that is still sending the reset comes instead of
the answer. So this side stops sending, which the client sees behind the answer, and goes on reading, within bounds.
"""

import asyncio

LINGER_SECONDS = 30.0
"""How long a client may go on sending after its answer."""
LINGER_BYTES = 256 << 20
"""How much a client may send after its answer."""


class Linger:
    """The end of a connection that has been answered; closes it when the client has, or at a bound.

    Args:
        transport: What the answer was written to.
        loop: Its event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._num_bytes_left = LINGER_BYTES
        self._timer = loop.call_later(LINGER_SECONDS, transport.close)
        if transport.can_write_eof():  # TLS cannot: there the header "connection: close" has to say it
            transport.write_eof()

    def drop(self, data: bytes) -> None:
        """Drop what has come."""
        self._num_bytes_left -= len(data)
        if self._num_bytes_left < 0:
            self._transport.close()

    def end(self) -> None:
        """The connection is gone."""
        self._timer.cancel()
