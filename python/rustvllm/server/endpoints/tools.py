"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request, checked; and the grammar that calls obey."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import shown
from rustvllm.sampling_params.structured_outputs import CallGrammar, StructuredOutputsParams, Unenforced
from rustvllm.server.schemas.protocol import ChatCompletionRequest
from rustvllm.text.turn_formats import Tools, TurnFormats, tool_call_formats

MAX_TOOLS: Final = 1024
"""Most tools of one request."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """Tools that an answer may call.

    Attributes:
        tools: Those that may be called.
        mode: ``auto``: the model decides. ``required``: one call or more. ``named``: the one tool, once.
        is_parallel: More than one call.
        has_strict: Some of the tools have arguments that obey their schema whenever they are called.
        unenforced: What was left out of the schemas of the others, where they have to be obeyed.
        constraint: What calls of the others obey where the model decides: ``off``, ``syntax`` or ``schema``.
    """

    tools: Tools
    mode: Mode
    is_parallel: bool
    has_strict: bool
    unenforced: Unenforced = field(default_factory=Unenforced)
    constraint: str = "off"

    @property
    def must_call(self) -> bool:
        """Whether an answer without a call is none."""
        return self.mode != "auto"


def read_tool_use(request: ChatCompletionRequest, formats: TurnFormats, constraint: str) -> ToolUse | None:
    """What a request says of tools; None if no tool may be called.

    Raises:
        InvalidRequestError: A tool or the choice is wrong, or the server cannot read the calls of its model.
    """
    functions = _functions(request.tools)
    choice = request.tool_choice
    if choice is None and not functions:
        return None
    if choice == "none":
        return None
    if not functions:
        raise InvalidRequestError("tool_choice needs tools: send tools, or leave it out.", "tool_choice")
    mode, names = _read_choice(choice, functions)
    if formats.tool_calls is None:
        if choice is None:
            return None  # the template may show them all the same, and what the model says of them is text
        known = ", ".join(tool_call_formats())
        raise InvalidRequestError(
            "tool_choice needs to know how the model writes calls, and its chat template does not show this: start "
            f"the server with --tool-call-parser and one of {known}, or leave tool_choice out.",
            "tool_choice",
        )
    called = [function for name, function in functions.items() if name in names]
    tools = _core_tools([_core_tool(function) for function in called], "tools")
    unenforced = Unenforced()
    if mode != "auto" or constraint == "schema":
        tools, places, count = tools.relaxed()
        unenforced.note(places, count)
    tools.check(only_strict=mode == "auto")
    return ToolUse(
        tools,
        mode,
        is_parallel=mode != "named" and request.parallel_tool_calls is not False,
        has_strict=any(function.get("strict") for function in called),
        unenforced=unenforced,
        constraint=constraint,
    )


def call_grammar(
    use: ToolUse, formats: TurnFormats, wanted: StructuredOutputsParams | None, *, begins_within: bool, is_gated: bool
) -> StructuredOutputsParams | None:
    """What an answer must be for its calls to be right; None: anything.

    Args:
        use: The tools.
        formats: Of the model.
        wanted: What an answer without a call must be.
        begins_within: The prompt ends within thoughts.
        is_gated: Thoughts are held by a gate, and no part of the grammar.

    Raises:
        InvalidRequestError: A schema says what cannot be enforced in the format.
    """
    assert formats.tool_calls is not None
    kind, schema = "calls", "{}"
    if not use.must_call and wanted is not None:
        kind, schema = "json", _schema_text(wanted)
    elif not use.must_call:
        kind = "text"
    write = partial(
        use.tools.grammar,
        formats.tool_calls,
        kind=kind,
        parallel=use.is_parallel,
        thinking=None if is_gated else formats.reasoning,
        begins_within=begins_within,
        schema=schema,
    )
    calls = _free_calls(use, formats, write) if kind == "text" else _calls(formats, write)
    if calls is None:
        return None
    calls.unenforced.note(use.unenforced.places, use.unenforced.count)
    return calls


def _free_calls(use: ToolUse, formats: TurnFormats, write: Callable[..., str | None]) -> CallGrammar | None:
    """What calls obey that the model may make or not; None if they obey nothing.

    Raises:
        InvalidRequestError: The schema of a strict tool says what cannot be enforced in the format.
    """
    if use.has_strict or use.constraint == "syntax":
        degrees = [use.constraint == "schema"]
    else:
        degrees = [True, False] if use.constraint == "schema" else []
    for all_obey in degrees:
        try:
            return _calls(formats, partial(write, all_obey=all_obey))
        except InvalidRequestError:
            if use.has_strict:
                raise
    return None  # a format may take less than a schema says, and then a tool that is not strict is free


def _calls(formats: TurnFormats, write: Callable[..., str | None]) -> CallGrammar | None:
    """A grammar for texts, and one for the tokens of the model."""
    written = [write(ids={}), write(ids=formats.marker_ids)]
    text_grammar, grammar = written
    if text_grammar is None or grammar is None:
        return None
    return CallGrammar(text_grammar=text_grammar, grammar=grammar)


def check_wanted(use: ToolUse, wanted: StructuredOutputsParams | None) -> None:
    """Refuse what an answer must be, where the tools of the request rule it out.

    Raises:
        InvalidRequestError: Says what would work.
    """
    if wanted is None:
        return
    if use.must_call:
        raise InvalidRequestError(
            f"{wanted.param} sets the format of the answer, but tool_choice requires a call: send only one of them, or "
            "tool_choice auto.",
            "tool_choice",
        )
    if wanted.kind not in ("json", "json_object") or wanted.whitespace_pattern is not None:
        raise InvalidRequestError(
            f"{wanted.param} with tools may only ask for JSON: send tool_choice none, or a schema without "
            "whitespace_pattern.",
            wanted.param,
        )
    _schema_text(wanted)


def _schema_text(wanted: StructuredOutputsParams) -> str:
    """The schema of JSON that is wanted, as text."""
    schema: Any = {"type": "object"} if wanted.json_object else wanted.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            schema = None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            f"The schema of {wanted.param} must be an object if the request has tools.", wanted.param
        )
    text = json.dumps(schema)
    _core_tools([("answer", text, True)], wanted.param).check(only_strict=False)
    return text


def _core_tools(tools: list[tuple[str, str, bool]], param: str) -> Tools:
    try:
        return Tools(tools)
    except ValueError as error:
        raise InvalidRequestError(f"A schema in {param} cannot be read: {error}.", param) from None


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The functions of all tools by their names."""
    if tools is None:
        return {}
    if not tools:
        raise InvalidRequestError("tools must not be an empty list; leave it out instead.", "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries; the limit is {MAX_TOOLS}.", "tools")
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = _function(f"tools[{index}]", tool)
        if function["name"] in functions:
            raise InvalidRequestError(
                f"tools[{index}].function.name is {function['name']!r}, which another tool has, too: give each tool "
                "its own name.",
                "tools",
            )
        functions[function["name"]] = function
    return functions


def _function(where: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool.get("type", "function") != "function":
        raise InvalidRequestError(f"{where}.type must be 'function', got {shown(tool.get('type'))}.", "tools")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.function must be an object with a name, got {shown(function)}.", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.function.name must have 1 to 64 characters out of A-Z a-z 0-9 _ . -, got {shown(name)}.", "tools"
        )
    parameters, strict = function.get("parameters"), function.get("strict")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(
            f"{where}.function.parameters must be a JSON schema of an object, got {shown(parameters)}.", "tools"
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{where}.function.strict must be true or false, got {shown(strict)}.", "tools")
    return function


def _core_tool(function: Mapping[str, Any]) -> tuple[str, str, bool]:
    parameters = function.get("parameters")
    try:
        text = json.dumps(_NO_PARAMETERS if parameters is None else parameters, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The parameters of {function['name']!r} cannot be JSON: {error}.", "tools") from None
    return function["name"], text, bool(function.get("strict"))


def _read_choice(choice: object, functions: Mapping[str, Any]) -> tuple[Mode, set[str]]:
    """How tools are chosen, and which of them may be."""
    names = set(functions)
    if choice is None or choice == "auto":
        return "auto", names
    if choice == "required":
        return "required", names
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            return "named", {_named("tool_choice", choice, functions)}
        if choice.get("type") == "allowed_tools":
            return _read_allowed(choice.get("allowed_tools"), functions)
    raise InvalidRequestError(
        "tool_choice must be none, auto, required, or an object of type function (with function.name) or "
        f"allowed_tools, got {shown(choice)}.",
        "tool_choice",
    )


def _read_allowed(allowed: object, functions: Mapping[str, Any]) -> tuple[Mode, set[str]]:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequestError(
            "tool_choice.allowed_tools must have mode (auto or required) and tools (one or more), "
            f"got {shown(allowed)}.",
            "tool_choice",
        )
    if len(tools) > len(functions):
        raise InvalidRequestError(
            f"tool_choice.allowed_tools.tools has {len(tools)} entries, but tools has {len(functions)}: name each tool "
            "once.",
            "tool_choice",
        )
    return mode, {
        _named(f"tool_choice.allowed_tools.tools[{index}]", tool, functions) for index, tool in enumerate(tools)
    }


def _named(where: str, choice: object, functions: Mapping[str, Any]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in functions:
        known = ", ".join(list(functions)[:8])
        raise InvalidRequestError(
            f"{where}.function.name must be the name of one of the tools ({known:.400}), got {shown(name)}.",
            "tool_choice",
        )
    return name
