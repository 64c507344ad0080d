"""``_core.bench_step`` and ``bench_trace``: a recorded trace against a plain set of prefixes, Ctrl-C, other threads."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from rustvllm import _core
from rustvllm.exceptions import TraceError

HASH_BLOCK = 512


def expected_hits(lines, block_size):
    """Hit blocks per request, the trace's own hits, and full blocks: prefixes as chains of hash ids, nothing evicted.

    A block is found when an earlier request had it after the same prefix. A prompt's last token is always computed.
    """
    per_id = HASH_BLOCK // block_size
    nodes, seen = {}, {}
    hits, own, full = [], 0, 0
    for line in lines:
        request = json.loads(line)
        blocks, parent, found, unbroken = request["input_length"] // block_size, 0, 0, True
        for place, hash_id in enumerate(request["hash_ids"]):
            parent = nodes.setdefault((parent, hash_id), len(nodes) + 1)
            here = min(blocks - place * per_id, per_id)
            known = min(seen.get(parent, 0), here)
            found += known if unbroken else 0
            unbroken = unbroken and known == per_id
            seen[parent] = max(seen.get(parent, 0), here)
        own += found
        full += blocks
        hits.append(min(found, (request["input_length"] - 1) // block_size))
    return hits, own, full


@pytest.mark.parametrize(("block_size", "num_blocks", "percent"), [(512, 600_000, "38.19"), (16, 10_000_000, "37.38")])
def test_a_pool_that_never_evicts_has_the_hits_of_the_trace(shared_dir, block_size, num_blocks, percent):
    path = shared_dir / "data" / "traces" / "mooncake_conversation_trace.jsonl"
    hits, own, full = expected_hits(path.read_text().splitlines(), block_size)
    assert f"{100 * own / full:.2f}" == percent
    report = _core.bench_trace(
        path, block_size=block_size, num_blocks=num_blocks, step_base_us=500_000, per_request=True
    )
    assert report["hit_blocks_per_request"] == hits
    assert (report["full_blocks"], report["hit_blocks"]) == (full, sum(hits))
    assert report["prefix_hit_rate"] == sum(hits) / full
    assert (report["requests"], report["preemptions"], report["refused"]) == (12_031, 0, {})


@pytest.mark.slow
def test_the_whole_trace_runs_in_a_pool_that_evicts(shared_dir):
    path = shared_dir / "data" / "traces" / "mooncake_conversation_trace.jsonl"
    report = _core.bench_trace(path, block_size=16, num_blocks=16_384)
    assert report["output_tokens"] == sum(json.loads(line)["output_length"] for line in path.read_text().splitlines())
    assert 0 < report["prefix_hit_rate"] < 0.37, "as much was found as where nothing is evicted"


def test_azures_trace_runs(shared_dir):
    report = _core.bench_trace(shared_dir / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv", limit=2000)
    assert (report["format"], report["requests"], report["hit_blocks"]) == ("azure", 2000, 0)


@pytest.fixture
def endless(tmp_path):
    """A trace that takes far longer than a test: many long answers, one at a time."""
    path = tmp_path / "endless.csv"
    lines = "2023-11-16 18:15:46,8,60000000\n" * 1000
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
    return path


LONG = {
    "step": "_core.bench_step(256, 1_000_000)",
    "trace": "_core.bench_trace(sys.argv[1], num_blocks=4_000_000, max_num_seqs=1)",
}


@pytest.mark.parametrize("call", LONG.values(), ids=LONG.keys())
def test_ctrl_c_ends_a_long_run_within_a_second(endless, call):
    code = f"""
import sys, time
from rustvllm import _core
print("begun", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted")
"""
    with subprocess.Popen([sys.executable, "-c", code, endless], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        rest = process.communicate(timeout=60)[0]
        seconds = time.monotonic() - begin
    assert (process.returncode, rest) == (0, "interrupted\n")
    assert seconds < 4, "one second, and three for a busy machine"


def test_other_threads_run_meanwhile():
    count, stop = 0, threading.Event()

    def counting():
        nonlocal count
        while not stop.is_set():
            count += 1
            time.sleep(0.001)

    thread = threading.Thread(target=counting)
    thread.start()
    try:
        before = count
        _core.bench_step(1024, 3000)
        assert count - before > 5
    finally:
        stop.set()
        thread.join()


def test_a_wrong_trace_is_a_named_error(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read .*nothing: No such file"):
        _core.bench_trace(tmp_path / "nothing")
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0]}\n')
    with pytest.raises(TraceError, match=r"wrong.jsonl, line 1: hash_ids must be a list of 2 ids, .* got 1"):
        _core.bench_trace(path)
    with pytest.raises(ValueError, match="trace_format must be 'auto', 'mooncake' or 'azure', got \"csv\""):
        _core.bench_trace(path, trace_format="csv")
