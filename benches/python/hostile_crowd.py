"""Measures what a crowd of hostile clients does to one that behaves: 200 connections at once, each with another fault.

The crowd sends bodies that are slow, cut off, empty, of the wrong length, compressed, nested, huge or no text at all,
and heads that are ambiguous or endless. Meanwhile 4 streams are read and ``/health`` is asked. The report has the
statuses of each kind of request, the gaps between the events of the streams before, during and after, and the open
files and memory of the server's processes before the crowd came and after it had gone.

    python benches/python/hostile_crowd.py --connections 200 --crowds 2
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import subprocess
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bench_report import add_common_flags, add_server_flag, new_report, parse, publish
from measured_server import MeasuredServer, rustvllm_server
from neighbours import SETTLE_SECONDS, Neighbours

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
STREAMS = 4
CONNECTIONS = 200
ANSWER_SECONDS = 120.0
"""How long a client waits before it says that the server hangs."""
PAUSE_SECONDS, NUM_DRIPS = 1.0, 4
"""Between two bytes of a slow body, and how many of them come before the rest."""
USER = {"role": "user", "content": "x"}
GOOD = {"prompt": "Once", "max_tokens": 2}

Pieces = Iterator[bytes | float | None]
"""What a client sends: bytes, seconds that it waits, and None: it closes its sending half."""


def head(size: int | None, *lines: str, path: str = COMPLETIONS, method: str = "POST") -> bytes:
    """The head of a request whose body has so many bytes, which is the connection's last."""
    length = () if size is None else (f"Content-Length: {size}",)
    kind = ("Host: localhost", "Connection: close", "Content-Type: application/json")
    return "\r\n".join([f"{method} {path} HTTP/1.1", *kind, *length, *lines, "", ""]).encode()


def whole(body: bytes, *lines: str, path: str = COMPLETIONS) -> Pieces:
    """An ordinary request."""
    yield head(len(body), *lines, path=path)
    yield body


def text(body: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(body, separators=(",", ":")).encode()


def slow() -> Pieces:
    """A good body, of which the first bytes come one by one."""
    body = text(GOOD)
    yield head(len(body))
    for byte in body[:NUM_DRIPS]:
        yield bytes([byte])
        yield PAUSE_SECONDS
    yield body[NUM_DRIPS:]


def slow_head() -> Pieces:
    """A good head, of which the first bytes come one by one."""
    request = head(len(text(GOOD))) + text(GOOD)
    for byte in request[:NUM_DRIPS]:
        yield bytes([byte])
        yield PAUSE_SECONDS
    yield request[NUM_DRIPS:]


def cut_off() -> Pieces:
    """Half of what was promised; then the client has closed its half."""
    yield head(1000)
    yield b'{"prompt": "On'
    yield PAUSE_SECONDS
    yield None


def too_long() -> Pieces:
    """More than was promised."""
    yield head(len(text(GOOD)) - 1)
    yield text(GOOD)


def endless_chunks() -> Pieces:
    """Chunks without a last one."""
    yield head(None, "Transfer-Encoding: chunked")
    for _ in range(50):
        yield b"1\r\n \r\n"
    yield PAUSE_SECONDS
    yield None


def two_encodings() -> Pieces:
    """Two headers of which a proxy may read another one than the server."""
    yield head(None, "Transfer-Encoding: chunked", "Transfer-Encoding: identity")
    yield b"2\r\n{}\r\n0\r\n\r\n"


def pipelined() -> Pieces:
    """Several requests before the first is answered."""
    body = text(GOOD)
    request = head(len(body)).replace(b"Connection: close\r\n", b"") + body
    yield request * 4 + head(None, method="GET", path="/health")


def header_flood() -> Pieces:
    """More headers than a head may have."""
    yield head(0)[:-2] + b"".join(b"x%d: y\r\n" % number for number in range(20_000)) + b"\r\n"


@cache
def _large(name: str) -> bytes:
    made: dict[str, Callable[[], Any]] = {
        "stop": lambda: {**GOOD, "stop": [f"s{number}" for number in range(10**6)]},
        "stop, short": lambda: {**GOOD, "stop": ["s"] * 10**6},
        "messages": lambda: {"messages": [USER] * 10**5, "max_tokens": 1},
        "logit_bias": lambda: {**GOOD, "logit_bias": {str(number): 1 for number in range(400_000)}},
    }
    return text(made[name]())


def image(data: str) -> bytes:
    """A chat with an image at this address."""
    part = {"type": "image_url", "image_url": {"url": data}}
    return text({"messages": [{**USER, "content": [part]}], "max_tokens": 1})


BRACKETS = b"[" * 10**5
CASES: dict[str, Callable[[], Pieces]] = {
    "good": lambda: whole(text(GOOD)),
    "slow body": slow,
    "slow head": slow_head,
    "cut off": cut_off,
    "no body": lambda: whole(b""),
    "body longer than its length": too_long,
    "chunks without end": endless_chunks,
    "two transfer encodings": two_encodings,
    "pipelined": pipelined,
    "header flood": header_flood,
    "gzip": lambda: whole(gzip.compress(text(GOOD)), "Content-Encoding: gzip"),
    "gzip, not said": lambda: whole(gzip.compress(text(GOOD))),
    "duplicate keys": lambda: whole(b'{"prompt":"a","prompt":["b"],"max_tokens":1,"max_tokens":2}'),
    "brackets": lambda: whole(BRACKETS),
    "brackets in a field": lambda: whole(b'{"prompt":"a","metadata":' + BRACKETS + b"]" * 10**5 + b"}"),
    "objects in a field": lambda: whole(b'{"prompt":"a","metadata":' + b'{"a":' * 10**5 + b"1" + b"}" * (10**5 + 1)),
    "huge integer": lambda: whole(b'{"prompt":"a","max_tokens":1' + b"0" * 10**5 + b"}"),
    "huge number": lambda: whole(b'{"prompt":"a","temperature":1e999999}'),
    "huge seed": lambda: whole(text({**GOOD, "seed": -(10**400)})),
    "not a number": lambda: whole(b'{"prompt":"a","temperature":NaN}'),
    "invalid UTF-8": lambda: whole(b'{"prompt":"\xff\xfe\xed\xa0\x80"}'),
    "half a surrogate": lambda: whole(b'{"prompt":"\\ud800 a","max_tokens":1}'),
    "NUL bytes": lambda: whole(b"\x00" * 10**5),
    "NUL in a text": lambda: whole(text({**GOOD, "prompt": "a\x00b", "stop": "\x00"})),
    "a million stop strings": lambda: whole(_large("stop")),
    "a million short stop strings": lambda: whole(_large("stop, short")),
    "many messages": lambda: whole(_large("messages"), path=CHAT),
    "many messages, Anthropic": lambda: whole(_large("messages"), path=MESSAGES),
    "huge logit_bias": lambda: whole(_large("logit_bias")),
    "image without base64": lambda: whole(image("data:image/png;base64,!!!!"), path=CHAT),
    "image of three zero bytes": lambda: whole(image("data:image/png;base64,AAAA"), path=CHAT),
}
"""What the clients of a crowd send, by name; each connection sends one of them."""


@dataclass
class Crowd:
    """What became of the requests.

    Attributes:
        statuses: How often each kind got each status; ``closed``: the connection ended without an answer.
        hung: Kinds that got no end within ``ANSWER_SECONDS``.
        failed: The first answers with a status of 500 or more.
        seconds: The longest time from the connection to its end, by kind.
    """

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, said: bytes, seconds: float) -> None:
        """Take in all that a connection was answered."""
        found = [part[:3].decode(errors="replace") for part in said.split(b"HTTP/1.1 ")[1:]] or ["closed"]
        self.statuses.setdefault(name, Counter()).update(found)
        self.seconds[name] = max(self.seconds.get(name, 0.0), round(seconds, 2))
        if any(status >= "500" for status in found if status != "closed"):
            self.failed.append(f"{name}: {said[:500].decode(errors='replace')}")


async def come(url: str, num_connections: int, names: list[str] | None = None) -> Crowd:
    """Open so many connections at once, send over each one what a kind of request is, and read to the end.

    Args:
        url: The server's.
        num_connections: Of all kinds in turn.
        names: Of ``CASES``; None: all.
    """
    parts = urllib.parse.urlsplit(url)
    chosen = list(CASES) if names is None else names
    crowd = Crowd()
    for name in chosen:
        next(CASES[name]())  # what is large is made before the first connection

    async def one(name: str) -> None:
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                said = await exchange(parts.hostname or "", parts.port or 80, CASES[name]())
        except TimeoutError:
            crowd.hung.append(name)
        else:
            crowd.note(name, said, time.perf_counter() - begin)

    await asyncio.gather(*(one(chosen[index % len(chosen)]) for index in range(num_connections)))
    return crowd


async def exchange(host: str, port: int, pieces: Pieces) -> bytes:
    """Send over a new connection, and return all that is said until it ends."""
    async with connection(host, port) as (reader, writer):
        reading = asyncio.create_task(_read_all(reader))
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                if piece is None:
                    writer.write_eof()
                elif isinstance(piece, float):
                    await asyncio.sleep(piece)
                else:
                    writer.write(piece)
                    await writer.drain()
        return await reading


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            said += piece
    return said


@contextlib.asynccontextmanager
async def connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed at the end, whatever its state."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def come_from_afar(url: str, num_connections: int, names: list[str] | None = None) -> Crowd:
    """The same in a process of its own: what it computes delays no measurement here."""
    command = [sys.executable, __file__, "--url", url, "--connections", str(num_connections)]
    command += [] if names is None else ["--cases", *names]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    statuses = {name: Counter(counts) for name, counts in found.pop("statuses").items()}
    return Crowd(statuses=statuses, **found)


def open_files(pids: list[int]) -> int:
    """File descriptors of all these processes; one that has ended has none."""
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            count += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return count


def state(server: MeasuredServer) -> dict[str, Any]:
    """What the server's processes hold."""
    held = server.resident_bytes()
    return {
        "open_files": open_files(server.pids()),
        "memory_mb": {name: round(held[name] / 1e6) for name in sorted(held)},
    }


def main() -> None:
    """Send crowds one after another, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", help="send one crowd to this server, measure nothing, and print what became of it")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--crowds", type=int, default=3, help="how many come one after another")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), metavar="CASE")
    add_common_flags(parser)
    add_server_flag(parser)
    args = parse(parser)
    if args.url is not None:
        print(json.dumps(vars(asyncio.run(come(args.url, args.connections, args.cases)))))
        return
    rows = []
    with (
        rustvllm_server(args.serve, args.mode, command=args.server) as server,
        Neighbours(server.url, STREAMS) as neighbours,
    ):
        for _ in range(args.crowds):
            neighbours.take()
            time.sleep(SETTLE_SECONDS)
            before = {**neighbours.take(), **state(server)}
            crowd = come_from_afar(server.url, args.connections, args.cases)
            during = neighbours.take()
            time.sleep(SETTLE_SECONDS)
            after = {**neighbours.take(), **state(server)}
            rows.append({
                "statuses": {name: dict(found) for name, found in sorted(crowd.statuses.items())},
                "seconds": crowd.seconds,
                "hung": crowd.hung,
                "failed": crowd.failed[:5],
                "before": before,
                "during": during,
                "after": after,
            })  # fmt: skip
    report = {**new_report(), "connections": args.connections, "streams": STREAMS, "crowds": rows}
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
