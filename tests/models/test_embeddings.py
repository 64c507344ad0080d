"""Embeddings against transformers: hidden states pooled by hand, of every family, however the steps are cut."""

import asyncio
import json

import numpy as np
import pytest
import torch
from broken_states import assert_they_fail_alone, break_states
from checkpoints import ARCHITECTURES, make, prompts
from peft_adapters import make_adapter, with_adapter

from async_streams import until_idle
from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, PoolingParams
from rustvllm.exceptions import ConfigError, InvalidRequestError, ModelLoadError
from rustvllm.lora.request import LoRARequest

VARIANTS = {
    **{kind: (kind, {}) for kind in ARCHITECTURES},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "opt-post-norm-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
}
POOLINGS = ("LAST", "MEAN", "CLS")
PROMPTS = prompts(97, [1, 2, 5, 8, 16, 17, 24, 30, 33, 37, 41, 60])
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 64, "num_gpu_blocks_override": 200, "block_size": 4}
TIGHT = {
    "num_gpu_blocks_override": 24, "max_num_batched_tokens": 16, "max_num_seqs": 8, "long_prefill_token_threshold": 5,
}  # fmt: skip
"""Prompts are cut into pieces, and there is room for one and a half of the longest."""
TOLERANCE = 2e-5


@torch.no_grad()
def expected(body, ids, pooling, *, normalised=True, dimensions=None):
    """What transformers' model without a head gives."""
    hidden = body(torch.tensor([ids])).last_hidden_state[0].double()
    vector = {"LAST": hidden[-1], "MEAN": hidden.mean(dim=0), "CLS": hidden[0]}[pooling][:dimensions]
    return (torch.nn.functional.normalize(vector, dim=0) if normalised else vector).float().numpy()


def vectors(outputs):
    return [np.array(output.outputs.embedding, np.float32) for output in outputs]


def counted(llm, name):
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def saved(model, folder):
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A folder, and transformers' model without its head."""
    model = make("qwen3", {})
    return saved(model, tmp_path_factory.mktemp("qwen3")), model.model


def check(llm, body, pooling, lists=PROMPTS, params=None, **options):
    found = vectors(llm.embed(lists, pooling_params=params, use_tqdm=False))
    assert len(found) == len(lists)
    for ids, vector in zip(lists, found, strict=True):
        np.testing.assert_allclose(vector, expected(body, ids, pooling, **options), atol=TOLERANCE, rtol=0)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_with_a_head_gives_transformers_vectors(variant, tmp_path):
    model = make(*VARIANTS[variant])
    folder = saved(model, tmp_path)
    for pooling in POOLINGS:
        with LLM(folder, runner="pooling", pooler_config={"pooling_type": pooling}, **OPTIONS) as llm:
            check(llm, model.base_model, pooling)
            assert counted(llm, "generation_tokens") == 0
            assert counted(llm, "prompt_tokens") == sum(map(len, PROMPTS))
            assert llm.supported_tasks == ("embed",)
            assert not llm.llm_engine.engine_core.core.executor._runner.model.has_head


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_checkpoint_without_a_head_is_a_pooling_model_by_itself(kind, tmp_path):
    body = make(kind, {}).base_model
    body.config.architectures = [type(body).__name__]
    folder = saved(body, tmp_path)
    names = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert names[0].endswith("Model")
    with LLM(folder, **OPTIONS) as llm:
        check(llm, body, "LAST")
    with pytest.raises(ModelLoadError, match=names[0]):
        LLM(folder, runner="generate", **OPTIONS)


def test_a_sentence_transformers_folder_says_how_it_pools(qwen3, tmp_path):
    model = make("qwen3", {})
    folder = saved(model, tmp_path)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    flags = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 62}))
    with LLM(folder, **(OPTIONS | {"max_model_len": None})) as llm:
        assert llm.model_config.max_model_len == 62
        check(llm, model.model, "MEAN", normalised=False)
        check(llm, model.model, "MEAN", params=PoolingParams(use_activation=True))
    (tmp_path / "sentence_bert_config.json").unlink()
    with LLM(folder, pooler_config={"pooling_type": "LAST", "use_activation": True}, **OPTIONS) as llm:
        check(llm, model.model, "LAST")
        check(llm, model.model, "LAST", params=PoolingParams(use_activation=False), normalised=False)
    with LLM(folder, runner="generate", **OPTIONS) as llm:
        assert llm.supported_tasks == ("generate",)


def test_shorter_vectors_are_normalised_after_they_are_cut(qwen3):
    folder, body = qwen3
    with LLM(folder, runner="pooling", hf_overrides={"matryoshka_dimensions": [4, 12]}, **OPTIONS) as llm:
        check(llm, body, "LAST", params=PoolingParams(dimensions=12), dimensions=12)
        every = [PoolingParams(dimensions=4), PoolingParams()] * (len(PROMPTS) // 2)
        sizes = [len(vector) for vector in vectors(llm.embed(PROMPTS, pooling_params=every, use_tqdm=False))]
        assert sizes == [4, 32] * (len(PROMPTS) // 2)
        for wrong, says in ((5, "one of 4, 12"), (64, "between 1 and 32")):
            with pytest.raises(InvalidRequestError, match=says):
                llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=wrong))
    pooler = {"dimensions": 8}
    with LLM(folder, runner="pooling", pooler_config=pooler, hf_overrides={"is_matryoshka": True}, **OPTIONS) as llm:
        check(llm, body, "LAST", dimensions=8)
    with pytest.raises(ConfigError, match="not trained for shorter embeddings"):
        LLM(folder, runner="pooling", pooler_config=pooler, **OPTIONS)
    with LLM(folder, runner="pooling", **OPTIONS) as llm, pytest.raises(InvalidRequestError, match="leave dimensions"):
        llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=8))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["alone", "overlapping"])
def test_pieces_and_preemptions_change_no_vector(qwen3, pooling, options):
    folder, body = qwen3
    options = OPTIONS | TIGHT | options
    with LLM(folder, runner="pooling", pooler_config={"pooling_type": pooling}, **options) as llm:
        check(llm, body, pooling, PROMPTS * 3)
        assert counted(llm, "num_preemptions") > 0


def test_a_swapped_prompt_goes_on_where_it_was(qwen3):
    folder, body = qwen3
    swap = {"preemption_mode": "swap", "swap_space": 0.01}
    with LLM(folder, runner="pooling", **(OPTIONS | TIGHT | swap)) as llm:
        check(llm, body, "LAST", PROMPTS * 3)
        assert counted(llm, "num_preemptions") > 0
    with pytest.raises(ConfigError, match="preemption_mode=swap and MEAN pooling"):
        LLM(folder, runner="pooling", pooler_config={"pooling_type": "MEAN"}, **(OPTIONS | swap))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_with_batch_invariance_no_bit_depends_on_the_batch(qwen3, pooling):
    folder, _ = qwen3
    options = OPTIONS | {"runner": "pooling", "pooler_config": {"pooling_type": pooling}, "batch_invariant": True}
    with LLM(folder, **options) as llm:
        alone = [vectors(llm.embed([ids], use_tqdm=False))[0] for ids in PROMPTS]
    with LLM(folder, **(options | TIGHT)) as llm:
        together = vectors(llm.embed(PROMPTS * 2, use_tqdm=False))
        assert counted(llm, "num_preemptions") > 0
    for one, other in zip(alone * 2, together, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_common_beginning_is_computed_once_where_only_the_last_token_counts(qwen3):
    folder, body = qwen3
    lists = [[*PROMPTS[-1][:40], 9, number] for number in range(6)]
    for pooling in POOLINGS:
        with LLM(folder, runner="pooling", pooler_config={"pooling_type": pooling}, **OPTIONS) as llm:
            check(llm, body, pooling, lists[:1])
            outputs = llm.embed(lists, use_tqdm=False)
            cached = [output.num_cached_tokens for output in outputs]
            assert cached == ([40] * 6 if pooling == "LAST" else [0] * 6)
            check(llm, body, pooling, lists)
            skipping = PoolingParams(skip_reading_prefix_cache=True)
            [output] = llm.embed(lists[:1], pooling_params=skipping, use_tqdm=False)
            assert output.num_cached_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_ranks_that_share_the_layers_give_the_same_vectors(qwen3, pooling):
    folder, body = qwen3
    options = OPTIONS | TIGHT | {"tensor_parallel_size": 2}
    with LLM(folder, runner="pooling", pooler_config={"pooling_type": pooling}, **options) as llm:
        check(llm, body, pooling)


def test_adapters_change_vectors_as_peft_does(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    model = make("qwen3", {})
    folder = saved(model, tmp_path / "model")
    adapter = tmp_path / "adapter"
    make_adapter(model, adapter, seed=1, size=0.5, target_modules="all-linear")
    request = LoRARequest("own", 1, str(adapter))
    with LLM(folder, runner="pooling", enable_lora=True, **OPTIONS) as llm:
        asked = [request, None] * (len(PROMPTS) // 2)
        found = vectors(llm.embed(PROMPTS, lora_request=asked, use_tqdm=False))
    plain = [expected(model.model, ids, "LAST") for ids in PROMPTS]
    with with_adapter(model, adapter) as adapted:
        body = adapted.base_model.model.model
        with_it = [expected(body, ids, "LAST") for ids in PROMPTS]
    for index, vector in enumerate(found):
        np.testing.assert_allclose(vector, (plain if index % 2 else with_it)[index], atol=TOLERANCE, rtol=0)
    assert np.abs(plain[4] - with_it[4]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("multiprocess", [False, True], ids=["thread", "process"])
async def test_an_asynchronous_engine_gives_them_too(qwen3, multiprocess):
    folder, body = qwen3
    args = AsyncEngineArgs(model=folder, runner="pooling", **(OPTIONS | TIGHT))
    engine = await asyncio.to_thread(AsyncLLM, args.create_engine_config(), multiprocess=multiprocess)

    async def one(index, ids):
        params = PoolingParams(use_activation=index % 2 == 0)
        [output] = [each async for each in engine.encode({"prompt_token_ids": ids}, params, f"r{index}")]
        assert (output.request_id, output.finished, output.prompt_token_ids) == (f"r{index}", True, ids)
        assert output.outputs.data.dtype == np.float32
        wanted = expected(body, ids, "LAST", normalised=index % 2 == 0)
        np.testing.assert_allclose(output.outputs.data, wanted, atol=TOLERANCE * max(1, np.abs(wanted).max()), rtol=0)

    try:
        await asyncio.gather(*(one(index, ids) for index, ids in enumerate(PROMPTS * 3)))
        with pytest.raises(InvalidRequestError, match="generates no text"):
            async for _ in engine.generate("a", None, "r"):
                pass
    finally:
        await asyncio.to_thread(engine.shutdown)


async def test_requests_that_are_given_up_leave_nothing_behind(qwen3):
    folder, body = qwen3
    args = AsyncEngineArgs(model=folder, runner="pooling", **(OPTIONS | TIGHT))
    engine = await asyncio.to_thread(AsyncLLM, args.create_engine_config())
    rng = np.random.default_rng(0)
    lists = [PROMPTS[place] for place in rng.integers(0, len(PROMPTS), 120)]

    async def one(index, ids):
        async for output in engine.encode({"prompt_token_ids": ids}, PoolingParams(), f"r{index}"):
            np.testing.assert_allclose(output.outputs.data, expected(body, ids, "LAST"), atol=TOLERANCE, rtol=0)
            return 1
        return 0

    try:
        tasks = [asyncio.create_task(one(index, ids)) for index, ids in enumerate(lists)]
        for index in range(0, len(lists), 3):
            await asyncio.sleep(0.001)
            if index % 2:
                tasks[index].cancel()
            else:
                await engine.abort(f"r{index}")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        wrong = [
            each for each in results if isinstance(each, Exception) and not isinstance(each, asyncio.CancelledError)
        ]
        assert not wrong, wrong[0]
        assert sum(each == 1 for each in results) >= 60
        stats = await until_idle(engine)
        assert stats["num_free_blocks"] == stats["num_usable_blocks"]
        assert await one("last", PROMPTS[3]) == 1
    finally:
        await asyncio.to_thread(engine.shutdown)


@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_states_that_are_not_numbers_fail_their_request_alone(pooling, tmp_path):
    folder = saved(break_states(make("qwen3", {})), tmp_path)
    options = OPTIONS | {"runner": "pooling", "pooler_config": {"pooling_type": pooling}}
    assert_they_fail_alone(folder, "hidden states) is not finite", **options)


def test_what_cannot_be_combined_is_refused_by_name(qwen3):
    folder, _ = qwen3
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    for options, says in (
        ({"speculative_config": ngram}, "speculative_config: there are no tokens to guess"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: set it to 1"),
        ({"model_impl": "transformers"}, "model_impl=transformers: rustvllm has no code of its own"),
        ({"logits_processors": ["m:C"]}, "logits_processors: there are no logits"),
    ):
        with pytest.raises(ConfigError, match=r"makes embeddings .* cannot be combined with") as caught:
            LLM(folder, runner="pooling", **(OPTIONS | options))
        assert says in str(caught.value)
    both_ways = {"is_causal": False}
    with pytest.raises(ModelLoadError, match="only serves causal attention"):
        LLM(folder, runner="pooling", hf_overrides=both_ways, **OPTIONS)


def test_prompts_and_parameters_that_are_wrong_are_refused_before_anything_runs(qwen3):
    folder, body = qwen3
    with LLM(folder, runner="pooling", **OPTIONS) as llm:
        check(llm, body, "LAST", prompts(97, [64]))
        for given, says in (
            ([[]], "at least one token"),
            ([[1] * 65], "at most 64 fit"),
            ([[97]], "not in the vocabulary"),
            ([["a"]], "must be integers"),
            (None, "prompts must be"),
            ("text", "no tokenizer"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                llm.embed(given)
        for params, says in (
            ("x", "pooling_params must be a PoolingParams"),
            ([PoolingParams()], "has 1 entries for 2 prompts"),
            ([PoolingParams(), None], "got NoneType"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                llm.embed([[1], [2]], pooling_params=params)
        cut = PoolingParams(truncate_prompt_tokens=3)
        [output] = llm.embed([[1, 2, 3, 4, 5]], pooling_params=cut, use_tqdm=False)
        assert output.prompt_token_ids == [1, 2, 3]
        cut = PoolingParams(truncate_prompt_tokens=-1, truncation_side="left")
        [output] = llm.embed([list(range(70))], pooling_params=cut, use_tqdm=False)
        assert output.prompt_token_ids == list(range(6, 70))
        with pytest.raises(InvalidRequestError, match="generates no text"):
            llm.generate([[1]])
        for params in (PoolingParams(), [PoolingParams()]):
            with pytest.raises(InvalidRequestError, match="got PoolingParams"):
                llm.generate([[1]], params)
    with LLM(folder, **OPTIONS) as llm, pytest.raises(InvalidRequestError, match="--runner pooling"):
        llm.embed([[1]])
