"""One model on two nodes: the tokens are those of one process, what does not fit is said on both sides, and the end of
a node is known.

The head is an ``LLM`` in this process, the other node ``rustvllm serve --headless`` in another, both on the loopback.
"""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rustvllm import LLM, SamplingParams
from rustvllm.config.hub import embedded_model_path
from rustvllm.exceptions import ConfigError, EngineDeadError, ModelLoadError

SECRET = "a secret for tests alone"
FOUR_HEADS = {"n_head": 4}
SMALL: dict[str, Any] = {"max_model_len": 96, "block_size": 8, "max_num_seqs": 8, "num_gpu_blocks_override": 25}
SHAPES = {"tp2": (2, 1), "pp2": (1, 2)}


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSTVLLM_CHECK_INVARIANTS", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RUSTVLLM_ENGINE_SECRET", SECRET)
        yield


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What this process logs, line by line."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rustvllm")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Node:
    """A node other than the head, and what it prints."""

    def __init__(self, port: int, *flags: str, secret: str | None = SECRET, shape: str = "tp2") -> None:
        tensor_size, stages = SHAPES[shape]
        command = [sys.executable, "-m", "rustvllm.cli.main", "serve", "--headless", "--device", "cpu", "-n", "2"]
        command += ["-r", "1", "--master-port", str(port), "-tp", str(tensor_size), "-pp", str(stages)]
        command += ["--hf-overrides", json.dumps(FOUR_HEADS), "--block-size", "8", *flags]
        environment = {**os.environ, "RUSTVLLM_ENGINE_SECRET": secret or ""}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.text = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._news:
                    self.text += line
                    self._news.notify_all()

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: words in self.text, seconds), self.text

    def wait(self, seconds: float = 30.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def ranks(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children()
            return [each for each in children if "rustvllm.worker.process" in each.cmdline()]
        return []


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
    return LLM(hf_overrides=FOUR_HEADS, device="cpu", nnodes=2, master_port=port, **{**SMALL, **sizes, **options})


def assert_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [3 + (7 * i + 11 * j) % 200 for j in range(5 + 3 * i)]} for i in range(count)]


def tokens(llm: LLM, params: Any, given: Any) -> list[list[list[int]]]:
    outputs = llm.generate(given, params, use_tqdm=False)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def generate_without_end(llm: LLM) -> None:
    while True:
        tokens(llm, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), prompts(4))


def mixed_params() -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.8,
            seed=i,
            max_tokens=24,
            ignore_eos=True,
            n=1 if i % 2 else 1 + i % 4,
            presence_penalty=0.3,
        )
        for i in range(8)
    ]


@pytest.mark.parametrize("shape", ["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_two_nodes_give_the_tokens_of_one_process_and_end_together(shape: str) -> None:
    """A follower that comes before the head waits for it."""
    with LLM(hf_overrides=FOUR_HEADS, device="cpu", **SMALL) as alone:
        expected = tokens(alone, mixed_params(), prompts(8))
    assert len({str(each) for each in expected}) > 4, "output that is all the same proves nothing"
    port = free_port()
    with node(port, shape=shape) as other:
        with head(port, shape) as llm:
            other.wait_for("holds rank 1")
            [rank] = other.ranks()
            assert tokens(llm, mixed_params(), prompts(8)) == expected
            executor = llm.llm_engine.engine_core.core.executor  # type: ignore[attr-defined]
            views = executor.rank_views()
            assert [(view.rank, view.node_rank) for view in views] == [(0, 0), (1, 1)]
            assert views[1].pid == rank.pid
            assert views[1].collectives > 0
            assert f"worker rank 1{' of stage 0' if shape == 'pp2' else ''} (node 1, pid {rank.pid})" in str(views[1])
        assert other.wait() == 0, other.text
        assert_gone([rank])


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
        f"llm = LLM(hf_overrides={FOUR_HEADS!r}, device='cpu', nnodes=2, tensor_parallel_size=2, master_port={port}, "
        f"**{SMALL!r})\n"
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
        assert "has ended or cannot be reached any more" in other.text
        assert_gone(ranks)


UNLIKE = {
    "flags": (("--block-size", "16"), {}, r"node 1 \(.+\) has block_size 16, node 0 \(.+\) has 8"),
    "model": (("--model", "MODEL"), {}, r"node 1 \(.+\) has model \(.+\) \w+, node 0 \(.+\) has \w+"),
}


@pytest.mark.parametrize("what", ["flags", pytest.param("model", marks=pytest.mark.slow)])
def test_a_node_that_is_unlike_the_head_ends_both_starts_with_both_values(what: str, tmp_path: Any) -> None:
    flags, options, message = UNLIKE[what]
    if what == "model":
        source = embedded_model_path()
        for path in source.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-4}))
        flags = ("--model", str(tmp_path))
    port = free_port()
    with node(port, *flags) as other:
        with pytest.raises(ConfigError, match=message):
            head(port, **options)
        assert other.wait(5) == 1
        assert re.search(message, other.text), other.text


def test_other_secrets_and_none_are_refused_on_the_node_and_the_head_goes_on(log: list[str]) -> None:
    port = free_port()
    with node(port, secret=None) as none:
        assert none.wait() == 1
        assert re.search(r"--nnodes 2 needs a \S+ of 16 bytes or more", none.text), none.text
    with node(port, secret="fedcba9876543210-of-tests") as wrong, node(port) as right, head(port) as llm:
        assert wrong.wait() == 1
        message = r"node 1 \(.+\) and the head \(node 0\) at 127.0.0.1 port \d+ have different \S+: give both the same"
        assert re.search(message, wrong.text), wrong.text
        assert "the two sides have different" in "\n".join(log)
        right.wait_for("holds rank 1")
        with node(port) as twice:
            assert twice.wait() == 1
            assert re.search(r"node 1 \(.+\) cannot join node 0 \(.+\): node 1 \(.+\) has joined as node 1", twice.text)
        assert tokens(llm, SamplingParams(max_tokens=2, ignore_eos=True), prompts(1))


@pytest.mark.slow
def test_nodes_that_do_not_come_are_named_on_both_sides(log: list[str]) -> None:
    port = free_port()
    with node(port, "--distributed-timeout-seconds", "7") as alone:
        assert alone.wait() == 1
        assert re.search(r"node 1 \(.+\) waits for the head \(node 0\) at 127.0.0.1 port", alone.text)
        assert re.search(r"node 1 \(.+\) found nothing that listens as the head .+ within 7 s", alone.text)
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
        LLM(hf_overrides=FOUR_HEADS, device="cpu", **{**SMALL, "nnodes": 2, "tensor_parallel_size": 2, **options})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-r", "1"], "--node-rank 1 is a machine whose engine is on node 0, so it serves no API: add --headless"),
        (
            ["-r", "1", "--headless", "--engine-address", "tcp:127.0.0.1:1"],
            "--node-rank 1 follows the engine of node 0 and has none of its own: leave --engine-address out",
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
