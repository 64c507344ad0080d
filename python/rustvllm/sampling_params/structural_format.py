"""``StructuralFormat``: the newer form of a structural tag, whose ``format`` is a tree of texts, schemas and tags."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rustvllm import _core
from rustvllm.parameter_checks import shown
from rustvllm.sampling_params.structural_tag import (
    MAX_CHARS,
    MAX_STRUCTURES,
    MAX_TEXT_CHARS,
    StructuralTag,
    Structure,
    escaped,
    json_rule,
    literal_parts,
)

MAX_DEPTH: Final = 32
"""Of formats within formats."""
_KINDS: Final = (
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    "optional",
    "plus",
    "star",
    "tag",
    "triggered_tags",
    "tags_with_separator",
)
_REPEATS: Final = {"optional": "?", "plus": "+", "star": "*"}
_FREE: Final = frozenset({"any_text", "triggered_tags"})


@dataclass(frozen=True)
class StructuralFormat:
    """A format whose parts were checked.

    Attributes:
        root: The format, as it was sent.
        structures: Its JSON schemas, as structures of the older form.
    """

    root: Mapping[str, Any]
    structures: tuple[Structure, ...]

    @classmethod
    def read(cls, value: object) -> "StructuralFormat":
        """Of the field ``format``.

        Raises:
            ValueError: Says what is wrong with it, and where.
        """
        check = _Check()
        check.format(value, "format", is_last=True, depth=0)
        if not isinstance(value, Mapping):
            raise TypeError("a format that was checked is an object")
        return cls(value, tuple(Structure("", schema, "") for schema in check.schemas))

    def marks(self) -> set[str]:
        """Parts of its texts that may be special tokens of a model."""
        texts = _texts(self.root)
        whole = tuple(text for text in texts if text)
        if not whole:
            return set()
        return StructuralTag((), whole).marks()

    def lark(self, ids: Mapping[str, int]) -> str:
        """The grammar; ``ids`` as for ``StructuralTag.lark``."""
        writer = _Writer(ids)
        start = writer.write(self.root)
        return "\n".join([f"start: {start}", *writer.lines, ""])


@dataclass
class _Check:
    schemas: list[Mapping[str, Any] | bool] = field(default_factory=list)
    num_formats: int = 0

    def format(self, value: object, place: str, *, is_last: bool, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise ValueError(f"{place} of a structural_tag must be an object, got {shown(value)}")
        kind = value.get("type")
        if kind not in _KINDS:
            raise ValueError(f"{place} of a structural_tag has the type {shown(kind)}; supported: {', '.join(_KINDS)}")
        self.num_formats += 1
        if depth > MAX_DEPTH or self.num_formats > MAX_STRUCTURES:
            raise ValueError(f"a structural_tag has at most {MAX_STRUCTURES} formats, {MAX_DEPTH} within one another")
        if kind in _FREE and not is_last:
            raise ValueError(
                f"{place}: {kind} is not supported before something else, but for any_text as all of a tag"
            )
        match kind:
            case "const_string":
                _text(value, "value", place)
            case "regex":
                _text(value, "pattern", place)
            case "grammar":
                self.grammar(value, place)
            case "json_schema":
                schema = value.get("json_schema")
                if not isinstance(schema, Mapping | bool):
                    raise ValueError(f"json_schema of {place} must be an object or a boolean, got {shown(schema)}")
                self.schemas.append(schema)
            case "sequence":
                elements = _list(value, "elements", place)
                for index, element in enumerate(elements):
                    is_end = is_last and index == len(elements) - 1
                    self.format(element, f"{place}.elements[{index}]", is_last=is_end, depth=depth + 1)
            case "or":
                for index, element in enumerate(_list(value, "elements", place)):
                    self.format(element, f"{place}.elements[{index}]", is_last=is_last, depth=depth + 1)
            case "optional":
                self.format(value.get("content"), f"{place}.content", is_last=is_last, depth=depth + 1)
            case "plus" | "star":
                self.format(value.get("content"), f"{place}.content", is_last=False, depth=depth + 1)
            case "tag":
                self.tag(value, place, depth)
            case "triggered_tags" | "tags_with_separator":
                self.tags(value, kind, place, depth)

    def grammar(self, value: Mapping[str, Any], place: str) -> None:
        try:
            _core.grammar_as_lark(_text(value, "grammar", place))
        except ValueError as error:
            raise ValueError(f"{error} (grammar of {place})") from None

    def tag(self, value: Mapping[str, Any], place: str, depth: int) -> None:
        _text(value, "begin", place)
        end = _text(value, "end", place)
        content = value.get("content")
        is_text = isinstance(content, Mapping) and content.get("type") == "any_text"
        self.format(content, f"{place}.content", is_last=is_text and bool(end), depth=depth + 1)

    def tags(self, value: Mapping[str, Any], kind: str, place: str, depth: int) -> None:
        for name in ("at_least_one", "stop_after_first"):
            if not isinstance(value.get(name, False), bool):
                raise ValueError(f"{name} of {place} must be true or false, got {shown(value[name])}")
        tags = _list(value, "tags", place)
        for index, tag in enumerate(tags):
            if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
                raise ValueError(f"{place}.tags[{index}] must be a tag, got {shown(tag)}")
            self.tag(tag, f"{place}.tags[{index}]", depth + 1)
        if kind == "tags_with_separator":
            _text(value, "separator", place)
            return
        triggers = _list(value, "triggers", place)
        if value.get("excludes"):
            raise ValueError(f"excludes of {place} is not supported")
        # The rules are those of the older form.
        structures = [{"begin": tag["begin"], "schema": True, "end": tag["end"]} for tag in tags]
        StructuralTag.read({"structures": structures, "triggers": triggers})


@dataclass
class _Writer:
    ids: Mapping[str, int]
    lines: list[str] = field(default_factory=list)

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def write(self, value: Mapping[str, Any]) -> str:
        """Rules for a format; returns the expression of all of it."""
        match value["type"]:
            case "const_string":
                return self.literal(value["value"]) or '""'
            case "json_schema":
                return self.rule(json_rule(value["json_schema"]))
            case "regex":
                pattern = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", value["pattern"]).replace("\n", r"\n")
                return self.rule(f"/{pattern}/")
            case "grammar":
                return self.rule(f"%lark {{\n{_core.grammar_as_lark(value['grammar'])}\n}}")
            case "any_text":
                return self.rule("/(?s:.*)/")
            case "optional" | "plus" | "star":
                return self.rule(f"({self.write(value['content'])}){_REPEATS[value['type']]}")
            case "sequence":
                return self.rule(" ".join(self.write(element) for element in value["elements"]))
            case "or":
                return self.rule(" | ".join(self.write(element) for element in value["elements"]))
            case "tag":
                return self.tag(value, value["begin"])
            case "tags_with_separator":
                return self.separated(value)
            case _:
                return self.triggered(value)

    def literal(self, text: str) -> str:
        return " ".join(literal_parts(text, self.ids))

    def tag(self, value: Mapping[str, Any], begin: str) -> str:
        """A tag from ``begin`` on, which is the rest of its own behind a trigger."""
        content, end = value["content"], value["end"]
        if content["type"] == "any_text":
            if end in self.ids:
                body = f"{self.rule('/(?s:.*)/')} {self.literal(end)}"
            else:
                body = self.rule("/(?s:.*)/", f"[suffix={json.dumps(end)}]")
        else:
            body = f"{self.write(content)} {self.literal(end)}"
        return self.rule(f"{self.literal(begin)} {body}".strip())

    def separated(self, value: Mapping[str, Any]) -> str:
        tag = self.rule(" | ".join(self.tag(tag, tag["begin"]) for tag in value["tags"]))
        separator = self.literal(value["separator"])
        several = tag if value.get("stop_after_first") else f"{tag} ({f'{separator} {tag}'.strip()})*"
        return self.rule(several if value.get("at_least_one") else f"({several})?")

    def triggered(self, value: Mapping[str, Any]) -> str:
        triggers = list(dict.fromkeys(value["triggers"]))
        spelled = [escaped(trigger) for trigger in triggers if trigger not in self.ids]
        # A terminal, as only these are complements: its name is in capitals.
        text = f"TEXT{len(self.lines)}"
        self.lines.append(f"{text}: " + (f"~/(?s:.*)({'|'.join(spelled)})(?s:.*)/" if spelled else "/(?s:.*)/"))
        tagged = []
        for trigger in triggers:
            tags = [tag for tag in value["tags"] if tag["begin"].startswith(trigger)]
            bodies = self.rule(" | ".join(self.tag(tag, tag["begin"][len(trigger) :]) for tag in tags))
            if trigger in self.ids:
                before = f"{text} <[{self.ids[trigger]}]>"
            else:
                before = self.rule("/(?s:.*)/", f"[suffix={json.dumps(trigger)}]")
            tagged.append(f"{before} {bodies}")
        one = self.rule(" | ".join(tagged))
        if value.get("stop_after_first"):
            return one if value.get("at_least_one") else self.rule(f"{one} | {text}")
        return self.rule(f"{one} {one}* {text}" if value.get("at_least_one") else f"{one}* {text}")


def _texts(value: Mapping[str, Any]) -> list[str]:
    texts = [value[name] for name in ("value", "begin", "end", "separator") if isinstance(value.get(name), str)]
    texts += value.get("triggers", ())
    children = [*value.get("elements", ()), *value.get("tags", ())]
    if isinstance(value.get("content"), Mapping):
        children.append(value["content"])
    return texts + [text for child in children for text in _texts(child)]


def _text(value: Mapping[str, Any], name: str, place: str) -> str:
    text = value.get(name)
    limit = {"pattern": 64 * MAX_TEXT_CHARS, "grammar": MAX_CHARS}.get(name, MAX_TEXT_CHARS)
    may_be_empty = name in ("end", "separator")
    if not isinstance(text, str) or len(text) > limit or not (text or may_be_empty):
        raise ValueError(f"{name} of {place} must be a string of 1 to {limit} characters, got {shown(text)}")
    return text


def _list(value: Mapping[str, Any], name: str, place: str) -> Sequence[Any]:
    found = value.get(name)
    if isinstance(found, str) or not isinstance(found, Sequence) or not found:
        raise ValueError(f"{name} of {place} must be a list with at least one entry, got {shown(found)}")
    return found
