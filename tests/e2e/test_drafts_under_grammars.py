"""Drafts change no token of an answer that must obey: with and without, over kinds of grammars and ways to run.

Each cell must have seen accepted drafts and rejected ones. What is predicted is what was answered without drafts, which
goes over into what another seed was answered: drafts are found that the grammar takes, that it refuses, and that it
takes and the model does not draw.
"""

import json

import pytest

from draft_pairs import EVERYTHING, LENGTH, ORDINARY, PROMPTS, STORY, SUFFIX, WORLDS, check_world, pair_of, stats_of
from rustvllm import SamplingParams, StructuredOutputsParams
from rustvllm.sampling_params.structured_outputs import GatedOutputs, ThinkingGate

OPEN, CLOSE = 1, 2
ITEM = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mood", "age"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 2, "maxItems": 6}
TAG = {"begin": "<age>", "content": {"type": "json_schema", "json_schema": ITEM}, "end": "</age>"}
REGEX = StructuredOutputsParams(regex=r"(( the cat| and| a dog){1,3},){3,9}\.")


def thinking(budget, answer):
    gate = ThinkingGate(open_id=OPEN, close_id=CLOSE, begins_within=True, budget=budget, end_ids=(CLOSE,))
    return GatedOutputs(gate=gate, answer=answer)


LONG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 12, "prompt_lookup_max": 12}
"""What is predicted is nearly all that drafts are made of."""
CELLS = {
    "regex": {"temperature": 0, "structured_outputs": REGEX},
    "schema": {
        "temperature": 0.9,
        "seed": 3,
        "structured_outputs": StructuredOutputsParams(json=LIST, disable_any_whitespace=True),
    },
    "tokens of the model alone": {
        "temperature": 0.7,
        "seed": 5,
        "logprobs": 2,
        "structured_outputs": StructuredOutputsParams(json=LIST, disable_any_whitespace=True),
    },
    "past EOS": {"temperature": 0.7, "seed": 6, "ignore_eos": True, "structured_outputs": REGEX},
    "penalties": {"temperature": 0.8, "seed": 7, "presence_penalty": 0.2, "structured_outputs": REGEX},
    "samples": {"temperature": 0.8, "seed": 8, "n": 2, "structured_outputs": REGEX},
    "stop string": {"temperature": 0, "stop": ["dog and"], "structured_outputs": REGEX},
    "thoughts": {
        "temperature": 0.5,
        "seed": 9,
        "logit_bias": {CLOSE: -100.0},
        "structured_outputs": thinking(9, REGEX),
    },
    "a budget alone": {"temperature": 0, "logit_bias": {CLOSE: -100.0}, "structured_outputs": thinking(12, None)},
    "calls": {
        "temperature": 0.8,
        "seed": 10,
        "structured_outputs": StructuredOutputsParams(
            structural_tag=json.dumps(
                {
                    "type": "structural_tag",
                    "format": {"type": "tags_with_separator", "tags": [TAG], "separator": "\n", "at_least_one": True},
                }
            )
        ),
    },
    "calls behind a trigger": {
        "temperature": 0.4,
        "seed": 11,
        "ignore_eos": True,
        "structured_outputs": StructuredOutputsParams(
            structural_tag=json.dumps(
                {
                    "type": "structural_tag",
                    "structures": [{"begin": " was", "schema": ITEM, "end": "."}],
                    "triggers": [" was"],
                }
            )
        ),
    },
}


def params_of(cell, length=LENGTH):
    return SamplingParams(max_tokens=length, **CELLS[cell])


def predicted(pair, params, prompts):
    """The prompts, each with what is answered without drafts up to some token and then with another answer."""
    all_params = params if isinstance(params, list) else [params] * len(prompts)
    others = [each.clone(seed=99 + index, temperature=1.0) for index, each in enumerate(all_params)]
    answers = [
        [list(output.outputs[0].token_ids) for output in pair.plain.generate(prompts, each, use_tqdm=False)]
        for each in (all_params, others)
    ]
    found = []
    for index, (prompt, own, other) in enumerate(zip(prompts, *answers, strict=True)):
        seam = 6 + 4 * (index % 4)
        found.append({"prompt": prompt, "prediction": own[:seam] + other[seam:]})
    return found


@pytest.fixture(scope="module")
def pair():
    return pair_of(**ORDINARY)


@pytest.mark.parametrize("cell", CELLS)
def test_no_kind_of_grammar_sees_drafts(pair, cell):
    params = params_of(cell)
    drafted, accepted = pair.compare(params)  # without a prediction, drafts are what was said before
    more_drafted, more_accepted = pair.compare(params, predicted(pair, params, PROMPTS))
    drafted, accepted = drafted + more_drafted, accepted + more_accepted
    assert 0 < accepted < drafted


@pytest.mark.parametrize("world", WORLDS)
def test_no_way_to_run_sees_drafts_under_grammars(world):
    pair = pair_of(**WORLDS[world])
    params = [params_of(cell) for cell in CELLS] + [SamplingParams(temperature=0, max_tokens=LENGTH)]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    drafted, accepted = pair.compare(params, predicted(pair, params, prompts))
    assert 0 < accepted < drafted
    check_world(pair, world)
    scheduler = pair.speculative.llm_engine.engine_core.core.scheduler
    scheduler.check_invariants()
    assert stats_of(pair.speculative)["num_forced_tokens"] > 0, "what has to follow is appended next to drafts"


def test_a_right_prediction_saves_steps_under_a_grammar(pair):
    params = params_of("tokens of the model alone")
    [answer] = pair.plain.generate(STORY, params, use_tqdm=False)
    ids = answer.outputs[0].token_ids
    before = stats_of(pair.speculative)["num_steps"]
    drafted, accepted = pair.compare(params, [{"prompt": STORY, "prediction": ids}])
    num_steps = stats_of(pair.speculative)["num_steps"] - before
    num_drafts = EVERYTHING["num_speculative_tokens"]
    assert accepted == drafted >= len(ids) * num_drafts // (num_drafts + 1) - 2
    assert num_steps <= len(ids) // num_drafts + 2


def test_what_the_grammar_refuses_is_not_run():
    """What is predicted is right but for letters where the grammar has digits: those cost no row."""
    pair = pair_of(LONG, **ORDINARY)
    params = params_of("tokens of the model alone")
    [answer] = pair.plain.generate(STORY, params, use_tqdm=False)
    ids = list(answer.outputs[0].token_ids)
    wrong = pair.plain.get_tokenizer().encode(" girl", add_special_tokens=False)[0]
    for place in range(8, len(ids), 12):
        ids[place] = wrong
    drafted, accepted = pair.compare(params, [{"prompt": STORY, "prediction": ids}])
    assert drafted == accepted > len(ids) // 3


def test_longest_matches_give_drafts_under_grammars():
    pair = pair_of(SUFFIX, **ORDINARY)
    params = [params_of(cell, 100) for cell in ("regex", "tokens of the model alone")]
    drafted, accepted = pair.compare(params, PROMPTS[:2])
    assert 0 < accepted <= drafted


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_simulated_steps_see_no_drafts_under_grammars(async_scheduling):
    pair = pair_of(executor="sim", async_scheduling=async_scheduling, **ORDINARY)
    cells = ("schema", "tokens of the model alone", "regex")
    params = [params_of(cell) for cell in cells]
    drafted, accepted = pair.compare(params, predicted(pair, params, PROMPTS[:3]))
    assert 0 < accepted < drafted
