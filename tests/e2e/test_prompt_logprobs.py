"""Log-probabilities of prompts of the whole engine against transformers', whatever else runs.

transformers computes in float64 here. In float32 the logits of this model, up to 20, are right within some 1e-5: five
times the smallest difference that there is at their size. So 1e-5 is more than the arithmetic allows, and 3e-5 is asked
for.
"""

import asyncio

import pytest

import transformers_logprobs
from chunked_prompts import IN_PIECES, TEXT
from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from rustvllm.engine import input_processor
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import RequestOutputKind

ATOL = 3e-5


@pytest.fixture(scope="module")
def reference(folder):
    return transformers_logprobs.of_prompts(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **IN_PIECES) as llm:
        yield llm


@pytest.fixture(scope="module")
def unchunked(folder):
    with LLM(str(folder), dtype="float32", device="cpu", max_num_batched_tokens=128, max_model_len=72) as llm:
        yield llm


def check(output, num_logprobs, reference):
    expected = reference(output.prompt_token_ids)
    first, *places = output.prompt_logprobs
    assert first is None
    assert len(places) == len(output.prompt_token_ids) - 1
    for token_id, place, row in zip(output.prompt_token_ids[1:], places, expected, strict=True):
        assert next(iter(place)) == token_id
        own = place[token_id]
        higher = int((row > row[token_id] + ATOL).sum())
        assert higher < own.rank <= 1 + int((row > row[token_id] - ATOL).sum())
        for candidate, logprob in place.items():
            assert abs(logprob.logprob - float(row[candidate])) < ATOL
            assert logprob.decoded_token == logprob.decoded_bytes.decode(errors="replace")
        assert len(place) == num_logprobs + (own.rank > num_logprobs)
        largest = sorted((logprob.logprob for logprob in place.values()), reverse=True)[:num_logprobs]
        assert largest == pytest.approx(row.topk(num_logprobs).values.tolist(), abs=ATOL)


def test_in_pieces_preempted_and_among_others(llm, reference):
    tokenizer = llm.llm_engine.get_tokenizer()
    ids = tokenizer.encode(TEXT)
    prompts = [ids[: 20 + 3 * i] for i in range(10)]  # they begin alike: nothing may come from the prefix cache
    asked = [None, 0, 1, 5, 20]
    params = [
        SamplingParams(
            temperature=0 if i % 2 else 0.8,
            seed=i,
            max_tokens=[1, 20, 3][i % 3],
            ignore_eos=True,
            prompt_logprobs=asked[i % 5],
            logprobs=2 if i % 4 == 0 else None,
        )
        for i in range(10)
    ]
    stats = llm.llm_engine.engine_core.handle.stats
    before = stats()["num_preemptions"]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert stats()["num_preemptions"] > before, "the pool is too large for this test"
    for output, param in zip(outputs, params, strict=True):
        [sample] = output.outputs
        assert len(sample.token_ids) == param.max_tokens
        assert (sample.cumulative_logprob is None) == (param.logprobs is None)
        if param.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert output.num_cached_tokens == 0
            check(output, param.prompt_logprobs, reference)


def test_pieces_change_nothing(llm, unchunked):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
    [pieces], [whole] = llm.generate([TEXT], params), unchunked.generate([TEXT], params)
    for of_pieces, of_whole in zip(pieces.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert list(of_pieces) == list(of_whole)
        for token_id, logprob in of_pieces.items():
            assert logprob.logprob == pytest.approx(of_whole[token_id].logprob, abs=ATOL)
            assert logprob.rank == of_whole[token_id].rank


def test_few_rows_of_logits_at_a_time(unchunked, reference, monkeypatch):
    monkeypatch.setattr("rustvllm.sample.prompt_logprobs.MAX_ROWS", 5)
    [output] = unchunked.generate([TEXT], SamplingParams(max_tokens=1, prompt_logprobs=4))
    check(output, 4, reference)


def test_samples_share_a_prompt_that_was_scored_once(unchunked, reference):
    [output] = unchunked.generate([TEXT], SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=1, logprobs=0))
    assert [len(sample.logprobs) for sample in output.outputs] == [4, 4, 4]
    check(output, 1, reference)
    for sample in output.outputs:
        own = [place[token_id].logprob for token_id, place in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert sample.cumulative_logprob == pytest.approx(sum(own))


def test_one_token_and_bad_values(unchunked, monkeypatch):
    [output] = unchunked.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert output.prompt_logprobs == [None]
    for number, message in ((21, "prompt_logprobs is 21, but the limit is 20"), (-1, "vocabulary of 512")):
        with pytest.raises(InvalidRequestError, match=message):
            unchunked.generate(["a"], SamplingParams(prompt_logprobs=number))
    monkeypatch.setattr(input_processor, "MAX_PROMPT_LOGPROBS", 50)
    with pytest.raises(InvalidRequestError, match="ask for at most 11 candidates"):
        unchunked.generate([{"prompt_token_ids": [5] * 4}], SamplingParams(prompt_logprobs=20))
    assert unchunked.generate([{"prompt_token_ids": [5] * 4}], SamplingParams(prompt_logprobs=11, max_tokens=1))


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_streams_abort_and_the_whole_vocabulary(folder, monkeypatch, multiprocessing):
    """In this process and in another one, where a prompt's log-probabilities take many frames."""
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", multiprocessing)
    args = AsyncEngineArgs(
        model=str(folder),
        executor="sim",
        max_num_seqs=4,
        max_num_batched_tokens=256,  # whose log-probabilities are more than a frame
        max_logprobs=-1,
        sim_step_time=20,
    )

    async def run():
        engine = AsyncLLM.from_engine_args(args)
        ids = list(range(3, 303))
        prompt = {"prompt_token_ids": ids}
        try:
            for kind in RequestOutputKind:
                params = SamplingParams(max_tokens=3, prompt_logprobs=-1, output_kind=kind)
                outputs = [output async for output in engine.generate(prompt, params, f"{kind}")]
                first = outputs[0].prompt_logprobs
                assert [next(iter(place)) for place in first[1:]] == ids[1:]
                num_candidates = {len(place) for place in first[1:]}
                assert max(num_candidates) > 60  # as many as the simulation has words
                later = [output.prompt_logprobs for output in outputs[1:]]
                if kind is RequestOutputKind.DELTA:
                    assert later == [None] * len(later)
                else:
                    assert all(len(each) == len(ids) for each in later)
            params = SamplingParams(max_tokens=150, prompt_logprobs=-1)
            doomed = await engine.add_request("doomed", prompt, params)
            await engine.abort("doomed")
            last = [output async for output in doomed][-1]
            assert last.outputs[0].finish_reason == "abort"
            if not last.outputs[0].token_ids:
                assert len(last.prompt_logprobs) < len(ids)
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            [output] = [output async for output in engine.generate(prompt, params, "after")]
            assert len(output.prompt_logprobs) == len(ids)
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), 100))
