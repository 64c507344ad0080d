"""The way in of one request: the Python files of this package that run before the engine's core has it.

One process serves the simulated model over a socket. A first request brings what is made once; the second is traced,
from the first byte that its connection reads to the call that hands it to the core.
``tests/server/test_request_path.py`` holds the number of files.

Usage: ``python scripts/request_path.py [--endpoint chat|completions] [--stream]``
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.server import ServerState as HttpState

import rustvllm
from rustvllm.cli.serve import parse_args
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.engine.async_llm import AsyncLLM
from rustvllm.server.app import build_app
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.http.limited_protocol import limited_protocol
from rustvllm.server.state import ServerState

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
    "completions": ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
}
ROOT = Path(rustvllm.__file__).parent
HAND_OVER = "add_request"
"""What the core's handle of an engine calls the taking of a request."""


@dataclass
class RequestPath:
    """What ran between the socket and the core.

    Attributes:
        files: Of this package, in the order in which each was first entered.
        checks: Each call of a function whose name begins with ``check`` or ``_check``: its name, and the field that it
            was given to check.
        is_whole: The core was reached.
    """

    files: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    is_whole: bool = False

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Follow one call or return of this thread (see :func:`sys.setprofile`)."""
        if event == "c_call":
            owner = type(getattr(argument, "__self__", None))
            if argument.__name__ == HAND_OVER and owner.__name__ == "EngineHandle":
                self.is_whole = True
                sys.setprofile(None)
            return
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)):
            return
        name = Path(code.co_filename).relative_to(ROOT).as_posix()
        if name not in self.files:
            self.files.append(name)
        if code.co_name.lstrip("_").startswith("check"):
            told = [frame.f_locals[each] for each in code.co_varnames[: code.co_argcount]]
            fields = [value for value in told if isinstance(value, str)][:1]
            self.checks.append(f"{name}:{code.co_name}({', '.join(fields)})")


async def trace(endpoint: str = "chat", *, stream: bool = False) -> RequestPath:
    """Serve two requests and follow the second.

    Args:
        endpoint: Of :data:`BODIES`.
        stream: Ask for the answer as a stream.
    """
    args = parse_args(["--executor", "sim", "--sim-step-time", "0"])
    settings = ServerSettings.from_args(args)
    engine = AsyncLLM(AsyncEngineArgs.from_cli_args(args).create_engine_config(), multiprocess=False)
    state = ServerState(settings)
    try:
        state.set_ready(engine)
        protocol = limited_protocol(settings.http.max_head_bytes, settings.http.max_header_count)
        config = uvicorn.Config(build_app(state), http=protocol, ws="none", lifespan="off", log_config=None)
        config.load()
        http_state = HttpState()
        server = await asyncio.get_running_loop().create_server(
            lambda: protocol(config=config, server_state=http_state, app_state={}), "127.0.0.1", 0
        )
        path, body = BODIES[endpoint]
        found = RequestPath()
        async with server:
            port = server.sockets[0].getsockname()[1]
            await _ask(port, path, body | {"stream": stream})
            sys.setprofile(found.note)
            try:
                await _ask(port, path, body | {"stream": stream})
            finally:
                sys.setprofile(None)
    finally:
        engine.shutdown()
        state.close()
    return found


async def _ask(port: int, path: str, body: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the request was not answered: {answer[:300]!r}")


def main() -> None:
    """Print the files, and each check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", choices=sorted(BODIES), default="chat")
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    found = asyncio.run(trace(args.endpoint, stream=args.stream))
    for number, name in enumerate(found.files, 1):
        print(f"{number:3} {name}")
    for check in sorted(set(found.checks)):
        print(f"{found.checks.count(check):3} x {check}")
    if not found.is_whole:
        raise SystemExit("the request never reached the core")


if __name__ == "__main__":
    main()
