"""The journey of one request as a stream of events: begun before the request is sent, ended when it has ended.

The request's engine is not known beforehand, so all are asked to watch until one has seen it.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Final

from rustvllm.exceptions import QueryTimeoutError, RustVLLMError
from rustvllm.server.stream.sse import json_bytes

if TYPE_CHECKING:
    from rustvllm.engine.async_llm import AsyncLLM

POLL_SECONDS: Final = 0.15
QUERY_SECONDS: Final = 5.0
UNSEEN_SECONDS: Final = 60.0
"""How long a request may take to come."""
MAX_SECONDS: Final = 900.0
"""How long one is watched at most."""
_ending: set[asyncio.Task[None]] = set()


async def journey_events(
    engine: "AsyncLLM", request_id: str, text_of: Callable[[int], str]
) -> AsyncGenerator[bytes, None]:
    """``begun`` when the engines watch, ``records`` as they come, and ``end`` with why.

    Args:
        engine: The front end of the engines.
        request_id: The request's, as its answer will have it.
        text_of: The text of a token by itself.
    """
    ranks = [health.rank for health in engine.health() if health.death is None]
    watching: list[int] = []
    try:
        for rank in ranks:
            await _ask(engine, rank, "begin", request_id)
            watching.append(rank)
        yield _event("begun", {"ranks": watching})
        reason = "unseen"
        deadline = time.monotonic() + UNSEEN_SECONDS
        since, has_begun = 0, False
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            for rank in list(watching):
                try:
                    news = await _ask(engine, rank, "take", request_id, since=since if has_begun else 0)
                except QueryTimeoutError:  # a long step: what was missed is still there afterwards
                    continue
                if not news["records"]:
                    continue
                if not has_begun:
                    has_begun, reason, deadline = True, "too long", time.monotonic() + MAX_SECONDS
                    for other in [other for other in watching if other != rank]:
                        watching.remove(other)
                        await _end(engine, other, request_id)
                since = news["records"][-1]["index"] + 1
                for record in news["records"]:
                    if record["event"] == "token":
                        record["extras"]["text"] = text_of(record["extras"]["token_id"])
                yield _event("records", {"rank": rank, **news})
                if news["is_finished"]:
                    yield _event("end", {"reason": "finished"})
                    return
        yield _event("end", {"reason": reason})
    except RustVLLMError as error:
        yield _event("end", {"reason": str(error)})
    finally:
        for rank in watching:
            # Not awaited: the reader may be gone, and what it awaits is cancelled then.
            task = asyncio.create_task(_end(engine, rank, request_id))
            _ending.add(task)
            task.add_done_callback(_ending.discard)


async def _ask(engine: "AsyncLLM", rank: int, do: str, request_id: str, **more: int) -> dict[str, Any]:
    question = json.dumps({"do": do, "request_id": request_id, **more}).encode()
    answer: dict[str, Any] = json.loads(await engine.query("journey", question, rank=rank, seconds=QUERY_SECONDS))
    return answer


async def _end(engine: "AsyncLLM", rank: int, request_id: str) -> None:
    with contextlib.suppress(RustVLLMError):  # the engine has gone, or ends the watch by itself soon
        await _ask(engine, rank, "end", request_id)


def _event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(value) + b"\n\n"
