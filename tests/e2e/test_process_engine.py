"""An engine in a process of its own: the same tokens, and every way to lose it ends in an error and leaves nothing."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rustvllm import SamplingParams, TokensPrompt
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.engine.async_llm import AsyncLLM
from rustvllm.engine.core_client.process import ProcessClient
from rustvllm.engine.core_client.remote import RemoteClient
from rustvllm.exceptions import (
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    QueryTimeoutError,
    RequestFailedError,
)

PROMPTS = ["Once upon a time", "The little dog", "What is two plus two?", "A"]


def make_engine(monkeypatch: pytest.MonkeyPatch, *, process: bool, **arguments: object) -> AsyncLLM:
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", "1" if process else "0")
    given: dict[str, object] = {"executor": "sim", "num_gpu_blocks_override": 200} | arguments
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**given))  # type: ignore[arg-type]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    engine = make_engine(monkeypatch, process=True, sim_step_time=2.0)
    yield engine
    engine.shutdown()


def client_of(engine: AsyncLLM) -> ProcessClient:
    client = engine._client
    assert isinstance(client, ProcessClient)
    return client


async def texts(engine: AsyncLLM) -> list[str]:
    async def one(index: int, prompt: str) -> str:
        params = SamplingParams(max_tokens=24, temperature=0.7, seed=index, n=1 + index % 2)
        final = None
        async for output in engine.generate(prompt, params, f"r{index}"):
            final = output
        assert final is not None
        return " | ".join(sample.text for sample in final.outputs)

    return list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(PROMPTS * 4))))


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return True
    # A zombie is gone as well: its parent has yet to ask for it.
    return stat.rsplit(")", 1)[1].split()[0] == "Z"


def wait_until_gone(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there after {seconds} s"
        time.sleep(0.02)


async def test_it_answers_questions_while_it_lives_and_not_when_it_stands(engine: AsyncLLM) -> None:
    async def state(seconds: float = 20) -> dict[str, object]:
        answer: dict[str, object] = json.loads(await engine.query("state", seconds=seconds))
        return answer

    assert (await state())["requests"] == []
    stream = await engine.add_request("asked", "Once", SamplingParams(max_tokens=200, ignore_eos=True))
    while not (rows := (await state())["requests"]):
        pass
    assert "asked" in str(rows)
    stream.close()
    os.kill(client_of(engine).pid, signal.SIGSTOP)
    with pytest.raises(QueryTimeoutError, match="it is in a long step or has stalled"):
        await state(seconds=0.1)
    os.kill(client_of(engine).pid, signal.SIGCONT)
    await state()
    os.kill(client_of(engine).pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await state()
    with pytest.raises(EngineDeadError):
        await state()


async def test_engines_in_other_processes_are_paused_together_for_every_front_end(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
    second = make_engine(monkeypatch, process=True, sim_step_time=2.0)
    addresses = [client_of(each)._address for each in (engine, second)]
    front = AsyncLLM(engine.config, client=RemoteClient(addresses, None, 10.0))

    async def ids(of: AsyncLLM, name: str) -> list[int]:
        outputs = [output async for output in of.generate("Once", params, name)]
        return list(outputs[-1].outputs[0].token_ids)

    try:
        expected = await ids(second, "alone")
        running = [asyncio.create_task(ids(each, "running")) for each in (engine, second, front)]
        await asyncio.sleep(0.05)
        await front.pause_generation(mode="keep")
        assert [await each.is_paused() for each in (engine, second, front)] == [True] * 3
        running.append(asyncio.create_task(ids(front, "late")))
        steps = [(await each.current_stats())["num_steps"] for each in (engine, second)]
        await asyncio.sleep(0.5)
        assert [(await each.current_stats())["num_steps"] for each in (engine, second)] == steps
        assert max(each.step_age for each in front.health()) < 0.3, "they count as idle"
        assert not any(task.done() for task in running)
        await second.resume_generation()
        assert [await each.is_paused() for each in (engine, second, front)] == [True, False, False]
        await front.resume_generation()
        assert await asyncio.gather(*running) == [expected] * 4
        ended = asyncio.create_task(ids(engine, "ended"))
        await asyncio.sleep(0.05)
        await front.pause_generation()
        assert len(await ended) < len(expected), "aborted by another front end"
    finally:
        front.shutdown()
        second.shutdown()


@pytest.mark.parametrize("executor", ["sim", "auto"])
def test_the_tokens_are_those_of_an_engine_in_a_thread(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    results = []
    for process in (False, True):
        engine = make_engine(monkeypatch, process=process, executor=executor)
        try:
            results.append(asyncio.run(texts(engine)))
        finally:
            engine.shutdown()
    assert results[0] == results[1]
    assert len(set(results[0])) > 1


def test_a_wrong_request_harms_no_other(engine: AsyncLLM) -> None:
    async def scene() -> None:
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            async for _ in engine.generate([1] * 100_000, SamplingParams(max_tokens=1), "long"):
                pass
        assert len(await texts(engine)) == 4 * len(PROMPTS)
        engine.check_health()

    asyncio.run(scene())


def test_leaving_a_stream_ends_its_request(engine: AsyncLLM) -> None:
    async def scene() -> None:
        async for _ in engine.generate("Once", SamplingParams(max_tokens=200, ignore_eos=True), "left"):
            break
        deadline = time.monotonic() + 5
        while engine.stats().get("num_running", 1) or engine.stats().get("num_waiting", 1):
            assert time.monotonic() < deadline, engine.stats()
            await asyncio.sleep(0.05)
        assert engine.stats()["kv_cache_usage"] == 0

    asyncio.run(scene())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_engine_ends_every_stream_within_two_seconds(engine: AsyncLLM, number: signal.Signals) -> None:
    pid = client_of(engine).pid

    async def one(index: int) -> float:
        with pytest.raises((EngineDeadError, RequestFailedError)):
            async for _ in engine.generate("Once", SamplingParams(max_tokens=250, ignore_eos=True), f"k{index}"):
                pass
        return time.monotonic()

    async def scene() -> float:
        tasks = [asyncio.create_task(one(index)) for index in range(8)]
        await asyncio.sleep(0.2)
        os.kill(pid, number)
        killed = time.monotonic()
        return max(await asyncio.gather(*tasks)) - killed

    assert asyncio.run(scene()) < 2
    assert engine.errored
    with pytest.raises(EngineDeadError):
        engine.check_health()


def test_a_shutdown_leaves_nothing(engine: AsyncLLM) -> None:
    client = client_of(engine)
    pid, directory = client.pid, client._directory
    assert directory.stat().st_mode & 0o777 == 0o700
    engine.shutdown()
    engine.shutdown()
    assert is_gone(pid)
    assert not directory.exists()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.check_health()


def test_a_dropped_engine_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, process=True)
    pid, directory = client_of(engine).pid, client_of(engine)._directory
    del engine
    gc.collect()
    wait_until_gone(pid, 5)
    deadline = time.monotonic() + 5
    while directory.exists():
        assert time.monotonic() < deadline, f"{directory} is still there"
        time.sleep(0.02)


def test_an_engine_that_stands_still_is_killed_at_the_end(engine: AsyncLLM) -> None:
    pid = client_of(engine).pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    engine.shutdown()
    assert is_gone(pid)
    assert time.monotonic() - began < 10


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # A place of its own: other tests make and drop engines in the usual one meanwhile. Sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="rv-", dir="/tmp") as place:
        monkeypatch.setenv("TMPDIR", place)
        with pytest.raises(ModelLoadError, match="the KV cache has 64 bytes"):
            make_engine(
                monkeypatch, process=True, executor="auto", num_gpu_blocks_override=None, kv_cache_memory_bytes=64
            )
        assert list(Path(place).glob("rustvllm-*")) == []


PARENT = """
import os, sys, time
os.environ["RUSTVLLM_ENABLE_MULTIPROCESSING"] = "1"
from rustvllm.engine.async_llm import AsyncLLM
from rustvllm.config.engine_args import AsyncEngineArgs
engine = AsyncLLM.from_engine_args(AsyncEngineArgs(executor=sys.argv[1], num_gpu_blocks_override=200))
print(engine._client.pid, engine._client._directory, "torch" in sys.modules, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("executor", ["sim", "auto"])
def test_an_engine_dies_with_its_parent_whose_process_has_no_torch(executor: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, executor], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid, directory, has_torch = parent.stdout.readline().split()
            assert has_torch == "False"
            assert not is_gone(int(pid))
        finally:
            parent.kill()
    wait_until_gone(int(pid), 3)
    assert not Path(directory).exists()


async def test_a_front_end_hears_what_the_engine_settled_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, process=True, max_model_len="auto", num_gpu_blocks_override=5, block_size=8)
    try:
        assert engine.config.model.max_model_len == client_of(engine).max_model_len == 32
        with pytest.raises(InvalidRequestError, match="32 tokens"):
            await anext(engine.generate({"prompt_token_ids": [5] * 32}, SamplingParams(max_tokens=1), "r"))
    finally:
        engine.shutdown()


async def test_the_prefix_cache_of_an_engine_in_another_process_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, process=True)
    prompt, params = TokensPrompt(prompt_token_ids=[7] * 64), SamplingParams(max_tokens=2)
    try:
        found = []
        for number in range(3):
            if number == 2:
                assert await engine.reset_prefix_cache() is True
            async for output in engine.generate(prompt, params, f"r{number}"):
                last = output
            found.append(last.num_cached_tokens)
        assert found == [0, 48, 0]
    finally:
        engine.shutdown()


async def test_a_shutdown_waits_for_the_requests_of_an_engine_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(monkeypatch, process=True, sim_step_time=2.0)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)

    async def last_of(name: str) -> int:
        async for output in engine.generate("Once", params, name):
            last = output
        return len(last.outputs[0].token_ids)

    tasks = [asyncio.create_task(last_of(f"r{number}")) for number in range(3)]
    while engine.get_num_unfinished_requests() < 3:  # noqa: ASYNC110 -- what is waited for happens in other tasks
        await asyncio.sleep(0.005)
    engine.shutdown(timeout=60)
    assert await asyncio.gather(*tasks) == [60] * 3


FORK = """
import asyncio, gc, os, sys
from rustvllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from rustvllm.exceptions import EngineDeadError

async def answer(engine, name):
    return [output async for output in engine.generate("a", SamplingParams(max_tokens=2), name)][-1].finished

engine = AsyncLLM.from_engine_args(AsyncEngineArgs(executor="sim", num_gpu_blocks_override=200))
print(asyncio.run(answer(engine, "before")), flush=True)
parent, child = os.getpid(), os.fork()
if not child:
    try:
        asyncio.run(asyncio.wait_for(answer(engine, "fork"), 20))
    except EngineDeadError as error:
        print(f"belongs to process {parent} and" in str(error), engine.is_running, flush=True)
    engine.shutdown()
    del engine
    gc.collect()
    sys.exit(0)
print(os.waitpid(child, 0)[1], asyncio.run(answer(engine, "after")), flush=True)
engine.shutdown()
"""


@pytest.mark.parametrize("process", [False, True])
def test_a_fork_cannot_use_the_engine_of_its_parent_nor_end_it(monkeypatch: pytest.MonkeyPatch, process: bool) -> None:
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", str(int(process)))
    ended = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines() == ["True", "True False", "0 True"], ended.stdout + ended.stderr
    assert ended.returncode == 0, ended.stderr
