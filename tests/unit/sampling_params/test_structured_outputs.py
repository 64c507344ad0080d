"""What ``StructuredOutputsParams`` takes, and what it says of the rest."""

import pytest

from rustvllm import StructuredOutputsParams
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import StructuredOutputsParams as InItsHomeOfVllm


def tag_of(*, triggers=("<f",), schema=True):
    return {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": list(triggers)}


WRONG = [
    ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag, got none"),
    ({"regex": "a", "json": {}}, "got json and regex"),
    ({"json": 3}, "json of structured_outputs must be a schema .*, got 3"),
    ({"regex": ""}, "regex of structured_outputs must be a text that is not empty, got ''"),
    ({"grammar": 3}, "grammar of structured_outputs must be a text"),
    ({"choice": []}, "a list of one or more texts"),
    ({"choice": "yes"}, "a list of one or more texts, got 'yes'"),
    ({"choice": ["a", ""]}, "texts that are not empty, got ''"),
    ({"choice": ["a"] * 50_001}, "choice has 50001 texts; the limit is 50000"),
    ({"json_object": False}, "json_object of structured_outputs must be true, got False"),
    ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern of structured_outputs must be a text"),
    ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace of structured_outputs must be true or false"),
    ({"structural_tag": "{}"}, "structures of a structural_tag must be a list with at least one entry, got None"),
    ({"structural_tag": "{"}, "structural_tag must be an object or its JSON text"),
    ({"structural_tag": {"format": {}}}, "format of a structural_tag has the type None; supported: const_string"),
    ({"structural_tag": {"type": "tag"}}, "the type of a structural_tag must be structural_tag, got 'tag'"),
    ({"structural_tag": tag_of(triggers=["<g"])}, "begin must begin with one of the triggers, '<f>' does not"),
    ({"structural_tag": tag_of(triggers=["<f", "<g"])}, "the trigger '<g' begins no structure"),
    ({"structural_tag": tag_of(triggers=["<f", "<"])}, "the trigger '<f' begins with another one"),
    (
        {"structural_tag": tag_of(triggers=[""])},
        "a trigger of a structural_tag must be a string of 1 to 1024 characters",
    ),
    ({"structural_tag": tag_of(schema="{}")}, "the schema of a structure must be an object or a boolean, got '{}'"),
    ({"structural_tag": {**tag_of(), "triggers": ["<f"] * 1025}}, "has 1025 triggers; the limit is 1024"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_what_is_wrong_is_named(values, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        StructuredOutputsParams(**values)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar", "json_object", "structural_tag"])
def test_the_kind_is_what_was_given(kind):
    values = {"json": True, "regex": "a", "choice": ("a",), "grammar": "start: A", "json_object": True}
    value = {**values, "structural_tag": tag_of()}[kind]
    assert StructuredOutputsParams(**{kind: value}).kind == kind
    assert InItsHomeOfVllm is StructuredOutputsParams
