"""The processes of `rustvllm serve`: which there are, how they find each other, and how a start can fail."""

import ctypes
import signal
import stat
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import REAL, STOP_SECONDS, TEMPLATES, ServerProcess

SIM = [*REAL, "--executor", "sim", "--port", "0"]
BODY = {"prompt": "Once", "max_tokens": 8, "temperature": 0}
SECRET = "0123456789abcdef-secret"


def complete(url: str, **more: object) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | more, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(command: list[str], code: int = 1, **environment: str) -> ServerProcess:
    """A server that ended by itself, with that code and without a traceback."""
    with ServerProcess(command, **environment) as server:
        try:
            assert server.process.wait(60) == code, server.output
        finally:
            server.children()
        server._reader.join(10)
        server.assert_nothing_left(2)
    assert "Traceback" not in server.output
    return server


def test_only_the_engine_has_torch_and_only_the_api_process_has_fastapi(empty_tmpdir):
    with ServerProcess([*REAL, "--port", "0"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        assert complete(url)
        (engine,), (api,) = server.engines(), server.apis()
        assert len(server.children()) == 2
        assert "libtorch" in maps(engine.pid)
        assert "libtorch" not in maps(api.pid)
        assert "pydantic_core" in maps(api.pid)
        assert "libtorch" not in maps(server.process.pid)
        assert "pydantic_core" not in maps(server.process.pid)
        (directory,) = empty_tmpdir.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        code, seconds = server.end(signal.SIGTERM)
        server.assert_nothing_left()
    assert code == 0, server.output
    assert seconds < STOP_SECONDS
    assert "Traceback" not in server.output
    for words in ("engine 0 ready after", "API process 0 ready after", "(import "):
        assert words in server.output


def test_orphans_that_come_to_the_launcher_as_process_1_leave_no_zombies():
    becomes_subreaper = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1); os.execv(sys.argv[1], sys.argv[1:])"
    with ServerProcess([sys.executable, "-c", becomes_subreaper, *SIM]) as server:
        server.wait_until_ready()
        wait_until(lambda: server.children(TEMPLATES))
        (worker,), (api,) = server.children(TEMPLATES), server.apis()
        api.kill()  # its worker ends too, and is now a child of the launcher
        server.wait_for("starting it again")
        wait_until(lambda: not worker.is_running())
        wait_until(lambda: [other for other in server.apis() if other != api])
        code, _ = server.end(signal.SIGTERM)
    assert code == 0, server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0, 0.1, 0.5, 1.5])
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(empty_tmpdir, number, delay):
    with ServerProcess([*REAL, "--port", "0"], TMPDIR=str(empty_tmpdir)) as server:
        server.wait_for("listening on")
        time.sleep(delay)
        code, seconds = server.end(number)
        server.assert_nothing_left(2)
        wait_until(lambda: not list(empty_tmpdir.iterdir()), 5)
    assert code == 0, server.output
    assert seconds < STOP_SECONDS
    assert "Traceback" not in server.output


def test_a_signal_that_another_thread_gets_ends_the_server(empty_tmpdir):
    """As that of `kill %1` behind a Ctrl-Z does most times: a stopped process has no thread that is due."""
    with ServerProcess(SIM, TMPDIR=str(empty_tmpdir)) as server:
        server.wait_until_ready()
        server.children()
        pid = server.process.pid
        other = next(thread.id for thread in psutil.Process(pid).threads() if thread.id != pid)
        assert ctypes.CDLL(None).tgkill(pid, other, signal.SIGTERM) == 0
        assert server.process.wait(STOP_SECONDS) == 0, server.output
        server.assert_nothing_left()


def test_several_api_processes_share_the_socket_and_the_engine(empty_tmpdir):
    with ServerProcess([*SIM, "--api-server-count", "2", "--sim-step-time", "5"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        assert len(server.apis()) == 2
        assert len({complete(url) for _ in range(10)}) == 1
        # Each connection finds one of the two, and after some tries both have been found.
        found = set()
        streams = []
        with httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            for _ in range(200):
                request = client.build_request(
                    "POST", f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 400, "stream": True}
                )
                streams.append(client.send(request, stream=True))
                found = {api.pid for api in server.apis() if len(api.net_connections()) > 1}
                if len(found) == 2:
                    break
            for stream in streams:
                stream.close()
        assert len(found) == 2
        wait_until(lambda: httpx.get(f"{url}/load").json()["num_running"] == 0)
        assert server.end(signal.SIGTERM)[0] == 0
        server.assert_nothing_left()


def test_several_engines_serve_the_same(empty_tmpdir):
    command = [*SIM, "--data-parallel-size", "2", "--sim-step-time", "5"]
    with ServerProcess(command, TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        assert len(server.engines()) == 2
        one = complete(url)
        assert {complete(url) for _ in range(6)} == {one}
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        # One engine dies: the other serves on, and /health names the dead one.
        server.engines()[1].kill()
        wait_until(lambda: httpx.get(f"{url}/health").json() == {"status": "ok", "dead_engines": [1]})
        assert complete(url) == one
        server.wait_for("1 of 2 engines continue")
        # The last one dies, and the server with it.
        server.engines()[0].kill()
        assert server.process.wait(10) == 1
        server.assert_nothing_left(2)
    assert "engine process 0 ended, killed by SIGKILL; stopping the server" in server.output


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("kind", ["private", "unix", "tcp"])
def test_engines_and_front_ends_apart(empty_tmpdir, kind, num_engines):
    environment = {"TMPDIR": str(empty_tmpdir), "RUSTVLLM_ENGINE_SECRET": SECRET}
    engines = [*REAL, "--headless", "--executor", "sim", "--data-parallel-size", str(num_engines)]
    if kind == "unix":
        (empty_tmpdir / "d").mkdir(mode=0o700)
        engines += ["--engine-address", *(f"unix:{empty_tmpdir}/d/{rank}" for rank in range(num_engines))]
    elif kind == "tcp":
        engines += ["--engine-address", *["tcp:127.0.0.1:0"] * num_engines]
    with ServerProcess(engines, **environment) as back:
        back.wait_for("ready, front ends connect with")
        (line,) = [line for line in back.lines if "front ends connect with" in line]
        addresses = line.split("--engine-address ")[1].split()
        assert len(addresses) == num_engines
        front_command = [*REAL, "--port", "0", "--engine-address", *addresses, "--served-model-name", "mine"]
        with ServerProcess(front_command, **environment) as front:
            url = front.wait_until_ready()
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
            first = complete(url)
            assert front.engines() == []
            # A front end goes and another comes: the engines do not mind.
            assert front.end(signal.SIGTERM)[0] == 0
            front.assert_nothing_left()
        with ServerProcess([*front_command, "--api-server-count", "2"], **environment) as front:
            assert complete(front.wait_until_ready()) == first
            assert back.end(signal.SIGTERM)[0] == 0
            assert front.process.wait(10) == 1
            front._reader.join(10)
            front.assert_nothing_left()
        back.assert_nothing_left()
    assert "the engine was shut down; stopping the server" in front.output
    assert SECRET not in front.output + back.output
    if kind == "unix":
        (empty_tmpdir / "d").rmdir()


def test_a_front_end_with_the_wrong_secret_is_turned_away(empty_tmpdir):
    file = empty_tmpdir / "secret"
    file.write_text("another-secret-of-some-length")
    engines = [*REAL, "--headless", "--executor", "sim", "--engine-address", "tcp:127.0.0.1:0"]
    with ServerProcess(engines, TMPDIR=str(empty_tmpdir), RUSTVLLM_ENGINE_SECRET=SECRET) as back:
        back.wait_for("ready, front ends connect with")
        (line,) = [line for line in back.lines if "front ends connect with" in line]
        address = line.split("--engine-address ")[1].strip()
        command = [*REAL, "--port", "0", "--engine-address", address, "--engine-secret-file", str(file)]
        front = ended(command, TMPDIR=str(empty_tmpdir), RUSTVLLM_ENGINE_READY_TIMEOUT="2")
        assert "secret is wrong" in front.output
        assert "another-secret" not in front.output
        (process,) = back.engines()
        assert SECRET not in " ".join(process.cmdline()) + str(process.environ())
    file.unlink()


def test_keys_are_in_no_list_of_processes():
    with ServerProcess(SIM, RUSTVLLM_API_KEY="sk-very-secret") as server:
        url = server.wait_until_ready()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sk-very-secret"}).status_code == 200
        for child in server.children():
            assert "sk-very-secret" not in " ".join(child.cmdline()) + str(child.environ())
    assert "sk-very-secret" not in server.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--num-gpu-blocks-override", "3"], "one request of --max-model-len 512 needs 32"),
        (["--executor", "auto", "--kv-cache-memory-bytes", "64"], "the KV cache has 64 bytes"),
        (["--sim-step-time", "-1"], "--sim-step-time must be between 0"),
        (["--chat-template", "{% if %}"], "chat template"),
        (["--disable-frontend-multiprocessing", "--api-server-count", "2"], "--api-server-count 2 needs several"),
        (["--disable-frontend-multiprocessing", "--data-parallel-size", "2"], "--data-parallel-size 2 needs several"),
        (["--disable-frontend-multiprocessing", "--restart-engine"], "--restart-engine needs several"),
        (["--headless", "--api-server-count", "2"], "contradict each other"),
        (["--data-parallel-size", "0"], "at least 1"),
        (["--headless", "--engine-address", "udp:1"], "unix:/path or tcp:HOST:PORT"),
        (["--headless", "--engine-address", "tcp:127.0.0.1:70000"], "port up to 65535"),
        (["--headless", "--engine-address", "unix:/" + "x" * 120], "at most 107"),
        (["--headless", "--engine-address", "tcp:127.0.0.1:0"], "RUSTVLLM_ENGINE_SECRET"),
        (["--headless", "--engine-address", "unix:/tmp/a", "tcp:127.0.0.1:1"], "all unix: or all tcp:"),
        (["--headless", "--engine-address", "unix:/tmp/a", "-dp", "2"], "the same number of engine addresses"),
        (["--headless", "--engine-address", "unix:/tmp/a", "unix:/tmp/a", "-dp", "2"], "its own address"),
        (["--headless", "--engine-address", "unix:/nowhere/at/all/x"], "cannot listen on unix:/nowhere/at/all/x"),
        (["--headless", "--engine-address", "unix:/usr/x"], "mode 7"),
        (["--engine-address", "unix:/tmp/a"], "executor is an engine setting"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_start_that_cannot_be_says_why_once(empty_tmpdir, flags, says):
    server = ended([*SIM, *flags], TMPDIR=str(empty_tmpdir))
    errors = [line for line in server.lines if "error" in line.lower()]
    assert len(errors) == 1, server.output
    assert says in errors[0]


def test_a_front_end_whose_engine_does_not_come_says_so(empty_tmpdir):
    command = [*REAL, "--port", "0", "--engine-address", f"unix:{empty_tmpdir}/absent"]
    server = ended(command, TMPDIR=str(empty_tmpdir), RUSTVLLM_ENGINE_READY_TIMEOUT="0.5")
    assert f"no engine within 0.5 s on unix:{empty_tmpdir}/absent" in server.output


@pytest.mark.parametrize("role", ["engine", "api"])
def test_a_child_killed_while_it_loads_ends_the_start(empty_tmpdir, role):
    with ServerProcess([*REAL, "--port", "0"], TMPDIR=str(empty_tmpdir)) as server:
        server.wait_for("listening on")
        find = server.engines if role == "engine" else server.apis
        wait_until(find)
        find()[0].kill()
        assert server.process.wait(20) == 1
        server._reader.join(10)
        server.assert_nothing_left(2)
    name = "engine process 0" if role == "engine" else "API process 0"
    assert f"the {name} ended while it was starting, killed by SIGKILL" in server.output
    assert "Traceback" not in server.output


@pytest.mark.parametrize("place", ["/nowhere/at/all", "/tmp/" + "x" * 90, "/dev/null"])
def test_a_tmpdir_that_will_not_do_is_passed_over(place):
    is_made = place.startswith("/tmp")
    if is_made:
        Path(place).mkdir(exist_ok=True)
    with ServerProcess(SIM, TMPDIR=place) as server:
        assert complete(server.wait_until_ready())
        engine = server.engines()[0].cmdline()
        directory = engine[engine.index("--directory") + 1]
        assert directory.startswith("/tmp/rustvllm-")
        assert server.end(signal.SIGTERM)[0] == 0
        assert not Path(directory).exists()
        server.assert_nothing_left()
    if is_made:
        Path(place).rmdir()


@pytest.mark.parametrize("executor", ["sim", "auto"])
def test_one_process_is_one_process(executor):
    command = [*REAL, "--port", "0", "--executor", executor, "--disable-frontend-multiprocessing"]
    with ServerProcess(command) as server:
        url = server.wait_until_ready()
        text = complete(url)
        assert server.children() == []
        assert ("libtorch" in maps(server.process.pid)) == (executor == "auto")
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        body = BODY | {"stream": True, "max_tokens": 480, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            pieces = response.iter_text()
            next(pieces)
        wait_until(lambda: httpx.get(f"{url}/load").json()["num_running"] == 0)
        assert httpx.get(f"{url}/load").json()["kv_cache_usage"] == 0
        assert complete(url) == text
        code, seconds = server.end(signal.SIGTERM)
        server.assert_nothing_left()
    assert code == 0, server.output
    assert seconds < STOP_SECONDS
