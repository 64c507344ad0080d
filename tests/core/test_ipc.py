"""``EngineServer`` and ``EngineClient`` from Python: in one process, and with the engine in a process of its own."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_process import StepThread

from rustvllm import _core
from rustvllm.exceptions import EngineDeadError, InvalidRequestError, QueueFullError, SchedulerStateError

ENGINE = Path(__file__).parent / "engine_process.py"
PATIENCE = 20.0


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "private" / "engine"


@pytest.fixture
def engine() -> Iterator[StepThread]:
    thread = StepThread()
    yield thread
    thread.stop()


@pytest.fixture
def server(engine: StepThread, path: Path) -> Iterator[_core.EngineServer]:
    server = _core.EngineServer(engine.handle, path, info=b"hello")
    yield server
    server.stop()


@pytest.fixture
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(ENGINE), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdin
        assert child.stdout.readline() == "ready\n"
        yield child
        child.send_signal(signal.SIGCONT)
        child.kill()


def collect(
    client: _core.EngineClient, processor: _core.OutputProcessor, num_ends: int
) -> dict[int, list[_core.RequestDelta]]:
    """Deltas by key until so many requests have ended, as an event loop gets them."""
    deltas: dict[int, list[_core.RequestDelta]] = {}
    readable = select.poll()
    readable.register(client.output_fd, select.POLLIN)
    while num_ends > 0:
        assert readable.poll(PATIENCE * 1000), f"silent, with {num_ends} requests running"
        for delta in processor.poll(client)[1]:
            deltas.setdefault(delta.key, []).append(delta)
            num_ends -= delta.finish_reason is not None
    return deltas


def add(client: _core.EngineClient, processor: _core.OutputProcessor, request_id: str, max_tokens: int = 5) -> int:
    key = client.new_key()
    prompt = np.array([1, 2, 3], np.int32)
    processor.add_request(key, [1, 2, 3])
    client.add_request(key, request_id, prompt, max_tokens=max_tokens, cache_salt="pepper")
    return key


def test_a_request_goes_and_its_tokens_come(server: _core.EngineServer, path: Path) -> None:
    client = _core.EngineClient.connect(path)
    processor = _core.OutputProcessor(None)
    keys = [add(client, processor, str(index), 40) for index in range(10)]
    deltas = collect(client, processor, 10)
    for key in keys:
        assert [token for delta in deltas[key] for token in delta.new_token_ids] == [7] * 40
        assert deltas[key][-1].finish_reason == "length"
        assert deltas[key][-1].error_kind is None
        assert 0 < deltas[key][0].first_scheduled_ts <= deltas[key][0].last_token_ts <= time.monotonic()
    assert (client.max_model_len, client.block_size, client.num_blocks) == (16384, 16, 4096)
    assert (client.info, client.engine_pid, client.client_index) == (b"hello", os.getpid(), 1)
    stats = client.stats(timeout=PATIENCE)
    assert (stats["num_running"], stats["num_waiting"], stats["num_queued"]) == (0, 0, 0)
    assert stats["kv_cache_usage"] == 0.0
    assert server.stats()["num_requests"] == 10
    assert client.is_alive
    assert client.num_steps >= 0
    assert "connected" in repr(client)


def test_the_same_errors_as_in_one_process(server: _core.EngineServer, engine: StepThread, path: Path) -> None:
    client = _core.EngineClient.connect(path)
    for prompt, max_tokens in [([1] * 20000, 1), ([], 1), ([-1], 1)]:
        with pytest.raises(InvalidRequestError) as here:
            engine.handle.add_request(engine.handle.new_key(), "a", prompt, max_tokens=max_tokens)
        with pytest.raises(InvalidRequestError) as there:
            client.add_request(client.new_key(), "a", prompt, max_tokens=max_tokens)
        assert (str(here.value), here.value.param) == (str(there.value), there.value.param)
    with pytest.raises(ValueError, match="is not one of this client's"):
        client.add_request(1, "a", [1], max_tokens=1)
    with pytest.raises(SchedulerStateError, match="another EngineServer"):
        _core.EngineServer(engine.handle, path.with_name("other"))


def test_a_full_queue_is_the_requests_error(path: Path) -> None:
    engine = StepThread(max_num_queued_reqs=2)
    engine.paused.set()
    server = _core.EngineServer(engine.handle, path)
    client = _core.EngineClient.connect(path)
    processor = _core.OutputProcessor(None)
    keys = [add(client, processor, str(index)) for index in range(3)]
    (delta,) = collect(client, processor, 1)[keys[2]]
    assert (delta.finish_reason, delta.error_kind, delta.error_param) == ("error", "queue_full", None)
    assert delta.error == (
        "the queue is full: 2 requests are waiting, 1 more would exceed max_num_queued_reqs = 2; try again later"
    )
    samples = [(client.new_key(), f"s{index}", 0) for index in range(2)]
    with pytest.raises(QueueFullError):
        client.add_request(client.new_key(), "b", [1], max_tokens=1, samples=samples)
    client.abort_requests(["0", "1"])
    client.stats(timeout=PATIENCE)  # what was sent before has been taken when this is answered
    engine.paused.clear()
    assert [deltas[-1].finish_reason for deltas in collect(client, processor, 2).values()] == ["abort"] * 2
    server.stop()
    engine.stop()


def test_why_a_step_failed_is_known_with_the_outputs_that_it_ended(
    engine: StepThread, server: _core.EngineServer, path: Path
) -> None:
    clients = [_core.EngineClient.connect(path) for _ in range(2)]
    processors = [_core.OutputProcessor(None) for _ in clients]
    reasons = iter(["RuntimeError: first", "ValueError: " + "ü" * 40_000])

    def fail() -> str | None:
        reason = next(reasons, None)
        if reason is not None:
            server.note_step_error(reason)
        return reason

    assert clients[0].last_step_error is None
    for expected in ("RuntimeError: first", "ValueError: " + "ü" * 8186):  # 16 KiB of text are sent
        engine.paused.set()
        key = add(clients[0], processors[0], "a")
        clients[0].stats(timeout=PATIENCE)
        engine.on_step = fail
        engine.paused.clear()
        (delta,) = collect(clients[0], processors[0], 1)[key]
        assert (delta.finish_reason, delta.error_kind) == ("error", "failed")
        assert clients[0].last_step_error == expected
        engine.on_step = lambda: None
        assert clients[1].last_step_error is None, "none of its requests failed"
        key = add(clients[1], processors[1], "a")
        assert collect(clients[1], processors[1], 1)[key][-1].finish_reason == "length"


def test_a_stop_string_ends_the_request_in_the_engine(server: _core.EngineServer, path: Path) -> None:
    client = _core.EngineClient.connect(path)
    processor = _core.OutputProcessor(None)
    key = add(client, processor, "a", 16000)
    processor.discard(key)
    client.abort_requests(["a"])
    deadline = time.monotonic() + PATIENCE
    while client.stats(timeout=PATIENCE)["num_finished"] < 1:
        assert time.monotonic() < deadline
    assert processor.poll(client) == ([], [])


def test_tcp_needs_the_secret(engine: StepThread) -> None:
    with pytest.raises(ValueError, match="needs a shared secret"):
        _core.EngineServer(engine.handle, tcp_address="127.0.0.1:0")
    with pytest.raises(ValueError, match="needs a path"):
        _core.EngineServer(engine.handle)
    secret = os.urandom(32)
    server = _core.EngineServer(engine.handle, tcp_address="127.0.0.1:0", secret=secret)
    assert server.tcp_port
    client = _core.EngineClient.connect_tcp("localhost", server.tcp_port, secret)
    processor = _core.OutputProcessor(None)
    add(client, processor, "a")
    collect(client, processor, 1)
    with pytest.raises(ConnectionError, match="the shared secret is wrong"):
        _core.EngineClient.connect_tcp("127.0.0.1", server.tcp_port, os.urandom(32))
    # The client learns of it before the server writes it down.
    complaints: list[str] = []
    deadline = time.monotonic() + PATIENCE
    while not any("secret" in line for line in complaints):
        assert time.monotonic() < deadline, complaints
        complaints += server.take_complaints()
        time.sleep(0.005)
    server.stop()
    assert not server.is_alive


def test_a_socket_that_listens_is_inherited(engine: StepThread, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        for fd in (-1, 12345, listener.fileno()):
            with pytest.raises(ValueError, match=f"listening Unix socket, got {fd}"):
                _core.EngineServer(engine.handle, fd=fd)
        listener.listen()
        server = _core.EngineServer(engine.handle, fd=listener.fileno())
    client = _core.EngineClient.connect(tmp_path / "s")
    processor = _core.OutputProcessor(None)
    add(client, processor, "a")
    collect(client, processor, 1)
    server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_process_of_another_user_is_turned_away(engine: StepThread) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place, socket.socket(socket.AF_UNIX) as listener:
        path = Path(place) / "s"
        listener.bind(str(path))
        listener.listen()
        # Every user may reach the socket here, so that nothing but the peer's credentials is between them.
        Path(place).chmod(0o777)
        path.chmod(0o777)
        server = _core.EngineServer(engine.handle, fd=listener.fileno())
        client = _core.EngineClient.connect(path)
        os.seteuid(65534)
        try:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(PATIENCE)
                stranger.connect(str(path))
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b"", "not even a greeting"
        finally:
            os.seteuid(0)
        complaints: list[str] = []
        deadline = time.monotonic() + PATIENCE
        while not any("belongs to uid 65534" in line for line in complaints):
            assert time.monotonic() < deadline, complaints
            complaints += server.take_complaints()
            time.sleep(0.005)
        processor = _core.OutputProcessor(None)
        add(client, processor, "a")
        collect(client, processor, 1)
        server.stop()


def test_places_where_no_engine_can_listen(engine: StepThread, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the limit is 107"):
        _core.EngineServer(engine.handle, tmp_path / ("x" * 120) / "s")
    public = tmp_path / "public"
    public.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="mode 755"):
        _core.EngineServer(engine.handle, public / "s")
    file = tmp_path / "private"
    file.mkdir(mode=0o700)
    (file / "s").write_text("precious")
    with pytest.raises(FileExistsError, match="is not a socket"):
        _core.EngineServer(engine.handle, file / "s")
    with pytest.raises(ConnectionError, match="cannot connect to the engine"):
        _core.EngineClient.connect(tmp_path / "absent", timeout=0.05)
    with pytest.raises(ValueError, match="number of seconds"):
        _core.EngineClient.connect(tmp_path / "absent", timeout=-1.0)


def test_an_event_loop_is_woken(server: _core.EngineServer, path: Path) -> None:
    client = _core.EngineClient.connect(path)
    processor = _core.OutputProcessor(None)

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        tokens: list[int] = []

        def on_outputs() -> None:
            for delta in processor.poll(client)[1]:
                tokens.extend(delta.new_token_ids)
                if delta.finish_reason is not None:
                    done.set_result(None)

        loop.add_reader(client.output_fd, on_outputs)
        add(client, processor, "a", 100)
        await asyncio.wait_for(done, PATIENCE)
        loop.remove_reader(client.output_fd)
        return tokens

    assert asyncio.run(run()) == [7] * 100


def test_an_engine_process_serves_and_leaves_nothing(process: subprocess.Popen[str], path: Path) -> None:
    client = _core.EngineClient.connect(path)
    assert client.engine_pid == process.pid
    processor = _core.OutputProcessor(None)
    keys = [add(client, processor, str(index), 200) for index in range(64)]
    deltas = collect(client, processor, 64)
    assert all(sum(len(delta.new_token_ids) for delta in deltas[key]) == 200 for key in keys)
    assert process.stdin
    process.stdin.close()
    assert process.wait(PATIENCE) == 0
    assert client.death == "the engine was shut down"
    assert not path.parent.exists()


@pytest.mark.parametrize("way", ["killed", "failed"])
def test_a_dead_engine_fails_every_request_at_once(way: str, process: subprocess.Popen[str], path: Path) -> None:
    client = _core.EngineClient.connect(path)
    processor = _core.OutputProcessor(None)
    keys = [add(client, processor, str(index), 16000) for index in range(32)]
    began = time.monotonic()
    if way == "killed":
        process.kill()
        reason = f"the engine died: its process {process.pid} ended without a word"
    else:
        assert process.stdin
        process.stdin.write("fail RuntimeError: no memory\n")
        process.stdin.flush()
        reason = "the engine died: RuntimeError: no memory"
    deltas = collect(client, processor, 32)
    assert time.monotonic() - began < 5.0
    for key in keys:
        last = deltas[key][-1]
        assert (last.finish_reason, last.error_kind) == ("error", "engine_dead")
        assert last.error
        assert last.error.startswith(reason)
    assert not client.is_alive
    with pytest.raises(EngineDeadError, match=reason):
        client.check_alive()
    with pytest.raises(EngineDeadError, match=reason):
        add(client, processor, "later")


def test_a_stopped_process_has_an_old_heartbeat(process: subprocess.Popen[str], path: Path) -> None:
    client = _core.EngineClient.connect(path, heartbeat_interval=0.01)
    time.sleep(0.1)
    deadline = time.monotonic() + PATIENCE
    while client.last_heartbeat_age > 0.09:  # one that was never heard grows older with every look
        assert time.monotonic() < deadline
    assert client.step_age == 0.0
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert client.last_heartbeat_age > 0.2
    began = time.monotonic()
    client.stats(timeout=0.1)
    assert time.monotonic() - began < 5.0, "a stopped engine is not waited for"
    process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE
    while client.last_heartbeat_age > 0.1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_in_another_process_takes_its_requests_along(
    server: _core.EngineServer, engine: StepThread, path: Path
) -> None:
    code = (
        "import sys, os, time; from rustvllm import _core; client = _core.EngineClient.connect(sys.argv[1])\n"
        "for i in range(50): client.add_request(client.new_key(), str(i), [1, 2, 3], max_tokens=16000)\n"
        "deadline = time.monotonic() + 20\n"
        "while client.stats(timeout=20)['num_requests'] < 50: assert time.monotonic() < deadline\n"
        "print(client.client_index, flush=True); os.kill(os.getpid(), 9)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, check=False)
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, "1\n")
    deadline = time.monotonic() + PATIENCE
    while (stats := engine.handle.stats())["num_finished"] < 50 or stats["kv_cache_usage"] > 0:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    assert server.stats()["num_clients"] == 0
