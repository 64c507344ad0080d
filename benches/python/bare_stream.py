"""Measures the lowest cost of a streaming server in Python: FastAPI on uvicorn, ready bytes as events, no engine.

Events follow each other at once, or, with ``--step-time``, the events of all streams come together, as an engine's do.
``serving_cost.py`` compares rustvllm with this server. It prints what ``rustvllm serve`` prints when it is ready.
"""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

CHUNK = {
    "id": "cmpl-51926a1c8a7c3ece68fdf3d53380bca5",
    "object": "text_completion",
    "created": 1795281036,
    "model": "bare",
    "system_fingerprint": "rustvllm-0.1.0",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}],
    "usage": None,
}
EVENT = b"data: " + json.dumps(CHUNK, separators=(",", ":")).encode() + b"\n\n"

app = FastAPI()


class Steps:
    """Says when the next event of every stream is due."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waiting: list[asyncio.Future[None]] = []
        self._clock: asyncio.Task[None] | None = None

    async def next(self) -> None:
        """Wait for the next step; without a step time, give the other streams a turn."""
        if not self.seconds:
            await asyncio.sleep(0)
            return
        if self._clock is None:
            self._clock = asyncio.create_task(self._run())
        due = asyncio.get_running_loop().create_future()
        self._waiting.append(due)
        await due

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.seconds)
            waiting, self._waiting = self._waiting, []
            for due in waiting:
                if not due.done():  # else its client has gone
                    due.set_result(None)


steps = Steps()


@app.get("/v1/models")
async def models() -> dict[str, Any]:
    """List one model."""
    return {"object": "list", "data": [{"id": "bare", "object": "model"}]}


@app.post("/v1/completions")
async def completions(request: Request) -> StreamingResponse:
    """Stream as many events as tokens were asked for, one in each step."""
    count = (await request.json())["max_tokens"]

    async def events() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield EVENT
            await steps.next()
        usage = {"choices": [], "usage": {"prompt_tokens": 32, "completion_tokens": count}}
        yield b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--step-time", type=float, default=0.0, help="milliseconds")
    steps.seconds = parser.parse_args().step_time / 1000
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}, ready, serving bare", flush=True)
        config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
