"""Adapters by their names on the hub: what is fetched of them, what is refused before, and which names are theirs."""

import json

import pytest

from hub_server import NEWER, HubServer
from rustvllm.config import hub
from rustvllm.config.engine_args import EngineArgs
from rustvllm.config.hub.adapters import is_hub_name
from rustvllm.config.lora import LoRAConfig, find_adapter
from rustvllm.exceptions import ConfigError, HubUnreachableError, InvalidRequestError, ModelLoadError
from rustvllm.lora.registry import AdapterRegistry
from rustvllm.lora.request import LoRARequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b'{"r": 8}', WEIGHTS: b"matrices" * 100}
OTHERS = {
    "README.md": b"text",
    "tokenizer.json": b"{}",
    "adapter_model.bin": b"pickle",
    "checkpoint/a.safetensors": b"",
}


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with HubServer() as server:
        server.use_here(monkeypatch, tmp_path)
        server.put("acme/polite", FILES | OTHERS)
        yield server


def go_offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_only_two_files_are_fetched(server, monkeypatch, tmp_path):
    folder = find_adapter("polite", "acme/polite")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert folder.is_relative_to(tmp_path / "hub")
    assert sorted(server.fetched()) == [CONFIG, WEIGHTS]
    assert find_adapter("polite", "acme/polite", tmp_path / "there").is_relative_to(tmp_path / "there")
    server.requests.clear()
    assert find_adapter("polite", "acme/polite") == folder
    go_offline(monkeypatch)
    assert find_adapter("polite", "acme/polite") == folder
    assert server.fetched() == []


def test_a_folder_comes_before_the_hub(server, tmp_path):
    local = tmp_path / "acme" / "polite"
    local.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"acme/polite has no adapter_config\.json"):
        find_adapter("polite", "acme/polite")
    for name, content in FILES.items():
        (local / name).write_bytes(content)
    assert find_adapter("polite", "acme/polite") == local
    assert server.requests == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {CONFIG: b"{}", "adapter_model.bin": b""},
            "no adapter_model.safetensors, but adapter_model.bin; .* can run code",
        ),
        ({WEIGHTS: b""}, "acme/other has no adapter_config.json; peft's save_pretrained"),
        ({"config.json": b"", "model.safetensors": b""}, "no adapter_config.json, but config.json: it is a model"),
    ],
    ids=["pickle", "no configuration", "model"],
)
def test_what_is_no_adapter_is_refused_before_anything_is_fetched(server, files, message):
    server.put("acme/other", files)
    with pytest.raises(ModelLoadError, match=message):
        find_adapter("other", "acme/other")
    assert server.fetched() == []


@pytest.mark.parametrize(("name", "limit"), [(CONFIG, "4.00 MiB"), (WEIGHTS, "16.0 GiB")])
def test_files_that_are_too_large_are_refused_before_anything_is_fetched(server, name, limit):
    server.sizes["acme/polite", name] = 1 << 50
    with pytest.raises(ModelLoadError, match=f"{name} of acme/polite has 1048576.0 GiB; .* at most {limit}"):
        find_adapter("polite", "acme/polite")
    assert server.fetched() == []


def test_each_spelling_of_a_name_has_the_same_copy(server):
    server.repos["ACME/Polite"] = server.repos["acme/polite"]
    server.ids["ACME/Polite"] = "acme/polite"
    folder = find_adapter("polite", "acme/polite")
    server.requests.clear()
    assert find_adapter("polite", "ACME/Polite") == folder
    assert server.fetched() == []
    server.repos["acme/other"] = server.repos["acme/polite"]
    server.ids["acme/other"] = "acme/polite"
    assert find_adapter("polite", "acme/other") != folder, "another name may be another owner's tomorrow"


def test_wrong_bytes_are_refused(server):
    server.spoiled.add(("acme/polite", WEIGHTS))
    with pytest.raises(ModelLoadError, match=f"{WEIGHTS} has the SHA-256"):
        find_adapter("polite", "acme/polite")
    server.spoiled.clear()
    assert (find_adapter("polite", "acme/polite") / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((403, "GatedRepo"), "acme/none is gated: accept its licence at .*, then set HF_TOKEN"),
        ((404, "RepoNotFound"), "no adapter acme/none on http.*, and no local folder of that name; check the spelling"),
        ((500, None), "answered HTTP 500 for acme/none"),
    ],
    ids=["gated", "missing", "broken"],
)
def test_refusals_of_the_hub_are_explained(server, answer, message):
    server.answers["acme/none"] = answer
    with pytest.raises(ModelLoadError, match=message):
        find_adapter("none", "acme/none")


def test_offline(server, monkeypatch):
    go_offline(monkeypatch)
    with pytest.raises(
        HubUnreachableError, match=r"cannot get the adapter acme/polite: it is not cached in .*, and offl"
    ) as e:
        find_adapter("polite", "acme/polite")
    assert str(e.value).endswith(f"give a local folder with {CONFIG} and {WEIGHTS}")


def test_names_have_no_revision(server):
    with pytest.raises(ConfigError, match=r"takes no revision: leave @v1 out"):
        find_adapter("polite", "acme/polite@v1")
    assert server.requests == []


@pytest.mark.parametrize(
    "path",
    [
        "polite",
        "./acme/polite",
        "/acme/polite",
        "~/polite",
        "a/b/c",
        "acme/..",
        "acme/x--y",
        "acme/",
        "é/polite",
        "a b/c",
    ],
)
def test_other_paths_are_folders(path):
    assert not is_hub_name(path)
    with pytest.raises(ConfigError):
        find_adapter("polite", path)


def test_modules_come_before_a_model_and_are_looked_up_once(server, tmp_path):
    arguments = {"enable_lora": True, "lora_modules": ["polite=acme/polite"], "executor": "sim"}
    config = EngineArgs(**arguments, download_dir=str(tmp_path / "there")).create_engine_config()
    [module] = config.lora.modules
    assert module.path == str(find_adapter("polite", "acme/polite", tmp_path / "there"))
    assert server.fetched(WEIGHTS) == [WEIGHTS]
    server.requests.clear()
    with pytest.raises(ModelLoadError, match="no adapter acme/rude on"):
        EngineArgs(model="acme/none", **(arguments | {"lora_modules": ["rude=acme/rude"]})).create_engine_config()
    assert not any("none" in path for _, path in server.requests)
    with pytest.raises(ConfigError, match="max_loras must be"):
        EngineArgs(**arguments, max_loras=0).create_engine_config()
    assert not any("polite" in path for _, path in server.requests), "checks without the hub come first"


def test_a_model_name_that_is_an_adapter_says_how_to_serve_it(server):
    with pytest.raises(ModelLoadError, match=r"it is an adapter: .* in --lora-modules: NAME=acme/polite"):
        hub.resolve_model("acme/polite")


def test_a_loaded_adapter_is_known_by_its_name_on_the_hub(server):
    registry = AdapterRegistry(LoRAConfig(), ())
    request = LoRARequest("polite", 1, "acme/polite")
    assert registry.find(request) is None
    folder = registry.check(request)
    registry.put(LoRARequest("polite", 1, folder), 7)
    server.put("acme/polite", FILES, NEWER)
    server.revisions["acme/polite"]["main"] = NEWER
    server.requests.clear()
    for path in ("acme/polite", "ACME/Polite", folder, ""):
        assert registry.find(LoRARequest("polite", 1, path)).number == 7
    assert server.requests == []
    for path in ("acme/rude", "polite"):
        with pytest.raises(InvalidRequestError, match="is loaded from"):
            registry.find(LoRARequest("polite", 1, path))
    assert json.loads((find_adapter("polite", "acme/polite") / CONFIG).read_bytes()) == {"r": 8}
    with pytest.raises(InvalidRequestError, match="no adapter acme/rude on"):
        registry.check(LoRARequest("rude", 2, "acme/rude"))
