"""Adapters loaded and unloaded over HTTP: by any API process, for all of them, while requests are under way."""

import asyncio
import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_process import REAL, ServerProcess
from tiny_adapters import GREEDY, PROMPT, make_adapters, say

from rustvllm import LLM
from rustvllm.lora.request import LoRARequest

pytest.importorskip("peft", reason="peft is not installed")

LONG = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A root with two adapters, a folder next to it, and what the model says with each and alone, short and long."""
    root = tmp_path_factory.mktemp("root")
    make_adapters([root / "a", root / "b"])
    outside = shutil.copytree(root / "a", tmp_path_factory.mktemp("outside") / "a")
    texts = {}
    with LLM(enable_lora=True, max_loras=2) as llm:
        for name in (None, "a", "b"):
            request = None if name is None else LoRARequest(name, ord(name), str(root / name))
            for length in (GREEDY, LONG):
                texts[name, length["max_tokens"]] = say(llm, request, length)
    assert len({texts[name, 16] for name in (None, "a", "b")}) == 3
    return root, outside, texts


@pytest.fixture(scope="module")
def server(world):
    flags = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--lora-root", str(world[0])]
    with ServerProcess([*REAL, "--port", "0", "--api-server-count", "2", *flags]) as process:
        process.wait_until_ready()
        yield process


def post(server, path, **body):
    return httpx.post(server.url + path, json=body, timeout=60, headers={"Connection": "close"})


def load(server, name, path, **more):
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def unload(server, name):
    return post(server, "/v1/unload_lora_adapter", lora_name=name)


def names(server):
    return {card["id"] for card in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]}


def says(server, name, **options):
    answer = post(server, "/v1/completions", model=name, prompt=PROMPT, **(GREEDY | options))
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code


def test_what_one_process_loads_every_process_serves_at_once_and_no_more_once_it_is_unloaded(server, world):
    root, _, texts = world
    for path in ("a", root / "a"):
        answer = load(server, "new", path)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
        # Each request is a connection of its own, so that both processes have some.
        assert [says(server, "new") for _ in range(12)] == [texts["a", 16]] * 12
        assert all("new" in names(server) for _ in range(6))
        answer = load(server, "new", path)
        assert answer.status_code == 400
        assert "has already been loaded. If you want to load the adapter in place" in answer.text
        answer = unload(server, "new")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
        assert [says(server, "new") for _ in range(12)] == [404] * 12
        assert not any("new" in names(server) for _ in range(6))
    assert unload(server, "new").status_code == 404


def test_requests_under_way_keep_their_weights_and_the_first_token_after_a_reload_is_of_the_new(server, world):
    root, _, texts = world
    changing = shutil.copytree(root / "a", root / "changing")

    async def everything():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def ask(path, **body):
                return await client.post(path, json=body, headers={"Connection": "close"})

            async def stream(name, begun):
                text = ""
                body = {"model": name, "prompt": PROMPT, "stream": True, **LONG}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
                            begun.set()
                return text

            assert (await ask("/v1/load_lora_adapter", lora_name="c", lora_path="changing")).status_code == 200
            events = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(stream("c", event)) for event in events]
            await asyncio.gather(*(event.wait() for event in events))
            for file in (CONFIG, WEIGHTS):
                shutil.copy(root / "b" / file, changing / file)
            body = {"lora_name": "c", "lora_path": "changing", "load_inplace": True}
            assert (await ask("/v1/load_lora_adapter", **body)).status_code == 200
            were_under_way = [not task.done() for task in streams]
            new = await asyncio.gather(*(ask("/v1/completions", model="c", prompt=PROMPT, **GREEDY) for _ in range(8)))
            assert [answer.json()["choices"][0]["text"] for answer in new] == [texts["b", 16]] * 8
            assert any(were_under_way), "no stream was under way while the adapter was loaded again"
            begun = asyncio.Event()
            last = asyncio.create_task(stream("c", begun))
            await begun.wait()
            assert (await ask("/v1/unload_lora_adapter", lora_name="c")).status_code == 200
            assert await asyncio.gather(*streams) == [texts["a", 400]] * 4
            assert await last == texts["b", 400]

    asyncio.run(everything())


def test_many_loads_and_requests_at_once(server, world):
    """Names come and go while others are asked for: each answer is the adapter's, or says that there is none."""
    _, _, texts = world

    async def everything():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def ask(path, **body):
                return await client.post(path, json=body, headers={"Connection": "close"})

            async def turn(number):
                name, folder = f"n{number % 3}", "ab"[number % 2]
                path, body = "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}
                if number % 5 == 0:
                    path, body = "/v1/unload_lora_adapter", {"lora_name": name}
                change = await ask(path, **body | ({"load_inplace": True} if "load_" in path[4:9] else {}))
                answer = await ask("/v1/completions", model=name, prompt=PROMPT, **GREEDY)
                return change.status_code, answer

            done = await asyncio.gather(*(turn(number) for number in range(30)))
            assert {status for status, _ in done} <= {200, 404}
            told = [answer.json()["choices"][0]["text"] for _, answer in done if answer.status_code == 200]
            assert len(told) >= 10
            assert set(told) <= {texts["a", 16], texts["b", 16]}
            # 400: it was unloaded while the request came in.
            assert {answer.status_code for _, answer in done} <= {200, 400, 404}
            for number in range(3):
                await ask("/v1/unload_lora_adapter", lora_name=f"n{number}")
            base = await ask("/v1/completions", prompt=PROMPT, **GREEDY)
            assert base.json()["choices"][0]["text"] == texts[None, 16]

    asyncio.run(everything())


def _with_nan(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    tensors[next(name for name in tensors if "lora_B" in name)][0, 0] = float("nan")
    save_file(tensors, folder / WEIGHTS)


def _without_half(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor for name, tensor in tensors.items() if "lora_A" in name}, folder / WEIGHTS)


def _of_another_base(folder):
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    save_file({name: torch.zeros(t.shape[0], 8) if "lora_A" in name else t for name, t in tensors.items()},
              folder / WEIGHTS)  # fmt: skip


def _of_rank_9(folder):
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 9}))


def _linked_outside(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder.parent.parent / "outside" / WEIGHTS)


BROKEN = {
    "a number that is none": (_with_nan, "not finite"),
    "half of the tensors": (_without_half, "but no lora_B"),
    "another base": (_of_another_base, "the adapter belongs to another model"),
    "rank": (_of_rank_9, "rank 9 (r) is greater than max_lora_rank 8"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "half a file": (lambda folder: os.truncate(folder / WEIGHTS, 999), "not a complete safetensors file"),
    "weights outside": (_linked_outside, "is outside the folder"),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_folder_that_is_wrong_changes_nothing(server, world, case):
    root, _, texts = world
    break_it, message = BROKEN[case]
    folder = shutil.copytree(root / "a", root / "broken")
    before = names(server)
    try:
        break_it(folder)
        answer = load(server, "broken", "broken")
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        assert names(server) == before
        assert says(server, "broken") == 404
        assert says(server, "") == texts[None, 16]
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "", "lora_path": "a"}, 400, "Both 'lora_name'"),
        ({"lora_name": 7, "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "x", "lora_path": ["a"]}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "a", "load_inplace": "perhaps"}, 400, "load_inplace"),
        ({"lora_name": "a=b", "lora_path": "a"}, 400, "without ="),
        ({"lora_name": "../x", "lora_path": "a"}, 400, "must not be empty, . or .."),
        ({"lora_name": "x" * 300, "lora_path": "a"}, 400, "1 to 256 characters"),
        ({"lora_name": "x\u0000", "lora_path": "a"}, 400, "printable"),
        ({"lora_name": "rustvllm-tiny", "lora_path": "a"}, 400, "conflicts with a served base model"),
        ({"lora_name": "x", "lora_path": "nothing"}, 404, "there is no folder 'nothing'"),
        ({"lora_name": "x", "lora_path": "../outside/a"}, 400, "is outside the folder"),
        ({"lora_name": "x", "lora_path": "{outside}"}, 400, "is outside the folder"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "is outside the folder"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "is outside the folder"),
        ({"lora_name": "x", "lora_path": "a\u0000"}, 400, "cannot be read"),
        ({"lora_name": "x", "lora_path": "a/" * 4000}, 400, "8000 characters"),
        ({"lora_name": "x", "lora_path": "y" * 400}, 400, "cannot be read"),
    ],
)
def test_what_cannot_be_loaded(server, world, body, status, message):
    root, outside, _ = world
    link = root / "link"
    if not link.is_symlink():
        link.symlink_to(outside)
    if body.get("lora_path") == "{outside}":
        body = {**body, "lora_path": str(outside)}
    answer = post(server, "/v1/load_lora_adapter", **body)
    assert answer.status_code == status, answer.text
    assert answer.text.count("lora_path '") <= 1, "the path is named once"
    assert message in answer.json()["error"]["message"]
    assert "x" not in names(server)


def test_metrics_name_the_adapters_that_run_and_those_that_wait(server, world):
    """Five adapters have requests all the time, and four may run: each is seen to wait sooner or later."""
    wanted = {f"shown-{number}" for number in range(5)}
    for name in wanted:
        assert load(server, name, "a").status_code == 200

    def found():
        text = httpx.get(f"{server.url}/metrics", timeout=60, headers={"Connection": "close"}).text
        [line] = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        assert labels.keys() == {"model_name", "engine", "max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        assert labels["max_lora"] == "4"
        assert time.time() - 60 < float(line.rpartition(" ")[2]) <= time.time()
        return [set(filter(None, labels[f"{state}_lora_adapters"].split(","))) for state in ("running", "waiting")]

    assert found() == [set(), set()]
    ended = threading.Event()

    def ask(name):
        while not ended.is_set():
            assert says(server, name, **LONG) == world[2]["a", LONG["max_tokens"]]

    with ThreadPoolExecutor(len(wanted)) as pool:
        askers = [pool.submit(ask, name) for name in wanted]
        try:
            seen, deadline = [set(), set()], time.monotonic() + 60
            while not (seen[0] == wanted and seen[1]):
                now = found()
                assert len(now[0]) <= 4
                assert now[0] | now[1] <= wanted
                seen = [before | names for before, names in zip(seen, now, strict=True)]
                assert time.monotonic() < deadline, seen
        finally:
            ended.set()
        for asker in askers:
            asker.result(60)
    for name in wanted:
        assert unload(server, name).status_code == 200


def test_names_of_any_script_and_what_cannot_be_unloaded(server, world):
    name = "команда/ü 鹿"
    assert load(server, name, "b").status_code == 200
    assert says(server, name) == world[2]["b", 16]
    assert unload(server, name).status_code == 200
    for body, status in (
        ({}, 400),
        ({"lora_name": ""}, 400),
        ({"lora_name": "rustvllm-tiny"}, 404),
        ({"lora_name": 1}, 400),
    ):
        assert post(server, "/v1/unload_lora_adapter", **body).status_code == status


def test_as_many_as_may_be_in_memory(world):
    """With two engines, each has the same; a name more than may be is refused and crowds none out."""
    root, _, texts = world
    flags = ["--enable-lora", "--max-cpu-loras", "2", "--lora-root", str(root), "--data-parallel-size", "2"]
    with ServerProcess([*REAL, "--port", "0", *flags]) as process:
        process.wait_until_ready()
        assert [load(process, name, path).status_code for name, path in (("one", "a"), ("two", "b"))] == [200, 200]
        answer = load(process, "three", "a")
        assert answer.status_code == 400
        assert "2 adapters are loaded, and max_cpu_loras is 2" in answer.text
        assert [says(process, "two") for _ in range(6)] == [texts["b", 16]] * 6
        assert load(process, "one", "b", load_inplace=True).status_code == 200
        assert [says(process, "one") for _ in range(6)] == [texts["b", 16]] * 6
        assert unload(process, "two").status_code == 200
        assert load(process, "three", "a").status_code == 200
        assert {"one", "three"} < names(process)


def test_an_engine_that_is_started_again_has_its_adapters_back(world):
    """Until then clients are asked to wait; never is a name unknown, whichever API process answers and what it knew."""
    root, _, texts = world
    flags = ["--enable-lora", "--lora-root", str(root), "--api-server-count", "2", "--restart-engine"]
    with ServerProcess([*REAL, "--port", "0", *flags]) as process:
        process.wait_until_ready()
        # One API process has heard of the adapters so far: the one that loaded them; or both have, each of one.
        assert load(process, "one", "a").status_code == 200
        assert load(process, "two", "b").status_code == 200
        assert unload(process, "one").status_code == 200
        [engine] = process.engines()
        engine.kill()
        engine.wait(30)
        found, deadline = [], time.monotonic() + 90
        while (found := [*found, says(process, "two")])[-12:] != [texts["b", 16]] * 12:
            assert time.monotonic() < deadline, found
            if found[-1] in (500, 503):
                time.sleep(0.05)  # the engine starts sooner where no client asks meanwhile
        assert set(found) <= {500, 503, texts["b", 16]}
        assert process.engines() != [engine]
        assert [says(process, "one") for _ in range(6)] == [404] * 6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_names(world):
    root, _, texts = world
    flags = ["--enable-lora", "--max-loras", "2", "--lora-root", str(root), "--api-server-count", "2"]
    with ServerProcess([*REAL, "--port", "0", *flags]) as process:
        process.wait_until_ready()
        assert {load(process, f"n{number}", "ab"[number % 2]).status_code for number in range(1000)} == {200}
        assert len(names(process)) == 1001
        for number in (0, 1, 100, 999):
            assert says(process, f"n{number}") == texts["ab"[number % 2], 16]
        assert unload(process, "n100").status_code == 200
        assert says(process, "n100") == 404
