"""The flags that say what requests become and how answers look, with a server and without one (``run-batch``)."""

import argparse
from collections.abc import Callable
from typing import Any

from rustvllm.config.flags.fields import parse_json_object
from rustvllm.exceptions import ConfigError, InvalidRequestError

CONTENT_FORMATS = ("auto", "string", "openai")
MAX_THINKING_TOKENS = 2**31 - 1
TOOL_CALL_CONSTRAINTS = ("off", "syntax", "schema")
DEFAULT_TOOL_CALL_CONSTRAINT = "syntax"


def add_answer_args(group: Any) -> None:
    """Add them to a group of a parser."""
    group.add_argument(
        "--chat-template", metavar="FILE_OR_TEXT", help="Jinja chat template to use instead of the model's"
    )
    group.add_argument(
        "--chat-template-content-format",
        choices=CONTENT_FORMATS,
        default="auto",
        help="form of a message's content for the template: string, its text; openai, a list of its parts; auto, a "
        "list if the template iterates over it (default: %(default)s)",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=_template_variables,
        default={},
        metavar="JSON",
        help="variables for the chat template, unless a request's chat_template_kwargs say otherwise",
    )
    group.add_argument(
        "--response-role",
        type=_role,
        default="assistant",
        metavar="ROLE",
        help="role of messages in chat answers; an answer that continues the last message has that message's role "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="show the tokens of log-probabilities as token_id:123, unless a request says otherwise",
    )
    group.add_argument(
        "--tool-call-parser",
        type=_tool_call_parser,
        default="auto",
        metavar="NAME",
        help="format of the model's tool calls, such as hermes, llama3_json, mistral, qwen3_coder, pythonic, glm45, "
        "kimi_k2, minimax_m2, deepseek_v3, deepseek_v31, granite, jamba, lfm2, internlm, phi4_mini_json; auto, "
        "recognised from its chat template; none, calls stay text (default: %(default)s)",
    )
    group.add_argument(
        "--reasoning-parser",
        type=_reasoning_parser,
        default="auto",
        metavar="NAME",
        help="format of the model's reasoning, such as qwen3, deepseek_r1, mistral, seed_oss; auto, recognised from "
        "its chat template; none, reasoning stays text (default: %(default)s)",
    )
    group.add_argument(
        "--default-thinking-token-budget",
        type=_budget,
        default=None,
        metavar="TOKENS",
        help="most tokens of reasoning, unless a request has a thinking_token_budget; -1: no limit (default: no limit)",
    )
    group.add_argument(
        "--reasoning-end-text",
        default="",
        metavar="TEXT",
        help="text that the model says before the marker that ends its reasoning, when a budget ends it (default: "
        "nothing)",
    )
    group.add_argument(
        "--reasoning-field",
        choices=("both", "reasoning", "reasoning_content"),
        default="both",
        help="field of a message that holds the model's reasoning (default: %(default)s)",
    )
    group.add_argument(
        "--tool-call-constraint",
        choices=TOOL_CALL_CONSTRAINTS,
        default=DEFAULT_TOOL_CALL_CONSTRAINT,
        help="what is enforced on calls if tool_choice is auto and the tool is not strict: syntax, the name of a tool "
        "and the syntax of the format; schema, the tool's schema too; off, nothing (default: %(default)s)",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="accepted without effect: a model whose format of tool calls is known may always call tools",
    )
    group.add_argument(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help="do not show tools to the model if tool_choice is none",
    )


def _template_variables(text: str) -> dict[str, Any]:
    from rustvllm.text.chat_template import check_template_variables

    variables = parse_json_object(text)
    try:
        check_template_variables(variables)
    except InvalidRequestError as error:
        reason = str(error).removeprefix("chat_template_kwargs ")
        raise argparse.ArgumentTypeError(reason) from None
    return variables


def _tool_call_parser(text: str) -> str:
    from rustvllm.text.turn_formats import check_tool_call_parser

    return _named(check_tool_call_parser, text)


def _reasoning_parser(text: str) -> str:
    from rustvllm.text.turn_formats import check_reasoning_parser

    return _named(check_reasoning_parser, text)


def _named(check: Callable[[str], str], text: str) -> str:
    try:
        return check(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _budget(text: str) -> int | None:
    try:
        budget = int(text)
    except ValueError:
        budget = -2
    if not -1 <= budget <= MAX_THINKING_TOKENS:
        raise argparse.ArgumentTypeError(f"must be a whole number from -1 to {MAX_THINKING_TOKENS}, got {text[:80]!r}")
    return None if budget == -1 else budget


def _role(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > 64:
        raise argparse.ArgumentTypeError(f"must be a word of 1 to 64 characters, got {text[:80]!r}")
    return text
