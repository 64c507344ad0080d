"""``StructuredOutputsParams``: what the output of a request must be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rustvllm.exceptions import InvalidRequestError

MAX_CHOICES: Final = 50_000
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
"""Exactly one of these is given."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the output of a request must be, with vLLM's names. It is enforced, or refused by name.

    Attributes:
        json: A JSON schema, as an object or as its text.
        regex: A regular expression in Rust's syntax that the whole output matches.
        choice: Texts, of which the output is one.
        grammar: A context-free grammar in Lark, or in GBNF where ``::=`` occurs in it.
        json_object: True: any JSON object.
        disable_any_whitespace: JSON without whitespace between its tokens.
        disable_additional_properties: Objects whose schema does not say have no further properties.
        whitespace_pattern: A regular expression for the whitespace of JSON, instead of 1 to 32 whitespace characters.
        structural_tag: Not supported yet.
        param: The field of a request that errors name.

    Raises:
        InvalidRequestError: A ``ValueError`` that says what is wrong.
    """

    param: ClassVar[str] = "structured_outputs"

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise InvalidRequestError("structural_tag is not supported yet", self.param)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise self._wrong(name, "true or false", getattr(self, name))
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequestError(
                f"{self.param} must have exactly one of {', '.join(KINDS)}, got {found}", self.param
            )
        if self.json_object not in (None, True):
            raise self._wrong("json_object", "true", self.json_object)
        if self.json is not None and not isinstance(self.json, str | Mapping | bool):
            raise self._wrong("json", "a schema (an object or a boolean) or its text", self.json)
        self._check_texts()

    @property
    def kind(self) -> str:
        """Which of :data:`KINDS` it is."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def _check_texts(self) -> None:
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise self._wrong(name, "a text that is not empty", text)
        choices: object = self.choice
        if choices is None:
            return
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise self._wrong("choice", "a list of one or more texts", choices)
        if len(choices) > MAX_CHOICES:
            raise InvalidRequestError(
                f"choice has {len(choices)} texts, at most {MAX_CHOICES} are possible", self.param
            )
        for text in choices:
            if not isinstance(text, str) or not text:
                raise self._wrong("choice", "a list of texts that are not empty", text)

    def _wrong(self, name: str, expected: str, value: object) -> InvalidRequestError:
        return InvalidRequestError(f"{name} of {self.param} must be {expected}, got {value!r:.80}", self.param)


@dataclass(frozen=True, kw_only=True)
class CallGrammar(StructuredOutputsParams):
    """A grammar that tool calls obey; made of a request's tools, never by a caller.

    Attributes:
        text_grammar: The same with its markers as text, which is checked where the vocabulary is not known.
    """

    param: ClassVar[str] = "tools"

    text_grammar: str
