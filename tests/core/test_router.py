"""Several engines behind one ``EngineClient``, from Python."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import StepThread

from rustvllm import _core
from rustvllm.exceptions import EngineDeadError

PATIENCE = 20.0


@contextlib.contextmanager
def _serving(path: Path, *, paused: threading.Event | None = None) -> Iterator[_core.EngineServer]:
    """An engine on a socket; while ``paused`` is set it takes requests and runs none."""
    thread = StepThread()
    thread.paused = paused or thread.paused
    server = _core.EngineServer(thread.handle, path, info=path.name.encode())
    try:
        yield server
    finally:
        server.stop()
        thread.stop()


@pytest.fixture
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("s")
    return [directory / name / "e" for name in ("a", "b", "c")]


def add(
    client: _core.EngineClient, processor: _core.OutputProcessor, request_id: str, token_id: int, max_tokens: int = 5
) -> int:
    key = client.new_key()
    processor.add_request(key, [token_id] * 20)
    client.add_request(key, request_id, [token_id] * 20, max_tokens=max_tokens)
    return key


def collect(client: _core.EngineClient, processor: _core.OutputProcessor, num_ends: int) -> list[_core.RequestDelta]:
    """All deltas until so many requests have ended, woken by the one descriptor."""
    deltas: list[_core.RequestDelta] = []
    readable = select.poll()
    readable.register(client.output_fd, select.POLLIN)
    while sum(delta.finish_reason is not None for delta in deltas) < num_ends:
        assert readable.poll(PATIENCE * 1000), "silent"
        _, news = processor.poll(client)
        deltas += news
    return deltas


def tokens_by_key(deltas: list[_core.RequestDelta]) -> dict[int, list[int]]:
    """What each request generated; each must have ended by its length."""
    assert {delta.finish_reason for delta in deltas if delta.finish_reason is not None} == {"length"}
    tokens: dict[int, list[int]] = {}
    for delta in deltas:
        tokens.setdefault(delta.key, []).extend(delta.new_token_ids)
    return tokens


def test_two_engines_are_one_client(paths: list[Path]) -> None:
    with _serving(paths[0]) as first, _serving(paths[1]) as second:
        client = _core.EngineClient.connect([str(paths[0]), paths[1]], PATIENCE)
        processor = _core.OutputProcessor(None)
        keys = [add(client, processor, str(index), index + 1) for index in range(20)]
        assert tokens_by_key(collect(client, processor, 20)) == dict.fromkeys(keys, [7] * 5)
        counts = [server.stats()["num_requests"] for server in (first, second)]
        assert sum(counts) == 20
        assert min(counts) >= 7
        assert client.num_engines == 2
        assert client.stats(PATIENCE)["num_requests"] == 20
        assert [client.engine_stats(rank, PATIENCE)["num_requests"] for rank in range(2)] == counts
        assert client.stats(PATIENCE)["num_usable_blocks"] == 2 * client.engine_stats(0)["num_usable_blocks"]
        assert (client.info, client.engine_pid) == (b"e", os.getpid())
        # The last heartbeat may have seen it at work.
        deadline = time.monotonic() + PATIENCE
        while (health := client.engine_health(1))["num_running"] or health["step_age"]:
            assert time.monotonic() < deadline, health
            time.sleep(0.01)
        assert (health["is_alive"], health["death"], health["pid"]) == (True, None, os.getpid())
        assert 0.0 <= health["last_heartbeat_age"] < PATIENCE
        assert (health["num_running"], health["num_waiting"], health["step_age"]) == (0, 0, 0.0)
        assert health["num_steps"] >= 0
        with pytest.raises(IndexError, match="no engine of rank 2; this client has 2"):
            client.engine_health(2)


def test_a_rank_dies_and_comes_back(paths: list[Path]) -> None:
    paused = threading.Event()
    paused.set()
    with _serving(paths[0], paused=paused) as first, _serving(paths[1], paused=paused):
        client = _core.EngineClient.connect(paths[:2], PATIENCE)
        processor = _core.OutputProcessor(None)
        for index in range(10):
            add(client, processor, str(index), index + 1, max_tokens=16000)
        deadline = time.monotonic() + PATIENCE
        while client.stats(PATIENCE)["num_queued"] < 10:
            assert time.monotonic() < deadline
        lost = first.stats()["num_requests"]
        first.fail("RuntimeError: no memory")
        last = [delta for delta in collect(client, processor, lost) if delta.finish_reason is not None]
        assert {(delta.error_kind, delta.error) for delta in last} == {
            ("engine_dead", "the engine died: RuntimeError: no memory")
        }
        assert client.is_alive
        assert client.death is None
        client.check_alive()
        assert client.engine_health(0)["death"] == "the engine died: RuntimeError: no memory"
        assert client.engine_health(0)["num_running"] == 0
        with pytest.raises(ConnectionError, match="cannot connect to the engine"):
            client.reconnect(0, paths[2], 0.05)
        with _serving(paths[2], paused=paused) as again:
            client.reconnect(0, paths[2], PATIENCE)
            assert client.engine_health(0)["is_alive"]
            for index in range(20, 30):
                add(client, processor, str(index), index + 1, max_tokens=16000)
            deadline = time.monotonic() + PATIENCE
            while again.stats()["num_requests"] < 5:
                assert time.monotonic() < deadline
            client.abort_requests([str(index) for index in range(30)])
            client.stats(PATIENCE)  # what was sent before has been taken when this is answered
            paused.clear()
            rest = collect(client, processor, 20 - lost)
            assert [delta.finish_reason for delta in rest if delta.finish_reason] == ["abort"] * (20 - lost)
    assert client.death == ("no engine is alive: rank 0: the engine was shut down; rank 1: the engine was shut down")
    with pytest.raises(EngineDeadError, match="no engine is alive"):
        client.check_alive()


def test_what_is_wrong_with_the_places_is_said(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        _core.EngineClient.connect([])
    with pytest.raises(ValueError, match="needs a shared secret"):
        _core.EngineClient.connect_tcp("localhost", 1)
    with pytest.raises(ValueError, match="a host needs a port"):
        _core.EngineClient.connect_tcp("localhost", secret=b"0123456789abcdef")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="leave the argument port out"):
        _core.EngineClient.connect_tcp([("localhost", 1)], 2, b"0123456789abcdef")  # type: ignore[call-overload]
    with _serving(paths[0]):
        client = _core.EngineClient.connect(paths[0])
        with pytest.raises(ValueError, match="needs a shared secret"):
            client.reconnect(0, ("localhost", 1))
        with pytest.raises(IndexError, match="no engine of rank 1"):
            client.reconnect(1, paths[0])


def test_several_engines_over_tcp() -> None:
    secret = os.urandom(32)
    threads = [StepThread() for _ in range(2)]
    servers = [_core.EngineServer(thread.handle, tcp_address="127.0.0.1:0", secret=secret) for thread in threads]
    places = [("127.0.0.1", server.tcp_port or 0) for server in servers]
    client = _core.EngineClient.connect_tcp(places, secret=secret)
    processor = _core.OutputProcessor(None)
    keys = [add(client, processor, str(index), index + 1) for index in range(6)]
    tokens = tokens_by_key(collect(client, processor, 6))
    assert tokens == dict.fromkeys(keys, [7] * 5)
    client.reconnect(1, places[0])
    again = add(client, processor, "again", 1)
    assert tokens_by_key(collect(client, processor, 1)) == {again: [7] * 5}
    for server, thread in zip(servers, threads, strict=True):
        server.stop()
        thread.stop()
