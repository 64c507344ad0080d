"""Where adapters are seen: in the state of an engine, in records of a request, in what ``rustvllm trace`` prints."""

import json

import pytest

from rustvllm import LLM, SamplingParams
from rustvllm.engine.adapters import EngineAdapters
from rustvllm.lora.request import LoRARequest
from rustvllm.observe.inspect.inspection import Inspection
from rustvllm.observe.inspect.queries import LocalQuery

pytest.importorskip("peft", reason="peft is not installed")
from checkpoints import make
from peft_adapters import ALL_LINEAR, make_adapter

RANKS = {"small": 2, "large": 5}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folders of a model and of two adapters, one of them with another rank in a layer."""
    folder = tmp_path_factory.mktemp("observed")
    reference = make("llama", {})
    reference.save_pretrained(folder / "model")
    for number, (name, rank) in enumerate(RANKS.items()):
        options = ALL_LINEAR | {"r": rank, "rank_pattern": {r".*\.1\..*": 1}}
        make_adapter(reference, folder / name, seed=number, **options)
    return folder


def options_of(world):
    return {
        "skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "max_model_len": 64, "enable_lora": True,
        "max_loras": 1, "lora_modules": [f"{name}={world / name}" for name in RANKS],
    }  # fmt: skip


def state_of(inspection):
    query = LocalQuery("state", b"{}")
    inspection.answer(query)
    return json.loads(query.outcome.result(0))


def test_the_state_lists_adapters_with_their_ranks_and_requests_and_records_name_them(world):
    records = []
    with LLM(str(world / "model"), trace=records.append, **options_of(world)) as llm:
        engine = llm.llm_engine
        core = engine.engine_core.core
        inspection = Inspection(core, EngineAdapters(core))
        assert state_of(inspection)["adapters"] == [
            {"name": name, "rank": rank, "num_running": 0, "num_waiting": 0} for name, rank in RANKS.items()
        ]
        params = SamplingParams(max_tokens=4, detokenize=False)
        for name, adapter in (("a", "small"), ("b", "large"), ("c", None), ("d", "small")):
            request = None if adapter is None else LoRARequest(adapter, 1 + list(RANKS).index(adapter))
            engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, params, lora_request=request)
        engine.step()
        state = state_of(inspection)
        assert {row["request_id"]: (row["status"], row["adapter"]) for row in state["requests"]} == {
            "a": ("RUNNING", "small"), "b": ("WAITING", "large"), "c": ("RUNNING", None), "d": ("RUNNING", "small"),
        }  # fmt: skip
        assert state["adapters"] == [
            {"name": "small", "rank": 2, "num_running": 2, "num_waiting": 0},
            {"name": "large", "rank": 5, "num_running": 0, "num_waiting": 1},
        ]
        while engine.has_unfinished_requests():
            engine.step()
    checked = {record.request_id: record.extras for record in records if record.layer == "input_processing"}
    assert {name: extras.get("adapter") for name, extras in checked.items()} == {
        "a": "small", "b": "large", "c": None, "d": "small",
    }  # fmt: skip


def test_the_page_of_a_request_names_its_adapter(repository, tmp_path, capsys):
    import torch
    import transformers

    from rustvllm.cli.trace import trace

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        repository / "python" / "rustvllm" / "assets" / "tiny", dtype=torch.float32
    )
    make_adapter(reference, tmp_path / "polite", seed=1, **ALL_LINEAR)
    flags = ["Once upon a time", "--max-tokens", "2", "--num-gpu-blocks-override", "64", "--enable-lora"]
    flags += ["--lora-modules", f"polite={tmp_path / 'polite'}"]
    assert trace([*flags, "--adapter", "polite"]) == 0
    assert "temperature 0, adapter polite" in " ".join(capsys.readouterr().out.split())
    assert trace([*flags, "--adapter", "rude"]) == 1
    assert "--adapter is 'rude', but the loaded adapters are polite" in capsys.readouterr().err
