"""Budgets of thoughts: exact in every batch, whatever else runs, and what is asked of the answer holds behind them."""

import random
import re

import pytest

from rustvllm import LLM, SamplingParams, StructuredOutputsParams
from rustvllm.sampling_params.structured_outputs import GatedOutputs, ThinkingGate

OPEN, CLOSE, WORD = 1, 2, 300
NUM_RUNS = 200
LENGTH = 48


def gated(budget, answer=None, *, begins_within=True, words=()):
    gate = ThinkingGate(
        open_id=OPEN, close_id=CLOSE, begins_within=begins_within, budget=budget, end_ids=(*words, CLOSE)
    )
    return GatedOutputs(gate=gate, answer=answer)


def thoughts_of(token_ids):
    """Tokens before the one that ends thoughts, and those behind it."""
    token_ids = list(token_ids)
    end = token_ids.index(CLOSE)
    return token_ids[:end], token_ids[end + 1 :]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True, "executor": "sim"},
        {"num_gpu_blocks_override": 26, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 26, "preemption_mode": "swap", "swap_space": 0.05, "async_scheduling": True},
    ],
    ids=str,
)
def test_a_budget_is_exact_in_any_batch(options):
    draw = random.Random(18)
    answer = StructuredOutputsParams(regex="[a-c]{3}")
    runs = []
    for index in range(NUM_RUNS // 4):
        budget = draw.choice([0, 1, 2, 5, 9, 17])
        wanted, ignores_eos = draw.choice([(None, True), (answer, False)])
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=index,
            max_tokens=LENGTH,
            ignore_eos=ignores_eos,
            logit_bias={CLOSE: -100.0, OPEN: -100.0},
            structured_outputs=gated(budget, wanted),
        )
        runs.append((f"Once there {'was ' * draw.randrange(9)}", params, budget, wanted))
        if draw.random() < 0.3:
            runs.append(("Once upon a time", SamplingParams(seed=index, max_tokens=LENGTH), None, None))
    with LLM(device="cpu", dtype="float32", max_model_len=128, block_size=8, max_num_seqs=12, **options) as llm:
        results = llm.generate([run[0] for run in runs], [run[1] for run in runs], use_tqdm=False)
        scheduler = llm.llm_engine.engine_core.core.scheduler
        scheduler.check_invariants()
        if "preemption_mode" in options:
            assert scheduler.stats()["num_preemptions"] > 0
    for result, (_, _, budget, wanted) in zip(results, runs, strict=True):
        if budget is None:
            continue
        thoughts, rest = thoughts_of(result.outputs[0].token_ids)
        assert len(thoughts) == budget
        if wanted is not None:
            assert re.fullmatch("[a-c]{3}", result.outputs[0].text[-3:])
            assert result.outputs[0].finish_reason == "stop"
        else:
            assert len(rest) == LENGTH - budget - 1


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", dtype="float32", max_model_len=128, block_size=8) as llm:
        yield llm


def test_words_that_end_thoughts_come_before_their_marker_and_each_sample_has_its_own_budget(llm):
    params = SamplingParams(
        n=3, seed=1, max_tokens=20, logit_bias={CLOSE: -100.0}, structured_outputs=gated(4, words=(WORD, WORD))
    )
    [result] = llm.generate("Once", params, use_tqdm=False)
    for sample in result.outputs:
        assert list(sample.token_ids)[4:7] == [WORD, WORD, CLOSE]
    assert len({sample.text for sample in result.outputs}) > 1


def test_a_model_that_ends_its_thoughts_itself_is_left_alone(llm):
    free = SamplingParams(seed=1, max_tokens=20, logit_bias={CLOSE: 100.0})
    params = free.clone(structured_outputs=gated(9, StructuredOutputsParams(choice=["yes", "no"])))
    [result] = llm.generate("Once", params, use_tqdm=False)
    thoughts, rest = thoughts_of(result.outputs[0].token_ids)
    assert thoughts == []
    assert rest
    assert result.outputs[0].text.endswith(("yes", "no"))


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_an_answer_may_think_first_where_the_prompt_does_not_say(llm, bias):
    wanted = gated(3, StructuredOutputsParams(choice=["yes", "no"]), begins_within=False)
    params = SamplingParams(seed=1, max_tokens=20, logit_bias={OPEN: bias, CLOSE: -100.0}, structured_outputs=wanted)
    [result] = llm.generate("Once", params, use_tqdm=False)
    token_ids = list(result.outputs[0].token_ids)
    assert (token_ids[0] == OPEN) == (bias > 0)
    if bias > 0:
        assert len(thoughts_of(token_ids)[0]) == 1 + 3
    assert result.outputs[0].text.endswith(("yes", "no"))


def test_a_request_does_not_end_within_thoughts_before_an_answer_that_must_come(llm):
    end = llm.llm_engine.model_config.eos_token_ids[0] if hasattr(llm.llm_engine, "model_config") else 0
    bias = {end: 100.0, CLOSE: -100.0}
    free = llm.generate("Once", SamplingParams(max_tokens=20, seed=1, logit_bias=bias), use_tqdm=False)
    assert len(free[0].outputs[0].token_ids) <= 1, "it would end at once"
    params = SamplingParams(
        max_tokens=20, seed=1, logit_bias=bias, structured_outputs=gated(5, StructuredOutputsParams(choice=["yes"]))
    )
    [result] = llm.generate("Once", params, use_tqdm=False)
    assert len(thoughts_of(result.outputs[0].token_ids)[0]) == 5
    assert result.outputs[0].text.endswith("yes")
