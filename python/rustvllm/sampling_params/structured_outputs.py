"""``StructuredOutputsParams``: what the output of a request must be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final
from urllib.parse import quote

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import shown
from rustvllm.sampling_params.structural_format import StructuralFormat
from rustvllm.sampling_params.structural_tag import StructuralTag, parse

MAX_CHOICES: Final = 50_000
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Exactly one of these is given."""
_MAX_SHOWN_PLACES: Final = 16
_MAX_READ_AT_ONCE: Final = 64 << 10
"""Characters of JSON whose reading takes less than a millisecond."""
_MAX_SHOWN_CHARS: Final = 2048


@dataclass
class Unenforced:
    """What is left out of schemas because it cannot be enforced.

    Attributes:
        places: JSON pointers of the first ones, behind ``name#`` in the schema of a tool.
        count: How many there are.
    """

    places: list[str] = field(default_factory=list)
    count: int = 0

    def note(self, places: Sequence[str], count: int) -> None:
        """Say what it is."""
        self.places = list(places)
        self.count = count


def shown_places(unenforced: Unenforced) -> str:
    """Where something is left out, for a header or a log: percent-encoded, some places, and how many more there are."""
    shown: list[str] = []
    num_chars = 0
    for place in unenforced.places[:_MAX_SHOWN_PLACES]:
        shown.append(quote(place, safe="/#~"))
        num_chars += len(shown[-1])
        if num_chars > _MAX_SHOWN_CHARS:
            shown.pop()
            break
    more = unenforced.count - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown)


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
        structural_tag: ``structures`` of ``begin``, ``schema`` and ``end``, and the ``triggers`` in the text that they
            stand behind; an object, or its text as JSON. The schemas are enforced as with ``strict``.
        strict: Refuse a schema of which a keyword cannot be enforced; else such a keyword is left out, and told.
        unenforced: What was left out of the schema, once the request was checked.
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
    structural_tag: str | Mapping[str, Any] | None = None
    strict: bool = False
    unenforced: Unenforced = field(default_factory=Unenforced, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties", "strict"):
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
        is_long = isinstance(self.structural_tag, str) and len(self.structural_tag) > _MAX_READ_AT_ONCE
        if self.structural_tag is not None and not is_long:  # a long one is read in the thread that checks grammars
            self.read_structural_tag()

    def read_structural_tag(self) -> StructuralTag | StructuralFormat:
        """What ``structural_tag`` says.

        Raises:
            InvalidRequestError: It is none.
        """
        try:
            value = parse(self.structural_tag)
            return StructuralFormat.read(value["format"]) if "format" in value else StructuralTag.read(value)
        except ValueError as error:
            raise InvalidRequestError(str(error), self.param) from None

    @property
    def asked_by(self) -> tuple[str, str]:
        """The field of a request that asks for it, and what to do to ask for nothing."""
        return self.param, "leave it out"

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
            raise InvalidRequestError(f"choice has {len(choices)} texts; the limit is {MAX_CHOICES}", self.param)
        for text in choices:
            if not isinstance(text, str) or not text:
                raise self._wrong("choice", "a list of texts that are not empty", text)

    def _wrong(self, name: str, expected: str, value: object) -> InvalidRequestError:
        return InvalidRequestError(f"{name} of {self.param} must be {expected}, got {shown(value)}", self.param)


@dataclass(frozen=True, kw_only=True)
class CallGrammar(StructuredOutputsParams):
    """A grammar that tool calls obey; made of a request's tools, never by a caller.

    Attributes:
        text_grammar: The same with its markers as text, which is checked where the vocabulary is not known.
    """

    param: ClassVar[str] = "tools"

    text_grammar: str


@dataclass(frozen=True, kw_only=True)
class ThinkingGate:
    """Thoughts before an answer, told by the tokens that begin and end them.

    Attributes:
        open_id: Begins them.
        close_id: Ends them.
        begins_within: The prompt ends within them.
        budget: Most tokens of them, the two markers aside; None: any number.
        end_ids: What comes once the budget is spent; ends with ``close_id``.
    """

    open_id: int
    close_id: int
    begins_within: bool
    budget: int | None
    end_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MessageOutputs(StructuredOutputsParams):
    """What the last of an answer's messages must be, for a model that says thoughts and answer in messages (gpt-oss).

    Made of a request, never by a caller.

    Attributes:
        answer: What the message in the channel ``final`` must be; thoughts before it are free.
        marker_ids: Ids of the marks of messages that are one token each.
        begins_within: The prompt ends within thoughts.
    """

    answer: StructuredOutputsParams
    marker_ids: Mapping[str, int]
    begins_within: bool

    def __post_init__(self) -> None:
        """There is nothing to check: the answer is."""

    @property
    def asked_by(self) -> tuple[str, str]:
        """See there."""
        return self.answer.asked_by


@dataclass(frozen=True, kw_only=True)
class GatedOutputs(StructuredOutputsParams):
    """What the output must be behind thoughts; made of a request for a model that thinks, never by a caller.

    Attributes:
        gate: The thoughts.
        answer: What comes behind them; None: anything.
    """

    gate: ThinkingGate
    answer: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """There is nothing to check: both parts are."""

    @property
    def asked_by(self) -> tuple[str, str]:
        """See there; without an answer it is the budget of the thoughts, which may be the server's own."""
        if self.answer is not None:
            return self.answer.asked_by
        return "thinking_token_budget", f"it is {self.gate.budget}, send -1"
