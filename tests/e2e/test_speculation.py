"""Drafts change no token: the same requests with and without, over parameters and ways to run.

Without the controller, so that drafts run wherever some are found: each cell must have seen accepted and rejected ones.
"""

import asyncio
import re

import pytest

from draft_pairs import (
    ARCHIVE,
    CELLS,
    EVERYTHING,
    LENGTH,
    ORDINARY,
    PROMPTS,
    STORY,
    SUFFIX,
    WORLDS,
    Pair,
    check_way_to_run,
    check_world,
    facts,
    make,
    pair_of,
    stats_of,
)
from rustvllm import LLM, SamplingParams
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.engine.async_llm import AsyncLLM
from rustvllm.exceptions import ConfigError, InvalidRequestError
from rustvllm.sampling_params import RequestOutputKind
from rustvllm.text.prediction import PredictionReader


@pytest.fixture(scope="module")
def pair():
    return pair_of(**ORDINARY, logprobs_mode="processed_logprobs")


@pytest.mark.parametrize("cell", CELLS)
def test_no_parameter_sees_drafts(pair, cell):
    drafted, accepted = pair.compare(SamplingParams(max_tokens=LENGTH, **CELLS[cell]))
    assert 0 < accepted < drafted


def test_every_parameter_in_one_batch(pair):
    params = [SamplingParams(max_tokens=LENGTH, **cell) for cell in CELLS.values()]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    drafted, accepted = pair.compare(params, prompts)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("world", WORLDS)
def test_no_way_to_run_sees_drafts(world):
    check_way_to_run(pair_of(**WORLDS[world]), world)


@pytest.mark.parametrize("config", [SUFFIX, ARCHIVE], ids=["own", "archive"])
def test_longest_matches_give_drafts_too(config):
    pair = pair_of(config, **ORDINARY)
    params = [SamplingParams(max_tokens=100, **CELLS[cell]) for cell in ("greedy", "random", "logprobs", "past EOS")]
    drafted, accepted = pair.compare(params)
    assert 0 < accepted < drafted


def test_drafts_save_steps(pair):
    before = stats_of(pair.speculative)
    output = pair.speculative.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=LENGTH), use_tqdm=False)
    after = stats_of(pair.speculative)
    num_steps = after["num_steps"] - before["num_steps"]
    num_tokens = len(output[0].outputs[0].token_ids)
    assert num_steps == num_tokens - (after["num_accepted_tokens"] - before["num_accepted_tokens"]) < num_tokens


def test_the_decoder_chooses_for_drafts_of_greedy_requests_too(pair, monkeypatch):
    sampler = pair.speculative.llm_engine.engine_core.core.executor._worker.runner.sampler
    sample, sampled = sampler.sample, []
    monkeypatch.setattr(sampler, "sample", lambda *args: sampled.append(1) or sample(*args))
    drafted, accepted = pair.compare(SamplingParams(temperature=0, max_tokens=LENGTH))
    assert (0 < accepted < drafted, sampled) == (True, [])
    drafted, accepted = pair.compare(SamplingParams(temperature=0, max_tokens=LENGTH, repetition_penalty=1.01))
    assert accepted > 0
    assert sampled, "a penalty is none of the decoder's business"


@pytest.mark.parametrize("config", [EVERYTHING, SUFFIX], ids=["ngram", "suffix"])
def test_a_predicted_answer_takes_fewer_steps_and_has_the_same_tokens(config):
    pair = pair_of(config, **ORDINARY)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    [answer] = pair.plain.generate(STORY, params, use_tqdm=False)
    text, ids = answer.outputs[0].text, answer.outputs[0].token_ids
    words = text.split(" ")
    edited = " ".join([*words[:10], "elephant", *words[11:30], *words[35:]])
    num_drafts = config["num_speculative_tokens"]

    def run(prediction, params=params):
        return pair.compare(params, [{"prompt": STORY, "prediction": prediction}])

    own_drafted, own_accepted = run(None)
    for whole in (text, ids):
        drafted, accepted = run(whole)
        assert drafted == accepted >= len(ids) * num_drafts // (num_drafts + 1) - 2
    drafted, accepted = run(edited)
    assert len(ids) // 2 < accepted < drafted, "it was found again after each edit"
    drafted, accepted = run(" elephants everywhere, as if nothing else had been foretold")
    assert accepted <= own_accepted + 2
    assert drafted <= own_drafted + 4 * num_drafts, "an answer that never follows it has no more drafts of it"
    drafted, accepted = run(text, SamplingParams(temperature=0.5, seed=3, n=3, logprobs=2, max_tokens=60))
    assert 0 < accepted < drafted
    drafted, accepted = run("", params)
    assert (drafted, accepted) == (own_drafted, own_accepted)


@pytest.mark.parametrize("world", WORLDS)
def test_a_predicted_answer_survives_whatever_happens(world):
    pair = pair_of(ARCHIVE, **WORLDS[world])
    params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    stories = [f"{name} had a {thing}" for name in ("Tom", "Lily", "The fox") for thing in ("ball", "hat")]
    answers = pair.plain.generate(stories, params, use_tqdm=False)
    prompts = [
        {"prompt": story, "prediction": answer.outputs[0].text} for story, answer in zip(stories, answers, strict=True)
    ]
    drafted, accepted = pair.compare(params, 2 * prompts)
    leaves_room = world != "chunked"  # twelve tokens for twelve requests
    assert accepted > (0.5 * len(prompts) * LENGTH if leaves_room else 0)
    assert drafted >= accepted
    check_world(pair, world)


def test_each_of_several_requests_has_its_own_prediction():
    """Requests with one prompt are handed in together when they are samples; these are not, and expect other things."""
    pair = pair_of(SUFFIX, **ORDINARY)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [answer] = pair.plain.generate(STORY, params, use_tqdm=False)
    right, wrong = answer.outputs[0].text, " no such thing as this"
    prompts = [{"prompt": STORY, "prediction": each} for each in (wrong, right, wrong, right)]
    drafted, accepted = pair.compare(params, prompts)
    assert accepted >= 2 * 30, "both of the right ones"
    assert drafted - accepted <= 2 * SUFFIX["num_speculative_tokens"], "the wrong ones are left at once"


def test_an_answer_helps_who_asks_for_it_again_but_not_under_another_salt():
    pair = pair_of(ARCHIVE, **ORDINARY)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    first = pair.compare(params, [STORY])
    drafted, accepted = pair.compare(params, [STORY])
    assert drafted >= accepted > first[1] + 60
    salted: dict[str, str] = {"prompt": STORY, "cache_salt": "another"}
    assert pair.compare(params, [salted]) == first
    assert pair.compare(params, [salted])[1] > first[1] + 60


@pytest.mark.parametrize("world", WORLDS)
def test_no_way_to_run_sees_what_others_were_answered(world):
    pair = pair_of(ARCHIVE, **WORLDS[world])
    cells = ("greedy", "random", "logprobs", "samples")
    params = [SamplingParams(max_tokens=40, **CELLS[cell]) for cell in cells]
    prompts = [STORY, *PROMPTS[1:]]
    pair.compare(params, prompts)
    drafted, accepted = pair.compare(params * 2, prompts * 2)
    assert accepted > (40 if world != "chunked" else 0)
    assert drafted > accepted or world == "chunked", "with twelve tokens for twelve requests few drafts run"


def test_a_prediction_means_nothing_without_drafts(pair):
    params = SamplingParams(temperature=0, max_tokens=8)
    plain = pair.plain.generate(STORY, params, use_tqdm=False)
    got = pair.plain.generate({"prompt": STORY, "prediction": plain[0].outputs[0].text}, params, use_tqdm=False)
    assert facts(got[0]) == facts(plain[0])


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        (5, "prediction must be text or a list of token ids, got int"),
        ({"type": "content"}, "prediction must be text or a list of token ids, got dict"),
        ([1, -1], "prediction must only contain token ids from 0 to 2047"),
        ([2048], "prediction must only contain token ids from 0 to 2047"),
        ([10**20], "prediction must only contain token ids from 0 to 2047"),
        ([1.5], "prediction must only contain token ids from 0 to 2047"),
        (["a"], "prediction must only contain token ids from 0 to 2047"),
        ("a \ud800", "prediction contains lone surrogates, which are not characters"),
        ([1] * 257, "prediction has 257 tokens, but an answer has at most 256: shorten it"),
        ("a b " * 400, "prediction has 801 tokens, but an answer has at most 256: shorten it"),
        ("x" * 10**6, "prediction has 1000000 characters, which is more than 256 tokens, the longest answer, can have"),
    ],
    ids=lambda value: str(value)[:16].encode("ascii", "replace").decode(),
)
def test_predictions_that_are_none_are_refused(pair, prediction, message):
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as caught:
        pair.speculative.generate({"prompt": STORY, "prediction": prediction}, use_tqdm=False)
    assert caught.value.param == "prediction"


async def test_a_long_prediction_is_tokenised_off_the_event_loop(pair):
    """With the same ids, and the same refusal, as a short one."""
    tokenizer = pair.speculative.get_tokenizer()
    reader = PredictionReader(pair.speculative.llm_engine.tokenizer, 2048, 5000, 0)
    text = "One day, a girl went to the park. " * 100
    ids = await reader.read_off_loop(text)
    assert list(ids) == tokenizer.encode(text, add_special_tokens=False)
    assert len(text) > 2048
    with pytest.raises(InvalidRequestError, match="prediction contains lone surrogates") as caught:
        await reader.read_off_loop(text + "\ud800")
    assert caught.value.param == "prediction"


def test_a_request_with_a_processor_of_its_own_has_no_drafts(pair):
    def prefer(output_token_ids, logits):
        logits[20 + len(output_token_ids) % 2] += 100.0
        return logits

    params = SamplingParams(temperature=0, max_tokens=12, logits_processors=[prefer])
    assert pair.compare(params) == (0, 0)
    drafted, accepted = pair.compare([params, SamplingParams(temperature=0, max_tokens=LENGTH)], 2 * PROMPTS[:1])
    assert 0 < accepted < drafted, "its neighbour has"


def test_the_controller_changes_no_token_either():
    pair = Pair(make(None, **ORDINARY), make({"method": "auto"}, **ORDINARY))
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    drafted, _ = pair.compare(params)
    stats = stats_of(pair.speculative)
    assert drafted + stats["num_withheld_draft_tokens"] > 0


async def test_streams_of_another_process_see_no_drafts(pair, monkeypatch):
    cells = [CELLS["greedy"], CELLS["logprobs"], CELLS["samples"], CELLS["stop strings"]]
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", "1")
    config = {**EVERYTHING, "adaptive": False}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(max_model_len=256, batch_invariant=True, speculative_config=config, **ORDINARY)
    )

    async def stream(index, prompt, cell):
        params = SamplingParams(max_tokens=LENGTH, output_kind=RequestOutputKind.DELTA, **cell)
        texts, most_at_once = {}, 0
        async for output in engine.generate(prompt, params, f"r{index}"):
            for sample in output.outputs:
                texts[sample.index] = texts.get(sample.index, "") + sample.text
                most_at_once = max(most_at_once, len(sample.token_ids))
        return texts, most_at_once

    try:
        results = await asyncio.gather(*(stream(i, *each) for i, each in enumerate(zip(PROMPTS, cells, strict=True))))
    finally:
        engine.shutdown()
    params = [SamplingParams(max_tokens=LENGTH, **cell) for cell in cells]
    expected = pair.plain.generate(PROMPTS, params, use_tqdm=False)
    assert [texts for texts, _ in results] == [
        {sample.index: sample.text for sample in output.outputs} for output in expected
    ]
    assert max(most for _, most in results) > 1, "some steps gave several tokens"


def test_what_is_not_there_is_refused_before_a_model_is_loaded():
    with pytest.raises(ConfigError, match="method 'eagle3' is not supported yet; rustvllm has ngram, suffix, auto"):
        LLM(speculative_config={"method": "eagle3", "model": "some/head", "num_speculative_tokens": 3})
