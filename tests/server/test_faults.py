"""Everything that can break while a server serves: each client gets an answer, and nothing is left behind."""

import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_process import REAL, STOP_SECONDS, ServerProcess

SIM = [*REAL, "--executor", "sim", "--port", "0", "--sim-step-time", "5"]
SLOW = [*SIM, "--sim-step-time", "20"]
"""A stream lasts ten seconds: it still runs when the test has opened the others."""
STREAM = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
BODY = {"prompt": "Once", "max_tokens": 4, "temperature": 0}

BREAKING_ENGINE = '''
"""In an engine process: while the file $BREAK holds a number above 0, a forward pass raises and counts it down."""
import os, sys
if "rustvllm.engine.process" in sys.orig_argv:
    from pathlib import Path
    from rustvllm.executor.sim import SimExecutor
    file, execute = Path(os.environ["BREAK"]), SimExecutor.execute_model
    def execute_model(self, output):
        if left := int(file.read_text() or 0):
            file.write_text(str(left - 1))
            raise RuntimeError("a hole in the tensor")
        execute(self, output)
    SimExecutor.execute_model = execute_model
'''


class OpenStreams:
    """Streaming requests in threads, each of which notes what it got and when it ended."""

    def __init__(self, url: str, count: int, body: dict[str, object] = STREAM) -> None:
        self.texts: list[str] = [""] * count
        self.ends: list[float] = [0.0] * count
        self._started = [threading.Event() for _ in range(count)]
        self._threads = [threading.Thread(target=self._read, args=(url, index, body)) for index in range(count)]
        for thread in self._threads:
            thread.start()
        for started in self._started:
            assert started.wait(30)

    def _read(self, url: str, index: int, body: dict[str, object]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                for piece in response.iter_text():
                    self.texts[index] += piece
                    self._started[index].set()
        except httpx.TransportError:
            self.texts[index] += "<broken>"
        self._started[index].set()
        self.ends[index] = time.monotonic()

    def join(self) -> None:
        """Wait for the end of each."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def health(url: str) -> tuple[int, dict[str, object]]:
    answer = httpx.get(f"{url}/health", timeout=10)
    return answer.status_code, answer.json()


def wait_for_health(url: str, status: str, seconds: float = 30) -> dict[str, object]:
    deadline = time.monotonic() + seconds
    while (found := health(url))[1]["status"] != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    assert found[0] == (200 if status == "ok" else 503)
    return found[1]


def wait_until_idle(url: str, seconds: float = 30) -> None:
    """Wait until no request runs or waits. An API process that was started again knows that only with its engines."""
    deadline = time.monotonic() + seconds
    while (answer := httpx.get(f"{url}/load", timeout=10)).status_code != 200 or has_requests(answer.json()):
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)
    assert answer.json()["kv_cache_usage"] == 0


def has_requests(load: dict[str, int]) -> bool:
    return load["num_running"] > 0 or load["num_waiting"] > 0


def complete(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)


def test_a_server_that_has_no_engine_yet_is_not_idle(monkeypatch):
    load = {"num_running": 1, "num_waiting": 0, "kv_cache_usage": 0.0}
    answers = [httpx.Response(503, json={"error": {"message": "loading"}}), httpx.Response(200, json=load)]
    answers.append(httpx.Response(200, json=load | {"num_running": 0}))
    left = iter(answers)
    monkeypatch.setattr(httpx, "get", lambda *_, **__: next(left))
    wait_until_idle("http://anywhere")
    assert list(left) == []


@pytest.mark.parametrize("api_server_count", [1, 2])
def test_a_killed_engine_ends_every_stream_and_the_server(empty_tmpdir, api_server_count):
    command = [*SLOW, "--api-server-count", str(api_server_count)]
    with ServerProcess(command, TMPDIR=str(empty_tmpdir)) as server:
        streams = OpenStreams(server.wait_until_ready(), 20)
        server.engines()[0].kill()
        killed = time.monotonic()
        streams.join()
        assert server.process.wait(10) == 1
        server.assert_nothing_left(2)
    for text in streams.texts:
        assert '"error"' in text, text[-500:]
        assert text.endswith("data: [DONE]\n\n"), text[-500:]
    assert max(streams.ends) - killed < 6  # they would have lasted ten seconds
    assert "engine process 0 ended, killed by SIGKILL; stopping the server" in server.output
    assert "Traceback" not in server.output


def test_a_killed_engine_of_a_real_model_ends_every_stream_and_the_server(empty_tmpdir):
    with ServerProcess([*REAL, "--port", "0"], TMPDIR=str(empty_tmpdir)) as server:
        streams = OpenStreams(server.wait_until_ready(), 8, {**STREAM, "max_tokens": 480})
        server.engines()[0].send_signal(signal.SIGSEGV)
        killed = time.monotonic()
        streams.join()
        assert server.process.wait(10) == 1
        server.assert_nothing_left(2)
    assert sum('"error"' in text for text in streams.texts) >= 1  # short ones may have been done
    assert all(text.endswith("data: [DONE]\n\n") for text in streams.texts)
    assert max(streams.ends) - killed < 6
    assert "killed by SIGSEGV; stopping the server" in server.output


def test_a_stopped_engine_is_told_by_health_until_it_goes_on(empty_tmpdir):
    with ServerProcess([*SIM, "--stall-timeout", "0.6"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        streams = OpenStreams(url, 4)
        (engine,) = server.engines()
        engine.suspend()
        body = wait_for_health(url, "stalled")
        assert body["engine"] == 0
        assert body["seconds"] >= 0.6
        assert "--stall-timeout 0.6" in body["message"]
        assert httpx.get(f"{url}/ping").status_code == 503
        engine.resume()
        wait_for_health(url, "ok")
        streams.join()
        for text in streams.texts:
            assert '"error"' not in text
            assert text.endswith("data: [DONE]\n\n")
        # The same without work: the process answers nothing, and that is enough.
        engine.suspend()
        wait_for_health(url, "stalled")
        code, _ = server.end(signal.SIGTERM)
        server.assert_nothing_left()
    assert code == 0


def test_a_stall_timeout_of_0_is_off(empty_tmpdir):
    with ServerProcess([*SIM, "--stall-timeout", "0"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        server.engines()[0].suspend()
        time.sleep(1)
        assert health(url) == (200, {"status": "ok"})


@pytest.fixture
def breaking(empty_tmpdir):
    """Environment of a server whose forward passes raise as often as the file says."""
    (empty_tmpdir / "sitecustomize.py").write_text(BREAKING_ENGINE)
    (empty_tmpdir / "break").write_text("0")
    import os

    path = f"{empty_tmpdir}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    environment = {"PYTHONPATH": path, "BREAK": str(empty_tmpdir / "break"), "TMPDIR": str(empty_tmpdir)}
    yield environment | {"PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("sitecustomize.py", "break"):
        (empty_tmpdir / name).unlink()


def test_a_forward_pass_that_raises_fails_its_requests_and_no_other(breaking):
    with ServerProcess(SLOW, **breaking) as server:
        url = server.wait_until_ready()
        good = complete(url).json()["choices"][0]["text"]
        streams = OpenStreams(url, 6)
        Path(breaking["BREAK"]).write_text("1")
        streams.join()
        for text in streams.texts:
            assert '"error"' in text
            assert "RuntimeError: a hole in the tensor" in text
            assert text.endswith("data: [DONE]\n\n")
        assert complete(url).json()["choices"][0]["text"] == good
        assert health(url) == (200, {"status": "ok"})
        wait_until_idle(url)
        # Three in a row are the engine's end.
        Path(breaking["BREAK"]).write_text("9")
        answers = []
        for _ in range(3):
            try:
                answers.append(complete(url).status_code)
            except httpx.TransportError:  # the server is gone already
                break
        assert answers
        assert set(answers) <= {500, 503}
        assert server.process.wait(10) == 1
        server.assert_nothing_left(2)
    assert "3 steps in a row failed, the last with RuntimeError: a hole in the tensor; stopping" in server.output


def test_an_engine_is_started_again(empty_tmpdir):
    with ServerProcess([*SLOW, "--restart-engine", "-asc", "2"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        good = complete(url).json()["choices"][0]["text"]
        for _ in range(3):
            streams = OpenStreams(url, 6)
            server.engines()[0].kill()
            body = wait_for_health(url, "restarting")
            assert set(body) <= {"status", "message"}
            refused = complete(url)
            if refused.status_code != 200:  # it may have been the other API process, which has its engine back
                assert refused.status_code == 503
                assert int(refused.headers["Retry-After"]) >= 1
                assert "starting it again" in refused.json()["error"]["message"]
            streams.join()
            for text in streams.texts:
                assert '"error"' in text, text[-300:]
                assert text.endswith("data: [DONE]\n\n")
            for _ in range(20):  # both API processes have their engine back, whichever one answers
                wait_for_health(url, "ok")
            deadline = time.monotonic() + 30
            while (answer := complete(url)).status_code != 200:
                assert answer.status_code == 503
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert answer.json()["choices"][0]["text"] == good
        # A fourth time within five minutes is too often.
        server.engines()[0].kill()
        assert server.process.wait(10) == 1
        server.assert_nothing_left(2)
    assert "too often to start it again (3 of 3 within 5 minutes); stopping the server" in server.output


def test_one_of_two_engines_is_started_again_while_the_other_serves(empty_tmpdir):
    with ServerProcess([*SIM, "--restart-engine", "-dp", "2"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        server.engines()[0].kill()
        first = complete(url)
        if first.status_code != 200:  # it went to the engine in the moment of its death, and says so
            assert first.status_code == 500
            assert "engine" in first.json()["error"]["message"]
        for _ in range(10):
            assert complete(url).status_code == 200
        server.wait_for("engine 0 is back")
        wait_for_health(url, "ok")
        assert len(server.engines()) == 2
        assert server.end(signal.SIGTERM)[0] == 0
        server.assert_nothing_left()


def test_a_killed_api_process_is_started_again_and_harms_no_other_streams(empty_tmpdir):
    with ServerProcess([*SIM, "--api-server-count", "2"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        for round_ in range(3):
            streams = OpenStreams(url, 16)
            first, second = server.apis()
            first.kill()
            streams.join()
            broken = ["<broken>" in text for text in streams.texts]
            whole = [text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in streams.texts]
            assert all(a != b for a, b in zip(broken, whole, strict=True))
            wait_until_idle(url)
            deadline = time.monotonic() + 30
            while len(server.apis()) < 2 or server.output.count("API process") < 2 * (round_ + 2):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert second in server.apis()
            assert complete(url).status_code == 200
        server.apis()[0].kill()
        assert server.process.wait(10) == 1
        server.assert_nothing_left(2)
    assert "too often to start it again (3 of 3 within 5 minutes)" in server.output


@pytest.mark.parametrize("state", ["running", "stopped", "loading"])
def test_a_killed_launcher_takes_everything_along(empty_tmpdir, state):
    command = [*SIM, "-asc", "2", "-dp", "2"] if state != "loading" else [*REAL, "--port", "0"]
    with ServerProcess(command, TMPDIR=str(empty_tmpdir)) as server:
        if state == "loading":
            server.wait_for("listening on")
            deadline = time.monotonic() + 30
            while len(server.children()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        else:
            url = server.wait_until_ready()
            assert len(server.children()) == 4
            assert complete(url).status_code == 200
        if state == "stopped":
            for child in server.children():
                child.suspend()
        server.children()
        server.process.kill()
        server.process.wait()
        server.assert_nothing_left(2)
        deadline = time.monotonic() + 2
        while list(empty_tmpdir.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_stop_drains_and_a_second_one_is_at_once(empty_tmpdir):
    patient = [*SIM, "--shutdown-timeout", "30", "-asc", "2"]
    with ServerProcess(patient, TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        streams = OpenStreams(url, 8)
        server.children()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping")
        wait_for_health(url, "stopping")
        refused = complete(url)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        streams.join()
        assert server.process.wait(10) == 0
        server.assert_nothing_left()
    for text in streams.texts:
        assert '"finish_reason":"length"' in text
    with ServerProcess(patient, TMPDIR=str(empty_tmpdir)) as server:
        streams = OpenStreams(server.wait_until_ready(), 4)
        server.children()
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)  # the echo of the first, as launchers send it
        time.sleep(1)
        assert server.process.poll() is None
        code, seconds = server.end(signal.SIGTERM)
        server.assert_nothing_left(1)
        streams.join()
    assert code == -signal.SIGTERM
    assert seconds < STOP_SECONDS
