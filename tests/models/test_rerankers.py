"""Classifiers made of a text model's head: the rows of some tokens, against transformers' logits of these tokens."""

import numpy as np
import pytest
import torch
from checkpoints import ARCHITECTURES, make, prompts
from word_tokenizer import WORDS, write_tokenizer

from rustvllm import LLM, PoolingParams
from rustvllm.exceptions import InvalidRequestError, ModelLoadError

PROMPTS = prompts(97, [1, 2, 5, 8, 16, 17, 24, 30, 33, 37, 41, 60])
OPTIONS = {"max_model_len": 64, "num_gpu_blocks_override": 200, "block_size": 4}
NO_YES = {"classifier_from_token": ["no", "yes"]}
TWO_WAY = NO_YES | {"method": "from_2_way_softmax"}
TOLERANCE = 1e-5


@torch.no_grad()
def expected_logits(model, words):
    """transformers' logits of tokens after each prompt, ``[num_prompts, num_tokens]``."""
    ids = [WORDS[word] for word in words]
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1, ids] for prompt in PROMPTS]).double()


def probs(llm, **params):
    asked = PoolingParams(**params) if params else None
    outputs = llm.classify([{"prompt_token_ids": ids} for ids in PROMPTS], pooling_params=asked, use_tqdm=False)
    return np.array([output.outputs.probs for output in outputs], np.float32)


def saved(model, folder):
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_score_is_the_softmax_of_two_tokens(kind, tied, tmp_path):
    model = make(kind, {"tie_word_embeddings": tied})
    if (cap := getattr(model.config, "final_logit_softcapping", None)) is not None:
        model.config.final_logit_softcapping = None  # a layer of its own has no cap, as in vLLM
        assert cap > 0
    if (scaling := getattr(model.config, "logits_scaling", None)) is not None:
        model.config.logits_scaling = 1.0  # nor a factor
        assert scaling != 1.0
    folder = saved(model, tmp_path)
    wanted = torch.softmax(expected_logits(model, ["no", "yes"]), dim=1)[:, 1:].float()
    with LLM(folder, convert="classify", hf_overrides=TWO_WAY, **OPTIONS) as llm:
        found = probs(llm)
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=0)
        assert np.ptp(found) > 100 * TOLERANCE


def test_qwen3_rerankers_flags_are_vllms(tmp_path):
    model = make("qwen3", {"tie_word_embeddings": True})
    folder = saved(model, tmp_path)
    wanted = torch.softmax(expected_logits(model, ["no", "yes"]), dim=1)[:, 1:].float()
    overrides = NO_YES | {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
    with LLM(folder, hf_overrides=overrides, **OPTIONS) as llm:
        np.testing.assert_allclose(probs(llm), wanted, atol=TOLERANCE, rtol=0)
    with (
        LLM(folder, runner="pooling", convert="classify", hf_overrides=TWO_WAY, **OPTIONS) as llm,
        pytest.raises(InvalidRequestError, match="start the engine with --runner generate"),
    ):
        llm.generate("w1")


def test_rows_as_they_are_give_a_number_for_each_token(tmp_path):
    model = make("llama", {})
    folder = saved(model, tmp_path)
    words = ["w7", "yes", "w3"]
    overrides = {"classifier_from_token": words, "method": "no_post_processing"}
    logits = expected_logits(model, words)
    with LLM(folder, convert="classify", hf_overrides=overrides, **OPTIONS) as llm:
        np.testing.assert_allclose(probs(llm, use_activation=False), logits.float(), atol=1e-4, rtol=0)
        np.testing.assert_allclose(probs(llm), torch.softmax(logits, dim=1).float(), atol=TOLERANCE, rtol=0)
    overrides["classifier_from_token"] = ["yes"]
    with LLM(folder, convert="classify", hf_overrides=overrides, quantization="int8", **OPTIONS) as llm:
        np.testing.assert_allclose(probs(llm), torch.sigmoid(logits[:, 1:2]).float(), atol=0.05, rtol=0)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind_of_head", ["F32", "F16", "Q8_0", "Q4_K"])
def test_a_gguf_file_has_the_rows_in_blocks(kind_of_head, tied, tmp_path):
    gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    model = make("llama", sizes)
    gguf_files.write_model(
        tmp_path / "m.gguf", model, lambda name: kind_of_head if name.startswith(("output.", "token_embd")) else "F32"
    )
    write_tokenizer(tmp_path)
    wanted = torch.softmax(expected_logits(model.eval(), ["no", "yes"]), dim=1)[:, 1:].float()
    options = OPTIONS | {"convert": "classify", "hf_overrides": TWO_WAY, "tokenizer": str(tmp_path)}
    with LLM(str(tmp_path / "m.gguf"), **options) as llm:
        np.testing.assert_allclose(probs(llm), wanted, atol=2e-3 if kind_of_head == "Q4_K" else 2e-4, rtol=0)


def test_what_is_wrong_is_named(tmp_path):
    model = make("llama", {})
    folder = saved(model, tmp_path)
    for overrides, options, says in (
        ({}, {}, "'score.weight' is missing"),
        (TWO_WAY | {"classifier_from_token": ["no", "maybe"]}, {}, "'maybe', which is not a token of the model"),
        (TWO_WAY, {"skip_tokenizer_init": True}, "leave out skip_tokenizer_init"),
        (NO_YES, {}, "classifier_from_token needs method"),
    ):
        with pytest.raises(ModelLoadError, match=says):
            LLM(folder, convert="classify", hf_overrides=overrides, **(OPTIONS | options))
    with torch.no_grad():
        model.lm_head.weight[WORDS["yes"], 3] = float("inf")
    model.save_pretrained(folder)
    with pytest.raises(ModelLoadError, match=r"the head's rows of 'no', 'yes' have a number that is not finite"):
        LLM(folder, convert="classify", hf_overrides=TWO_WAY, **OPTIONS)
    bare = model.model
    bare.config.tie_word_embeddings = False
    bare.save_pretrained(folder)
    with pytest.raises(ModelLoadError, match=r"needs the head's rows, but there is no tensor lm_head\.weight"):
        LLM(folder, convert="classify", hf_overrides=TWO_WAY, **OPTIONS)
    with LLM(folder, convert="classify", hf_overrides=TWO_WAY, load_format="dummy", **OPTIONS) as llm:
        assert np.isfinite(probs(llm)).all()
