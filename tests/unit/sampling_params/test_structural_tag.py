"""``StructuralTag``: the grammar takes what its schemas take behind triggers, any other text, and nothing else."""

import pytest

from rustvllm import _core
from rustvllm.sampling_params.structural_tag import StructuralTag

CALL = {
    "begin": "<function=add>",
    "schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "end": "</function>",
}
WORD = {"begin": "<function=say>", "schema": {"enum": ["x", "y"]}, "end": ""}
NOTE = {"begin": "[NOTE]", "schema": {"type": "boolean", "x-guidance": {"lenient": True}}, "end": "[/NOTE]"}
TAG = {"structures": [CALL, WORD, NOTE], "triggers": ["<function=", "[NOTE]"]}


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("", True),
        ("any text at all, a < b\n", True),
        ("half a trigger: <functio", True),
        ('so <function=add>{"a": 1}</function> and <function=say>"x" then [NOTE]true[/NOTE].', True),
        ('<function=add>{"a": "1"}</function>', False),
        ('<function=add>{"a": 1}', False),
        ('<function=sub>{"a": 1}</function>', False),
        ("<function=", False),
        ("[NOTE]1[/NOTE]", False),
    ],
)
def test_what_stands_behind_a_trigger_obeys(text, is_taken):
    spec = _core.GrammarSpec("grammar", StructuralTag.read(TAG).lark({}))
    spec.check("structured_outputs")
    assert spec.accepts(text) is is_taken


def test_special_tokens_stand_as_such():
    tag = StructuralTag.read(TAG)
    assert {"[NOTE]", "[/NOTE]", "<function=add>"} <= tag.marks()
    lark = tag.lark({"[NOTE]": 7, "[/NOTE]": 8})
    assert "t1: TEXT <[7]>\n" in lark
    assert "b1: s2 <[8]>\n" in lark
    assert "NOTE" not in lark.partition("TEXT: ")[2].partition("\n")[0], "text cannot be a token"


def test_a_schema_that_cannot_be_enforced_is_refused(tmp_path):
    from rustvllm.engine.request.grammar_spec import make_grammar_spec
    from rustvllm.exceptions import InvalidRequestError
    from rustvllm.sampling_params.structured_outputs import StructuredOutputsParams

    class Words:
        @staticmethod
        def convert_tokens_to_ids(token):
            return {"[NOTE]": 7}.get(token)

        @staticmethod
        def decode(ids):
            return ""

    tag = {"structures": [{**NOTE, "schema": {"not": {}}}], "triggers": ["[NOTE]"]}
    with pytest.raises(InvalidRequestError, match="/not is not supported"):
        make_grammar_spec(StructuredOutputsParams(structural_tag=tag), Words)
    make_grammar_spec(StructuredOutputsParams(structural_tag=TAG), Words)
    with pytest.raises(InvalidRequestError, match="must only hold values that JSON can express"):
        make_grammar_spec(
            StructuredOutputsParams(structural_tag={**tag, "structures": [{**NOTE, "schema": {"const": {1, 2}}}]}),
            Words,
        )
