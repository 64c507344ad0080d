"""``StructuralFormat``: each kind of format takes what it says and nothing else."""

import pytest

from rustvllm import _core
from rustvllm.sampling_params.structural_format import StructuralFormat

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}


def const(value):
    return {"type": "const_string", "value": value}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


NOTE, COUNT = tag("<note>", TEXT, "</note>"), tag("<count>", NUMBER, "</count>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<note>", "<count"], "tags": [NOTE, COUNT]}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": [COUNT, NOTE]}
GBNF = 'root ::= "a" root "b" | "ab"'
LARK = 'start: "{" (start | N)? "}"\nN: /[0-9]+/'
CASES = [
    (const("yes"), ["yes"], ["", "ye", "yes!"]),
    (NUMBER, ["1", "-20"], ["", "x", "1.5"]),
    ({"type": "regex", "pattern": "a/b{2}"}, ["a/bb"], ["a/b", "a/bbb"]),
    (TEXT, ["", "anything <note>\n"], []),
    (
        {"type": "sequence", "elements": [const("n="), NUMBER, const(";"), TEXT]},
        ["n=3;", "n=3; so"],
        ["n=;", "n=3", "3;"],
    ),
    ({"type": "or", "elements": [const("no"), NUMBER]}, ["no", "7"], ["", "no7"]),
    (NOTE, ["<note></note>", "<note>a < b\n</note>"], ["<note>", "<note>a</note>b", "note"]),
    (tag("<s>", {"type": "sequence", "elements": [NUMBER, const("!")]}, "</s>"), ["<s>4!</s>"], ["<s>4</s>", "<s>4!"]),
    (
        TRIGGERED,
        ["", "free", "so <count>3</count> and <note>it</note>.", "a < b"],
        ["<count>x</count>", "<count>3", "<counts>", "<note>"],
    ),
    (
        {**TRIGGERED, "at_least_one": True},
        ["<count>3</count>", "so <note>it</note> <count>1</count>"],
        ["", "free", "<count>x</count>"],
    ),
    (
        {**TRIGGERED, "stop_after_first": True},
        ["", "so <count>3</count>"],
        ["<count>3</count> and", "<count>3</count><note></note>"],
    ),
    (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        ["<count>3</count>", "so <count>3</count>"],
        ["", "so", "<count>3</count>."],
    ),
    (
        SEPARATED,
        ["", "<count>1</count>", "<count>1</count>, <note>x</note>, <count>2</count>"],
        ["<count>1</count><count>2</count>", "<count>1</count>, ", "x"],
    ),
    ({**SEPARATED, "at_least_one": True}, ["<note></note>"], [""]),
    ({"type": "optional", "content": NOTE}, ["", "<note>a</note>"], ["<note>", "<note></note><note></note>"]),
    ({"type": "plus", "content": COUNT}, ["<count>1</count>", "<count>1</count><count>2</count>"], ["", "<count>"]),
    ({"type": "star", "content": const("ab")}, ["", "ab", "ababab"], ["a", "aba"]),
    (
        {"type": "sequence", "elements": [{"type": "star", "content": const("a")}, const("b")]},
        ["b", "ab", "aaab"],
        ["", "a", "ba"],
    ),
    (
        {"type": "sequence", "elements": [const("<"), {"type": "grammar", "grammar": GBNF}, const(">")]},
        ["<ab>", "<aabb>"],
        ["<>", "<aab>", "ab"],
    ),
    ({"type": "or", "elements": [{"type": "grammar", "grammar": LARK}, NUMBER]}, ["1", "{1}", "{{}}"], ["{", "x", ""]),
    ({**SEPARATED, "stop_after_first": True}, ["", "<count>1</count>"], ["<count>1</count>, <count>2</count>"]),
]


@pytest.mark.parametrize(("value", "taken", "refused"), CASES, ids=[str(index) for index in range(len(CASES))])
def test_each_kind_takes_what_it_says(value, taken, refused):
    spec = _core.GrammarSpec("grammar", StructuralFormat.read(value).lark({}))
    spec.check("structured_outputs")
    assert [text for text in taken if not spec.accepts(text)] == []
    assert [text for text in refused if spec.accepts(text)] == []


def test_special_tokens_stand_as_such():
    read = StructuralFormat.read(TRIGGERED)
    assert {"<note>", "</note>", "</count>"} <= read.marks()
    lark = read.lark({"<note>": 7, "</note>": 8})
    assert "<[7]>" in lark
    assert "<[8]>" in lark
    assert "note" not in lark


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "format of a structural_tag must be an object, got 3"),
        ({"type": "qwen_xml_parameter"}, "has the type 'qwen_xml_parameter'; supported: const_string"),
        (
            {"type": "sequence", "elements": [TEXT, const("x")]},
            r"format.elements\[0\]: any_text is not supported before",
        ),
        ({"type": "sequence", "elements": []}, "elements of format must be a list with at least one entry"),
        (tag("<a>", TEXT, ""), r"format.content: any_text is not supported before"),
        (tag("", NUMBER, ""), "begin of format must be a string"),
        (
            tag("<a>", {"type": "json_schema"}, ""),
            "json_schema of format.content must be an object or a boolean, got None",
        ),
        ({**TRIGGERED, "triggers": ["<x>"]}, "begin must begin with one of the triggers"),
        ({"type": "grammar", "grammar": ""}, "grammar of format must be a string of 1 to 1048576"),
        ({"type": "plus"}, "format.content of a structural_tag must be an object, got None"),
        ({"type": "star", "content": TEXT}, "format.content: any_text is not supported before"),
        ({**TRIGGERED, "excludes": ["x"]}, "excludes of format is not supported"),
        ({**TRIGGERED, "at_least_one": 1}, "at_least_one of format must be true or false, got 1"),
        ({**SEPARATED, "tags": [TEXT]}, r"format.tags\[0\] must be a tag"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(value, message):
    with pytest.raises(ValueError, match=message):
        StructuralFormat.read(value)


def test_formats_within_formats_are_bounded():
    value = NUMBER
    for _ in range(40):
        value = {"type": "or", "elements": [value]}
    with pytest.raises(ValueError, match="32 within one another"):
        StructuralFormat.read(value)
