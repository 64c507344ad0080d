"""More connections than descriptors: each request gets an answer, and the server goes on."""

import asyncio
import json
import signal
import socket
import sys
import time
from collections import Counter

import httpx
import psutil
import pytest
from server_process import REAL, ServerProcess
from test_faults import SLOW, complete, wait_until_idle

LIMITED = """
import os, resource, sys
soft, hard = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
os.execv(sys.argv[3], sys.argv[3:])
"""
HARD = 160
"""Room for some ninety connections."""
NUM_CLIENTS = 300
STREAM = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()


def limited(command: list[str], soft: int, hard: int) -> list[str]:
    return [sys.executable, "-c", LIMITED, str(soft), str(hard), *command]


def address_of(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    return parsed.host, parsed.port


async def stream_once(address: tuple[str, int]) -> bytes:
    """Everything that a server says to one streaming request."""
    reader, writer = await asyncio.open_connection(*address)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(STREAM)}\r\n\r\n"
    writer.write(head.encode() + STREAM)
    try:
        return await reader.read(-1)
    except ConnectionError:
        return b"<broken>"
    finally:
        writer.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A server that may have few files open, with its URL."""
    directory = tmp_path_factory.mktemp("tmp")
    with ServerProcess(limited(SLOW, 64, HARD), TMPDIR=str(directory)) as server:
        url = server.wait_until_ready()
        yield server, url
        assert server.end(signal.SIGTERM)[0] == 0
        server.assert_nothing_left(1)


def test_the_limit_is_raised_to_what_the_user_may_have_and_a_small_one_is_told(full):
    server, _ = full
    for process in (psutil.Process(server.process.pid), *server.children()):
        assert process.rlimit(psutil.RLIMIT_NOFILE) == (HARD, HARD)
    (line,) = [line for line in server.lines if "RLIMIT_NOFILE" in line]
    assert f"may have {HARD} files open" in line
    assert "enough for about 88 connections, but the engines take 128 requests at once" in line
    assert "LimitNOFILE" in line


def test_every_one_of_too_many_streams_gets_a_status_and_probes_are_answered(full):
    server, url = full

    async def all_at_once() -> tuple[list[bytes], list[int], list[int]]:
        streams = [asyncio.create_task(stream_once(address_of(url))) for _ in range(NUM_CLIENTS)]
        probes: list[int] = []
        num_open: list[int] = []
        async with httpx.AsyncClient(timeout=30) as client:
            for path in ("/health", "/metrics", "/health"):
                await asyncio.sleep(0.3)
                probes.append((await client.get(url + path, headers={"connection": "close"})).status_code)
                num_open.append(sum(not stream.done() for stream in streams))
        return await asyncio.wait_for(asyncio.gather(*streams), 90), probes, num_open

    answers, probes, num_open = asyncio.run(all_at_once())
    statuses = Counter(answer[9:12] for answer in answers)
    assert set(statuses) == {b"200", b"503"}, statuses
    assert statuses[b"200"] >= 60
    assert statuses[b"503"] >= 60
    assert probes == [200, 200, 200]
    assert num_open[0] >= 60, "the server was not full when it was asked"
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        if answer[9:12] == b"200":
            assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), body[-200:]
            continue
        assert b"\r\nretry-after: 1\r\n" in head.lower() + b"\r\n"
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
        assert f"may have {HARD} files open (RLIMIT_NOFILE)" in error["message"]
        assert "LimitNOFILE" in error["message"]
    wait_until_idle(url)
    assert complete(url).status_code == 200
    assert "Traceback" not in server.output


def test_connections_that_say_nothing_cost_no_processor_time_and_make_room_in_the_end(full):
    server, url = full
    (api,) = server.apis()
    silent = [socket.create_connection(address_of(url), 10) for _ in range(HARD - 20)]
    try:
        time.sleep(0.5)
        taken = api.num_fds()
        assert taken > HARD - 24, "there was room left"
        assert taken < HARD, "open files other than connections need some"
        before = sum(api.cpu_times()[:2])
        time.sleep(2)
        assert sum(api.cpu_times()[:2]) - before < 1
        # Those that there is no room for are closed when they ask nothing, and this one gets its turn.
        answer = httpx.get(f"{url}/health", timeout=60)
        assert answer.status_code == 200
    finally:
        for connection in silent:
            connection.close()
    wait_until_idle(url, 30)
    assert complete(url).status_code == 200


def test_too_few_to_serve_with_are_refused_at_the_start(tmp_path):
    with ServerProcess(limited([*REAL, "--port", "0"], 40, 40), TMPDIR=str(tmp_path)) as server:
        assert server.process.wait(60) == 1
        server.assert_nothing_left(1)
    assert "may have 40 files open (RLIMIT_NOFILE), and a server needs 64 or more" in server.output
    assert "Traceback" not in server.output
