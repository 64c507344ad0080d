"""The scripts of ``examples/`` run as they are and print what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest
from server_process import REAL, ServerProcess

EXPECTED = {
    "agent_loop.py": ["called: get_weather({", " degrees ", "answer: '"],
    "basic.py": ["'Once upon a time' -> '", "'In the forest' -> '"],
    "completion_client.py": ["choice 0: '", "choice 1: '"],
    "chat.py": ["user: Tell me a story about a boat.\nassistant: "],
    "embeddings.py": [" numbers each", "'The dog ran in the park.'"],
    "enqueue.py": [
        "<Scheduler after step 1: running 2 (0, 1), waiting 1 (2), swapped 0; ",
        "<Request '1' RUNNING: ",
        "request 0: new -> WAITING",
        "request 2: RUNNING -> FINISHED_LENGTH_CAPPED",
        "2: 'In the forest' -> '",
    ],
    "engine_steps.py": ["first   12 tokens  length", "third ", "abort", "second  12 tokens  length"],
    "generate.py": ["'Once upon a time' -> '", "'The little dog' -> '"],
    "journey.py": ["InputProcessor       checked", "Sampler              token", "LLMEngine            finished"],
    "logits_processor.py": ["never twice: 24 different tokens of 24"],
    "logprobs.py": ["' time'"],
    "lora.py": ["the model:  ", "the adapter: "],
    "metrics.py": ["vllm:generation_tokens 64", "vllm:request_success 4"],
    "openai_client.py": ["completion: '", "chat: '", "stream: "],
    "responses.py": ["stream: ", "status: ", " tokens", "answer: '"],
    "prefix_caching.py": ["'The dog': 0 of ", "'Lily said': 272 of "],
    "structured_output.py": ["choice: '", "regex: ' ", "json: '{", "a "],
    "reranking.py": ["'The dog ran in the park.'\n"],
    "stream.py": ["a: 24 tokens in ", "b: 24 tokens in ", "c: 24 tokens in "],
}
CLIENTS = ("openai_client.py", "completion_client.py", "responses.py")
AGENT = "agent_loop.py"


def run(repository: Path, name: str, *argv: str) -> str:
    command = [sys.executable, str(repository / "examples" / name), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=repository)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_example_is_listed(repository):
    found = {path.name for path in (repository / "examples").glob("*.py")}
    assert found == set(EXPECTED)
    readme = (repository / "examples/README.md").read_text()
    assert all(f"`{name}`" in readme for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {*CLIENTS, AGENT}))
def test_an_example_prints_what_it_promises(repository, name):
    printed = run(repository, name)
    for part in EXPECTED[name]:
        assert part in printed


@pytest.mark.slow
def test_the_examples_of_clients(repository):
    with ServerProcess([*REAL, "--port", "0"]) as server:
        url = f"{server.wait_until_ready()}/v1"
        for name in CLIENTS:
            printed = run(repository, name, url)
            for part in EXPECTED[name]:
                assert part in printed
        assert "choice 1: '" in run(repository, "completion_client.py", "--stream", url)


@pytest.mark.slow
def test_the_example_of_an_agent(repository):
    template = str(repository / "examples" / "tools.jinja")
    with ServerProcess([*REAL, "--port", "0", "--chat-template", template]) as server:
        printed = run(repository, AGENT, f"{server.wait_until_ready()}/v1")
    for part in EXPECTED[AGENT]:
        assert part in printed
