""":class:`AccessLog`: one line per request when it has ended, with its status, its time and its id."""

import logging
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rustvllm.logger import ACCESS_LOGGER, FIELDS, init_logger
from rustvllm.server.http.request_ids import REQUEST_ID

_MAX_PATH_CHARS = 256


class AccessLog:
    """Middleware around all others. Query strings are left out: they may hold keys.

    Args:
        app: Answers.
        quiet_paths: Paths that get no line.
    """

    def __init__(self, app: ASGIApp, quiet_paths: Collection[str] = ()) -> None:
        self._app = app
        self._quiet_paths = frozenset(quiet_paths)
        self._logger = init_logger(ACCESS_LOGGER)
        self._logger.setLevel(logging.INFO)  # it was asked for by a flag of its own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (the ASGI entry point)."""
        root_path = scope.get("root_path", "")
        if scope["type"] != "http" or scope["path"].removeprefix(root_path) in self._quiet_paths:
            await self._app(scope, receive, send)
            return
        status = 499  # until an answer begins, the client may have gone
        begin = time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._log(scope, status, time.perf_counter() - begin)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = scope.get("client")
        where = f"{client[0]}:{client[1]}" if client else "-"
        path = _path(scope)
        request_id = scope[REQUEST_ID].text if REQUEST_ID in scope else ""
        self._logger.info(
            '%s - "%s %s HTTP/%s" %d %.1f ms %s',
            where,
            scope["method"],
            path,
            scope.get("http_version", ""),
            status,
            seconds * 1e3,
            request_id,
            extra={
                FIELDS: {
                    "client": where,
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "milliseconds": round(seconds * 1e3, 3),
                    "request_id": request_id,
                }
            },
        )


def _path(scope: Scope) -> str:
    """The path as it was sent, percent signs and all, so that it is one line whatever it holds."""
    raw = scope.get("raw_path")
    path: str = scope["path"] if raw is None else raw.decode("ascii", "backslashreplace")
    return path[:_MAX_PATH_CHARS] if path.isprintable() else ascii(path[:_MAX_PATH_CHARS])
