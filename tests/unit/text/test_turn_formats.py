"""Formats of tool calls and reasoning are found in chat templates, and the ids of their markers in the vocabulary."""

import pytest

from rustvllm.text.turn_formats import TurnFormats, find_turn_formats

FOUND = {
    "template_alpaca.jinja": None,
    "template_chatml.jinja": None,
    "tool_chat_template_hermes.jinja": "hermes",
    "tool_chat_template_llama3.1_json.jinja": "llama3_json",
    "tool_chat_template_mistral.jinja": "mistral",
}


class Vocabulary:
    """A vocabulary of a few words, of which the first are special tokens."""

    def __init__(self, *words, num_special=0):
        self.words = words
        self.num_special = num_special

    def convert_tokens_to_ids(self, token):
        return self.words.index(token) if token in self.words else None

    def decode(self, token_ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(self.words[token_id] for token_id in token_ids if token_id >= self.num_special)


@pytest.mark.parametrize("name", FOUND)
def test_templates_of_the_field(shared_dir, name):
    template = (shared_dir / "data" / "chat-templates" / name).read_text()
    formats = find_turn_formats(template, Vocabulary())
    assert (formats.tool_calls, formats.reasoning) == (FOUND[name], None)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ tools }}<tool_call><function=f><parameter=k></think>", "qwen3_coder", "qwen3"),
        ("{{ tools }}[TOOL_CALLS]f[ARGS]", "mistral_args", None),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "deepseek_v31", None),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", "pythonic", None),
        ("{{ tools }}<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name", "deepseek_v3", None),
        ("{{ tools }}<tool_call>f\n<arg_key>k</arg_key></think>", "glm45", "qwen3"),
        ('{{ tools }}<minimax:tool_call>\n<invoke name="f">', "minimax_m2", None),
        ("{{ tools }}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2", None),
        ("{{ tools }}<|tool_call_start|>[f()]<|tool_call_end|>", "lfm2", None),
        ("{{ tools }}<|action_start|><|plugin|>", "internlm", None),
        ("{{ tools }}<|tool_call|>[", "granite", None),
        ("{{ tools }}<tool_calls>[", "jamba", None),
        ("{{ tools }}functools[", "phi4_mini_json", None),
        ("{{ tools }}<｜tool▁call▁begin｜>' + tc['type'] + '<｜tool▁sep｜>' + name", "deepseek_v3", None),
        ("{{ tools }}</' + dsml_token + 'function_calls>", "deepseek_v32", None),
        ("List of tools: <|tool_list_start|>[{{ tools }}", "lfm2", None),
        ("{{ tools }}<tool_calls>\n{", None, None),
        ('{{ tools }}{"tool_name": "f", "parameters": {}}', None, None),
        ('{{ tools }}<function=example_function_name>{"k": 1}</function>', None, None),
        ("{{ tools }}{%- set begin = ns_token ~ '<tool_call>' %}", None, None),
        ("<tool_call> without a word of what may be called", None, None),
        ("<seed:think></seed:think>", None, "seed_oss"),
        ("{{ tools }}<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
        ("<|start|>assistant<|channel|>analysis<|message|>", None, "openai_gptoss"),
    ],
)
def test_signs_of_formats(template, calls, reasoning):
    formats = find_turn_formats(template, Vocabulary())
    assert (formats.tool_calls, formats.reasoning) == (calls, reasoning)
    assert find_turn_formats(template, Vocabulary(), "none", "none") == TurnFormats()
    named = find_turn_formats(template, Vocabulary(), "granite4", "glm45")
    assert (named.tool_calls, named.reasoning) == ("granite4", "glm45")
    assert find_turn_formats(template, None) == TurnFormats()


def test_markers_that_are_special_tokens_have_ids():
    template = "{{ tools }}[TOOL_CALLS] <think></think>"
    vocabulary = Vocabulary("[TOOL_CALLS]", "<think>", "</think>", num_special=1)
    formats = find_turn_formats(template, vocabulary)
    assert formats == TurnFormats(
        "mistral",
        "qwen3",
        call_ids="short",
        marker_ids={"[TOOL_CALLS]": 0},
        reasoning_ids=(1, 2),
        reasoning_end_ids=(2,),
    )
    assert find_turn_formats(template, Vocabulary("[TOOL_CALLS]", "<think>")).reasoning_ids is None
    # One that only stands before calls must be shown as well, to be found.
    llama = find_turn_formats("", Vocabulary("<|python_tag|>", num_special=1), "llama3_json")
    assert llama.marker_ids == {"<|python_tag|>": 0}


def test_marks_of_messages_have_ids_without_calls_too():
    words = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
    vocabulary = Vocabulary(*words, num_special=7)
    template = "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>"
    for calls in ("auto", "none"):
        formats = find_turn_formats(template, vocabulary, calls)
        assert formats.has_messages
        assert set(formats.marker_ids) == set(words)
        assert formats.reasoning_ids is None
    formats = find_turn_formats(template, vocabulary, "auto", "none")
    assert formats.has_messages
    assert "<|message|>" in formats.marker_ids
    assert not formats.continues_message("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert formats.continues_message("<|start|>assistant<|channel|>final<|message|>He")
    assert not TurnFormats().continues_message("He")
