"""Adapters that are named by their names on the hub: at the start, over HTTP, and in ``LoRARequest``."""

import threading

import httpx
import pytest
from server_process import REAL, ServerProcess
from tiny_adapters import GREEDY, PROMPT, make_adapters, say

from hub_server import HubServer
from rustvllm import LLM
from rustvllm.lora.request import LoRARequest

pytest.importorskip("peft", reason="peft is not installed")

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with an adapter, and what the model says with it and alone."""
    root = tmp_path_factory.mktemp("root")
    make_adapters([root / "polite"])
    with LLM(enable_lora=True) as llm:
        texts = [say(llm, request) for request in (None, LoRARequest("polite", 1, str(root / "polite")))]
    assert texts[0] != texts[1]
    return root, texts


@pytest.fixture
def hub(world):
    """A hub with that adapter under several names."""
    files = {path.name: path.read_bytes() for path in (world[0] / "polite").iterdir() if path.is_file()}
    with HubServer() as server:
        for repo in ("acme/polite", "acme/slow", "acme/bad", "other/polite"):
            server.put(repo, files)
        yield server


def post(server, path, **body):
    return httpx.post(server.url + path, json=body, timeout=60)


def load(server, name, path):
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path)


def text(server, name):
    return post(server, "/v1/completions", model=name, prompt=PROMPT, **GREEDY).json()["choices"][0]["text"]


def test_requests_name_them(hub, world, monkeypatch, tmp_path):
    hub.use_here(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    with LLM(enable_lora=True) as llm:
        for _ in range(2):
            assert say(llm, LoRARequest("polite", 1, "acme/polite")) == world[1][1]
        assert hub.fetched(WEIGHTS) == [WEIGHTS]
        assert say(llm, None) == world[1][0]
    with LLM(merge_lora=["acme/polite"]) as llm:
        assert say(llm, None) == world[1][1]


def test_a_server_downloads_what_its_flags_allow_while_it_answers(hub, world, tmp_path):
    flags = ["--enable-lora", "--max-loras", "4", "--lora-modules", "first=acme/polite", "--lora-hub", "acme"]
    hub.held.add(("acme/slow", WEIGHTS))
    hub.spoiled.add(("acme/bad", WEIGHTS))
    with ServerProcess([*REAL, "--port", "0", *flags], **hub.environ(tmp_path)) as process:
        process.wait_until_ready()
        assert text(process, "first") == world[1][1]
        answers = []
        loader = threading.Thread(target=lambda: answers.append(load(process, "slow", "acme/slow")))
        loader.start()
        assert hub.is_held.wait(60)
        assert text(process, "first") == world[1][1], "other requests go on during a download"
        assert not answers
        hub.may_go_on.set()
        loader.join(60)
        assert (answers[0].status_code, answers[0].text) == (200, "Success: LoRA adapter 'slow' added successfully.")
        assert text(process, "slow") == world[1][1]
        hub.requests.clear()
        for path, status, words in (
            ("other/polite", 404, "'other/polite' is not a hub name that --lora-hub allows (acme)"),
            ("/etc", 404, "is not a hub name"),
            ("acme/../x", 404, "is not a hub name"),
            ("http://127.0.0.1/acme/polite", 404, "is not a hub name"),
        ):
            answer = load(process, "new", path)
            assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
        answer = load(process, "first", "acme/bad")
        assert (answer.status_code, "already been loaded" in answer.json()["error"]["message"]) == (400, True)
        assert hub.requests == [], "nothing is asked for what will be refused"
        answer = load(process, "new", "acme/none")
        assert answer.status_code == 404
        assert "there is no adapter acme/none on http" in answer.json()["error"]["message"]
        answer = load(process, "new", "acme/bad")
        assert answer.status_code == 400
        assert f"{WEIGHTS} has the SHA-256" in answer.json()["error"]["message"]
        assert post(process, "/v1/unload_lora_adapter", lora_name="slow").status_code == 200
        hub.stop()
        answer = load(process, "new", "acme/late")
        assert answer.status_code == 503
        assert "cannot get the adapter acme/late: it is not cached" in answer.json()["error"]["message"]
        assert load(process, "new", "acme/slow").status_code == 200, "it is cached"


def test_a_root_alone_downloads_nothing(hub, world, tmp_path):
    flags = ["--enable-lora", "--lora-root", str(world[0])]
    with ServerProcess([*REAL, "--port", "0", *flags], **hub.environ(tmp_path)) as process:
        process.wait_until_ready()
        answer = load(process, "new", "acme/polite")
        assert answer.status_code == 404
        assert "there is no folder 'acme/polite' below --lora-root." in answer.json()["error"]["message"]
        assert hub.requests == []
        assert load(process, "new", "polite").status_code == 200
