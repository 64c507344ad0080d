"""``prompt_logprob_token_ids`` of the whole engine against transformers', whatever else runs.

As in ``test_prompt_logprobs.py``, transformers computes in float64.
"""

import asyncio
import math

import numpy as np
import pytest

import transformers_logprobs
from chunked_prompts import IN_PIECES, TEXT
from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import RequestOutputKind

ATOL = 3e-5


@pytest.fixture(scope="module")
def reference(folder):
    logprobs = transformers_logprobs.of_prompts(folder)
    return lambda prompt: logprobs(prompt).numpy()


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **IN_PIECES) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids(llm):
    return llm.llm_engine.get_tokenizer().encode(TEXT)


def table(seed, num_rows, width):
    """Any ids, with −1 in places."""
    return np.random.default_rng(seed).integers(-1, 512, (num_rows, width))


def check(output, rows, start, reference):
    """Each row is about the token behind its place; padding is minus infinity."""
    got = output.prompt_token_id_logprobs
    assert (got.dtype, got.shape) == (np.float32, rows.shape)
    row_logprobs = reference(output.prompt_token_ids)[start:]
    assert len(row_logprobs) == len(rows)
    expected = np.where(rows < 0, -math.inf, np.take_along_axis(row_logprobs, rows.clip(min=0), axis=1))
    assert (np.isneginf(got) == (rows < 0)).all()
    np.testing.assert_allclose(got[rows >= 0], expected[rows >= 0], atol=ATOL, rtol=0)


def test_in_pieces_preempted_and_among_others(llm, ids, reference):
    prompts = [ids[: 20 + 3 * i] for i in range(12)]  # they begin alike: nothing may come from the prefix cache
    widths, starts = [0, 1, 5, 20], [None, 0, 7]
    tables, params = [], []
    for i, prompt in enumerate(prompts):
        start = starts[i % 3]
        rows = table(i, len(prompt) - 1 - (start or 0), widths[i % 4]) if widths[i % 4] else None
        tables.append(rows)
        params.append(
            SamplingParams(
                temperature=0 if i % 2 else 0.8,
                seed=i,
                max_tokens=[1, 30, 25][i % 3],
                ignore_eos=True,
                prompt_logprobs=[None, 2, None, 0, 3][i % 5],
                prompt_logprob_token_ids=rows,
                prompt_logprob_start=None if rows is None else start,
                logprobs=2 if i % 4 == 0 else None,
            )
        )
    alone = [param.clone(prompt_logprob_token_ids=None, prompt_logprob_start=None) for param in params]
    stats = llm.llm_engine.engine_core.handle.stats
    before = stats()["num_preemptions"]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert stats()["num_preemptions"] > before, "the pool is too large for this test"
    plain = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], alone)
    for i, (output, same, rows, param) in enumerate(zip(outputs, plain, tables, params, strict=True)):
        assert output.outputs[0].token_ids == same.outputs[0].token_ids
        if rows is None:
            assert output.prompt_token_id_logprobs is None
        else:
            assert output.num_cached_tokens == 0
            check(output, rows, starts[i % 3] or 0, reference)
        if param.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        for one, other in zip(output.prompt_logprobs[1:], same.prompt_logprobs[1:], strict=True):
            assert list(one) == list(other)
            assert [each.rank for each in one.values()] == [each.rank for each in other.values()]
            for token_id, logprob in one.items():
                assert logprob.logprob == pytest.approx(other[token_id].logprob, abs=ATOL)


def test_nested_lists_are_padded(llm, ids, reference):
    lists = [[3], [], [5, -1, 7]]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprob_token_ids=lists)
    [output] = llm.generate([{"prompt_token_ids": ids[:4]}], params)
    check(output, np.array([[3, -1, -1], [-1, -1, -1], [5, -1, 7]]), 0, reference)


@pytest.mark.parametrize("start", [0, 1, 20, 29])
def test_a_start_anywhere_in_the_prompt(llm, ids, reference, start):
    rows = table(start, 30 - start, 2)
    params = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprob_token_ids=rows.tolist(), prompt_logprob_start=start
    )
    [output] = llm.generate([{"prompt_token_ids": ids[:31]}], params)
    check(output, rows, start, reference)


def test_samples_share_them_and_a_cached_prompt_is_computed(llm, ids, reference):
    rows = table(1, 23, 3)
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=4, prompt_logprob_token_ids=rows)
    for _ in range(2):
        [output] = llm.generate([{"prompt_token_ids": ids[:24]}], params)
        assert len(output.outputs) == 3
        check(output, rows, 0, reference)


def test_what_is_given_is_kept(ids):
    rows = table(1, 4, 3)
    params = SamplingParams(prompt_logprob_token_ids=rows)
    before = rows.copy()
    rows[:] = 0
    assert (params.prompt_logprob_token_ids == before).all()
    assert params.clone().prompt_logprob_token_ids is params.prompt_logprob_token_ids
    with pytest.raises(ValueError, match="read-only"):
        params.prompt_logprob_token_ids[0, 0] = 1
    assert not params.recheck()


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_outputs_have_them_once_and_whole(folder, monkeypatch, multiprocessing, reference, ids):
    """In this process and in another one; deltas give them in the first output."""
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", multiprocessing)
    args = AsyncEngineArgs(
        model=str(folder), dtype="float32", device="cpu", max_num_seqs=4, max_num_batched_tokens=11, max_model_len=72
    )
    kinds = list(RequestOutputKind)

    async def run():
        engine = AsyncLLM.from_engine_args(args)

        async def stream(index):
            params = SamplingParams(
                temperature=0,
                max_tokens=5,
                ignore_eos=True,
                prompt_logprobs=1 if index % 2 else None,
                prompt_logprob_token_ids=table(index, 30 - index, 4),
                prompt_logprob_start=index,
                output_kind=kinds[index % 3],
            )
            prompt = {"prompt_token_ids": ids[:31]}
            return [output async for output in engine.generate(prompt, params, f"{index}")]

        try:
            return await asyncio.wait_for(asyncio.gather(*map(stream, range(6))), 100)
        finally:
            engine.shutdown()

    for index, outputs in enumerate(asyncio.run(run())):
        with_them = [output for output in outputs if output.prompt_token_id_logprobs is not None]
        assert len(with_them) == (1 if kinds[index % 3] is RequestOutputKind.DELTA else len(outputs))
        check(with_them[0], table(index, 30 - index, 4), index, reference)
        assert (with_them[0].prompt_logprobs is None) == (index % 2 == 0)


ROWS = [[1], [2], [3]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "must name a token at least"),
        ([[], [], []], "must name a token at least"),
        (np.empty((3, 0), np.int32), "must name a token at least"),
        ([1, 2, 3], "the row 1"),
        (5, "must be a list of lists"),
        ("123", "must be a list of lists"),
        (["1", "2", "3"], "must be a list of lists"),
        ({}, "must be a list of lists"),
        ([[1], None, [3]], "the row None"),
        ([[1], [[2]], [3]], r"\[2\] \(list\) in row 1"),
        ([[1], [2.0], [3]], "2.0 .float. in row 1"),
        ([[1], [float("nan")], [3]], "nan .float. in row 1"),
        ([[1], [None], [3]], "None .NoneType. in row 1"),
        ([[1], [True], [3]], "True .bool. in row 1"),
        ([[1], [-2], [3]], "-1 to pad a row, got -2"),
        ([[1], [2**70], [3]], "must hold token ids from 0 to 2147483647"),
        (np.array([[1], [-5], [3]]), "-1 to pad a row, got -5"),
        (np.array([[1], [2**40], [3]]), "must hold token ids"),
        (np.array([[1], [2**63], [3]], np.uint64), "must hold token ids"),
        (np.array([[1.0], [2.0], [3.0]]), "array of float64 with 2 dimensions"),
        (np.array([[True], [False], [True]]), "array of bool with 2 dimensions"),
        (np.array([1, 2, 3]), "array of int64 with 1 dimensions"),
        (np.ones((3, 1, 1), np.int64), "with 3 dimensions"),
        (np.array([["a"], ["b"], ["c"]]), "with 2 dimensions"),
        ([[512], [2], [3]], r"holds 512, which is not in the vocabulary \(0 to 511\)"),
        ([list(range(21)), [2], [3]], "has rows of 21 ids, but the limit is 20"),
        (np.zeros((786_433, 1), np.int32), "has 786433 rows of 1 ids; the limit is 786432 ids together"),
        ([[0] * 786_432, [1]], "the limit is 786432 ids together"),
        ([[1], [2]], "has 2 rows, but a prompt of 4 tokens needs 3 with prompt_logprob_start=0"),
        ([[1]] * 4, "has 4 rows, but a prompt of 4 tokens needs 3"),
    ],
    ids=range(30),
)
def test_bad_rows_name_the_parameter(llm, ids, rows, message):
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        llm.generate([{"prompt_token_ids": ids[:4]}], SamplingParams(max_tokens=1, prompt_logprob_token_ids=rows))
    assert refusal.value.param == "prompt_logprob_token_ids"
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("start", [-1, 1.0, True, "1", float("nan"), 2**31, [0]], ids=repr)
def test_a_bad_start_names_the_parameter(start):
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(prompt_logprob_token_ids=ROWS, prompt_logprob_start=start)
    assert refusal.value.param == "prompt_logprob_start"


@pytest.mark.parametrize("start", [0, 3])
def test_a_start_alone_is_refused(start):
    with pytest.raises(InvalidRequestError, match="prompt_logprob_start needs prompt_logprob_token_ids"):
        SamplingParams(prompt_logprob_start=start)


def test_rows_and_start_have_to_fit_together(llm, ids):
    prompt = {"prompt_token_ids": ids[:4]}
    for start in (1, 3, 2**31 - 1):
        params = SamplingParams(max_tokens=1, prompt_logprob_token_ids=ROWS, prompt_logprob_start=start)
        with pytest.raises(InvalidRequestError, match=f"has 3 rows, .* with prompt_logprob_start={start}"):
            llm.generate([prompt], params)
    with pytest.raises(InvalidRequestError, match="prompt_logprob_token_ids cannot be used with use_beam_search"):
        SamplingParams(n=2, use_beam_search=True, temperature=0, prompt_logprob_token_ids=ROWS)
