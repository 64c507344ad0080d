"""Types of tool calls and reasoning in ``rustvllm._core``, where they are found; there is no module of this name."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Self, final

@final
class Tools:
    """Functions that a model may call; immutable."""

    def __new__(cls, tools: Sequence[tuple[str, str, bool]]) -> Self:
        """Name, parameters (the JSON text of a schema's object) and strictness of each."""
    def check(self, only_strict: bool) -> None:
        """Raise InvalidRequestError about the first tool whose schema cannot be enforced; a walk, nothing is compiled.

        ``only_strict``: leave out the tools that are not strict.
        """
    def relaxed(self) -> tuple[Self, list[str], int]:
        """The same tools, those that are not strict without what cannot be enforced of their schemas.

        Also where that stands, of the first ones (``name#/pointer``), and how many they are.
        """
    def grammar(
        self,
        call_format: str,
        *,
        kind: str = "calls",
        parallel: bool = True,
        thinking: str | None = None,
        begins_within: bool = False,
        ids: Mapping[str, int] = ...,
        schema: str = "{}",
        all_obey: bool = False,
    ) -> str | None:
        """A grammar in Lark of an answer with calls in a format.

        Kind ``calls``: one call or more. ``text``: text with calls in it, of which those of strict tools obey their
        schema, and with ``all_obey`` those of the others; None where the format does not mark calls. ``json``: calls,
        or JSON of ``schema``. ``parallel``: more than one call. ``thinking``: the format of thoughts that may stand
        before, and begin within the prompt. ``ids``: markers that are one token each. Raises InvalidRequestError.
        """

@final
class TurnReading:
    """How the answers of one request are read; immutable."""

    def __new__(
        cls,
        call_format: str | None = None,
        reasoning: str | None = None,
        tools: Tools | None = None,
        begins_within: bool = False,
        *,
        thinks_once: bool = False,
        parallel: bool = True,
        reasoning_fields: Sequence[str] | None = None,
    ) -> Self:
        """Calls are looked for in ``call_format``, thoughts in ``reasoning``, within which a text begins if
        ``begins_within``. ``tools`` give the types of arguments that are not written as JSON. ``parallel`` and
        ``reasoning_fields`` are for events: more than the first call is passed on, and thoughts in these fields (None:
        ``reasoning`` and ``reasoning_content``).
        """

@final
class TurnParser:
    """Reads one answer while it comes. The events, joined, do not depend on how the text is cut.

    An event is its kind and its text: ``content``, ``reasoning``, ``call`` (the name of a tool), ``arguments`` (more
    JSON text of the call that began last) or ``end`` (that call is whole).
    """

    def __new__(cls, reading: TurnReading) -> Self: ...
    def push(self, text: str) -> list[tuple[str, str]]:
        """Take more text; what became certain of it."""
    def finish(self) -> list[tuple[str, str]]:
        """The text has ended; what was held back."""

@final
class ResponseEvents:
    """The events of the output items of one response, numbered behind the two that a response begins with.

    An output processor makes some of them, a caller others: both at any time, and from any thread.
    """

    def __new__(cls, turn_reading: TurnReading | None = None, custom: AbstractSet[str] = ...) -> Self:
        """Without ``turn_reading`` the answer is one message. ``custom``: functions that stand for custom tools."""
    def read(self, text: str, logprobs: bytes | None = None) -> bytes:
        """The events of more text. ``logprobs``: those of its tokens, as the inner part of a JSON list."""
    def finish(self, is_whole: bool) -> ByteSlices:
        """The events of what was held back, and of the end of the last item; there is one item at least."""
    def break_off(self) -> ByteSlices:
        """The events of the end of an item that an error has cut short."""
    def output(self) -> ByteSlices:
        """The JSON list of the items that are complete."""
    def take_number(self) -> int:
        """The number of the next event, which the caller makes."""

@final
class ByteSlices:
    """Bytes in slices of at most 256 KiB, each of which is copied when it is asked for."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> bytes: ...

def custom_input(arguments: str) -> str:
    """The input of a custom tool, out of the arguments of the function that it is for the model.

    What was cut short is completed, so that all of it that there is is shown; arguments of another shape are shown as
    they are.
    """

def tool_call_formats() -> list[tuple[str, list[str]]]:
    """The formats of calls, with their other names."""

def reasoning_formats() -> list[tuple[str, list[str]]]:
    """The formats of reasoning, with their other names."""

def find_tool_call_format(template: str) -> str | None:
    """The format in which a chat template writes calls."""

def find_reasoning_format(template: str) -> str | None:
    """The format in which a chat template marks thoughts."""

def tool_call_format_facts(name: str) -> tuple[list[str], str]:
    """Markers that a grammar of the format has, and what ids of calls look like: ``random``, ``short`` (9 letters and
    digits) or ``numbered`` (``functions.name:0``).
    """

def reasoning_markers(name: str) -> tuple[str, str]:
    """What begins thoughts and what ends them."""

def special_reasoning_markers(name: str) -> list[str]:
    """Texts around thoughts, and around all that is said, that may be special tokens."""

def begins_within_reasoning(name: str, prompt: str) -> bool:
    """Whether an answer to this prompt begins within thoughts."""
