"""Classification against transformers' ``…ForSequenceClassification``, of every family, however the steps are cut."""

import asyncio

import numpy as np
import pytest
import torch
import transformers
from broken_states import assert_they_fail_alone, break_states
from checkpoints import ARCHITECTURES, prompts
from peft_adapters import make_adapter, with_adapter
from safetensors.torch import load_file, save_file

from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, PoolingParams
from rustvllm.config.architectures import CLASSIFIER_CLASSES
from rustvllm.exceptions import ConfigError, InvalidRequestError, ModelLoadError
from rustvllm.lora.request import LoRARequest

CLASSES = {kind: name for kind, (_, name, _) in ARCHITECTURES.items()}
CLASSIFIERS = [kind for kind in CLASSES if kind not in ("dots1", "glm4-moe", "granite")]
"""Kinds of which transformers has a class that classifies."""
PROMPTS = prompts(97, [1, 2, 5, 8, 16, 17, 24, 30, 33, 37, 41, 60])
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 64, "num_gpu_blocks_override": 200, "block_size": 4}
TIGHT = {
    "num_gpu_blocks_override": 24, "max_num_batched_tokens": 16, "max_num_seqs": 8, "long_prefill_token_threshold": 5,
}  # fmt: skip
"""Prompts are cut into pieces, and there is room for one and a half of the longest."""
TOLERANCE = 1e-5
PAD = 96


def make_classifier(kind, num_labels, **settings):
    """A random model of transformers, whose probabilities are not all alike."""
    config_name, _, base = ARCHITECTURES[kind]
    names = {own: name for name, own in CLASSIFIER_CLASSES.items()}
    name = names[CLASSES[kind]]
    config = getattr(transformers, config_name)(**(base | {"num_labels": num_labels, "pad_token_id": PAD} | settings))
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval().float()
    with torch.no_grad():
        model.score.weight.normal_(std=0.5)
    return model


def saved(model, folder):
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def expected_logits(model, lists):
    """What transformers gives for a batch, padded on the right: it reads the last token before the padding."""
    width = max(map(len, lists))
    ids = torch.tensor([[*each, *[PAD] * (width - len(each))] for each in lists])
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in lists])
    return model(ids, attention_mask=mask).logits.double()


def expected(model, lists):
    logits = expected_logits(model, lists)
    return (torch.sigmoid(logits) if logits.shape[1] == 1 else torch.softmax(logits, dim=1)).float().numpy()


def probs(outputs):
    return np.array([output.outputs.probs for output in outputs], np.float32)


def counted(llm, name):
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A folder, and transformers' model with three labels."""
    model = make_classifier("qwen3", 3, id2label={0: "bad", 1: "fair", 2: "good"}, label2id={})
    return saved(model, tmp_path_factory.mktemp("qwen3")), model


def check(llm, model, lists=PROMPTS):
    found = probs(llm.classify(lists, use_tqdm=False))
    np.testing.assert_allclose(found, expected(model, lists), atol=TOLERANCE, rtol=0)
    return found


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_probabilities_are_those_of_transformers(kind, num_labels, tmp_path):
    settings = {"word_embed_proj_dim": 20} if kind == "opt" else {}
    model = make_classifier(kind, num_labels, **settings)
    folder = saved(model, tmp_path)
    with LLM(folder, **OPTIONS) as llm:
        found = check(llm, model)
        assert np.ptp(found, axis=0).min() > 100 * TOLERANCE, "prompts differ"
        assert counted(llm, "generation_tokens") == 0
        assert counted(llm, "prompt_tokens") == sum(map(len, PROMPTS))
        assert llm.supported_tasks == ("classify",)
        raw = probs(llm.classify(PROMPTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False))
        np.testing.assert_allclose(raw, expected_logits(model, PROMPTS).float(), atol=1e-4, rtol=1e-5)
        assert not llm.llm_engine.engine_core.core.executor._runner.model.has_head


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["alone", "overlapping"])
def test_pieces_and_preemptions_change_no_probability(qwen3, pooling, options):
    folder, model = qwen3
    options = OPTIONS | TIGHT | options
    with LLM(folder, pooler_config={"pooling_type": pooling}, **options) as llm:
        found = probs(llm.classify(PROMPTS * 3, use_tqdm=False))
        assert counted(llm, "num_preemptions") > 0
    with torch.no_grad():
        hidden = [model.model(torch.tensor([ids])).last_hidden_state[0].double() for ids in PROMPTS]
        states = [{"LAST": each[-1], "MEAN": each.mean(dim=0), "CLS": each[0]}[pooling] for each in hidden]
        wanted = torch.softmax(torch.stack(states) @ model.score.weight.double().T, dim=1).float()
    np.testing.assert_allclose(found, wanted.repeat(3, 1), atol=TOLERANCE, rtol=0)


def test_with_batch_invariance_no_bit_depends_on_the_batch(qwen3):
    folder, _ = qwen3
    raw = PoolingParams(use_activation=False)
    with LLM(folder, batch_invariant=True, **OPTIONS) as llm:
        alone = [probs(llm.classify([ids], pooling_params=raw, use_tqdm=False))[0] for ids in PROMPTS]
    with LLM(folder, batch_invariant=True, **(OPTIONS | TIGHT)) as llm:
        together = probs(llm.classify(PROMPTS * 2, pooling_params=raw, use_tqdm=False))
        assert counted(llm, "num_preemptions") > 0
    for one, other in zip(alone * 2, together, strict=True):
        assert one.tobytes() == other.tobytes()


def test_swapped_prompts_cached_beginnings_and_adapters_change_nothing_else(qwen3, tmp_path):
    folder, model = qwen3
    swap = {"preemption_mode": "swap", "swap_space": 0.01}
    with LLM(folder, **(OPTIONS | TIGHT | swap)) as llm:
        check(llm, model, PROMPTS * 3)
        assert counted(llm, "num_preemptions") > 0
    lists = [[*PROMPTS[-1][:40], 9, number] for number in range(6)]
    with LLM(folder, **OPTIONS) as llm:
        check(llm, model, lists[:1])
        outputs = llm.classify(lists, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [40] * 6
        np.testing.assert_allclose(probs(outputs), expected(model, lists), atol=TOLERANCE, rtol=0)
    pytest.importorskip("peft", reason="peft is not installed")
    make_adapter(model, tmp_path, seed=1, size=0.5, task_type=None, target_modules=["q_proj", "v_proj", "down_proj"])
    request = LoRARequest("own", 1, str(tmp_path))
    with LLM(folder, enable_lora=True, **OPTIONS) as llm:
        found = probs(llm.classify(PROMPTS, lora_request=[request, None] * (len(PROMPTS) // 2), use_tqdm=False))
    plain = expected(model, PROMPTS)
    with with_adapter(model, tmp_path) as adapted:
        with_it = expected(adapted, PROMPTS)
    np.testing.assert_allclose(found[1::2], plain[1::2], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(found[::2], with_it[::2], atol=TOLERANCE, rtol=0)
    assert np.abs(plain - with_it).max() > 100 * TOLERANCE


@pytest.mark.slow
def test_ranks_that_share_the_layers_give_the_same_probabilities(qwen3):
    folder, model = qwen3
    with LLM(folder, **(OPTIONS | TIGHT | {"tensor_parallel_size": 2})) as llm:
        check(llm, model)


@pytest.mark.parametrize("multiprocess", [False, True], ids=["thread", "process"])
async def test_an_asynchronous_engine_gives_them_too(qwen3, multiprocess):
    folder, model = qwen3
    wanted = expected(model, PROMPTS)
    args = AsyncEngineArgs(model=folder, **(OPTIONS | TIGHT))
    engine = await asyncio.to_thread(AsyncLLM, args.create_engine_config(), multiprocess=multiprocess)

    async def one(index, ids):
        params = PoolingParams(task="classify" if index % 2 else None)
        [output] = [each async for each in engine.encode({"prompt_token_ids": ids}, params, f"r{index}")]
        np.testing.assert_allclose(output.outputs.data, wanted[index % len(PROMPTS)], atol=TOLERANCE, rtol=0)

    try:
        await asyncio.gather(*(one(index, ids) for index, ids in enumerate(PROMPTS * 3)))
        assert await engine.get_supported_tasks() == ("classify",)
        assert engine.config.model.pooler.classifier.names == ("bad", "fair", "good")
        for params, says in ((PoolingParams(task="embed"), "makes no embeddings"), (None, "generates no text")):
            with pytest.raises(InvalidRequestError, match=f"classifies here and {says}: use LLM.classify"):
                async for _ in engine.generate([1], None, "r") if params is None else engine.encode([1], params, "r"):
                    pass
    finally:
        await asyncio.to_thread(engine.shutdown)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_files_in_16_bits_are_read_and_the_layer_stays_in_float32(dtype, tmp_path):
    model = make_classifier("qwen2", 3).to(getattr(torch, dtype))
    folder = saved(model, tmp_path)
    with LLM(folder, dtype="float32", **OPTIONS) as llm:
        check(llm, model.float())
    with LLM(folder, dtype="bfloat16", **OPTIONS) as llm:
        score = llm.llm_engine.engine_core.core.executor._runner.model.score
        assert score.weight.dtype == torch.float32
        np.testing.assert_array_equal(score.weight.numpy(), model.score.weight.detach().numpy())
        found = probs(llm.classify(PROMPTS, use_tqdm=False))
        np.testing.assert_allclose(found, expected(model, PROMPTS), atol=0.05, rtol=0)
    with LLM(folder, dtype="float32", quantization="int8", **OPTIONS) as llm:
        score = llm.llm_engine.engine_core.core.executor._runner.model.score
        np.testing.assert_array_equal(score.weight.numpy(), model.score.weight.detach().numpy())
        found = probs(llm.classify(PROMPTS, use_tqdm=False))
        np.testing.assert_allclose(found, expected(model, PROMPTS), atol=0.05, rtol=0)


def test_what_config_json_says_of_the_problem_chooses_the_activation(qwen3, tmp_path):
    folder, model = qwen3
    logits = expected_logits(model, PROMPTS)
    for overrides, wanted in (
        ({"problem_type": "regression"}, logits),
        ({"problem_type": "multi_label_classification"}, torch.sigmoid(logits)),
        ({"problem_type": "single_label_classification"}, torch.softmax(logits, dim=1)),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, logits),
    ):
        with LLM(folder, hf_overrides=overrides, **OPTIONS) as llm:
            found = probs(llm.classify(PROMPTS, use_tqdm=False))
            np.testing.assert_allclose(found, wanted.float(), atol=1e-4, rtol=0)
    with LLM(folder, pooler_config={"use_activation": False}, **OPTIONS) as llm:
        found = probs(llm.classify(PROMPTS, use_tqdm=False))
        np.testing.assert_allclose(found, logits.float(), atol=1e-4, rtol=0)
        asked = PoolingParams(use_activation=True)
        found = probs(llm.classify(PROMPTS, pooling_params=asked, use_tqdm=False))
        np.testing.assert_allclose(found, torch.softmax(logits, dim=1).float(), atol=TOLERANCE, rtol=0)


def test_the_same_checkpoint_can_make_embeddings(qwen3):
    folder, model = qwen3
    with LLM(folder, convert="embed", **OPTIONS) as llm:
        found = np.array([output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)])
        with pytest.raises(InvalidRequestError, match=r"makes embeddings here and does not classify: use LLM\.embed"):
            llm.classify(PROMPTS)
    with torch.no_grad():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in PROMPTS]
        wanted = torch.nn.functional.normalize(torch.stack(states), dim=1)
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=0)


def test_a_layer_that_is_missing_or_wrong_is_refused_by_name(qwen3, tmp_path):
    model = make_classifier("qwen3", 3)
    folder = saved(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    weight = tensors["score.weight"]
    not_a_number = weight.clone()
    not_a_number[1, 2] = float("nan")
    for changed, says in (
        (None, "'score.weight' is missing"),
        (weight[:2].clone(), r"'score.weight' has shape \[2, 32\], expected \[3, 32\]"),
        (not_a_number, r"score\.weight of this Qwen3ForSequenceClassification has a number that is not finite"),
    ):
        rest = {name: tensor for name, tensor in tensors.items() if name != "score.weight"}
        save_file(rest if changed is None else rest | {"score.weight": changed}, file, {"format": "pt"})
        with pytest.raises(ModelLoadError, match=says):
            LLM(folder, **OPTIONS)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"expected \[4, 32\]"):
        LLM(folder, hf_overrides={"id2label": None, "num_labels": 4}, **OPTIONS)
    with pytest.raises(ModelLoadError, match="Qwen3ForSequenceClassification"):
        LLM(folder, runner="generate", **OPTIONS)


def test_states_that_are_not_numbers_fail_their_request_alone(tmp_path):
    folder = saved(break_states(make_classifier("qwen3", 3)), tmp_path)
    assert_they_fail_alone(folder, "is not finite", **OPTIONS)


def test_what_cannot_be_combined_is_refused_by_name(qwen3):
    folder, _ = qwen3
    for options, says in (
        ({"pipeline_parallel_size": 2}, "classifies .* cannot be combined with pipeline_parallel_size=2"),
        ({"pooler_config": {"dimensions": 4}}, "dimensions of pooler_config is for embeddings"),
        ({"pooler_config": {"task": "embed"}, "convert": "classify"}, "leave one of them out"),
        ({"runner": "generate", "convert": "classify"}, "contradict each other"),
    ):
        with pytest.raises(ConfigError, match=says):
            LLM(folder, **(OPTIONS | options))
    with LLM(folder, **OPTIONS) as llm:
        for call, says in (
            (lambda: llm.embed([[1]]), "classifies here and makes no embeddings"),
            (lambda: llm.generate([[1]]), "classifies here and generates no text"),
            (lambda: llm.encode([[1]], pooling_task="embed"), "classifies here and makes no embeddings"),
            (lambda: llm.encode([[1]], pooling_task="score"), "pooling_task must be one of embed, classify or None"),
            (lambda: llm.classify([[1]], pooling_params=PoolingParams(task="embed")), "this call's task is classify"),
            (lambda: llm.classify([[1]], pooling_params=PoolingParams(dimensions=2)), "dimensions is for embeddings"),
            (lambda: llm.classify([[1] * 65]), "at most 64 fit"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                call()
        [output] = llm.encode([[1, 2]], pooling_task="classify", use_tqdm=False)
        assert output.outputs.data.shape == (3,)
