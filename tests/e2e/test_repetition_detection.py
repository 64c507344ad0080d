"""``repetition_detection``: outputs end at the token with which they repeat themselves, however the engine runs.

What must come is worked out from the same output without it, by the definition and nothing else.
"""

import asyncio

import pytest

from draft_pairs import EVERYTHING, ORDINARY, PROMPTS, WORLDS, check_world, make, stats_of
from rustvllm import AsyncEngineArgs, AsyncLLM, RepetitionDetectionParams, SamplingParams
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import RequestOutputKind, StructuredOutputsParams

LENGTH = 60
REPEATS = ("repetition", "repetition_detected")
FEW = (20, 30, 40, 300, 301, 302, 500, 501, 502, 503, 504, 505)
"""Drawn from so few tokens, most outputs repeat themselves sooner or later."""


def repeats(ids, wanted):
    """Whether a pattern stands at the end so many times in a row."""
    for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
        end = ids[len(ids) - size :]
        if size * wanted.min_count <= len(ids) and ids[len(ids) - size * wanted.min_count :] == end * wanted.min_count:
            return True
    return False


def cut(sample, params):
    """The ids that are left of an output, and why it ends."""
    ids = list(sample.token_ids)
    for num_tokens in range(max(1, params.min_tokens), len(ids) + (sample.finish_reason == "repetition")):
        if repeats(ids[:num_tokens], params.repetition_detection):
            return ids[:num_tokens], *REPEATS
    return ids, sample.finish_reason, sample.stop_reason


def facts(sample):
    return list(sample.token_ids), sample.finish_reason, sample.stop_reason


def drawn(seed, **changes):
    """A request whose tokens are few and random, and what it looks for."""
    most = (1, 2, 3, 5, 9, 30)[seed % 6]
    wanted = RepetitionDetectionParams(most, (0, 1, 2)[seed % 3] if most > 1 else 0, (2, 3, 6)[seed // 2 % 3])
    values = {
        "temperature": 1.5,
        "seed": seed,
        "n": 1 + seed % 2,
        "allowed_token_ids": FEW[: 2 + seed % 11],
        "max_tokens": LENGTH,
        "min_tokens": (0, 0, 20)[seed // 3 % 3],
        "ignore_eos": True,
        "repetition_detection": wanted,
    }
    return SamplingParams(**{**values, **changes})


def greedy(seed):
    """A greedy one, which drafts can follow."""
    return drawn(seed, temperature=0, n=1, allowed_token_ids=None, max_tokens=150)


def check(llm, params, prompts):
    """Run without and with it; how many outputs ended so."""
    without = [each.clone(repetition_detection=None) for each in params]
    whole = llm.generate(prompts, without, use_tqdm=False)
    before = stats_of(llm)
    got = llm.generate(prompts, params, use_tqdm=False)
    after = stats_of(llm)
    expected = [[cut(sample, each) for sample in output.outputs] for output, each in zip(whole, params, strict=True)]
    assert [[facts(sample) for sample in output.outputs] for output in got] == expected
    for output, of_whole in zip(got, whole, strict=True):
        for sample, other in zip(output.outputs, of_whole.outputs, strict=True):
            assert other.text.startswith(sample.text)
            assert sample.text, "the token that completes the repetition is shown"
    reasons = [reason for samples in expected for _, reason, _ in samples]
    for reason in ("repetition", "stop", "length"):
        assert after[f"num_finished_{reason}"] - before[f"num_finished_{reason}"] == reasons.count(reason)
    return reasons.count("repetition")


@pytest.fixture(scope="module")
def llm():
    with make(None, **ORDINARY) as llm:
        yield llm


def test_random_outputs_end_where_the_definition_says(llm):
    params = [drawn(seed) for seed in range(60)]
    num_samples = sum(each.n for each in params)
    assert num_samples // 3 < check(llm, params, PROMPTS * 15) < num_samples


def test_a_greedy_model_that_repeats_itself_is_ended(llm):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    params = params.clone(repetition_detection=RepetitionDetectionParams(50, 5, 2))
    assert check(llm, [params], ["Once upon a time"]) == 1
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    [sample] = output.outputs
    assert len(sample.token_ids) < 200
    half = sample.text[-40:]
    assert half in sample.text[: -len(half)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("drafts", [None, EVERYTHING | {"adaptive": False}], ids=["plain", "drafts"])
def test_no_way_to_run_changes_the_end(world, drafts):
    with make(drafts, **WORLDS[world]) as llm:
        params = [drawn(seed) if seed % 2 else greedy(seed) for seed in range(16)]
        params = [each.clone(max_tokens=min(each.max_tokens, 90)) for each in params]
        assert check(llm, params, PROMPTS * 4) >= 8
        if drafts is not None:
            stats = stats_of(llm)
            assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
            check_world(type("Pair", (), {"speculative": llm})(), world)


def test_tokens_that_a_grammar_forces_are_counted_one_by_one(llm):
    grammar = StructuredOutputsParams(regex=r"( the cat and the dog){30}\.")
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=grammar)
    before = stats_of(llm)["num_forced_tokens"]
    llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert stats_of(llm)["num_forced_tokens"] > before, "without it, some are"
    for numbers in ((30, 0, 2), (30, 0, 4), (4, 4, 3)):
        wanted = params.clone(repetition_detection=RepetitionDetectionParams(*numbers))
        num_ended = check(llm, [wanted], PROMPTS[:1])
        assert num_ended == (numbers[0] > 4)


def test_every_other_end_comes_first(llm):
    detects = drawn(3, n=1, min_tokens=0, repetition_detection=RepetitionDetectionParams(1, 0, 3))
    one = detects.clone(allowed_token_ids=[20])

    def ends(params):
        [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
        return facts(output.outputs[0])[1:], len(output.outputs[0].token_ids)

    assert ends(one) == (REPEATS, 3)
    assert ends(one.clone(max_tokens=3)) == (("length", None), 3)
    assert ends(one.clone(max_tokens=4)) == (REPEATS, 3)
    assert ends(one.clone(min_tokens=7)) == (REPEATS, 7)
    assert ends(one.clone(stop_token_ids=[20])) == (("stop", 20), 1)
    [output] = llm.generate(PROMPTS[0], one, use_tqdm=False)
    text = output.outputs[0].text
    before = stats_of(llm)
    assert ends(one.clone(stop=[text])) == (("stop", text), 3), "in the text of the very token"
    assert ends(one.clone(stop=["no such text"])) == (REPEATS, 3)
    after = stats_of(llm)
    names = ("num_finished_stop", "num_finished_repetition", "num_finished_length")
    assert [after[name] - before[name] for name in names] == [1, 1, 0]


def test_what_looks_for_nothing_changes_nothing(llm):
    params = drawn(5, allowed_token_ids=[20])
    for neutral in (None, RepetitionDetectionParams(), RepetitionDetectionParams(0, 0, 5)):
        [output] = llm.generate(PROMPTS[0], params.clone(repetition_detection=neutral), use_tqdm=False)
        assert {facts(sample)[1] for sample in output.outputs} == {"length"}
    never = params.clone(repetition_detection=RepetitionDetectionParams(1024, 0, 2**31 - 1))
    assert check(llm, [never], PROMPTS[:1]) == 0


def test_the_best_of_several_and_log_probabilities(llm):
    params = drawn(4, n=2, best_of=5, logprobs=1, repetition_detection=RepetitionDetectionParams(3, 0, 2))
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert len(output.outputs) == 2
    for sample in output.outputs:
        assert cut(sample, params) == facts(sample)
        assert len(sample.logprobs) == len(sample.token_ids) < LENGTH


def test_a_search_is_refused(llm):
    search = SamplingParams(n=2, use_beam_search=True, max_tokens=5)
    llm.generate("a", search.clone(repetition_detection=RepetitionDetectionParams()), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="repetition_detection cannot be used with use_beam_search") as caught:
        search.clone(repetition_detection=RepetitionDetectionParams(3, 0, 2))
    assert caught.value.param == "repetition_detection"


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize("overlapping", [False, True], ids=["plain", "overlapping"])
async def test_an_asynchronous_engine_streams_up_to_the_end(monkeypatch, process, overlapping):
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", str(int(process)))
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(device="cpu", max_model_len=256, async_scheduling=overlapping, batch_invariant=True)
    )

    async def one(name, number, params):
        return [output async for output in engine.generate(PROMPTS[number % 4], params, f"{name}{number}")]

    try:
        every = [drawn(seed, n=1, output_kind=RequestOutputKind.DELTA) for seed in range(16)]
        without = [each.clone(repetition_detection=None, output_kind=RequestOutputKind.FINAL_ONLY) for each in every]
        whole = await asyncio.gather(*(one("w", number, params) for number, params in enumerate(without)))
        streams = await asyncio.gather(*(one("s", number, params) for number, params in enumerate(every)))
        num_ended = 0
        for [last], outputs, params in zip(whole, streams, every, strict=True):
            ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
            end = outputs[-1].outputs[0]
            assert (ids, end.finish_reason, end.stop_reason) == cut(last.outputs[0], params)
            assert [output.outputs[0].finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            text = "".join(output.outputs[0].text for output in outputs)
            assert last.outputs[0].text.startswith(text)
            num_ended += end.finish_reason == "repetition"
        assert num_ended > 8
    finally:
        engine.shutdown()
