"""``method: draft_model``: a second model's guesses change no token, are accepted where right, and are bounded."""

import json
import re
import shutil
import sys

import pytest

from draft_pairs import (
    CELLS,
    LENGTH,
    ORDINARY,
    PROMPTS,
    STORY,
    WORLDS,
    check_next_to_a_grammar,
    check_way_to_run,
    make,
    pair_of,
    stats_of,
)
from rustvllm import LLM, SamplingParams
from rustvllm.config.hub import embedded_model_path
from rustvllm.exceptions import ConfigError
from rustvllm.lora.request import LoRARequest

SAME = {"method": "draft_model", "model": str(embedded_model_path()), "num_speculative_tokens": 4}
"""The model in the package guesses for itself: greedily it is always right."""


@pytest.fixture(scope="module")
def pair():
    return pair_of(SAME, **ORDINARY, logprobs_mode="processed_logprobs")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """The model in the package with its last layer's weights mixed up: sometimes it is right."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("draft") / "other"
    shutil.copytree(embedded_model_path(), folder)
    weights = load_file(folder / "model.safetensors")
    last = max(int(found.group(1)) for name in weights if (found := re.search(r"\.h\.(\d+)\.", name)))
    for name in weights:
        if f".h.{last}." in name and name.endswith("c_proj.weight"):
            weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_that_guesses_for_itself_is_always_right(pair):
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    before = stats_of(pair.speculative)
    drafted, accepted = pair.compare(params, [STORY])
    num_steps = stats_of(pair.speculative)["num_steps"] - before["num_steps"]
    assert drafted == accepted >= LENGTH * 4 // 5 - 4
    assert num_steps == LENGTH - accepted


@pytest.mark.parametrize("cell", CELLS)
def test_no_parameter_sees_its_guesses(pair, cell):
    drafted, accepted = pair.compare(SamplingParams(max_tokens=LENGTH, **CELLS[cell]))
    assert 0 < accepted <= drafted
    is_drawn = CELLS[cell]["temperature"] >= 0.7
    assert accepted < drafted or not is_drawn, "what is drawn is not always the likeliest"


@pytest.mark.parametrize("world", [world for world in WORLDS if world != "overlapping"])
def test_no_way_to_run_sees_its_guesses(world, other_model):
    check_way_to_run(pair_of({**SAME, "model": str(other_model)}, **WORLDS[world]), world)


def test_it_goes_on_rightly_after_what_it_did_not_guess(pair):
    """Prefixes that both models have in their caches, answers without guesses, long prompts in pieces."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    prompt = " ".join(PROMPTS) + " " + STORY
    for _ in range(2):
        drafted, accepted = pair.compare(params, [prompt])
        assert drafted == accepted >= LENGTH * 4 // 5 - 4
    assert stats_of(pair.speculative)["prefix_cache_hits"] > 0
    small = make({**SAME, "disable_by_batch_size": 2, "adaptive": False}, **ORDINARY)
    # While two run none is guessed; when one is left, what it was given meanwhile is taken in first.
    both = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (100, 150)]
    outputs = small.generate([STORY, STORY], both, use_tqdm=False)
    expected = pair.plain.generate([STORY, STORY], both, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    stats = stats_of(small)
    assert stats["num_draft_tokens"] == stats["num_accepted_tokens"] >= 50 * 4 // 5 - 4


def test_a_request_with_a_grammar_or_a_search_has_no_guesses_and_its_neighbour_has(pair):
    check_next_to_a_grammar(pair)


def test_a_prediction_is_believed_first(pair):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [answer] = pair.plain.generate(STORY, params, use_tqdm=False)
    drafted, accepted = pair.compare(params, [{"prompt": STORY, "prediction": answer.outputs[0].text}])
    assert drafted == accepted >= 40 * 4 // 5 - 4


def test_requests_with_an_adapter_have_guesses_of_a_model_without(tmp_path, repository):
    import torch
    import transformers

    sys.path.insert(0, str(repository / "tests" / "models"))
    from peft_adapters import make_adapter

    reference = transformers.AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()
    make_adapter(reference, tmp_path, seed=1, size=0.1, target_modules="all-linear")
    adapter = LoRARequest("polite", 1, str(tmp_path))
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    answers = []
    for config in (None, {**SAME, "adaptive": False}):
        llm = make(config, enable_lora=True, **ORDINARY)
        outputs = llm.generate([STORY, STORY], params, use_tqdm=False, lora_request=[adapter, None])
        answers.append([output.outputs[0].token_ids for output in outputs])
        drafted, accepted = (stats_of(llm)[f"num_{name}_tokens"] for name in ("draft", "accepted"))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
    assert LENGTH * 4 // 5 < accepted < drafted, "guesses for the adapter's request were right at times too"


def test_the_controller_tires_of_a_model_that_is_never_right(tmp_path):
    """Random weights: hardly a guess is right, so hardly any are made."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "wrong"
    shutil.copytree(embedded_model_path(), folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.flip(-1).contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    counts = []
    for adaptive in (False, True):
        pair = pair_of({**SAME, "model": str(folder)}, adaptive=adaptive, **ORDINARY)
        counts.append(pair.compare(params, [STORY]))
    (all_drafted, all_accepted), (drafted, _) = counts
    assert all_accepted <= all_drafted // 4
    assert all_drafted > 400, "without the controller each step runs guesses"
    assert drafted < 60


def test_its_cache_counts_as_memory_of_a_block():
    size = 8 << 20
    plain, speculative = (
        make(config, kv_cache_memory_bytes=size).llm_engine.engine_core.num_blocks for config in (None, SAME)
    )
    assert plain // 2 == speculative


@pytest.mark.parametrize(
    ("config", "engine", "message"),
    [
        ({"model": None}, {}, "draft_model needs model, the name or folder of the draft model, got None"),
        ({"num_speculative_tokens": None}, {}, "draft_model needs num_speculative_tokens"),
        ({}, {"async_scheduling": True}, "cannot be combined with async_scheduling"),
        ({}, {"executor": "sim"}, "cannot be combined with executor=sim"),
        ({}, {"tensor_parallel_size": 2}, "cannot be combined with tensor_parallel_size or pipeline_parallel_size"),
        ({"method": "eagle"}, {}, "method 'eagle' is not supported yet"),
    ],
)
def test_what_cannot_be_combined_is_refused(config, engine, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(speculative_config={**SAME, **config}, **engine)


def test_models_that_do_not_fit_each_other_are_refused(tmp_path):
    source = embedded_model_path()
    config = json.loads((source / "config.json").read_text())
    scenes = {
        "ids": (config | {"vocab_size": config["vocab_size"] + 8}, "both must have the same vocabulary"),
        "short": (config | {"n_positions": 64}, "supports at most 64 tokens, but max_model_len is 512"),
    }
    for name, (changed, message) in scenes.items():
        shutil.copytree(source, tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message):
            LLM(speculative_config={**SAME, "model": str(tmp_path / name)})
    shutil.copytree(source, tmp_path / "words")
    tokenizer = json.loads((tmp_path / "words/tokenizer.json").read_text())
    first, second = list(tokenizer["model"]["vocab"])[300:302]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "words/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="have different vocabularies"):
        LLM(speculative_config={**SAME, "model": str(tmp_path / "words")})
