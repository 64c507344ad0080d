"""Rows of the table of parameters: what the model is given, as text, token ids or a conversation."""

import pytest
from conformance_case import CHAT, COMPLETIONS, PROMPT, USER, VOCAB_SIZE, Case, bad, run

TURNS = "add_generation_prompt / continue_final_message"
TOOLS, TEMPLATE = "tools / tool_choice", "chat_template / chat_template_kwargs"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OPEN = [*USER, {"role": "assistant", "content": "Of course"}]
SHOW = "{% for m in messages %}[{{ m.role }}{{ m.name or '' }}:{{ m.content }}]{% endfor %}"
SHOW_TOOLS = SHOW + "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
IDS = [810, 774, 261, 446]
"""``PROMPT`` as token ids."""


def prompt_tokens(number):
    def check(answer):
        assert answer["usage"]["prompt_tokens"] == number

    return check


def prompt_is(*ids):
    def check(answer):
        shown = (answer if "prompt_token_ids" in answer else answer["choices"][0])["prompt_token_ids"]
        assert shown == list(ids)

    return check


def chat(content, role="user", **more):
    return {"messages": [{"role": role, "content": content, **more}]}


SHOWN = {"return_token_ids": True}
GREEDY = {"temperature": 0}

CASES = [
    Case("prompt", "valid", {**GREEDY, "prompt": PROMPT}, text=", a little girl", check=prompt_tokens(4)),
    Case("prompt", "valid", {**GREEDY, "prompt": [PROMPT, PROMPT]}, choices=2, check=prompt_tokens(8)),
    Case("prompt", "valid", {**GREEDY, "prompt": IDS}, text=", a little girl", check=prompt_tokens(4)),
    Case(
        "prompt",
        "valid",
        {**GREEDY, "prompt": [IDS, IDS[:1]]},
        choices=2,
        text=", a little girl",
        check=prompt_tokens(5),
    ),
    Case("prompt", "edge", {"prompt": [0]}, check=prompt_tokens(1)),
    Case("prompt", "edge", {"prompt": [VOCAB_SIZE - 1]}, check=prompt_tokens(1)),
    Case("prompt", "edge", {"prompt": "\u00e9\u6f22\U0001f600\x00"}),
    Case("prompt", "edge", {"prompt": ["a"] * 33, "max_tokens": 1}, choices=33, tokens=33),
    bad("prompt", {"prompt": ""}, "prompt", "empty"),
    bad("prompt", {"prompt": []}, "prompt", "empty"),
    bad("prompt", {"prompt": [[]]}, "prompt", "empty"),
    bad("prompt", {"prompt": ["a", ""]}, "prompt", "empty"),
    bad("prompt", {"prompt": None}, "prompt", "null"),
    bad("prompt", {"prompt": {"text": "a"}}, "prompt", "an object"),
    bad("prompt", {"prompt": ["a", [1]]}, "prompt", "mix"),
    bad("prompt", {"prompt": [VOCAB_SIZE]}, "prompt", "2048", "0 to 2047"),
    bad("prompt", {"prompt": [-1]}, "prompt", "-1", "0 to 2047"),
    bad("prompt", {"prompt": [[1], [10**30]]}, "prompt", "vocabulary (0 to 2047)"),
    bad("prompt", {"prompt": [1.5]}, "prompt", "a number"),
    bad("prompt", {"prompt": [True]}, "prompt", "a boolean"),
    Case("prompt_embeds", "edge", {"prompt_embeds": None}),
    bad("prompt_embeds", {"prompt_embeds": "AAAA"}, "prompt_embeds", "not supported yet"),
    Case("suffix", "edge", {"suffix": None}),
    Case("suffix", "edge", {"suffix": ""}),
    bad("suffix", {"suffix": " the end."}, "suffix", "not supported yet"),
    Case("truncate_prompt_tokens", "valid", {"truncate_prompt_tokens": 2, **SHOWN}, check=prompt_is(261, 446)),
    Case(
        "truncate_prompt_tokens",
        "valid",
        {"truncate_prompt_tokens": 3, "truncation_side": "left", **SHOWN},
        check=prompt_is(774, 261, 446),
    ),
    Case(
        "truncate_prompt_tokens",
        "edge",
        {"truncate_prompt_tokens": 1, "truncation_side": "right", **SHOWN},
        check=prompt_is(810),
    ),
    Case("truncate_prompt_tokens", "edge", {"truncate_prompt_tokens": 400, **SHOWN}, check=prompt_is(*IDS)),
    Case(
        "truncate_prompt_tokens",
        "edge",
        {"truncate_prompt_tokens": -1, "prompt": [5] * 600},
        check=prompt_tokens(511),
        tokens=1,
    ),
    Case("truncate_prompt_tokens", "edge", {"truncate_prompt_tokens": 1, **SHOWN}, CHAT, check=prompt_is(3)),
    bad("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1", "got 0"),
    bad("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
    bad("truncate_prompt_tokens", {"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "513", "512"),
    bad("truncate_prompt_tokens", {"truncation_side": "middle"}, "truncation_side", "'left' or 'right'", "'middle'"),
    Case("add_special_tokens", "valid", {"add_special_tokens": True, **SHOWN}, check=prompt_is(*IDS)),
    Case("add_special_tokens", "edge", {"add_special_tokens": False, **SHOWN}, check=prompt_is(*IDS)),
    Case("add_special_tokens", "edge", {"add_special_tokens": None}, CHAT),
    bad("add_special_tokens", {"add_special_tokens": "some"}, "add_special_tokens", "valid boolean"),
    Case(TURNS, "valid", {**chat("Hello"), **SHOWN}, CHAT, check=prompt_is(2, 614, 4, 3)),
    Case(TURNS, "valid", {**chat("Hello"), "add_generation_prompt": False, **SHOWN}, CHAT, check=prompt_is(2, 614, 4)),
    Case(TURNS, "valid", {"messages": OPEN, "continue_final_message": True, **GREEDY}, CHAT, text=". There was once"),
    Case(
        TURNS,
        "edge",
        {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": False, **GREEDY},
        CHAT,
        text=". There was once",
    ),
    Case(TURNS, "edge", {"messages": OPEN, "continue_final_message": False, "add_generation_prompt": True}, CHAT),
    bad(
        TURNS,
        {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "cannot both be true",
        url=CHAT,
    ),
    bad(TURNS, {"add_generation_prompt": 7}, "add_generation_prompt", "valid boolean", url=CHAT),
    Case("messages", "valid", {"messages": [{"role": "system", "content": "Be kind."}, *OPEN, *USER]}, CHAT),
    Case(
        "messages", "valid", {**chat([{"type": "text", "text": "Hello"}]), **SHOWN}, CHAT, check=prompt_is(2, 614, 4, 3)
    ),
    Case("messages", "valid", {**chat("a", name="Ann"), "chat_template": SHOW, "max_tokens": 1}, CHAT),
    Case("messages", "edge", {**chat(""), **SHOWN}, CHAT, check=prompt_is(2, 4, 3)),
    Case("messages", "edge", chat("Be kind.", role="developer"), CHAT),
    Case(
        "messages",
        "edge",
        {
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
                },
                *USER,
            ]
        },
        CHAT,
    ),
    bad("messages", {"messages": []}, "messages", "empty", url=CHAT),
    bad("messages", {"messages": None}, "messages", "valid array, got null", url=CHAT),
    bad("messages", {"messages": "Hello"}, "messages", "valid array", url=CHAT),
    bad("messages", {"messages": [{"content": "a"}]}, "messages", "messages[0].role is required", url=CHAT),
    bad(
        "messages",
        chat("a", role="wizard"),
        "messages",
        "The chat template refused",
        "not wizard",
        url=CHAT,
    ),
    bad("messages", chat("a", role="tool"), "messages", "the roles system, user and assistant, not tool", url=CHAT),
    Case("messages", "edge", {**chat(None), **GREEDY}, CHAT),
    Case("messages", "edge", {**chat([]), **GREEDY}, CHAT),
    bad(
        "messages",
        chat([{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages",
        "'image_url'",
        "text parts only",
        url=CHAT,
    ),
    bad("messages", chat([{"type": "input_audio"}]), "messages", "'input_audio'", "text parts only", url=CHAT),
    bad("messages", chat([{"type": "text"}]), "messages", "content[0]", "string", url=CHAT),
    bad("messages", chat("word " * 600), "input_tokens", "maximum context length is 512 tokens", url=CHAT),
    Case(TEMPLATE, "valid", {"chat_template": SHOW}, CHAT),
    Case(
        TEMPLATE,
        "valid",
        {**chat("Hello"), "chat_template": "{{ greeting }}", "chat_template_kwargs": {"greeting": PROMPT}, **SHOWN},
        CHAT,
        check=prompt_is(*IDS),
    ),
    Case(TEMPLATE, "edge", {"chat_template_kwargs": {}, "chat_template": None}, CHAT),
    bad(TEMPLATE, {"chat_template": "{% for %}"}, "chat_template", "not valid", url=CHAT),
    bad(TEMPLATE, {"chat_template": "{{ raise_exception('no') }}"}, "messages", "no", url=CHAT),
    bad(TEMPLATE, {"chat_template": "{{ ''.__class__.__mro__ }}"}, "messages", "__class__", url=CHAT),
    bad(TEMPLATE, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages", url=CHAT),
    bad(TEMPLATE, {"chat_template_kwargs": 3}, "chat_template_kwargs", "an object", url=CHAT),
    Case(TOOLS, "valid", {"tools": [TOOL]}, CHAT),
    Case(TOOLS, "valid", {"tools": [TOOL], "tool_choice": "none"}, CHAT),
    Case(TOOLS, "valid", {**chat("Hello"), "tools": [TOOL], "chat_template": SHOW_TOOLS}, CHAT),
    Case(TOOLS, "edge", {"tools": None, "tool_choice": None}, CHAT),
    bad(TOOLS, {"tools": []}, "tools", "empty list", url=CHAT),
    bad(TOOLS, {"tools": "look"}, "tools", "valid array", url=CHAT),
    bad(TOOLS, {"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "--tool-call-parser", url=CHAT),
    bad(TOOLS, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "--tool-call-parser", url=CHAT),
    bad(
        TOOLS,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        "tool_choice",
        "--tool-call-parser",
        url=CHAT,
    ),
    Case(
        "echo (chat)",
        "valid",
        {"messages": OPEN, "continue_final_message": True, "echo": True, **GREEDY},
        CHAT,
        text="Of course. There was once",
    ),
    Case("echo (chat)", "edge", {"echo": True, **chat("Hello"), **GREEDY}, CHAT, text="Hello! How are"),
    Case(
        "echo (chat)", "edge", {"echo": True, "messages": OPEN, "continue_final_message": True, "n": 2}, CHAT, choices=2
    ),
    bad("echo (chat)", {"echo": "loud"}, "echo", "valid boolean", url=CHAT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case, client):
    run(case, client)


def test_names_and_parts_reach_the_template(client):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ann"},
        {"role": "tool", "content": "3", "tool_call_id": "call"},
    ]
    body = {"messages": messages, "chat_template": SHOW, "return_token_ids": True, "max_tokens": 1}
    ids = client.post(CHAT, json=body).json()["prompt_token_ids"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "[userAnn:one\ntwo][tool:3]"}


def test_a_batch_is_numbered_prompt_by_prompt(client):
    """Choice prompt · n + i is sample i of that prompt."""
    body = {"max_tokens": 4, "temperature": 1.0, "seed": 9}
    together = client.post(COMPLETIONS, json={**body, "prompt": ["One", "Two"], "n": 2}).json()["choices"]
    alone = [
        choice["text"]
        for prompt in ("One", "Two")
        for choice in client.post(COMPLETIONS, json={**body, "prompt": prompt, "n": 2}).json()["choices"]
    ]
    assert [choice["text"] for choice in together] == alone
