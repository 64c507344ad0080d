"""``rustvllm serve --executor sim`` as a program, and ``rustvllm bench serve`` against it: no weights, no torch."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from server_process import REAL, ServerProcess

BENCH = [sys.executable, "-W", "error", "-m", "rustvllm.cli.main", "bench", "serve"]


@pytest.fixture(scope="module")
def server():
    command = [*REAL, "--executor", "sim", "--port", "0", "--sim-step-time", "2"]
    with ServerProcess(command, PYTHONPROFILEIMPORTTIME="1") as process:
        process.wait_until_ready()
        yield process


def bench(server, *arguments):
    done = subprocess.run(
        [*BENCH, "--base-url", server.url, "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_process_of_it_has_torch(server):
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 3}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 3
    # Every module that its processes have imported is in their output, and every library in their memory maps.
    imported = {line.rpartition("|")[2].strip() for line in server.lines if line.startswith("import time:")}
    assert {"rustvllm.executor.sim", "fastapi", "numpy"} <= imported
    assert {name for name in imported if name.partition(".")[0] in {"torch", "transformers", "triton"}} == set()
    processes = server.children()
    assert len(processes) == 2
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "_core" in maps
        assert "libtorch" not in maps


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_a_load_is_served_and_measured(server, endpoint):
    report = bench(
        server, "--endpoint", endpoint, "--num-prompts", "40", "--max-concurrency", "8", "--random-input-len", "20",
        "--random-output-len", "12", "--random-range-ratio", "0.5", "--ignore-eos", "--warmup", "4",
    )  # fmt: skip
    assert (report["completed"], report["failed"]) == (40, 0), report["errors_by_kind"]
    assert report["output_tokens_from"] == "usage"
    assert 40 * 6 <= report["total_output_tokens"] <= 40 * 18
    assert report["requests_of_unknown_input"] == 0
    assert report["tokens_per_event"] >= 1
    assert report["max_concurrent_requests"] == 8
    # A step takes two milliseconds, and so does a token; a busy machine hands some of them on together.
    assert report["median_tpot_ms"] > 1
    assert report["mean_itl_ms"] > 1
    load = httpx.get(f"{server.url}/load").json()
    assert load["num_running"] == load["num_waiting"] == 0


def test_a_result_of_chats_is_saved_with_details(server, tmp_path):
    report = bench(
        server, "--backend", "openai-chat", "--num-prompts", "12", "--max-concurrency", "3", "--random-input-len", "10",
        "--random-output-len", "9", "--ignore-eos", "--save-result", "--save-detailed", "--result-dir", str(tmp_path),
        "--metadata", "build=nightly", "--goodput", "ttft:60000", "e2el:60000",
    )  # fmt: skip
    [path] = tmp_path.iterdir()
    assert path.name.startswith("openai-chat-infqps-concurrency3-")
    assert json.loads(path.read_text()) == report
    assert (report["completed"], report["backend"], report["build"]) == (12, "openai-chat", "nightly")
    assert report["request_goodput"] == report["request_throughput"] > 0
    assert report["output_lens"] == [9] * 12
    assert sum(report["input_lens"]) == report["total_input_tokens"] > 0
    assert report["errors"] == [""] * 12
    assert report["start_times"] == sorted(report["start_times"])
    assert min(report["ttfts"]) > 0


def test_a_load_that_is_refused_leaves_no_result(server, tmp_path):
    command = [*BENCH, "--base-url", server.url, "--num-prompts", "3", "--extra-body", '{"temperature": -1}']
    saved = ["--save-result", "--result-dir", str(tmp_path)]
    done = subprocess.run([*command, *saved], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert "none of 3 requests finished; first http_400: HTTP status 400: " in done.stderr
    assert "temperature must be" in done.stderr
    assert "TTFT" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_streams_of_equal_requests_are_equal(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 30, "temperature": 1, "seed": 3}
    texts = {httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1
    assert len(texts.pop().split()) == 30


def test_ctrl_c_ends_a_measurement_within_a_second(server):
    lengths = ["--random-input-len", "20", "--random-output-len", "400", "--ignore-eos"]
    command = [*BENCH, "--base-url", server.url, "--num-prompts", "100000", "--request-rate", "20", *lengths]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 30
            while httpx.get(f"{server.url}/load").json()["num_running"] == 0:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "")
    assert time.monotonic() - begin < 4, "one second, and three for a busy machine"
