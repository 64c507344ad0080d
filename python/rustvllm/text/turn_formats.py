""":class:`TurnFormats`: how a model writes tool calls and reasoning, found in its chat template or set by a flag."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rustvllm import _core
from rustvllm.exceptions import ConfigError
from rustvllm.parameter_checks import shown
from rustvllm.sampling_params.structured_outputs import (
    GatedOutputs,
    MessageOutputs,
    StructuredOutputsParams,
    ThinkingGate,
)

Tools = _core.Tools
TurnParser = _core.TurnParser
CoreTurnReading = _core.TurnReading
CoreResponseEvents = _core.ResponseEvents
custom_input = _core.custom_input
AUTO: Final = "auto"
NONE: Final = "none"
_MESSAGE_MARK: Final = "<|message|>"
_ANSWER_HEAD: Final = "<|start|>assistant"
_HEAD_MARKS: Final = ("<|start|>", "<|channel|>", "<|constrain|>")


@dataclass(frozen=True)
class TurnFormats:
    """The formats of one model.

    Attributes:
        tool_calls: Format of the model's tool calls; None if it is unknown.
        reasoning: Format of the model's reasoning; None if it has none.
        call_ids: Style of the ids of tool calls, on which the template may depend: ``random``, ``short`` (9 letters and
            digits) or ``numbered`` (``functions.name:0``).
        marker_ids: Ids of the markers that are special tokens and therefore never appear in decoded text.
        reasoning_ids: Ids of the tokens that begin and end reasoning; None unless each marker is one token.
        reasoning_end_ids: Tokens that are forced when the reasoning budget is spent; the last one ends the reasoning.
        has_messages: A turn consists of messages in channels, each with a head (gpt-oss).
    """

    tool_calls: str | None = None
    reasoning: str | None = None
    call_ids: str = "random"
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    reasoning_ids: tuple[int, int] | None = None
    reasoning_end_ids: tuple[int, ...] = ()
    has_messages: bool = False

    @property
    def head_ids(self) -> tuple[int, ...]:
        """Ids of the markers behind which stand words of a message's head, which belong to no text."""
        return tuple(self.marker_ids[mark] for mark in _HEAD_MARKS if self.has_messages and mark in self.marker_ids)

    def thinking_gate(self, prompt: str, budget: int | None) -> ThinkingGate | None:
        """Describe the reasoning of an answer to this prompt; None unless each marker is one token.

        Args:
            prompt: Text of the prompt.
            budget: Most tokens of reasoning; None: no limit.
        """
        if self.reasoning_ids is None:
            return None
        begin, end = self.reasoning_ids
        return ThinkingGate(
            open_id=begin,
            close_id=end,
            begins_within=self.begins_within(prompt),
            budget=budget,
            end_ids=self.reasoning_end_ids or (end,),
        )

    def has_thought(self, prompt: str) -> bool:
        """Whether the prompt ends with the marker that ends reasoning, so that the answer contains none."""
        return self.reasoning is not None and prompt.rstrip().endswith(_core.reasoning_markers(self.reasoning)[1])

    def continues_message(self, prompt: str) -> bool:
        """Whether the prompt ends within a message, so that the answer does not begin with a head."""
        return self.has_messages and not prompt.rstrip().endswith(_ANSWER_HEAD)

    def begins_within(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within the reasoning."""
        return self.reasoning is not None and _core.begins_within_reasoning(self.reasoning, prompt)

    def behind_thoughts(
        self, wanted: StructuredOutputsParams, prompt: str, budget: int | None = None
    ) -> StructuredOutputsParams:
        """What all of an answer to this prompt must be, so that what follows its thoughts is ``wanted``.

        Args:
            wanted: What the answer must be.
            prompt: Text of the prompt.
            budget: Most tokens of reasoning; None: no limit.

        Returns:
            ``wanted`` itself where it holds from the first token on: the model marks no thoughts, or marks them with
            several tokens, or the prompt has ended them.
        """
        gate, begins_within = self.thinking_gate(prompt, budget), self.begins_within(prompt)
        if gate is None and self.has_messages and (begins_within or not self.continues_message(prompt)):
            return MessageOutputs(answer=wanted, marker_ids=self.marker_ids, begins_within=begins_within)
        if gate is None or self.has_thought(prompt):
            return wanted
        return GatedOutputs(gate=gate, answer=wanted)


def find_turn_formats(
    template: str,
    tokenizer: Any,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    reasoning_end_text: str = "",
) -> TurnFormats:
    """Find the formats of a model.

    Args:
        template: The model's chat template.
        tokenizer: The model's tokenizer; None: no formats, because answers cannot be decoded.
        tool_call_parser: Name of a format, ``auto`` to find it in the template, or ``none``.
        reasoning_parser: Likewise for reasoning.
        reasoning_end_text: Text that is forced before the marker that ends reasoning when the budget is spent.
    """
    if tokenizer is None:
        return TurnFormats()
    calls = _core.find_tool_call_format(template) if tool_call_parser == AUTO else tool_call_parser
    reasoning = _core.find_reasoning_format(template) if reasoning_parser == AUTO else reasoning_parser
    calls, reasoning = (None if name == NONE else name for name in (calls, reasoning))
    markers: list[str] = []
    call_ids = "random"
    if calls is not None:
        markers, call_ids = _core.tool_call_format_facts(calls)
    reasoning_ids = None
    end_ids: tuple[int, ...] = ()
    if reasoning is not None:
        thoughts = _core.reasoning_markers(reasoning)
        markers = [*markers, *_core.special_reasoning_markers(reasoning)]
        begin, end = (tokenizer.convert_tokens_to_ids(marker) for marker in thoughts)
        if begin is not None and end is not None:
            reasoning_ids = (begin, end)
            last_words = tokenizer.encode(reasoning_end_text, add_special_tokens=False) if reasoning_end_text else []
            end_ids = (*(token_id for token_id in last_words if token_id != end), end)
    return TurnFormats(
        calls,
        reasoning,
        call_ids,
        _special_ids(markers, tokenizer),
        reasoning_ids,
        end_ids,
        has_messages=_MESSAGE_MARK in markers,
    )


def tool_call_formats() -> list[str]:
    """The names of the formats of tool calls, without aliases."""
    return [name for name, _ in _core.tool_call_formats()]


def check_tool_call_parser(name: str) -> str:
    """Return ``name`` if it is a format of tool calls, ``auto`` or ``none``.

    Raises:
        ConfigError: It is none of these.
    """
    return _check(name, "--tool-call-parser", _core.tool_call_formats())


def check_reasoning_parser(name: str, argument: str = "--reasoning-parser") -> str:
    """Return ``name`` if it is a format of reasoning, ``auto`` or ``none``.

    Args:
        name: As it was given.
        argument: What the error calls it.

    Raises:
        ConfigError: It is none of these.
    """
    return _check(name, argument, _core.reasoning_formats())


def _check(name: str, flag: str, formats: list[tuple[str, list[str]]]) -> str:
    known = [AUTO, NONE, *(known for first, others in formats for known in (first, *others))]
    if name not in known:
        raise ConfigError(f"{flag} has no format {shown(name)}; the formats are {', '.join(known)}")
    return name


def _special_ids(markers: list[str], tokenizer: Any) -> dict[str, int]:
    """The ids of those markers that are special tokens, which decoding leaves out."""
    ids = {marker: tokenizer.convert_tokens_to_ids(marker) for marker in markers}
    return {
        marker: token_id
        for marker, token_id in ids.items()
        if token_id is not None and not tokenizer.decode([token_id], skip_special_tokens=True)
    }
