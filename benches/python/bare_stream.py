"""The least that a streaming server in Python costs: FastAPI on uvicorn, events that are ready bytes, no engine.

``serving_cost.py --bare`` measures it beside rustvllm. Prints what ``rustvllm serve`` prints when it is ready.
"""

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


@app.get("/v1/models")
async def models() -> dict[str, Any]:
    """One model."""
    return {"object": "list", "data": [{"id": "bare", "object": "model"}]}


@app.post("/v1/completions")
async def completions(request: Request) -> StreamingResponse:
    """As many events as tokens were asked for; after each, everybody else has a turn."""
    count = (await request.json())["max_tokens"]

    async def events() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield EVENT
            await asyncio.sleep(0)
        usage = {"choices": [], "usage": {"prompt_tokens": 32, "completion_tokens": count}}
        yield b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def main() -> None:
    """Serve until a signal."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}, ready, serving bare", flush=True)
        config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
