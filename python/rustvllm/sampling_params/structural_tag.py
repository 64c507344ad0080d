"""``StructuralTag``: text with JSON of given schemas between given texts, as in vLLM's field of this name."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rustvllm.parameter_checks import shown

MAX_STRUCTURES: Final = 1024
"""As many as there may be tools."""
MAX_CHARS: Final = 1 << 20
"""Of the whole as a text."""
MAX_TEXT_CHARS: Final = 1024
"""Of a begin, an end or a trigger."""
_MARK = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_/]{1,30}\]")
_OPTIONS: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}


@dataclass(frozen=True)
class Structure:
    """What stands behind a trigger: ``begin``, which begins with the trigger, JSON of a schema, ``end``."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str


@dataclass(frozen=True)
class StructuralTag:
    """Any text; where a trigger comes in it, one of its structures has to follow.

    Attributes:
        structures: At least one.
        triggers: Each begins a structure.
    """

    structures: tuple[Structure, ...]
    triggers: tuple[str, ...]

    @classmethod
    def read(cls, value: object) -> "StructuralTag":
        """Of a request's field: an object, or its JSON text.

        Raises:
            ValueError: Says what is wrong with it.
        """
        value = parse(value)
        structures = _list(value, "structures")
        if len(structures) > MAX_STRUCTURES:
            raise ValueError(f"structural_tag has {len(structures)} structures; the limit is {MAX_STRUCTURES}")
        triggers = tuple(_text("a trigger", trigger) for trigger in _list(value, "triggers"))
        if len(triggers) > MAX_STRUCTURES:
            raise ValueError(f"structural_tag has {len(triggers)} triggers; the limit is {MAX_STRUCTURES}")
        tag = cls(tuple(_structure(structure) for structure in structures), triggers)
        for structure in tag.structures:
            if not structure.begin.startswith(triggers):
                raise ValueError(f"begin must begin with one of the triggers, {shown(structure.begin)} does not")
        for trigger in triggers:
            if not any(structure.begin.startswith(trigger) for structure in tag.structures):
                raise ValueError(f"the trigger {shown(trigger)} begins no structure")
            if any(other != trigger and trigger.startswith(other) for other in triggers):
                raise ValueError(f"the trigger {shown(trigger)} begins with another one, which would always come first")
        return tag

    def marks(self) -> set[str]:
        """Parts of its texts that may be special tokens of a model."""
        texts = [*self.triggers, *(text for it in self.structures for text in (it.begin, it.end))]
        return {mark for text in texts for mark in _MARK.findall(text)} | set(self.triggers)

    def lark(self, ids: Mapping[str, int]) -> str:
        """The grammar.

        Args:
            ids: Marks that are special tokens, which no text is made of.
        """
        lines = []
        for index, structure in enumerate(self.structures):
            lines.append(f"s{index}: {json_rule(structure.schema)}")
        tagged = []
        for place, trigger in enumerate(dict.fromkeys(self.triggers)):
            bodies = [
                " ".join([*literal_parts(it.begin[len(trigger) :], ids), f"s{index}", *literal_parts(it.end, ids)])
                for index, it in enumerate(self.structures)
                if it.begin.startswith(trigger)
            ]
            lines.append(f"b{place}: {' | '.join(bodies)}")
            if trigger in ids:
                lines.append(f"t{place}: TEXT <[{ids[trigger]}]>")
            else:
                lines.append(f"t{place}[suffix={_quoted(trigger)}]: /(?s:.*)/")
            tagged.append(f"t{place} b{place}")
        spelled = [escaped(trigger) for trigger in dict.fromkeys(self.triggers) if trigger not in ids]
        text = f"~/(?s:.*)({'|'.join(spelled)})(?s:.*)/" if spelled else "/(?s:.*)/"
        return "\n".join([f"start: ({' | '.join(tagged)})* TEXT", f"TEXT: {text}", *lines, ""])


def parse(value: object) -> Mapping[str, Any]:
    """The object of a request's field, which may be its JSON text.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, str):
        if len(value) > MAX_CHARS:
            raise ValueError(f"structural_tag has {len(value)} characters; the limit is {MAX_CHARS}")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structural_tag must be an object or its JSON text: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"structural_tag must be an object or its JSON text, got {shown(value)}")
    if value.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"the type of a structural_tag must be structural_tag, got {shown(value['type'])}")
    return value


def _list(value: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = value.get(name)
    if isinstance(found, str) or not isinstance(found, Sequence) or not found:
        raise ValueError(f"{name} of a structural_tag must be a list with at least one entry, got {shown(found)}")
    return found


def _structure(value: object) -> Structure:
    if not isinstance(value, Mapping):
        raise ValueError(f"a structure must be an object of begin, schema and end, got {shown(value)}")
    schema, end = value.get("schema"), value.get("end", "")
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"the schema of a structure must be an object or a boolean, got {shown(schema)}")
    return Structure(_text("begin", value.get("begin")), schema, end if end == "" else _text("end", end))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT_CHARS:
        raise ValueError(
            f"{name} of a structural_tag must be a string of 1 to {MAX_TEXT_CHARS} characters, got {shown(value)}"
        )
    return value


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """JSON of a schema, with our options in the place of any that stood there."""
    keywords = {} if schema is True else {"not": {}} if schema is False else dict(schema)
    return f"%json {json.dumps({**keywords, 'x-guidance': _OPTIONS})}"


def literal_parts(text: str, ids: Mapping[str, int]) -> list[str]:
    """A text, in which special tokens stand as such."""
    if not text:
        return []
    if not ids:
        return [_quoted(text)]
    marks = "|".join(re.escape(mark) for mark in sorted(ids, key=len, reverse=True))
    parts = [part for part in re.split(f"({marks})", text) if part]
    return [f"<[{ids[part]}]>" if part in ids else _quoted(part) for part in parts]


def _quoted(text: str) -> str:
    return json.dumps(text)


def escaped(text: str) -> str:
    """A text within a regular expression of Lark."""
    return re.sub(r"([\\^$.|?*+()\[\]{}/])", r"\\\1", text).replace("\n", r"\n")
