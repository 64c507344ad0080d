"""Chat templates rendered as transformers renders them, and nothing else reachable from inside."""

import json
from types import SimpleNamespace

import pytest

from rustvllm.exceptions import InvalidRequestError
from rustvllm.text.chat_template import PLAIN_CHAT_TEMPLATE, render_chat

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather <now> & 'then' in a \"city\", é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]}},
}
CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hello!"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  "}],
    "turns": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b <tag> 漢字 😀"},
        {"role": "user", "content": "c"},
    ],
    "open": [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "It is  "}],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "weather"},
    ],
}
TEMPLATES = (
    "modern-tokenizers/minimind",
    "modern-tokenizers/phi-3-mini",
    "chat-templates/template_alpaca.jinja",
    "chat-templates/template_chatml.jinja",
    "chat-templates/tool_chat_template_hermes.jinja",
    "chat-templates/tool_chat_template_llama3.1_json.jinja",
    "chat-templates/tool_chat_template_mistral.jinja",
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def tokenizer_with(chat_template=None, tokens=TOKENS):
    return SimpleNamespace(chat_template=chat_template, special_tokens_map=tokens, **tokens)


def load_template(shared_dir, name):
    path = shared_dir / "data" / name
    if not path.exists():
        pytest.skip(f"no {path}")
    if path.is_dir():
        return json.loads((path / "tokenizer_config.json").read_text())["chat_template"]
    return path.read_text()


def outcome(render):
    try:
        return render()
    except Exception as exc:  # noqa: BLE001 -- what it is, is compared
        return type(exc)


@pytest.mark.parametrize("mode", ["ask", "history", "continue"])
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(shared_dir, name, conversation, with_tools, mode):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = load_template(shared_dir, name)
    messages = CONVERSATIONS[conversation]
    tools = [TOOL] if with_tools else None
    options = {"add_generation_prompt": mode == "ask", "continue_final_message": mode == "continue"}
    expected = outcome(
        lambda: render_jinja_template([messages], tools=tools, chat_template=source, **options, **TOKENS)[0][0]
    )
    ours = outcome(lambda: render_chat(tokenizer_with(source), messages, tools=tools, **options))
    if isinstance(expected, type):
        assert ours is InvalidRequestError
    else:
        assert ours == expected


def test_the_oracle_comparison_mostly_compares_text(shared_dir):
    """A template that refuses everything would pass above and show nothing."""
    rendered = 0
    for name in TEMPLATES:
        source = load_template(shared_dir, name)
        for messages in CONVERSATIONS.values():
            text = outcome(lambda source=source, messages=messages: render_chat(tokenizer_with(source), messages))
            rendered += isinstance(text, str) and len(text) > 5
    assert rendered >= len(TEMPLATES) * len(CONVERSATIONS) * 0.7


def test_the_plain_template():
    plain = tokenizer_with()
    assert render_chat(plain, [{"role": "user", "content": "Hello"}]) == "Hello"
    several = [{"role": "system", "content": "S"}, {"role": "user", "content": "U {{ 1 + 1 }}"}]
    assert render_chat(plain, several) == "system: S\nuser: U {{ 1 + 1 }}\nassistant:"
    assert render_chat(plain, several, add_generation_prompt=False) == "system: S\nuser: U {{ 1 + 1 }}"
    assert (
        render_chat(plain, CONVERSATIONS["open"], add_generation_prompt=False, continue_final_message=True)
        == "user: Say it\nassistant: It is  "
    )
    assert render_chat(tokenizer_with("other"), [], chat_template=PLAIN_CHAT_TEMPLATE) == "assistant:"


def test_helpers_that_templates_expect():
    render = lambda source, **extra: render_chat(tokenizer_with(source), [{"role": "user", "content": "x"}], **extra)  # noqa: E731
    assert render("{{ '<é>' | tojson }}{{ [1, {'b': 2}] | tojson(indent=1) }}") == '"<é>"[\n 1,\n {\n  "b": 2\n }\n]'
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "13"
    assert render("{% generation %}a{{ bos_token }}{% endgeneration %}") == "a<s>"
    assert render("{{ thinking }}", thinking=False) == "False"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '{0.__class__.__mro__}'.format('x') }}",
        "{{ ('{0.__class__}' | format(1)).__class__.__init__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ range(10000000) }}",
        "{{ strftime_now.__globals__[0] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.attribute }}",
        "{{ raise_exception('no') }}",
        "{% for %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_template_may_not_do_is_an_error_of_the_request(source):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError) as caught:
        render_chat(tokenizer_with(source), messages)
    assert caught.value.param in ("messages", "chat_template")
    assert messages == [{"role": "user", "content": "x"}]


def test_contradictions_are_refused():
    user = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError, match="cannot both be true"):
        render_chat(tokenizer_with(), user, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="changes the last message"):
        render_chat(tokenizer_with("nothing"), user, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="last message with text"):
        render_chat(tokenizer_with(), [{"role": "user"}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="last message with text"):
        render_chat(tokenizer_with(), [], add_generation_prompt=False, continue_final_message=True)


def test_objects_reach_a_template_as_their_type_name_only():
    shown = render_chat(tokenizer_with("{{ messages[0].content }} {{ thing }}"), [{"content": object()}], thing=b"x")
    assert shown == "<object> <bytes>"
