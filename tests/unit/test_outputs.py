"""``RequestOutput``: the ids of its prompt, as the engine keeps them and as a list."""

import copy
import dataclasses
import pickle  # noqa: TID251 -- of what the test itself made

import pytest

from rustvllm._core import TokenIds
from rustvllm.logprobs import FlatLogprobs, Logprob
from rustvllm.outputs import CompletionOutput, RequestOutput

COPIES = [lambda output: pickle.loads(pickle.dumps(output)), copy.copy, copy.deepcopy, dataclasses.replace]


def make_output(ids: list[int]) -> RequestOutput:
    return RequestOutput("r", "text", TokenIds(ids), [], finished=True)


def test_the_list_is_made_when_it_is_first_asked_for():
    output = make_output([5, 6, 7])
    assert len(output.prompt_ids) == 3
    assert isinstance(output.prompt_ids, TokenIds)
    made = output.prompt_token_ids
    assert isinstance(made, list)
    assert made == [5, 6, 7]
    assert output.prompt_token_ids is made


@pytest.mark.parametrize("duplicate", COPIES)
def test_an_output_can_be_copied_before_its_list_is_made(duplicate):
    output = make_output([5, 6, 7])
    copied = duplicate(output)
    assert copied == output
    assert copied.prompt_token_ids == [5, 6, 7]


def test_an_output_becomes_a_dict_before_its_list_is_made():
    shown = dataclasses.asdict(make_output([5, 6, 7]))
    assert shown["prompt_ids"] == [5, 6, 7]
    assert (shown["request_id"], shown["finished"]) == ("r", True)


def sample(index, text, ids, *, reason=None, logprobs=None):
    return CompletionOutput(index, text, ids, sum(ids) * 1.0, logprobs, reason)


def output(*samples, finished=False):
    return RequestOutput("r", "p", [1], list(samples), finished)


def test_deltas_are_put_together_and_states_are_replaced():
    whole = output(sample(0, "a", [1], logprobs=[{1: 0.5}]))
    later = output(
        sample(0, "b", [2, 3], reason="stop", logprobs=[{2: 0.1}, {3: 0.2}]), sample(1, "x", [9]), finished=True
    )
    whole.add(later, aggregate=True)
    assert whole.finished
    assert [(each.index, each.text, each.token_ids, each.finish_reason) for each in whole.outputs] == [
        (0, "ab", [1, 2, 3], "stop"),
        (1, "x", [9], None),
    ]
    assert whole.outputs[0].logprobs == [{1: 0.5}, {2: 0.1}, {3: 0.2}]
    whole.add(output(sample(1, "y", [8])), aggregate=True)
    assert (whole.outputs[1].text, later.outputs[1].text, whole.finished) == ("xy", "x", True)
    whole.add(output(sample(0, "new", [7], reason="length")), aggregate=False)
    assert (whole.outputs[0].text, whole.outputs[0].token_ids) == ("new", [7])


def test_flat_logprobs_stay_flat_when_they_are_put_together():
    places = [{index: Logprob(-index, 1, "x")} for index in range(3)]
    whole = output(sample(0, "a", [1], logprobs=FlatLogprobs.of(places[:1])))
    whole.add(output(sample(0, "b", [2], logprobs=FlatLogprobs.of(places[1:]))), aggregate=True)
    assert whole.outputs[0].logprobs == FlatLogprobs.of(places)
    assert list(whole.outputs[0].logprobs) == places


def test_attributes_of_features_that_are_not_built_are_none():
    made = output(sample(0, "a", [1]))
    for name in ("encoder_prompt", "kv_transfer_params", "num_cache_creation_tokens", "prompt_token_id_logprobs"):
        assert getattr(made, name) is None
    for name in ("routed_experts", "sampling_mask", "spec_decode_metrics", "weight_versions", "lora_request"):
        assert getattr(made.outputs[0], name) is None
