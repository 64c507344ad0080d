"""The life of a server process: port, loading, signals, failures. The engine is the fake one."""

import resource
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_process import FAKE, REAL, STOP_SECONDS, ServerProcess

SIGNALS = [signal.SIGINT, signal.SIGTERM]
FOREVER = {"prompt": "a", "max_tokens": 900_000, "stream": True}


def processor_seconds() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("number", SIGNALS)
def test_an_idle_server_ends_with_code_0(number):
    with ServerProcess([*FAKE, "--port", "0"]) as server:
        url = server.wait_until_ready()
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        code, seconds = server.end(number)
        server.assert_nothing_left()
    assert code == 0, server.output
    assert seconds < STOP_SECONDS
    assert "Traceback" not in server.output
    assert f"curl {url}/v1/completions" in server.output


@pytest.mark.parametrize("number", SIGNALS)
def test_a_loading_server_answers_health_and_ends_with_code_0(number):
    with ServerProcess([*FAKE, "--port", "0"], FAKE_LOAD_SECONDS="60") as server:
        url = server.wait_for("listening on")
        response = httpx.get(f"{url}/health", timeout=10)
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        code, seconds = server.end(number)
        server.assert_nothing_left()
    assert code == 0, server.output
    assert seconds < STOP_SECONDS
    assert "Traceback" not in server.output


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("delay", [0, 0.2, 0.5])
def test_a_signal_at_any_moment_of_the_start_ends_it_with_code_0(number, delay):
    with ServerProcess([*FAKE, "--port", "0"], FAKE_LOAD_SECONDS="60") as server:
        server.wait_for("listening on")
        time.sleep(delay)
        code, seconds = server.end(number)
        server.assert_nothing_left()
    assert code == 0, server.output
    assert seconds < STOP_SECONDS
    assert "Traceback" not in server.output


@pytest.mark.parametrize("number", SIGNALS)
def test_open_streams_end_with_abort_when_the_server_stops(number):
    with ServerProcess([*FAKE, "--port", "0"], FAKE_STEP_SECONDS="0.01") as server:
        url = server.wait_until_ready()
        texts: list[str] = []

        def read() -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json=FOREVER, timeout=30) as response:
                texts.append(response.read().decode())

        readers = [threading.Thread(target=read) for _ in range(5)]
        for reader in readers:
            reader.start()
        while httpx.get(f"{url}/load").json()["num_running"] < 5:
            time.sleep(0.02)
        code, seconds = server.end(number)
        for reader in readers:
            reader.join(10)
        server.assert_nothing_left()
    assert code == 0, server.output
    assert seconds < STOP_SECONDS
    assert len(texts) == 5
    for text in texts:
        assert '"finish_reason":"abort"' in text
        assert text.endswith("data: [DONE]\n\n")
    assert "Traceback" not in server.output


def test_a_patient_server_lets_open_requests_finish_and_takes_no_new_ones():
    with ServerProcess([*FAKE, "--port", "0", "--shutdown-timeout", "10"], FAKE_STEP_SECONDS="0.02") as server:
        url = server.wait_until_ready()
        answers = []
        body = {"prompt": "a", "max_tokens": 50}
        open_request = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30))
        )
        open_request.start()
        while httpx.get(f"{url}/load").json()["num_running"] < 1:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping")
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
        open_request.join(20)
        assert server.process.wait(10) == 0
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"
    assert answers[0].json()["usage"]["completion_tokens"] == 50


def test_a_second_signal_ends_the_process_at_once():
    arguments = [*FAKE, "--port", "0", "--shutdown-timeout", "60"]
    with ServerProcess(arguments, FAKE_STEP_SECONDS="0.01") as server:
        url = server.wait_until_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json=FOREVER, timeout=30) as response:
            chunks = response.iter_bytes()  # dropping it would close the connection
            next(chunks)
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGINT)  # the echo of the first, as launchers send it
            time.sleep(1)
            assert server.process.poll() is None
            code, seconds = server.end(signal.SIGINT)
    assert code == -signal.SIGINT
    assert seconds < STOP_SECONDS


def test_an_engine_that_does_not_stop_is_left_behind():
    with ServerProcess([*FAKE, "--port", "0"], FAKE_STUCK_SHUTDOWN="1") as server:
        server.wait_until_ready()
        code, seconds = server.end(signal.SIGTERM)
        server.assert_nothing_left()
    assert code == 0, server.output
    assert seconds < STOP_SECONDS


def test_a_client_that_never_reads_does_not_keep_the_server():
    with ServerProcess([*FAKE, "--port", "0"]) as server:
        url = httpx.URL(server.wait_until_ready())
        with socket.create_connection((url.host, url.port)) as client:
            body = b'{"prompt": "a", "max_tokens": 900000, "stream": true}'
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            time.sleep(0.5)
            code, seconds = server.end(signal.SIGTERM)
    assert code == 0, server.output
    assert seconds < STOP_SECONDS


@pytest.mark.parametrize("command", [FAKE, REAL], ids=["fake", "real"])
def test_a_taken_port_fails_at_once_with_one_message(command):
    seconds = []
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        for _ in range(3):  # the quickest counts, in processor time: the machine may be busy with something else
            start = processor_seconds()
            with ServerProcess([*command, "--port", str(port)], FAKE_LOAD_SECONDS="60") as server:
                assert server.process.wait(10) == 1
                seconds.append(processor_seconds() - start)
                server._reader.join(5)
            assert len(server.lines) == 1, server.output
            assert f"port {port} on 127.0.0.1 is in use" in server.output
            assert "--port" in server.output
    assert min(seconds) < 1


def test_a_failed_load_ends_the_process_with_its_message():
    with ServerProcess(
        [*FAKE, "--port", "0"], FAKE_LOAD_ERROR="no model of that name", FAKE_LOAD_SECONDS="0.2"
    ) as server:
        assert server.process.wait(10) == 1
        server._reader.join(5)
    assert "rustvllm serve: error: no model of that name\n" in server.output
    assert "Traceback" not in server.output


def test_a_load_that_fails_by_a_bug_says_where():
    with ServerProcess([*FAKE, "--port", "0"], FAKE_LOAD_BUG="oops") as server:
        assert server.process.wait(10) == 1
        server._reader.join(5)
    assert "loading the model failed: RuntimeError: oops" in server.output
    assert "serve_fake.py" in server.output


def test_a_dead_engine_ends_the_process_with_code_1():
    with ServerProcess([*FAKE, "--port", "0"], FAKE_DIE_SECONDS="3", FAKE_STEP_SECONDS="0.01") as server:
        url = server.wait_until_ready()
        with httpx.stream("POST", f"{url}/v1/completions", json=FOREVER, timeout=30) as response:
            text = response.read().decode()
        assert server.process.wait(10) == 1
        server._reader.join(5)
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert "died; stopping the server" in server.output


def test_a_unix_socket_is_served_replaced_when_stale_and_removed(tmp_path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert path.exists()
    with ServerProcess([*FAKE, "--uds", str(path)]) as server:
        server.wait_until_ready()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:
            assert client.get("/health").json() == {"status": "ok"}
        with ServerProcess([*FAKE, "--uds", str(path)]) as second:
            assert second.process.wait(10) == 1
            second._reader.join(5)
        assert "in use by another server" in second.output
        assert path.exists()
        assert server.end(signal.SIGTERM)[0] == 0
    assert not path.exists()
    assert f"--unix-socket {path}" in server.output


def test_a_key_from_the_environment_is_asked_for_and_never_printed():
    with ServerProcess([*FAKE, "--port", "0", "--enable-access-log"], RUSTVLLM_API_KEY="sk-very-secret") as server:
        url = server.wait_until_ready()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        fine = httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sk-very-secret"})
        assert fine.status_code == 200
        assert server.end(signal.SIGTERM)[0] == 0
    assert "sk-very-secret" not in server.output
    assert "Authorization: Bearer YOUR_KEY" in server.output


def test_a_root_path_that_a_proxy_took_off_is_put_in_front_of_links():
    with ServerProcess([*FAKE, "--port", "0", "--root-path", "/proxy"], RUSTVLLM_API_KEY="k") as server:
        url = server.wait_until_ready()
        key = {"Authorization": "Bearer k"}
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=key).status_code == 200
        assert 'href="openapi.json"' in httpx.get(f"{url}/docs", headers=key).text, (
            "relative, so the proxy's path stays"
        )
        server.end(signal.SIGTERM)


def test_a_client_that_leaves_a_stream_frees_its_blocks():
    with ServerProcess([*FAKE, "--port", "0"], FAKE_STEP_SECONDS="0.01") as server:
        url = server.wait_until_ready()
        for stream in (True, False):
            body = {**FOREVER, "prompt": ["a", "b"], "n": 3, "stream": stream}
            if stream:
                with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
                    chunks = response.iter_bytes()  # dropping it would close the connection
                    next(chunks)
                    assert httpx.get(f"{url}/load").json()["num_running"] == 2
            else:
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.3))
            deadline = time.monotonic() + 2
            while (load := httpx.get(f"{url}/load").json())["num_running"] and time.monotonic() < deadline:
                time.sleep(0.01)
            assert load == {"server_load": 0, "num_running": 0, "num_blocks_used": 0}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        server.end(signal.SIGTERM)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "0 to 65535"),
        (["--port", "x"], "0 to 65535"),
        (["--host", "no.such.host.invalid"], "cannot resolve the host"),
        (["--host", "192.0.2.1", "--port", "0"], "is not an address of this machine"),
        (["--uds", "/nowhere/at/all.sock"], "cannot listen on --uds"),
        (["--uds", str(Path(__file__))], "is not a socket"),
        (["--chat-template", "/nowhere/template.jinja"], "cannot read --chat-template"),
        (["--ssl-keyfile", "key.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--tool-call-parser", "x"], "--tool-call-parser has no format 'x'"),
        (["--shutdown-timeout", "-1"], "seconds from 0"),
        (["--max-body-bytes", "0"], "at least 1"),
    ],
)
def test_wrong_flags_are_refused_by_name(arguments, says):
    with ServerProcess([*FAKE, *arguments], FAKE_LOAD_SECONDS="60") as server:
        assert server.process.wait(15) in (1, 2)
        server._reader.join(5)
    assert says in server.output
    assert "Traceback" not in server.output
