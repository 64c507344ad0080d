"""Adapters as models of a server: several API processes, an engine process, names and folders that are wrong."""

import asyncio
import json
import shutil
import subprocess
import sys

import httpx
import pytest
from server_process import REAL, ServerProcess
from tiny_adapters import make_adapters

from rustvllm import LLM, SamplingParams
from rustvllm.cli.chat import chat
from rustvllm.lora.request import LoRARequest

pytest.importorskip("peft", reason="peft is not installed")

PROMPTS = ["Once upon a time", "The dog", "A girl named Lily", "The sea was"]
GREEDY = {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two folders, and what the embedded model says with each and alone."""
    folders = [tmp_path_factory.mktemp(f"adapter-{number}") for number in (1, 2)]
    make_adapters(folders)
    named = enumerate(zip(("polite", "team/wild ü"), folders, strict=True), 1)
    requests = [LoRARequest(name, number, str(folder)) for number, (name, folder) in named]
    texts = {}
    with LLM(enable_lora=True, max_loras=2) as llm:
        for request in (None, *requests):
            outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False, lora_request=request)
            texts["" if request is None else request.lora_name] = [output.outputs[0].text for output in outputs]
    for request in requests:
        assert all(one != other for one, other in zip(texts[""], texts[request.lora_name], strict=True))
    return requests, texts


def flags_of(requests):
    first, second = requests
    row = {"name": second.lora_name, "path": second.lora_path, "base_model_name": "stories"}
    modules = [f"{first.lora_name}={first.lora_path}", json.dumps(row)]
    return ["--enable-lora", "--max-loras", "2", "--lora-modules", *modules]


@pytest.fixture(scope="module")
def server(adapters):
    command = [*REAL, "--port", "0", "--api-server-count", "2", *flags_of(adapters[0])]
    with ServerProcess(command) as process:
        process.wait_until_ready()
        yield process


async def post(client, path, **body):
    return await client.post(path, json=body, headers={"Connection": "close"})


def test_adapters_are_models(server, adapters):
    requests, texts = adapters

    async def everything():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            listed = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
            base = next(iter(listed))
            assert listed[base]["parent"] is None
            assert (listed["polite"]["root"], listed["polite"]["parent"]) == (requests[0].lora_path, base)
            assert listed["team/wild ü"]["parent"] == "stories"
            assert (await client.get("/v1/models/team/wild ü")).json()["id"] == "team/wild ü"
            asked = [(name, index) for index in range(len(PROMPTS)) for name in texts] * 2
            answers = await asyncio.gather(
                *(
                    post(client, "/v1/completions", model=name or base, prompt=PROMPTS[index], **GREEDY)
                    for name, index in asked
                )
            )
            for (name, index), answer in zip(asked, answers, strict=True):
                assert answer.json()["model"] == (name or base)
                assert answer.json()["choices"][0]["text"] == texts[name][index]
            messages = [{"role": "user", "content": "Tell me a story."}]
            said = {
                name: (await post(client, "/v1/chat/completions", model=name, messages=messages, **GREEDY)).json()
                for name in (base, "polite")
            }
            contents = {name: answer["choices"][0]["message"]["content"] for name, answer in said.items()}
            assert contents["polite"] != contents[base]
            body = {"model": "polite", "messages": messages, "stream": True, **GREEDY}
            streamed = await client.post("/v1/chat/completions", json=body)
            chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
            assert {chunk["model"] for chunk in chunks} == {"polite"}
            text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
            assert text == contents["polite"]

    asyncio.run(everything())


def test_a_conversation_in_the_terminal_names_an_adapter(server, capsys):
    said = {}
    for name in (None, "polite", "team/wild ü"):
        flags = ["--url", f"{server.url}/v1", "--temperature", "0", "--max-tokens", "16", "-q", "Tell me a story."]
        assert chat([*flags, *([] if name is None else ["--model-name", name])]) == 0
        said[name] = capsys.readouterr().out
    assert len({*said.values()}) == 3, said
    assert chat(["--url", f"{server.url}/v1", "--model-name", "none", "-q", "Tell me a story."]) == 1
    assert "none" in capsys.readouterr().err


def test_lines_of_a_file_name_adapters(adapters, tmp_path):
    requests, texts = adapters
    asked = [(name, prompt) for prompt in PROMPTS for name in ("polite", "team/wild ü", "absent")]
    lines = [
        {
            "custom_id": str(index), "method": "POST", "url": "/v1/completions",
            "body": {"model": name, "prompt": prompt, **GREEDY},
        }
        for index, (name, prompt) in enumerate(asked)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "rustvllm.cli.main", "run-batch", "-i", "in.jsonl", "-o", "out.jsonl"]
    done = subprocess.run(
        [*command, *flags_of(requests)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110
    )
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(asked), done.stderr
    for (name, prompt), answer in zip(asked, found, strict=True):
        body = answer["response"]["body"]
        if name in texts:
            assert body["choices"][0]["text"] == texts[name][PROMPTS.index(prompt)]
        else:
            assert answer["response"]["status_code"] == 404
            assert "absent" in json.dumps(body)


@pytest.mark.parametrize("name", ["polit", "polite/", "../x", "a=b", "POLITE", "polite\u0000", "ü"])
def test_other_names_are_unknown_models(server, name):
    for path, rest in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
    ):
        answer = httpx.post(server.url + path, json={"model": name, **rest}, timeout=60)
        assert answer.status_code == 404, answer.text
        assert "`polite`" in answer.json()["error"]["message"]


def test_adapters_are_not_loaded_by_strangers(server, adapters):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "x", "lora_path": adapters[0][0].lora_path}
        assert httpx.post(server.url + path, json=body, timeout=60).status_code in (404, 501)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["a"], "lora_modules: expected name=path"),
        (["../x=/tmp"], "an adapter's name may contain slashes"),
        (["rustvllm-tiny={path}"], "has the same name as the served model"),
        (["broken={broken}"], "not finite"),
    ],
)
def test_what_is_wrong_at_the_start_ends_it(adapters, modules, message, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(adapters[0][0].lora_path, tmp_path / "broken")
    tensors = load_file(broken / "adapter_model.safetensors")
    tensors[next(iter(tensors))] += torch.nan
    save_file(tensors, broken / "adapter_model.safetensors")
    given = [module.format(path=adapters[0][0].lora_path, broken=broken) for module in modules]
    with ServerProcess([*REAL, "--port", "0", "--enable-lora", "--lora-modules", *given]) as process:
        assert process.process.wait(90) != 0
        process._reader.join(10)
        assert message in process.output.replace("--lora-modules", "lora_modules"), process.output
        assert "Traceback" not in process.output


def test_a_server_that_loads_none_over_http_says_what_would(server, adapters):
    for path in ("load", "unload"):
        body = {"lora_name": "x", "lora_path": adapters[0][0].lora_path}
        answer = httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=body, timeout=60)
        assert answer.status_code == 404
        assert "--lora-root" in answer.json()["error"]["message"]


def test_a_merged_adapter_is_the_models_own_weights(adapters):
    requests, texts = adapters
    [adapter, _] = requests
    with ServerProcess([*REAL, "--port", "0", "--merge-lora", adapter.lora_path]) as process:
        process.wait_until_ready()
        with httpx.Client(base_url=process.url, timeout=60) as client:
            [card] = client.get("/v1/models").json()["data"]
            assert card["merged_adapters"] == [adapter.lora_path]
            assert card["parent"] is None
            answers = [client.post("/v1/completions", json=GREEDY | {"prompt": prompt}).json() for prompt in PROMPTS]
    assert [answer["choices"][0]["text"] for answer in answers] == texts[adapter.lora_name]
