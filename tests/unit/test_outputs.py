"""``RequestOutput``: the ids of its prompt, as the engine keeps them and as a list."""

import copy
import dataclasses
import pickle  # noqa: TID251 -- of what the test itself made

import pytest

from rustvllm._core import TokenIds
from rustvllm.outputs import RequestOutput

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
