"""Chat messages to prompt text: renders a Jinja chat template in a sandbox.

Templates come with models and cannot be trusted. They are rendered in jinja2's immutable sandbox, with only the helpers
that models' templates commonly use. All values are rebuilt from plain JSON types first, so that a template never gets
an object with methods that it could misuse.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from rustvllm.exceptions import InvalidRequestError

PLAIN_CHAT_TEMPLATE = (
    "{%- if messages|length == 1 and messages[0].role == 'user' and add_generation_prompt -%}"
    "{{ messages[0].content }}"
    "{%- else -%}"
    "{%- for message in messages -%}"
    "{{ message.role + ': ' + message.content }}"
    "{%- if not loop.last or add_generation_prompt -%}{{ '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}"
    "{%- endif -%}"
)
"""For models without a template: a single user message becomes its text, several messages lines of ``role: text``."""

_RESERVED_VARIABLES = frozenset(
    {
        "tokenizer",
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tools",
        "documents",
        "raise_exception",
    }
)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Appended to the last message to find where it ends in the rendered text. The trailing space shows whether the template
# trims. The characters are from the private-use area, so that no message contains them by accident.
_END_MARK = "\ue0f0\ue0f1\ue0f0 "


class _GenerationTag(jinja2.ext.Extension):
    """Accepts ``{% generation %} … {% endgeneration %}``, which marks trainable text and renders as its contents."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().astimezone().strftime(fmt)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML: it would write \u003c where the model was trained on "<".
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )


@functools.lru_cache(maxsize=64)
def walks_through_parts(source: str) -> bool:
    """Whether a template loops over a message's ``content``, so that it expects a list of parts there (cached).

    This looks at the source only: at loops over ``….content``, over ``…['content']``, and over a variable that is
    called ``content`` or was set to one of these.
    """
    try:
        tree = _environment().parse(source)
    except (jinja2.TemplateError, RecursionError):
        return False  # compile_chat_template reports the error
    names = {"content"}

    def is_content(node: jinja2.nodes.Node | None) -> bool:
        match node:
            case jinja2.nodes.Name():
                return node.name in names
            case jinja2.nodes.Getattr():
                return node.attr == "content"
            case jinja2.nodes.Getitem():
                return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
            case jinja2.nodes.Filter():
                return is_content(node.node)
            case _:
                return False

    for assignment in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assignment.target, jinja2.nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


@functools.lru_cache(maxsize=64)
def compile_chat_template(source: str) -> jinja2.Template:
    """Compile a template for the sandbox (cached).

    Raises:
        InvalidRequestError: The template is not valid Jinja.
    """
    environment = _environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as exc:
        raise InvalidRequestError(f"The chat template is not valid: {exc}", "chat_template") from exc
    except RecursionError as exc:
        raise InvalidRequestError("The chat template is nested too deeply.", "chat_template") from exc


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """Render a conversation; returns the prompt text.

    Args:
        tokenizer: Has the template (``chat_template``) and the special tokens that templates use (``bos_token`` …).
        messages: Objects with ``role`` and ``content``. Their other fields reach the template too.
        add_generation_prompt: End the prompt with the text that opens the assistant's turn.
        continue_final_message: Leave the last message open, so that the model continues it.
        chat_template: Template to use instead of the tokenizer's; if there is neither, the plain template is used.
        tools: JSON schemas of functions, for templates that list them.
        documents: Texts for the templates of retrieval models.
        **kwargs: Further variables for the template.

    Raises:
        InvalidRequestError: The template is not valid, refuses the messages or fails on them, or the arguments
            contradict each other.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message cannot both be true: "
            "the first opens a new message, the second leaves the last one open.",
            "continue_final_message",
        )
    source = chat_template or getattr(tokenizer, "chat_template", None) or PLAIN_CHAT_TEMPLATE
    template = compile_chat_template(source)
    conversation = [_plain(message) for message in messages]
    if continue_final_message:
        _mark_end(conversation)
    variables = special_tokens(tokenizer)
    variables.update((name, _plain(value)) for name, value in kwargs.items())
    try:
        rendered = template.render(
            variables,
            messages=conversation,
            tools=None if tools is None else _plain(tools),
            documents=None if documents is None else _plain(documents),
            add_generation_prompt=add_generation_prompt,
        )
    except jinja2.TemplateError as exc:
        raise InvalidRequestError(f"The chat template refused the messages: {exc}", "messages") from exc
    except Exception as exc:
        # A template is a program that runs on the client's data, so its failure is an error of the request.
        raise InvalidRequestError(
            f"The chat template failed on the messages: {type(exc).__name__}: {exc}", "messages"
        ) from exc
    return _cut_at_mark(rendered) if continue_final_message else rendered


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Refuse variables of a request that :func:`render_chat` sets itself.

    Raises:
        InvalidRequestError: There are such variables; the message names them.
    """
    if reserved := sorted(_RESERVED_VARIABLES & variables.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs cannot set {', '.join(reserved)}; the request has fields for that.",
            "chat_template_kwargs",
        )


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """The special tokens that a tokenizer has, by the names that templates use."""
    tokens = {name: getattr(tokenizer, name, None) for name in _SPECIAL_TOKENS}
    tokens.update(getattr(tokenizer, "special_tokens_map", None) or {})
    return {name: token for name, token in tokens.items() if isinstance(token, str | list)}


def _mark_end(conversation: list[dict[str, Any]]) -> None:
    content = conversation[-1].get("content") if conversation else None
    if isinstance(content, str):
        conversation[-1]["content"] = content + _END_MARK
        return
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += _END_MARK
                return
    raise InvalidRequestError(
        "continue_final_message needs a last message with text in its content.", "continue_final_message"
    )


def _cut_at_mark(rendered: str) -> str:
    mark = _END_MARK.rstrip()
    end = rendered.rfind(mark)
    if end < 0:
        raise InvalidRequestError(
            "continue_final_message cannot be used with this model: its chat template changes the last message.",
            "continue_final_message",
        )
    if rendered.startswith(_END_MARK, end):
        return rendered[:end]
    return rendered[:end].rstrip()  # the template trims messages, so trim this one like it would have


def _plain(value: Any) -> Any:
    """Rebuild a value from dicts, lists and JSON scalars; replace any other object by the name of its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    return f"<{type(value).__name__}>"
