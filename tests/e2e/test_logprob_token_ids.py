"""``logprob_token_ids`` of the whole engine against transformers', whatever else runs."""

import asyncio

import pytest
import torch

import transformers_logprobs
from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from rustvllm.exceptions import InvalidRequestError
from rustvllm.logprobs import FlatLogprobs
from rustvllm.sampling_params import RequestOutputKind

ATOL = 1e-4
PROMPTS = ["Once upon a time", "Lily and Tom", "One day, a little dog", "The", "There was a big red ball"]
LISTS = [None, [5], [511, 0, 300], [7, 8, 7], list(range(128))]


@pytest.fixture(scope="module")
def reference(folder):
    return transformers_logprobs.of_outputs(folder, torch.float64)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        str(folder), dtype="float32", device="cpu", max_num_seqs=4, num_gpu_blocks_override=20, max_model_len=128
    ) as llm:
        yield llm


def check(prompt_ids, sample, named, reference):
    """The sampled token comes first, then the named ones in their order, each once."""
    expected = reference(prompt_ids, sample.token_ids)
    assert len(sample.logprobs) == len(sample.token_ids)
    for token_id, place, row in zip(sample.token_ids, sample.logprobs, expected, strict=True):
        assert list(place) == list(dict.fromkeys([token_id, *named]))
        for candidate, logprob in place.items():
            assert abs(logprob.logprob - float(row[candidate])) < ATOL
            assert (logprob.rank is None) == (candidate != token_id)
        own = place[token_id]
        assert int((row > row[token_id] + ATOL).sum()) < own.rank <= 1 + int((row > row[token_id] - ATOL).sum())
    total = sum(place[token_id].logprob for token_id, place in zip(sample.token_ids, sample.logprobs, strict=True))
    assert sample.cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_in_mixed_batches_with_preemption(llm, reference):
    """Some name tokens, some ask for the likeliest, some ask for nothing; greedy and random, with penalties."""
    params = [
        SamplingParams(
            temperature=0 if i % 2 else 0.9,
            seed=i,
            max_tokens=90,
            ignore_eos=True,
            logprobs=2 if i % 5 == 0 and i % 2 else None,
            logprob_token_ids=LISTS[i % 5],
            presence_penalty=0.5 if i % 3 == 0 else 0,
            bad_words=["little"] if i % 4 == 0 else None,
        )
        for i in range(12)
    ]
    stats = llm.llm_engine.engine_core.handle.stats
    before = stats()["num_preemptions"]
    results = llm.generate([PROMPTS[i % 5] for i in range(12)], params)
    assert stats()["num_preemptions"] > before, "the pool is too large for this test"
    for result, param in zip(results, params, strict=True):
        [sample] = result.outputs
        if param.logprob_token_ids:
            check(result.prompt_token_ids, sample, param.logprob_token_ids, reference)
        elif param.logprobs is None:
            assert (sample.logprobs, sample.cumulative_logprob) == (None, None)
        else:
            assert all(
                len(place) in (2, 3) and None not in {each.rank for each in place.values()} for place in sample.logprobs
            )


def test_what_is_sampled_stays_the_same(llm):
    plain = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    [[one], [other]] = (
        result.outputs for result in llm.generate(PROMPTS[:1] * 2, [plain, plain.clone(logprob_token_ids=[1, 2])])
    )
    assert one.token_ids == other.token_ids


def test_samples_and_the_best_of_them(llm, reference):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, logprob_token_ids=[9, 4])
    [result] = llm.generate(PROMPTS[:1], params)
    assert len({tuple(sample.token_ids) for sample in result.outputs}) > 1
    for sample in result.outputs:
        check(result.prompt_token_ids, sample, [9, 4], reference)
    [result] = llm.generate(PROMPTS[:1], params.clone(n=1, best_of=3))
    check(result.prompt_token_ids, result.outputs[0], [9, 4], reference)


def test_flat(llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprob_token_ids=[9, 4, 9])
    [[plain], [flat]] = (
        result.outputs for result in llm.generate(PROMPTS[:1] * 2, [params, params.clone(flat_logprobs=True)])
    )
    assert isinstance(flat.logprobs, FlatLogprobs)
    assert [list(place) for place in flat.logprobs] == [list(place) for place in plain.logprobs]
    assert flat.logprobs.logprobs == [each.logprob for place in plain.logprobs for each in place.values()]
    assert flat.logprobs.ranks == [each.rank for place in plain.logprobs for each in place.values()]


def test_with_drafts(folder, reference):
    with LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=256,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    ) as llm:
        prompt = "Lily saw a dog. Lily saw a dog. Lily saw a dog. Lily saw"
        named = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprob_token_ids=[3, 400, 13])
        results = llm.generate([prompt] * 3, [named, named.clone(logprob_token_ids=None), named.clone(n=1)])
        assert llm.llm_engine.engine_core.handle.stats()["num_accepted_tokens"] > 0
        assert results[0].outputs[0].token_ids == results[1].outputs[0].token_ids
        for result in (results[0], results[2]):
            check(result.prompt_token_ids, result.outputs[0], [3, 400, 13], reference)


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_streams_give_each_token_once(folder, monkeypatch, multiprocessing, reference):
    """In this process and in another one, deltas together are the whole."""
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", multiprocessing)
    args = AsyncEngineArgs(model=str(folder), dtype="float32", device="cpu", max_num_seqs=4)

    async def run():
        engine = AsyncLLM.from_engine_args(args)

        async def stream(index):
            params = SamplingParams(
                temperature=0.7,
                seed=index,
                max_tokens=15,
                ignore_eos=True,
                logprob_token_ids=[index, 2],
                output_kind=RequestOutputKind.DELTA,
            )
            whole = None
            async for output in engine.generate(PROMPTS[index], params, f"{index}"):
                if whole is None:
                    whole = output
                else:
                    whole.add(output, aggregate=True)
            return whole

        try:
            return await asyncio.wait_for(asyncio.gather(*map(stream, range(5))), 100)
        finally:
            engine.shutdown()

    for index, whole in enumerate(asyncio.run(run())):
        check(whole.prompt_token_ids, whole.outputs[0], [index, 2], reference)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logprob_token_ids": [512]}, r"holds 512, which is not in the vocabulary \(0 to 511\)"),
        ({"logprob_token_ids": [1] * 129}, "has 129 entries; the limit is 128"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1.0]}, "logprob_token_ids"),
        ({"logprob_token_ids": [float("nan")]}, "logprob_token_ids"),
        ({"logprob_token_ids": [True]}, "logprob_token_ids"),
        ({"logprob_token_ids": [None]}, "logprob_token_ids"),
        ({"logprob_token_ids": [[1]]}, "logprob_token_ids"),
        ({"logprob_token_ids": "12"}, "logprob_token_ids"),
        ({"logprob_token_ids": [2**70]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "names 2 tokens, but logprobs is 3"),
        ({"logprob_token_ids": [1, 2], "logprobs": -1}, "names 2 tokens, but logprobs is -1"),
        ({"logprob_token_ids": [1], "use_beam_search": True, "n": 2, "temperature": 0}, "cannot be used with use_beam"),
    ],
)
def test_bad_input_names_the_parameter(llm, more, message):
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        llm.generate(["a"], SamplingParams(**{"max_tokens": 1, **more}))
    assert refusal.value.param == "logprob_token_ids"


def test_nothing_named_is_nothing_asked(llm):
    for given in (None, [], ()):
        [result] = llm.generate(["a"], SamplingParams(max_tokens=2, temperature=0, logprob_token_ids=given))
        assert result.outputs[0].logprobs is None
    [result] = llm.generate(["a"], SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[3, 4], logprobs=2))
    assert list(result.outputs[0].logprobs[0])[1:] == [3, 4]
