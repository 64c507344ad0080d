"""Adapters that are merged into the weights while these are loaded: equal to what peft's merge gives."""

import json
import shutil

import pytest
import torch

from rustvllm import LLM, SamplingParams
from rustvllm.exceptions import ConfigError, ModelLoadError

pytest.importorskip("peft", reason="peft is not installed")
from checkpoints import make, prompts
from peft_adapters import ALL_LINEAR, logits, make_adapter, merged

LENGTH = 8
PROMPTS = prompts(97, [3, 8, 17, 30])
OPTIONS = {
    "skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "max_model_len": 64, "max_logprobs": -1,
    "logprobs_mode": "raw_logits", "dtype": "float32",
}  # fmt: skip
ALL_LOGITS = SamplingParams(temperature=0, max_tokens=LENGTH, detokenize=False, logprobs=-1)


def run(model, **options):
    """Ids and logits of each prompt."""
    with LLM(str(model), **(OPTIONS | options)) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], ALL_LOGITS, use_tqdm=False)
        found = []
        for output in outputs:
            [sample] = output.outputs
            found.append(
                (
                    sample.token_ids,
                    torch.tensor([[place[i].logprob for i in range(len(place))] for place in sample.logprobs]),
                )
            )
        return found


def assert_equal_to(reference, found):
    for prompt, (ids, actual) in zip(PROMPTS, found, strict=True):
        expected = logits(reference, [*prompt, *ids[:-1]])[len(prompt) - 1 :]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def assert_ids_differ(found, others):
    assert all(one[0] != other[0] for one, other in zip(found, others, strict=True)), "the adapter changes too little"


ADAPTERS = {
    "all linear": [ALL_LINEAR | {"use_rslora": True}],
    "magnitudes": [ALL_LINEAR | {"use_dora": True}],
    "one on another": [ALL_LINEAR, ALL_LINEAR | {"r": 3, "use_dora": True}],
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", ["gpt2", "llama", pytest.param("gpt-neox", marks=pytest.mark.slow)])
def test_a_merged_model_has_the_logits_of_pefts(family, kind, tmp_path):
    reference = make(family, {})
    reference.save_pretrained(tmp_path / "model")
    folders = []
    for number, options in enumerate(ADAPTERS[kind]):
        folders.append(tmp_path / f"adapter-{number}")
        make_adapter(reference, folders[-1], seed=number, **options)
    found = run(tmp_path / "model", merge_lora=[str(folder) for folder in folders])
    assert_ids_differ(found, run(tmp_path / "model"))
    assert_equal_to(merged(reference, folders), found)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folders of a Llama in bfloat16, of an adapter with magnitudes, and of what peft merges of them."""
    folder = tmp_path_factory.mktemp("merging")
    reference = make("llama", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}).to(torch.bfloat16)
    reference.save_pretrained(folder / "model")
    make_adapter(reference.float(), folder / "adapter", seed=5, **ALL_LINEAR, use_dora=True)
    merged(reference.float(), [folder / "adapter"]).to(torch.bfloat16).save_pretrained(folder / "merged")
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4-g32"},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_stored_in_bfloat16_is_merged_before_it_is_packed_or_rounded(world, options):
    found = run(world / "model", merge_lora=[str(world / "adapter")], **options)
    assert_ids_differ(found, run(world / "model", **options))
    expected = run(world / "merged", **options)
    scale = max(float(each.abs().max()) for _, each in expected)
    for (_, actual), (_, wanted) in zip(found, expected, strict=True):
        # The first token's logits: ids may part afterwards, because a few weights fall to the other side of a rounding.
        torch.testing.assert_close(actual[0], wanted[0], atol=(0.05 if options else 0.01) * scale, rtol=0)


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_cannot_be_merged_is_refused_by_name(world, tmp_path):
    adapter = str(world / "adapter")
    quantised = shutil.copytree(world / "model", tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (quantised / "config.json").write_text(json.dumps(config))
    biased = shutil.copytree(adapter, tmp_path / "biased")
    edit_config(biased, bias="all")
    other = shutil.copytree(adapter, tmp_path / "other")
    edit_config(other, r=3)
    for model, options, message in (
        ("model", {"merge_lora": adapter}, "merge_lora must be a list of folders"),
        ("model", {"merge_lora": [adapter, adapter]}, "twice: rustvllm merges an adapter only once"),
        ("model", {"merge_lora": [str(tmp_path / "none")]}, "there is no folder"),
        ("model", {"enable_lora": True}, "merge_lora is set, but enable_lora is set"),
        ("model", {"load_format": "dummy"}, "merge_lora is set, but load_format is dummy"),
        ("model", {"model_impl": "transformers"}, "merge_lora is set, but transformers' modelling code"),
        ("model", {"executor": "sim"}, "merge_lora is set, but executor is sim"),
        (quantised, {}, "merge_lora is set, but .*quantised has quantised weights"),
        ("model", {"merge_lora": [str(biased)]}, "adapter 'biased': bias is 'all'"),
        ("model", {"merge_lora": [str(other)]}, "adapter 'other': .* has rank 4, but adapter_config.json says 3"),
    ):
        with pytest.raises((ConfigError, ModelLoadError), match=message):
            LLM(str(world / model), **(OPTIONS | {"merge_lora": [adapter]} | options))


def test_a_weight_that_its_type_cannot_hold_is_refused_by_name(world, tmp_path):
    make("llama", {}).to(torch.float16).save_pretrained(tmp_path / "model")
    make_adapter(make("llama", {}), tmp_path / "adapter", seed=1, lora_alpha=1e9, target_modules=["v_proj"])
    message = r"tensor 'model.layers.0.self_attn.v_proj.weight' has a value that is not finite in its stored type, F16"
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(tmp_path / "model"), merge_lora=[str(tmp_path / "adapter")], **OPTIONS)
