"""A server that is asked for more than it can do: refusals with advice, requests that waited too long, slow readers."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from server_process import REAL, ServerProcess

PATIENCE = 60.0
SLOW = ["--sim-step-time", "100"]
"""A stream of 450 tokens takes longer than a test waits for anything."""
BODIES = {
    "/v1/completions": {"prompt": [5] * 20},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two three"}]},
}


def serve(*flags, in_process):
    # One request at a time, and each takes as long as it likes.
    layout = ["--disable-frontend-multiprocessing"] if in_process else []
    return ServerProcess([*REAL, "--executor", "sim", "--port", "0", "--max-num-seqs", "1", *layout, *flags])


@pytest.fixture(params=[True, False], ids=["one process", "engine apart"], scope="module")
def in_process(request):
    """Where the engine runs: in the API's process a refusal comes at once, from another as the first output."""
    return request.param


def wait_for_load(url, **expected):
    deadline = time.monotonic() + PATIENCE
    while True:
        load = httpx.get(f"{url}/load", timeout=PATIENCE).json()
        if all(load[name] == value for name, value in expected.items()):
            return
        assert time.monotonic() < deadline, (load, expected)
        time.sleep(0.02)


class Streams:
    """Streams that are opened and not read; they end with the context."""

    def __init__(self, url):
        self._address = urlsplit(url)
        self._stack = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._stack.close()

    def open(self, num_prompt_tokens=20, max_tokens=450, receive_buffer=None):
        connection = self._stack.enter_context(socket.socket())
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect((self._address.hostname, self._address.port))
        body = json.dumps(
            {"prompt": [5] * num_prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        return connection


def post(url, path, **fields):
    return httpx.post(f"{url}{path}", json={**BODIES[path], "max_tokens": 5, **fields}, timeout=PATIENCE)


def assert_refused(answer, words):
    assert answer.status_code == 503, answer.text
    error = answer.json()["error"]
    assert error["type"] == "ServiceUnavailableError"
    assert error["code"] == 503
    assert words in error["message"]
    assert 1 <= int(answer.headers["Retry-After"]) <= 60


def test_a_full_queue_answers_503_and_when_to_come_back(in_process):
    with serve(*SLOW, "--max-num-queued-reqs", "2", in_process=in_process) as server:
        url = server.wait_until_ready()
        with Streams(url) as streams:
            streams.open()
            wait_for_load(url, num_running=1)
            for waiting in (1, 2):
                streams.open()
                wait_for_load(url, num_running=1, num_waiting=waiting)
            for path in BODIES:
                for stream in (False, True):
                    answer = post(url, path, stream=stream)
                    assert_refused(answer, "2 requests are waiting, 1 more would exceed max_num_queued_reqs = 2")
        wait_for_load(url, num_running=0, num_waiting=0)
        for path in BODIES:
            assert post(url, path).status_code == 200, "there is room again"


def test_tokens_that_wait_are_limited_too(in_process):
    with serve(*SLOW, "--max-num-queued-tokens", "100", in_process=in_process) as server:
        url = server.wait_until_ready()
        with Streams(url) as streams:
            streams.open()
            wait_for_load(url, num_running=1)
            streams.open(num_prompt_tokens=90)
            wait_for_load(url, num_running=1, num_waiting=1)
            for stream in (False, True):
                answer = post(url, "/v1/completions", stream=stream)
                assert_refused(answer, "90 prompt tokens are waiting, 20 more would exceed max_num_queued_tokens = 100")
            streams.open(num_prompt_tokens=10)
            wait_for_load(url, num_running=1, num_waiting=2)
        wait_for_load(url, num_running=0, num_waiting=0)
        assert post(url, "/v1/completions", prompt=[5] * 300).status_code == 200, "alone, a longer one is taken"


def test_who_waits_too_long_is_told_so(in_process):
    with serve(*SLOW, "--queue-timeout", "0.2", in_process=in_process) as server:
        url = server.wait_until_ready()
        with Streams(url) as streams, ThreadPoolExecutor(4) as pool:
            streams.open()
            wait_for_load(url, num_running=1)
            began = time.monotonic()
            answers = list(
                pool.map(lambda path_and_stream: post(url, path_and_stream[0], stream=path_and_stream[1]),
                         [(path, stream) for path in BODIES for stream in (False, True)])
            )  # fmt: skip
            assert time.monotonic() - began >= 0.2
            for answer in answers:
                assert_refused(answer, "the request waited longer than queue_timeout = 0.2 s and did not start")
            wait_for_load(url, num_running=1, num_waiting=0)
        wait_for_load(url, num_running=0)
        assert post(url, "/v1/completions").status_code == 200


def resident_bytes(server):
    """Memory of the server's processes together."""
    parent = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])


@pytest.mark.slow
def test_unread_streams_take_bounded_memory(in_process):
    flags = ["--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--num-gpu-blocks-override", "8000"]
    with serve(*flags, in_process=in_process) as server:
        url = server.wait_until_ready()
        assert post(url, "/v1/completions").status_code == 200
        num_streams, max_tokens = 200, 450
        before = resident_bytes(server)
        with Streams(url) as streams:
            for _ in range(num_streams):
                streams.open(max_tokens=max_tokens, receive_buffer=4096)
            # The engine does its work all the same, and ends: what was not read is kept until then.
            wait_for_load(url, num_finished=1 + num_streams, num_running=0, num_waiting=0)
            growth = resident_bytes(server) - before
            # A token is some 10 bytes of text, and of each stream the head of its events.
            assert growth < 50 * 2**20, f"{growth / 2**20:.0f} MiB for {num_streams} streams of {max_tokens} tokens"
            assert post(url, "/v1/completions").status_code == 200, "others are served"
        wait_for_load(url, num_running=0, num_waiting=0)
