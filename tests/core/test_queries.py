"""Questions to the thread that steps an engine, from Python; and what the scheduler says at a glance."""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_process import StepThread
from hand_engine import HandEngine

from rustvllm import _core
from rustvllm.exceptions import EngineDeadError, QueryError, QueryTimeoutError, SchedulerStateError

PATIENCE = 20.0


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[_core.EngineServer, _core.EngineClient]]:
    engine = StepThread()
    path = tmp_path_factory.mktemp("q") / "private" / "engine"
    server = _core.EngineServer(engine.handle, path)
    client = _core.EngineClient.connect(path)
    yield server, client
    client.close()
    server.stop()
    engine.stop()


@contextlib.contextmanager
def answering(server: _core.EngineServer, answer: Any) -> Iterator[None]:
    """Another thread answers."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(0.002):
            for query in server.take_queries():
                answer(query)
                del query  # the last one, too, is to be dropped

    thread = threading.Thread(target=run)
    thread.start()
    yield
    done.set()
    thread.join()


def test_an_answer_comes_back(server: tuple[_core.EngineServer, _core.EngineClient]) -> None:
    engine, client = server
    with answering(engine, lambda query: query.answer(query.kind.encode() + query.payload)):
        assert client.query(0, "state", b"\0\xff", PATIENCE) == b"state\0\xff"
        threads = [threading.Thread(target=client.query, args=(0, "x", b"", PATIENCE)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_what_is_not_answered_says_why(server: tuple[_core.EngineServer, _core.EngineClient]) -> None:
    engine, client = server
    with answering(engine, lambda query: query.fail("not today")), pytest.raises(QueryError, match=r"^not today$"):
        client.query(0, "state", b"", PATIENCE)
    with answering(engine, lambda query: None), pytest.raises(QueryError, match="gave no answer"):
        client.query(0, "state", b"", PATIENCE)
    with pytest.raises(QueryTimeoutError, match=r"no answer within 0\.01 s"):
        client.query(0, "state", b"", 0.01)
    assert issubclass(QueryTimeoutError, TimeoutError)
    (late,) = engine.take_queries()
    late.answer(b"")
    with pytest.raises(SchedulerStateError, match="answered already"):
        late.fail("again")
    with pytest.raises(ValueError, match="payload of a query has 65537 bytes"):
        client.query(0, "state", b"x" * 65537, 1)
    with pytest.raises(IndexError, match="no engine of rank 1"):
        client.query(1, "state", b"", 1)
    with pytest.raises(ValueError, match="timeout must be a number of seconds"):
        client.query(0, "state", b"", -1)
    engine.fail("gone")
    with pytest.raises(EngineDeadError, match="gone"):
        client.query(0, "state", b"", PATIENCE)


def busy_engine(seed: int, steps: int) -> HandEngine:
    """Requests that share prefixes, wait, run and end, in a small pool."""
    chosen = random.Random(seed)
    engine = HandEngine(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    prefix = list(range(1, 40))
    for number in range(9):
        prompt = prefix[: chosen.randint(1, 39)] + [100 + number] * chosen.randint(1, 20)
        engine.add(f"r{number}", prompt, max_tokens=chosen.randint(2, 40))
    for _ in range(steps):
        engine.step()
    return engine


def test_the_summaries_are_what_the_requests_are() -> None:
    for steps in (0, 1, 5, 12):
        engine = busy_engine(steps, steps)
        scheduler = engine.scheduler
        rows = scheduler.request_summaries(100)
        queues = scheduler.queues()
        assert [row["request_id"] for row in rows] == queues["running"] + queues["leaving"] + queues["waiting"]
        for row in rows:
            state = engine.state(row["request_id"])
            assert row.pop("num_blocks") == len(state["block_table"])
            assert row == {name: state[name] for name in row}
        assert scheduler.request_summaries(2) == scheduler.request_summaries(100)[:2]
        assert scheduler.request_summaries(0) == []


def use_of(block: dict[str, Any]) -> int:
    if block["is_null"]:
        return 4
    if block["ref_count"] == 0:
        return 2 if block["is_cached"] else 0
    return 3 if block["ref_count"] > 1 else 1


def test_the_block_map_is_what_the_blocks_are() -> None:
    seen = set()
    for steps in (0, 1, 4, 30, 60):
        scheduler = busy_engine(steps, min(steps, 30)).scheduler
        uses = [use_of(block) for block in scheduler.block_states()]
        seen |= set(uses)
        totals = [uses.count(use) for use in range(5)]
        for max_cells in (40, 100):
            assert scheduler.block_map(max_cells) == (bytes(uses), 1, totals)
        for max_cells, per_cell in ((39, 2), (14, 3), (1, 40), (0, 40)):
            cells, blocks_per_cell, counts = scheduler.block_map(max_cells)
            assert (blocks_per_cell, counts) == (per_cell, totals)
            parts = [uses[at : at + per_cell] for at in range(0, 40, per_cell)]
            assert list(cells) == [max(set(part), key=lambda use: (part.count(use), use != 4, use)) for part in parts]
    assert seen == {0, 1, 2, 3, 4}, "the engines were to have blocks of every use"
