"""Clients that are cut at random moments: while they send, while they wait, while the answer comes."""

import asyncio
import json
import os
import random
import signal
import socket
import struct
import time

import httpx
import psutil
import pytest
from server_process import REAL, ServerProcess

COMMAND = [*REAL, "--executor", "sim", "--port", "0", "--sim-step-time", "1", "-asc", "2"]
MANY = int(os.environ.get("RUSTVLLM_TEST_CUT_CLIENTS", "2000"))
"""Of the long run."""
AT_ONCE = 64
WARM_UP = 200
MOST_GROWTH = 20 << 20
RESET = struct.pack("ii", 1, 0)


def request_of(choice: random.Random) -> bytes:
    prompt = [choice.randrange(500) for _ in range(choice.randrange(1, 60))]
    body = json.dumps(
        {
            "prompt": [prompt] * choice.randrange(1, 3),
            "n": choice.randrange(1, 3),
            "max_tokens": choice.randrange(1, 100),
            "ignore_eos": True,
            "stream": choice.random() < 0.7,
        }
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def be_cut(host: str, port: int, choice: random.Random) -> bool:
    """One client; whether any answer had begun to come before it was cut."""
    reader, writer = await asyncio.open_connection(host, port)
    request, answered = request_of(choice), False
    if choice.random() < 0.1:
        writer.write(request[: choice.randrange(len(request))])
        await asyncio.sleep(choice.random() * 0.01)
    else:
        writer.write(request)
        try:  # half are cut at a point in time, half at a point of the answer
            async with asyncio.timeout(choice.choice([choice.random() * 0.3, 30])):
                for _ in range(choice.randrange(1, 8)):
                    answered |= (await reader.read(4096)).startswith(b"HTTP/1.1 200")
        except TimeoutError:
            pass
    if choice.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
    return answered


async def be_cut_often(url: httpx.URL, count: int, seed: int) -> int:
    """That many clients, ``AT_ONCE`` at a time; how many were answering when they were cut."""
    left = iter(range(count))
    answered = 0

    async def one_after_the_other() -> None:
        nonlocal answered
        for index in left:
            was_answered = await be_cut(url.host, url.port, random.Random(f"{seed} {index}"))
            answered += was_answered

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    return answered


def assert_idle(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        load = httpx.get(f"{url}/load", timeout=30).json()
        idle = load["num_running"] == load["num_waiting"] == load["num_queued"] == 0 and load["kv_cache_usage"] == 0
        if idle and load["server_load"] == 0:
            return
        assert time.monotonic() < deadline, load
        time.sleep(0.05)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [300, pytest.param(MANY, marks=pytest.mark.slow)])
def test_cut_clients_leave_nothing_behind(empty_tmpdir, count):
    with ServerProcess(COMMAND, TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        processes = [psutil.Process(server.process.pid), *server.children()]
        assert asyncio.run(be_cut_often(httpx.URL(url), WARM_UP, seed=0)) > 0
        assert_idle(url)
        before = [process.memory_info().rss for process in processes]
        answered = asyncio.run(be_cut_often(httpx.URL(url), count, seed=1))
        assert count * 0.2 < answered < count
        assert_idle(url)
        growth = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
        assert max(growth) < MOST_GROWTH, [round(each / 2**20, 1) for each in growth]
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Once", "max_tokens": 3}, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.end(signal.SIGTERM)[0] == 0
        server.assert_nothing_left()
    assert "Traceback" not in server.output
