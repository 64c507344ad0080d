"""One server as it is operated: HTTPS, two API processes, a key, flags from a file, JSON in the log."""

import contextlib
import json
import signal
import socket
import ssl
import threading
import time

import httpx
import pytest
from certificates import make_certificate
from server_process import FAKE, REAL, ServerProcess

KEY = "sk-a-key-that-no-log-may-hold"
COMPLETIONS = "/v1/completions"
CONFIG = """
executor: sim
sim_step_time: 20
port: 0
api-server-count: 7  # the command line says 2
enable_access_log: true
enable-request-id-headers: true
enable-log-requests: true
allowed-origins: [https://page.example]
disable-access-log-for-endpoints: /ping
h11-max-incomplete-event-size: 4096
ssl-certfile: {certfile}
ssl-keyfile: {keyfile}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("operated")
    certificate = make_certificate(directory, "server")
    config = directory / "serve.yaml"
    config.write_text(CONFIG.format(certfile=certificate.certfile, keyfile=certificate.keyfile), encoding="utf-8")
    command = [*REAL, "--config", str(config), "--api-server-count", "2", "--log-format", "json"]
    with ServerProcess(command, RUSTVLLM_API_KEY=KEY) as process:
        process.certificate = certificate
        process.wait_until_ready()
        yield process
        code, _ = process.end(signal.SIGTERM)
        process._reader.join(10)
        assert code == 0, process.output
        # All that was ever printed: objects, one per line, without the key.
        lines = [json.loads(line) for line in process.lines]
        assert all({"time", "level", "logger", "process", "message"} <= set(line) for line in lines)
        assert KEY not in process.output


@pytest.fixture(scope="module")
def context(server):
    return ssl.create_default_context(cafile=server.certificate.certfile)


def client(server, context, key: str | None = KEY) -> httpx.Client:
    """A client with a connection of its own for each request, so that either process may take it."""
    headers = {"Connection": "close"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    return httpx.Client(base_url=server.url, verify=context, headers=headers, timeout=60)


def test_it_is_reached_by_https_alone(server, context):
    assert server.url.startswith("https://127.0.0.1:")
    with client(server, context, key=None) as plain:
        assert plain.get("/health").json() == {"status": "ok"}
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{server.url}/health", timeout=60)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url.replace('https', 'http')}/health", timeout=60)


def test_a_key_is_asked_for_and_a_preflight_needs_none(server, context):
    page = {"Origin": "https://page.example"}
    with client(server, context, key=None) as plain:
        refused = plain.get("/v1/models", headers=page)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        preflight = plain.options("/v1/models", headers={**page, "Access-Control-Request-Method": "GET"})
        assert preflight.status_code == 200
    with client(server, context) as keyed:
        assert keyed.get("/v1/models").status_code == 200


def test_a_stream_has_its_id_and_every_line_of_the_log_too(server, context):
    body = {"prompt": "Once", "max_tokens": 3, "stream": True}
    headers = {"X-Request-Id": "followed", "Origin": "https://page.example"}
    with client(server, context) as keyed:
        answer = keyed.post(COMPLETIONS, json=body, headers=headers)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"id":"cmpl-followed"' in answer.text
    assert answer.headers["x-request-id"] == "followed"
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    server.wait_for('"request_id": "followed"')
    (access,) = [json.loads(line) for line in server.lines if '"request_id": "followed"' in line]
    assert (access["logger"], access["status"], access["path"]) == ("rustvllm.access", 200, COMPLETIONS)
    assert access["milliseconds"] >= 20
    assert any("received request cmpl-followed: prompts of" in line for line in server.lines)
    assert '"path": "/ping"' not in server.output


def test_a_large_head_is_refused(server, context):
    with client(server, context) as keyed:
        refused = keyed.get("/v1/models", headers={"X-Large": "x" * 5000})
        assert refused.status_code == 431
        assert "more than 4096 bytes (--h11-max-incomplete-event-size)" in refused.json()["error"]["message"]
        assert keyed.get("/v1/models", headers={"X-Large": "x" * 3000}).status_code == 200


def test_a_silent_connection_keeps_no_other_waiting(server, context):
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)), client(server, context) as keyed:
        assert keyed.get("/v1/models").status_code == 200


def test_the_load_is_that_of_all_api_processes(server, context):
    """Also when one of them is killed, with what it had open. The last test: another process is loading afterwards."""
    first, second = server.apis()
    stop = threading.Event()
    opened = threading.Semaphore(0)
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}

    def load() -> int:
        while True:
            with client(server, context) as keyed:
                answer = keyed.get("/load")
            if answer.status_code == 200:
                return answer.json()["server_load"]
            assert answer.json()["error"]["message"] == "The model is still loading."

    def stream() -> None:
        with (
            contextlib.suppress(httpx.TransportError),
            client(server, context) as keyed,
            keyed.stream("POST", COMPLETIONS, json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            opened.release()
            for _ in lines:
                if stop.is_set():
                    break

    def wait_until(condition, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, load()
            time.sleep(0.02)

    streams = [threading.Thread(target=stream) for _ in range(12)]
    for thread in streams:
        thread.start()
    for _ in streams:
        assert opened.acquire(timeout=60)
    assert [load() for _ in range(6)] == [12] * 6  # whichever process is asked
    first.kill()
    wait_until(lambda: load() == sum(1 for link in second.net_connections() if link.status == "ESTABLISHED"))
    stop.set()
    for thread in streams:
        thread.join(60)
    wait_until(lambda: load() == 0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--middleware", "no_such_module.Name"], "--middleware no_such_module.Name cannot be imported"),
        (["--ssl-certfile", "/nowhere/c.pem"], "cannot read --ssl-certfile /nowhere/c.pem: No such file"),
    ],
)
def test_what_only_a_start_can_find_ends_it_with_one_message(flags, says):
    with ServerProcess([*REAL, "--executor", "sim", "--port", "0", *flags]) as process:
        assert process.process.wait(60) in (1, 2)
        process._reader.join(10)
    assert process.output.count("error:") == 1
    assert says in process.output
    assert "Traceback" not in process.output


def test_an_open_address_without_a_key_is_warned_of():
    with ServerProcess([*FAKE, "--host", "0.0.0.0", "--port", "0"]) as process:
        process.wait_until_ready()
        assert "listening on 0.0.0.0 without a key" in process.output
        process.end(signal.SIGTERM)
