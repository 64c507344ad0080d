"""What the playground of the live page offers on servers of each task; its script runs in node, without a browser."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import rustvllm

NODE = shutil.which("node")
SCRIPT = Path(rustvllm.__file__).parent / "server" / "dashboard" / "playground.js"


@pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")
def test_the_playground_offers_what_the_server_does():
    command = [NODE, Path(__file__).with_name("playground_stub.js"), SCRIPT]
    tasks = json.dumps(["generate", "embed", "classify"])
    done = subprocess.run(command, input=tasks, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    chat, embedding, classification = json.loads(done.stdout)
    assert (chat["endpoints"], chat["parameters"], chat["shown"]) == (["chat", "completion"], True, "hi")
    [(path, body)] = chat["sent"]
    assert (path, body["messages"]) == ("v1/chat/completions", [{"role": "user", "content": "The sea"}])
    assert chat["usage"].startswith("first token after")
    for found, path, shown in (
        (embedding, "v1/embeddings", "20 numbers: 0, 0.1429, 0.2857"),
        (classification, "classify", "good: 0.9\nall 2 labels: 0.1, 0.9"),
    ):
        assert found["endpoints"] == [{"embed": "embedding", "classify": "classification"}[found["task"]]]
        assert not found["parameters"], "they are those of generated text"
        [(sent_path, body)] = found["sent"]
        assert (sent_path, body["input"], set(body)) == (path, "The sea", {"model", "input", "request_id"})
        assert found["shown"].startswith(shown)
        assert found["usage"] == "answer after 1 ms · 3 tokens"
