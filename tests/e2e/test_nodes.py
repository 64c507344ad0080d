"""One model on two nodes: the tokens are those of one process, what does not fit is said on both sides, and the end of
a node is known.

The head is an ``LLM`` in this process, the other node ``rustvllm serve --headless`` in another, both on the loopback.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from logged import logged
from rank_engines import (
    FOUR_HEADS,
    SMALL,
    assert_gone,
    executor_of,
    generate_without_end,
    mixed_params,
    prompts,
    ranks_of,
    tokens,
)
from rustvllm import LLM, SamplingParams
from rustvllm.config.hub import embedded_model_path
from rustvllm.exceptions import ConfigError, EngineDeadError, ModelLoadError
from rustvllm.worker.step_output import ModelRunnerOutput

SECRET = "a secret for tests alone"
SHAPES = {"tp2": (2, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}
SOON = 5.0
"""Seconds after which a start that cannot be is over on both sides."""


@pytest.fixture(autouse=True, scope="module")
def secret(rank_environment: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSTVLLM_ENGINE_SECRET", SECRET)
        yield


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What this process logs, line by line."""
    with logged("rustvllm") as lines:
        yield lines


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Node:
    """``rustvllm serve`` on one of two nodes, and what it prints.

    Args:
        port: Of the head, for nodes.
        flags: In addition.
        rank: Of the node.
        secret: What it knows.
        shape: Of ``SHAPES``.
        before: Python that its process runs first.
    """

    def __init__(
        self, port: int, *flags: str, rank: int = 1, secret: str | None = SECRET, shape: str = "tp2", before: str = ""
    ) -> None:
        tensor_size, stages = SHAPES[shape]
        code = f"{before}\nimport sys\nfrom rustvllm.cli.main import main\nsys.exit(main())"
        command = [sys.executable, "-c", code, "serve", "--device", "cpu", "-n", "2", "-r", str(rank)]
        command += ["--headless"] if rank else ["--port", "0"]
        command += ["--master-port", str(port), "-tp", str(tensor_size), "-pp", str(stages)]
        command += ["--hf-overrides", json.dumps(FOUR_HEADS), "--block-size", "8", *flags]
        environment = {**os.environ, "RUSTVLLM_ENGINE_SECRET": secret or ""}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.text = ""
        self.joined_at = self.ended_at = float("nan")
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._news:
                    if "has joined" in line:
                        self.joined_at = time.monotonic()
                    self.text += line
                    self._news.notify_all()
        self.ended_at = time.monotonic()

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: words in self.text, seconds), self.text

    def wait(self, seconds: float = 30.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def ranks(self) -> list[psutil.Process]:
        return ranks_of(self.process.pid)


@contextlib.contextmanager
def node(port: int, *flags: str, **options: Any) -> Iterator[Node]:
    started = Node(port, *flags, **options)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.wait()


def head(port: int, shape: str = "tp2", **options: Any) -> LLM:
    tensor_size, stages = SHAPES[shape]
    sizes = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": stages}
    return LLM(**{**SMALL, "nnodes": 2, "master_port": port, **sizes, **options})


@pytest.mark.parametrize(
    ("shape", "overlaps"),
    [
        ("tp2", True),
        pytest.param("tp2", False, marks=pytest.mark.slow),
        pytest.param("pp2", False, marks=pytest.mark.slow),
        pytest.param("tp2 pp2", False, marks=pytest.mark.slow),
    ],
)
def test_two_nodes_give_the_tokens_of_one_process_and_end_together(
    shape: str, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that comes before the head waits for it."""
    with LLM(**SMALL) as alone:
        expected = tokens(alone, mixed_params(), prompts(8))
    assert len({str(each) for each in expected}) > 4, "output that is all the same proves nothing"
    if overlaps:
        monkeypatch.setattr(ModelRunnerOutput, "is_done", lambda _: False)  # else the CPU has nothing to overlap
    port = free_port()
    with node(port, shape=shape) as other:
        with head(port, shape, async_scheduling=overlaps) as llm:
            other.wait_for("holds rank")
            ranks = other.ranks()
            assert len(ranks) == SHAPES[shape][0] * SHAPES[shape][1] // 2
            assert llm.llm_engine.engine_core.core.max_concurrent_batches == max(1 + overlaps, SHAPES[shape][1])  # type: ignore[attr-defined]
            assert tokens(llm, mixed_params(), prompts(8)) == expected
            views = executor_of(llm).rank_views()
            num_own = len(views) - len(ranks)
            assert [view.rank for view in views] == list(range(len(views)))
            assert [view.node_rank for view in views] == [0] * num_own + [1] * len(ranks)
            assert sorted(view.pid for view in views[num_own:]) == sorted(rank.pid for rank in ranks)
            assert views[-1].collectives > 0
            place = f"worker rank {len(views) - 1}{' of stage 0' if 'pp2' in shape else ''} (node 1, pid "
            assert place in str(views[-1])
        assert other.wait() == 0, other.text
        assert_gone(ranks)


@pytest.mark.parametrize("victim", ["rank", pytest.param("node", marks=pytest.mark.slow)])
def test_a_rank_or_a_node_that_is_killed_is_named_and_the_rest_ends(victim: str) -> None:
    port = free_port()
    with node(port) as other, head(port) as llm:
        other.wait_for("holds rank 1")
        [rank] = other.ranks()
        killed = psutil.Process(other.process.pid) if victim == "node" else rank
        at: list[float] = []

        def kill() -> None:
            at.append(time.monotonic())
            killed.kill()

        killer = threading.Timer(0.3, kill)
        killer.start()
        with pytest.raises(EngineDeadError) as death:
            generate_without_end(llm)
        assert time.monotonic() - at[0] < 2.0, "known too late"
        if victim == "rank":
            assert f"worker rank 1 (node 1, pid {rank.pid}) was killed by SIGKILL" in str(death.value)
            assert other.wait(10) == 1
            assert "was killed by SIGKILL" in other.text
        else:
            assert f"worker rank 1 (node 1, pid {rank.pid}) ended with its node, node 1 (" in str(death.value)
        assert_gone([rank])


@pytest.mark.slow
def test_a_node_ends_with_the_head_and_waits_for_its_next_engine_if_told_to() -> None:
    port = free_port()
    script = (
        "import sys\nfrom rustvllm import LLM, SamplingParams\n"
        f"llm = LLM(nnodes=2, tensor_parallel_size=2, master_port={port}, **{SMALL!r})\n"
        "print(llm.generate('Once', SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids)\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
    )
    with node(port, "--restart-engine") as other:
        for number in range(2):
            with subprocess.Popen(
                [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as first:
                assert first.stdout is not None
                assert "ready" in [first.stdout.readline(), first.stdout.readline()][1]
                ranks = other.ranks()
                assert len(ranks) == 1
                first.send_signal(signal.SIGKILL)
            assert_gone(ranks)
            other.wait_for(f"waiting for its next engine ({number + 1} of")
    with node(port) as other:
        with subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as first:
            assert first.stdout is not None
            first.stdout.readline()
            ranks = other.ranks()
            first.send_signal(signal.SIGKILL)
        assert other.wait(10) == 1
        assert "has ended or can no longer be reached" in other.text
        assert_gone(ranks)


@pytest.mark.slow
def test_a_server_goes_on_with_new_ranks_on_each_node_when_one_was_killed() -> None:
    port = free_port()
    flags = ("--restart-engine", "--max-model-len", "96", "--max-num-seqs", "8", "--num-gpu-blocks-override", "25")
    with node(port, *flags) as other, node(port, *flags, rank=0) as first:
        first.wait_for("ready, serving", 90)
        [url] = re.findall(r"http://[0-9.]+:\d+", first.text)[:1]

        def answered() -> bool:
            body = json.dumps({"prompt": "Once", "max_tokens": 4, "ignore_eos": True}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
                return bool(json.load(answer)["usage"]["completion_tokens"] == 4)
            return False

        assert answered()
        [rank] = other.ranks()
        rank.kill()
        other.wait_for("waiting for its next engine (1 of", 10)
        deadline = time.monotonic() + 90
        while not answered():
            assert time.monotonic() < deadline, first.text + other.text
            time.sleep(0.2)
        [new] = other.ranks()
        assert new.pid != rank.pid
        assert f"worker rank 1 (node 1, pid {rank.pid}) was killed by SIGKILL" in first.text
        first.process.terminate()
        assert first.wait() == 0, first.text
        assert other.wait() == 0, other.text
        assert_gone([new])


OTHER_TORCH = (
    "import importlib.metadata as m\n_version = m.version\n"
    "m.version = lambda name: '1.2.3' if name == 'torch' else _version(name)"
)
UNLIKE: dict[str, tuple[tuple[str, ...], str, str]] = {
    "flags": (("--block-size", "16"), "", r"node 1 \(.+\) has block_size 16, node 0 \(.+\) has 8"),
    "model": ((), "", r"node 1 \(.+\) has model \(.+\) \w+, node 0 \(.+\) has \w+"),
    "torch": ((), OTHER_TORCH, r"node 1 \(.+\) has torch 1\.2\.3, node 0 \(.+\) has \d"),
    "rustvllm": (
        (),
        "from rustvllm import _core\n_core.__version__ = '0.0.1'",
        r"node 1 \(.+\) has rustvllm 0\.0\.1, node 0 \(.+\) has \d",
    ),
}


@pytest.mark.parametrize(
    "what", ["flags", *(pytest.param(what, marks=pytest.mark.slow) for what in ("model", "torch", "rustvllm"))]
)
def test_a_node_that_is_unlike_the_head_ends_both_starts_with_both_values(what: str, tmp_path: Any) -> None:
    flags, before, message = UNLIKE[what]
    if what == "model":
        source = embedded_model_path()
        for path in source.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-4}))
        flags = ("--model", str(tmp_path))
    port = free_port()
    with node(port, *flags, before=before) as other:
        with pytest.raises(ConfigError, match=message):
            head(port)
        ended_at = time.monotonic()
        other.wait_for("has joined")  # a line that may be read after the head has said what is wrong
        assert ended_at - other.joined_at < SOON
        assert other.wait() == 1
        assert other.ended_at - other.joined_at < SOON
        assert re.search(message, other.text), other.text


def test_other_secrets_and_none_are_refused_on_the_node_and_the_head_goes_on(log: list[str]) -> None:
    port = free_port()
    with node(port, secret=None) as none:
        assert none.wait() == 1
        assert re.search(r"--nnodes 2 needs a \S+ of 16 bytes or more", none.text), none.text
    with node(port, secret="fedcba9876543210-of-tests") as wrong, node(port) as right, head(port) as llm:
        assert wrong.wait() == 1
        right.wait_for("has joined")
        assert wrong.ended_at - right.joined_at < SOON, "both were let in at the same time"
        message = r"node 1 \(.+\) and the head \(node 0\) at 127.0.0.1 port \d+ have different \S+: give both the same"
        assert re.search(message, wrong.text), wrong.text
        assert "the two sides have different" in "\n".join(log)
        right.wait_for("holds rank 1")
        with node(port) as twice:
            assert twice.wait() == 1
            assert twice.ended_at - twice.joined_at < SOON
            assert re.search(r"node 1 \(.+\) cannot join node 0 \(.+\): node 1 \(.+\) has joined as node 1", twice.text)
        assert tokens(llm, SamplingParams(max_tokens=2, ignore_eos=True), prompts(1))


def test_a_head_without_a_secret_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUSTVLLM_ENGINE_SECRET")
    with pytest.raises(ConfigError, match=r"nnodes is 2, and all nodes need the same secret of 16 bytes or more: set"):
        head(free_port())


@pytest.mark.slow
def test_a_node_that_comes_late_is_waited_for_by_name(log: list[str]) -> None:
    port, late = free_port(), []
    timer = threading.Timer(SOON + 6, lambda: late.append(Node(port)))
    timer.start()
    try:
        with head(port) as llm:
            assert tokens(llm, SamplingParams(max_tokens=2, ignore_eos=True), prompts(1))
        assert re.search(r"node 0 \(.+\) waits for node 1 at 127.0.0.1 port \d+", "\n".join(log))
        assert late[0].wait() == 0, late[0].text
    finally:
        timer.join()
        late[0].process.kill()


@pytest.mark.slow
def test_nodes_that_do_not_come_are_named_on_both_sides(log: list[str]) -> None:
    """Later than either side waits for the other, which is a minute unless a flag says more or less."""
    port = free_port()
    with node(port, "--distributed-timeout-seconds", "7") as alone:
        assert alone.wait() == 1
        assert re.search(r"node 1 \(.+\) waits for the head \(node 0\) at 127.0.0.1 port", alone.text)
        assert re.search(r"node 1 \(.+\) could not reach the head .+ within 7 s", alone.text)
    message = r"node 1 of 2 did not come to node 0 \(.+\) at 127.0.0.1 port \d+ within 6 s"
    with pytest.raises(ModelLoadError, match=message):
        head(port, distributed_timeout_seconds=6)
    assert re.search(r"node 0 \(.+\) waits for node 1 at 127.0.0.1", "\n".join(log))


@pytest.mark.slow
def test_strangers_keep_no_node_up(log: list[str]) -> None:
    """One that says nothing, one that speaks HTTP, and the node that is waited for."""
    port = free_port()

    def connect() -> socket.socket:
        for _ in range(200):
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", port))
            time.sleep(0.05)
        raise TimeoutError

    silent: list[socket.socket] = []

    def disturb() -> None:
        silent.append(connect())
        with connect() as http:
            http.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
            time.sleep(0.5)

    threading.Thread(target=disturb).start()
    with node(port) as other, head(port) as llm:
        other.wait_for("holds rank 1")
        assert tokens(llm, SamplingParams(max_tokens=2, ignore_eos=True), prompts(1))
    assert "does not speak this protocol" in "\n".join(log)
    silent[0].close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 3}, r"nnodes 3 does not divide the 2 ranks .+; 1, 2 would"),
        ({"node_rank": 2}, r"node_rank is 2, but nnodes is 2: node ranks are 0 to 1"),
        ({"node_rank": 1}, r"node_rank is 1, but the engine runs on node 0: start this node with rustvllm serve"),
        ({"master_addr": "no.such.host.invalid"}, r"cannot resolve master_addr no\.such\.host\.invalid"),
        ({"master_addr": "192.0.2.1"}, r"the head cannot listen for other nodes on 192\.0\.2\.1 port"),
        ({"distributed_executor_backend": "uni"}, r"distributed_executor_backend is uni"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{**SMALL, "nnodes": 2, "tensor_parallel_size": 2, **options})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["-r", "1"],
            (
                "--node-rank 1 only runs ranks, because the engine is on node 0, so this machine cannot serve the API: "
                "add --headless"
            ),
        ),
        (
            ["-r", "1", "--headless", "--engine-address", "tcp:127.0.0.1:1"],
            "--node-rank 1 has no engine of its own, because the engine is on node 0: leave --engine-address out",
        ),
        (["-r", "2", "--headless"], "--node-rank is 2, but nnodes is 2: node ranks are 0 to 1"),
        (["--engine-secret-file", "/dev/null"], "-file /dev/null has 0 bytes"),
    ],
)
def test_command_lines_of_nodes_that_cannot_be(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "rustvllm.cli.main", "serve", "-n", "2", "-tp", "2", "--device", "cpu", *flags]
    command += ["--hf-overrides", json.dumps(FOUR_HEADS), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout
    assert message in done.stderr
