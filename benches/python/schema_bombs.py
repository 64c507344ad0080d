"""Schemas, expressions and grammars that are made to be expensive or invalid; a seed always gives the same ones.

Two of three are hostile. The others are large, but like real ones, and must be accepted.
"""

import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

Asked = dict[str, Any]


@dataclass(frozen=True)
class Bomb:
    """A request with ``structured_outputs``, or one whose JSON text no encoder would write.

    Attributes:
        kind: The name of the function that made it.
        body: The whole request as JSON; ``max_tokens`` is small.
        is_legal: Whether the answer must be 200.
    """

    kind: str
    body: bytes
    is_legal: bool


def nested(rng: random.Random) -> Asked:
    """Nested objects, some deeper than allowed."""
    depth = rng.choice([60, 100, 127, 128, 129, 3000, 30_000])
    return {"json": '{"required": ["a"], "properties": {"a": ' * depth + "{}" + "}}" * depth}


def product(rng: random.Random) -> Asked:
    """``allOf`` of ``anyOf``, with as many branches as the product of their sizes."""
    one_of = [{"properties": {rng.choice("abcdef"): {"type": kind}}} for kind in ("string", "integer", "array", "null")]
    return {"json": {"allOf": [{"anyOf": one_of} for _ in range(rng.randint(4, 60))]}}


def cycle(rng: random.Random) -> Asked:
    """References that form a cycle, through ``allOf`` or directly."""
    count = rng.randint(1, 50)
    link = rng.choice([lambda to: {"$ref": to}, lambda to: {"allOf": [{"$ref": to}, {"minProperties": 1}]}])
    definitions = {f"d{index}": link(f"#/$defs/d{(index + 1) % count}") for index in range(count)}
    return {"json": {"$defs": definitions, "$ref": "#/$defs/d0"}}


def one_of_bomb(rng: random.Random) -> Asked:
    """``oneOf`` within ``oneOf``."""
    schema: Any = {"type": "integer"}
    for level in range(rng.randint(6, 12)):
        schema = {
            "oneOf": [{"type": "object", "properties": {f"k{level}": schema}}, {"type": "array", "items": schema}]
        }
    return {"json": schema}


def repeats(rng: random.Random) -> Asked:
    """More repetitions than a text can have."""
    count = rng.choice([10**4, 10**6, 10**9, 2**53, 2**63])
    return {
        "json": rng.choice(
            [
                {"type": "array", "items": {"type": "string", "minLength": count}, "minItems": count},
                {"type": "string", "maxLength": count, "minLength": count - 1},
                {"type": "array", "items": {"enum": list("abcdefgh")}, "maxItems": count},
                {"type": "object", "minProperties": count},
            ]
        )
    }


def expression(rng: random.Random) -> Asked:
    """Regular expressions with exponential automata."""
    size = rng.choice([10, 20, 500, 1000])
    return {
        "regex": rng.choice(
            [
                f"(.*a){{{size}}}",
                "(a|aa)+" * min(size, 200) + "$",
                "((a{1,N}){1,N}){1,N}".replace("N", str(size)),
                "(.*)(b|a)" + "." * size,
                f"^(a{{1000}}){{{size}}}$",
                "(x+x+)+y" * 50,
                "(?:" * size + "a" + ")*" * size,
                r"(?=a)\b\1" + "a" * size,
            ]
        )
    }


def many_choices(rng: random.Random) -> Asked:
    """A megabyte of texts, in an ``enum`` or as choices."""
    size = rng.choice([64 << 10, 256 << 10, 1 << 20])
    length = rng.choice([8, 60, 5000])
    texts = ["".join(rng.choices(string.ascii_letters + "é\U0001f600", k=length)) for _ in range(size // length)]
    return rng.choice([{"json": {"enum": texts}}, {"choice": texts}])


def optional_properties(rng: random.Random) -> Asked:
    """Thousands of optional properties."""
    count = rng.choice([1000, 3000, 5000, 20_000])
    return {"json": {"properties": {f"p{rng.random()}": {"type": "integer"} for _ in range(count)}}}


def bad_text(rng: random.Random) -> Asked:
    """Invalid characters, in every place of a schema."""
    bad = rng.choice(["\x00", "a\x00b", "\uffff", "\x7f", "\u202e"])
    return rng.choice(
        [
            {"json": {"properties": {bad: {"const": bad}}, "required": [bad]}},
            {"json": {"pattern": bad, "type": "string"}},
            {"regex": bad},
            {"choice": [bad]},
            {"grammar": f'start: "{bad}"'},
        ]
    )


def lone_surrogate(rng: random.Random) -> Asked:
    """Lone surrogates, which JSON can write; they are ``@@`` until the body is encoded."""
    return rng.choice([{"json": {"enum": ["@@"]}}, {"regex": "@@"}, {"choice": ["@@", "b"]}, {"grammar": "@@"}])


def own_options(rng: random.Random) -> Asked:
    """The library's own options, which a client must not set."""
    options = {
        "whitespace_pattern": rng.choice(["(.*a){20}", "", "("]),
        "coerce_one_of": True,
        "lenient": True,
        "item_separator": "(,|x)*",
    }
    return {"json": {"x-guidance": options, "type": "object", "properties": {"a": {"x-guidance": options}}}}


def lark(rng: random.Random) -> Asked:
    """Grammars that are ambiguous, left-recursive, empty, or invalid."""
    return {
        "grammar": rng.choice(
            [
                'start: start start | start start start | "a"',
                "start: a\na: b\nb: a",
                "start: " + " ".join(["x?"] * 500) + '\nx: "a"',
                "start: /(.*a){20}/",
                "root ::= root root | ",
                "root ::= (" * 500,
                'root ::= "a"{1,1000000}',
                'start: %json {"$ref": "http://example.com"}',
                "start: undefined",
                "".join(f"r{index}: r{index + 1} r{index + 1}\n" for index in range(200)) + 'r200: "a"\nstart: r0',
            ]
        )
    }


def not_a_schema(rng: random.Random) -> Asked:
    """Values of wrong types, in every place."""
    wrong = rng.choice([None, 1, "x", [], {}, [[]], 1e400, -(10**400), {"a": {}}])
    key = rng.choice(
        ["type", "properties", "items", "required", "enum", "pattern", "$ref", "anyOf", "minimum", "format"]
    )
    return {"json": {key: wrong}}


def large_but_legal(rng: random.Random) -> Asked:
    """A large schema of a real application: nested records, lists, long enumerations, formats, definitions."""
    record: dict[str, Any] = {
        "type": "object",
        "properties": {
            f"field_{index}": rng.choice(
                [
                    {"type": "string", "maxLength": rng.randint(1, 200), "description": "x" * rng.randint(0, 400)},
                    {"type": "integer", "minimum": -rng.randint(0, 1000), "maximum": rng.randint(1, 10**6)},
                    {"enum": [f"value {number}" for number in range(rng.randint(1, 100))]},
                    {"type": "array", "items": {"type": "number"}, "maxItems": rng.randint(1, 20)},
                    {"type": ["string", "null"], "format": rng.choice(["date", "uuid", "email", "date-time"])},
                    {"$ref": "#/$defs/person"},
                ]
            )
            for index in range(rng.randint(5, 60))
        },
        "additionalProperties": False,
    }
    record["required"] = sorted(rng.sample(list(record["properties"]), 3))
    person = {"type": "object", "properties": {"name": {"type": "string"}, "friend": {"$ref": "#/$defs/person"}}}
    schema = {
        "type": "object",
        "properties": {"records": {"type": "array", "items": record}},
        "$defs": {"person": person},
    }
    return {"json": schema}


HOSTILE: Final[list[Callable[[random.Random], Asked]]] = [
    nested,
    product,
    cycle,
    one_of_bomb,
    repeats,
    expression,
    many_choices,
    optional_properties,
    bad_text,
    lone_surrogate,
    own_options,
    lark,
    not_a_schema,
]


def bombs(seed: int, count: int) -> Iterator[Bomb]:
    """``count`` requests of completions; every third is large but legal."""
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        is_legal = index % 3 == 2
        maker = large_but_legal if is_legal else HOSTILE[(index - index // 3) % len(HOSTILE)]
        asked = {"prompt": "Once", "max_tokens": 8, "seed": index, "structured_outputs": maker(rng)}
        body = json.dumps(asked).replace("@@", rng.choice(["\\ud800", "a\\udfff", "\\udc00\\ud800"]))
        yield Bomb(maker.__name__, body.encode(), is_legal)
