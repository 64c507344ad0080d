"""Log-probabilities of the whole engine against transformers', whatever else runs, and against the golden ones."""

import asyncio
import json
import math

import pytest
import torch

import transformers_logprobs
from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from rustvllm.exceptions import InvalidRequestError

ATOL = 1e-4
PROMPTS = ["Once upon a time", "Lily and Tom", "One day, a little dog", "The", "There was a big red ball"]


@pytest.fixture(scope="module")
def reference(folder):
    return transformers_logprobs.of_outputs(folder, torch.float32)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(
        str(folder), dtype="float32", device="cpu", max_num_seqs=4, num_gpu_blocks_override=20, max_model_len=128
    )


def check(result, output, num_logprobs, reference, tokenizer):
    """One sample's log-probabilities are transformers', its text is theirs, and they add up."""
    expected = reference(result.prompt_token_ids, output.token_ids)
    assert len(output.logprobs) == len(output.token_ids) == len(output.text_offsets)
    total = 0.0
    for place, (token_id, position) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert next(iter(position)) == token_id
        assert len(position) in (num_logprobs, num_logprobs + 1)
        for candidate, logprob in position.items():
            assert abs(logprob.logprob - float(expected[place, candidate])) < ATOL
            assert logprob.decoded_token == logprob.decoded_bytes.decode(errors="replace")
        largest = expected[place].topk(max(num_logprobs, 1)).values
        others = [logprob.logprob for logprob in list(position.values())[1:]]
        top = others if len(others) == num_logprobs else sorted((p.logprob for p in position.values()), reverse=True)
        if num_logprobs:
            assert top == pytest.approx(largest.tolist(), abs=ATOL)
        total += position[token_id].logprob
        if position[token_id].rank == 1:
            assert float(expected[place].max() - expected[place, token_id]) < ATOL
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-6)
    # A tokenizer with byte fallback: the text is that of the bytes, less the first space.
    raw = b"".join(
        p[t].decoded_bytes
        for t, p in zip(output.token_ids, output.logprobs, strict=True)
        if t not in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    )
    assert raw.decode(errors="replace").endswith(output.text)


@pytest.mark.slow
def test_mixed_batches_and_preemption(llm, reference):
    """More requests than fit: some are preempted; some ask, some do not, and greedy and random ones are mixed."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(12)]
    params = [
        SamplingParams(
            temperature=0 if i % 2 else 0.9,
            seed=i,
            max_tokens=90,
            ignore_eos=True,
            logprobs=[None, 0, 1, 5, 20][i % 5],
            presence_penalty=0.5 if i % 3 == 0 else 0,
            min_tokens=5,
        )
        for i in range(12)
    ]
    stats = llm.llm_engine.engine_core.handle.stats
    before = stats()["num_preemptions"]
    results = llm.generate(prompts, params)
    assert stats()["num_preemptions"] > before, "the pool is too large for this test"
    num_checked = 0
    for result, param in zip(results, params, strict=True):
        [output] = result.outputs
        if param.logprobs is None:
            assert (output.logprobs, output.cumulative_logprob, output.text_offsets) == (None, None, None)
        else:
            check(result, output, param.logprobs, reference, llm.llm_engine.get_tokenizer())
            num_checked += 1
    assert num_checked >= 9


def test_several_samples_and_stop_strings(llm, reference):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=24, logprobs=2, stop=["y"])
    [result] = llm.generate([PROMPTS[0]], params)
    assert len({tuple(output.token_ids) for output in result.outputs}) > 1
    for output in result.outputs:
        expected = reference(result.prompt_token_ids, output.token_ids)
        assert len(output.logprobs) == len(output.token_ids)
        for place, (token_id, position) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            assert abs(position[token_id].logprob - float(expected[place, token_id])) < ATOL


def test_the_golden_ones(llm, folder):
    golden = json.loads((folder.parent / "golden.json").read_text())
    num_compared = 0
    for case in golden["cases"]:
        params = SamplingParams(temperature=0, max_tokens=16, logprobs=5, ignore_eos=True)
        [result] = llm.generate([{"prompt_token_ids": case["prompt_ids"]}], params)
        [output] = result.outputs
        key = "top5_logprobs_first16"
        for position, stored in zip(output.logprobs, case[key], strict=False):
            pairs = stored.items() if isinstance(stored, dict) else stored
            for token_id, logprob in pairs:
                assert position[int(token_id)].logprob == pytest.approx(logprob, abs=ATOL)
                num_compared += 1
    assert num_compared > 100


@pytest.mark.parametrize(("num_logprobs", "message"), [(21, "the limit is 20"), (-1, "vocabulary of 512")])
def test_too_many(llm, num_logprobs, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["a"], SamplingParams(logprobs=num_logprobs))
    assert llm.generate(["a"], SamplingParams(logprobs=20, max_tokens=1))[0].outputs[0].logprobs


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_streams_give_each_token_once(folder, monkeypatch, multiprocessing):
    """In this process and in another one, deltas together are the whole."""
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", multiprocessing)
    args = AsyncEngineArgs(model=str(folder), executor="sim", max_num_seqs=8)

    async def run():
        engine = AsyncLLM.from_engine_args(args)
        try:
            from rustvllm.sampling_params import RequestOutputKind

            async def stream(index, kind):
                params = SamplingParams(
                    max_tokens=40, temperature=1, seed=index, n=2, logprobs=index % 4, output_kind=kind
                )
                tokens, seen, last = {0: [], 1: []}, {0: [], 1: []}, {}
                async for output in engine.generate(PROMPTS[0], params, f"{index} {kind}"):
                    for sample in output.outputs:
                        assert len(sample.logprobs) == len(sample.token_ids) == len(sample.text_offsets)
                        tokens[sample.index] += sample.token_ids
                        seen[sample.index] += zip(sample.logprobs, sample.text_offsets, strict=True)
                        last[sample.index] = sample.cumulative_logprob
                return tokens, seen, last

            kinds = (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
            streams = [stream(index, kind) for index in range(8) for kind in kinds]
            results = await asyncio.wait_for(asyncio.gather(*streams), 100)
        finally:
            engine.shutdown()
        for index in range(8):
            deltas, whole = results[2 * index : 2 * index + 2]
            assert deltas[:2] == whole[:2]
            assert [len(ids) for ids in whole[0].values()] == [40, 40]
            for sample, ids in whole[0].items():
                for token_id, (position, _) in zip(ids, whole[1][sample], strict=True):
                    assert next(iter(position)) == token_id
                    assert len(position) == max(1, index % 4)
                    assert position[token_id].logprob == pytest.approx(math.log(0.5))
                assert whole[2][sample] == deltas[2][sample] == pytest.approx(40 * math.log(0.5), abs=1e-4)

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_what_is_given_as_log_probabilities(folder, llm, mode):
    """Of the whole vocabulary, so that it can be seen what of it is left."""
    numbers = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 64}
    params = SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=1, logprobs=-1)
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    with LLM(str(folder), max_logprobs=-1, logprobs_mode=mode, **numbers) as engine:
        drawn, likeliest = (output.outputs[0] for output in engine.generate([PROMPTS[0]] * 2, [params, greedy]))
    [known] = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1, logprobs=20))
    [known] = known.outputs[0].logprobs
    [of_drawn], [of_likeliest] = drawn.logprobs, likeliest.logprobs
    assert len(of_drawn) == len(of_likeliest) == 512
    assert drawn.cumulative_logprob == of_drawn[drawn.token_ids[0]].logprob
    left = [token_id for token_id, logprob in of_drawn.items() if logprob.logprob > -math.inf]
    scale = 2 if mode.startswith("processed") else 1
    assert len(left) == (3 if scale == 2 else 512)
    if mode.endswith("logprobs"):
        assert sum(math.exp(of_drawn[token_id].logprob) for token_id in left) == pytest.approx(1, abs=1e-4)
    first, second, *_ = known.values()  # the differences are those of raw log-probabilities, divided by the temperature
    for logprobs, factor in ((of_drawn, scale), (of_likeliest, 1)):
        first_id, second_id, *_ = known
        difference = logprobs[first_id].logprob - logprobs[second_id].logprob
        assert difference == pytest.approx(factor * (first.logprob - second.logprob), abs=ATOL)
