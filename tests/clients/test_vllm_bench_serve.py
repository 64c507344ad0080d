"""vLLM's `bench serve` measures this server as it measures its own.

vLLM takes 6 GB, so `RUSTVLLM_TEST_VLLM_PYTHON` names the interpreter of an environment that has it (how to make one:
docs/benchmarks/engines.md).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from embedded_server import MODEL

import rustvllm

pytestmark = pytest.mark.timeout(600)
OUTPUT_TOKENS = 16
PROMPTS = 12


@pytest.fixture(scope="module")
def vllm_python():
    python = os.environ.get("RUSTVLLM_TEST_VLLM_PYTHON")
    if not python:
        pytest.skip("RUSTVLLM_TEST_VLLM_PYTHON names no interpreter with vLLM")
    return python


@pytest.fixture
def conversations(tmp_path):
    """A file as ShareGPT's: a question of a few words, and an answer whose length is asked for."""
    path = tmp_path / "conversations.json"
    path.write_text(
        json.dumps(
            [
                {
                    "id": str(i),
                    "conversations": [
                        {"from": "human", "value": f"Tell me the story of the {i} foxes and the old mill, please."},
                        {"from": "gpt", "value": "Once upon a time there were foxes near the old mill. " * 2},
                    ],
                }
                for i in range(PROMPTS)
            ]
        )
    )
    return path


@pytest.mark.parametrize("dataset", ["random", "sharegpt"])
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve(vllm_python, repository, url, conversations, backend, dataset):
    tokenizer = Path(rustvllm.__file__).parent / "assets" / "tiny"
    path = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    source = {
        "random": ["--random-input-len", "24", "--random-output-len", str(OUTPUT_TOKENS)],
        "sharegpt": ["--dataset-path", str(conversations), "--sharegpt-output-len", str(OUTPUT_TOKENS)],
    }[dataset]
    # fmt: off
    arguments = [
        "--base-url", url, "--backend", backend, "--endpoint", path, "--model", MODEL, "--tokenizer", str(tokenizer),
        "--dataset-name", dataset, *source, "--num-prompts", str(PROMPTS), "--ignore-eos", "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--goodput", "ttft:60000", "tpot:60000",
    ]
    # fmt: on
    before = httpx.get(f"{url}/load").json()["num_finished"]
    done = subprocess.run(
        [
            sys.executable,
            repository / "benches/python/vllm_bench_serve.py",
            "--vllm-python",
            vllm_python,
            "--",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS
    assert found["request_goodput"] == found["request_throughput"] > 0
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < found[f"median_{name}_ms"] <= found[f"p99_{name}_ms"]
    assert "tokenizer mismatch" not in done.stderr
    assert "unavailable" not in done.stderr
    assert httpx.get(f"{url}/load").json()["num_finished"] - before == PROMPTS
