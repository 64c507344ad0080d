""":class:`RequestIds`: gives every request an id that its answer, the header ``X-Request-Id`` and the log share."""

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rustvllm.server.error_bodies import is_of_anthropic, path_of

REQUEST_ID = "rustvllm.request_id"
"""In the ASGI scope: the :class:`RequestId` of this request."""
MAX_REQUEST_ID_CHARS = 256
_HEADER = b"x-request-id"
_ANTHROPICS_HEADER = b"request-id"
"""Where Anthropic's clients look for the id."""


class RequestId:
    """The id of one request; an endpoint may learn a better one from the body.

    Attributes:
        text: The id, without what an endpoint puts in front of it.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def is_valid_request_id(text: str) -> bool:
    """Whether a client's id can be used as it is."""
    return 0 < len(text) <= MAX_REQUEST_ID_CHARS and text.isprintable()


class RequestIds:
    """Middleware that notes the client's ``X-Request-Id`` or a random one.

    Args:
        app: Answers.
        show: Send it back as a header, also of errors and streams; to Anthropic's clients as ``request-id``, too.
    """

    def __init__(self, app: ASGIApp, *, show: bool) -> None:
        self._app = app
        self._show = show

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (the ASGI entry point)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER), "")
        request_id = RequestId(own if is_valid_request_id(own) else secrets.token_hex(16))
        scope[REQUEST_ID] = request_id

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                value = request_id.text.encode("latin-1", "backslashreplace")
                names = (_HEADER, _ANTHROPICS_HEADER) if is_of_anthropic(path_of(scope)) else (_HEADER,)
                message["headers"] = [*message.get("headers", ()), *((name, value) for name in names)]
            await send(message)

        await self._app(scope, receive, naming if self._show else send)
