""":class:`Endpoint`: one row of the table of endpoints, which says all that the rest of the server knows of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Endpoint:
    """One method and path, and what answers there.

    Attributes:
        method: In capitals.
        path: May have parameters, as the framework writes them.
        handler: Takes a request, and the path's parameters by name; returns a response, or what becomes its JSON.
        takes: Shapes of the body, one of which it must have.
        answer: Shape of the answer with status 200; None: the framework's description of it stands.
        chunk: Shape of an event's data, where the answer can be a stream.
        media_types: Of an answer that is text and not JSON.
        error: Shape of its errors; None: OpenAI's.
        names_events: Events of its streams have their names, and no ``[DONE]`` comes behind them.
        unavailable: Shape of a 503 that is an answer, not an error.
        errors: Statuses that its own work ends with, those of the guards apart.
        is_documented: Part of the OpenAPI document.
        is_open: Answered at any time: without a key, before there is an engine, and after it has died.
        is_answered_when_full: Answered on a connection that there is no room for, too.
        is_watching: Goes on until its client leaves, so that a stop of the server does not wait for it.
        generates: Counted as load.
        is_direct: Called without the framework's dispatch; takes a request and returns a response.
    """

    method: str
    path: str
    handler: Handler
    takes: tuple[type[BaseModel], ...] = ()
    answer: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    error: type[BaseModel] | None = None
    names_events: bool = False
    media_types: tuple[str, ...] = ()
    unavailable: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    is_documented: bool = True
    is_open: bool = False
    is_answered_when_full: bool = False
    is_watching: bool = False
    generates: bool = False
    is_direct: bool = False
