"""What a body of Anthropic's Messages API asks for, as the chat request that it becomes, and what is refused."""

import json

import pytest

from rustvllm.exceptions import InvalidRequestError
from rustvllm.server.answers.message import Ending, message_content
from rustvllm.server.endpoints.message_blocks import chat_request
from rustvllm.server.schemas.messages import MessagesRequest

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "ö"}}
CLEAR = {"type": "clear_thinking_20251015"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "QUJD"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "a fox"}


def text(said):
    return {"type": "text", "text": said}


def thought(said):
    return {"type": "thinking", "thinking": said, "signature": ""}


def chat(*messages, **fields):
    return chat_request(MessagesRequest.model_validate({"messages": messages, "max_tokens": 9, **fields}))


def messages_of(*messages, **fields):
    return [message.model_dump(exclude_unset=True) for message in chat(*messages, **fields).messages]


def test_blocks_become_texts_calls_and_results():
    seen = {**thought("Let me see."), "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    made = messages_of(
        {"role": "user", "content": [text("What"), text("is there?")]},
        {"role": "assistant", "content": [hidden, seen, text("I look."), CALL]},
        {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "call_2", "content": [text("b")]}, text("So?")]},
        system=[text("Be brief."), text("Be kind.")],
    )
    assert made == [
        {"role": "system", "content": [text("Be brief."), text("Be kind.")]},
        {"role": "user", "content": [text("What"), text("is there?")]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Let me see.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "ö"}}}
            ],
        },
        {"role": "tool", "content": "a fox", "tool_call_id": "call_1"},
        {"role": "tool", "content": "b", "tool_call_id": "call_2"},
        {"role": "user", "content": "So?"},
    ]


def test_thoughts_of_neighbours_are_all_kept():
    made = messages_of(
        USER,
        {"role": "assistant", "content": [thought("Hm."), text("I look.")]},
        {"role": "assistant", "content": [thought("Yes."), CALL]},
        {"role": "user", "content": [RESULT]},
    )
    assert [message.get("reasoning") for message in made] == [None, "Hm.\nYes.", None]
    assert made[1]["content"] == [text("I look.")]


@pytest.mark.parametrize(
    ("management", "kept"),
    [
        (None, "abcd"),
        ({}, "abcd"),
        ({"edits": []}, "abcd"),
        ({"edits": [{**CLEAR, "keep": "all"}]}, "abcd"),
        ({"edits": [{**CLEAR, "keep": {"type": "all"}}]}, "abcd"),
        ({"edits": [CLEAR]}, "d"),
        ({"edits": [{**CLEAR, "keep": None}]}, "d"),
        ({"edits": [{**CLEAR, "keep": {"type": "thinking_turns", "value": 2}}]}, "bcd"),
        ({"edits": [{**CLEAR, "keep": {"type": "thinking_turns", "value": 9}}]}, "abcd"),
    ],
)
def test_thoughts_that_are_to_be_cleared(management, kept):
    """Those of whole turns, the second of which has two messages, between which a tool ran."""
    made = messages_of(
        USER,
        {"role": "assistant", "content": [thought("a"), text("Hi.")]},
        USER,
        {"role": "assistant", "content": [thought("b"), CALL]},
        {"role": "user", "content": [RESULT]},
        {"role": "assistant", "content": [thought("c"), text("A fox.")]},
        USER,
        {"role": "assistant", "content": "Hi."},
        USER,
        {"role": "assistant", "content": [thought("d"), text("Hi.")]},
        USER,
        context_management=management,
    )
    assert "".join(message["reasoning"] for message in made if "reasoning" in message) == kept
    assert [message["role"] for message in made].count("assistant") == 5


def test_what_the_system_says_stays_in_its_place():
    made = messages_of(
        {"role": "system", "content": [text("Be kind.")]},
        USER,
        {"role": "system", "content": "Now be brief."},
        {"role": "system", "content": []},
        USER,
        system="Be polite.",
    )
    assert [(message["role"], message["content"]) for message in made] == [
        ("system", [text("Be polite."), text("Be kind.")]),
        ("user", "Hi"),
        ("system", "Now be brief."),
        ("user", "Hi"),
    ]


def test_images_stay_in_their_places():
    by_url = {"type": "image", "source": {"type": "url", "url": "data:image/png;base64,REVG"}}
    made = chat(
        {"role": "user", "content": [text("What"), IMAGE, text("is this?")]},
        {"role": "user", "content": [by_url, {**RESULT, "content": [text("a"), by_url]}]},
    )
    user, tool, more = [message.content for message in made.messages]
    assert [part["type"] for part in user] == ["text", "image_url", "text"]
    image = user[1]["image_url"]
    assert image.url == IMAGE["source"]["data"]
    assert image.before + image.url == "data:image/gif;base64,QUJD"
    assert image.where == "messages[0].content[1].source.data"
    assert tool[1]["image_url"].where == "messages[1].content[1].content[1].source.url"
    assert [part["image_url"].url for part in more] == ["data:image/png;base64,REVG"]


def test_turns_of_the_same_role_are_one_turn_and_results_are_not():
    made = messages_of(
        USER,
        {"role": "user", "content": [text("there")]},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [RESULT]},
        {"role": "user", "content": [{**RESULT, "tool_use_id": "call_2", "content": None}]},
    )
    assert [message["role"] for message in made] == ["user", "assistant", "tool", "tool"]
    assert made[0]["content"] == [text("Hi"), text("there")]
    assert made[1]["content"] == [text("A")]
    assert [call["id"] for call in made[1]["tool_calls"]] == ["call_1"]
    assert made[3] == {"role": "tool", "content": "", "tool_call_id": "call_2"}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such place", "Error: no such place"),
        ([text("no"), text("such place")], [text("Error: no"), text("such place")]),
        ([text("")], "Error"),
        (None, "Error"),
        ("", "Error"),
    ],
)
def test_results_that_are_errors_say_so(content, shown):
    """No template asks for ``is_error``: what the model reads of it is the text."""
    blocks = [{**RESULT, "content": content, "is_error": is_error} for is_error in (True, False, None)]
    failed, fine, unsaid = messages_of({"role": "user", "content": blocks})
    assert failed == {"role": "tool", "content": shown, "tool_call_id": "call_1"}
    assert fine == unsaid == messages_of({"role": "user", "content": [{**RESULT, "content": content}]})[0]
    assert fine["content"] != shown


def test_an_error_with_an_image_has_its_sign_before_it():
    [failed] = chat({"role": "user", "content": [{**RESULT, "content": [IMAGE], "is_error": True}]}).messages
    assert failed.content[0] == text("Error")
    assert [part["type"] for part in failed.content] == ["text", "image_url"]


def test_an_answer_that_has_begun_is_gone_on_with():
    begun = chat(USER, {"role": "assistant", "content": "He"})
    assert (begun.add_generation_prompt, begun.continue_final_message) == (False, True)
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    thinking = chat(USER, {"role": "assistant", "content": [thought]})
    assert (thinking.add_generation_prompt, thinking.continue_final_message) == (False, True)
    fresh = chat(USER)
    assert (fresh.add_generation_prompt, fresh.continue_final_message) == (None, None)


@pytest.mark.parametrize("content", [[CALL], [text("I look."), CALL]])
def test_a_call_that_ends_a_conversation_is_not_cut_out_of_it(content):
    """To go on with a message is to cut what the template writes behind its text: that would be the call."""
    made = chat(USER, {"role": "assistant", "content": content})
    assert made.messages[-1].tool_calls
    assert (made.add_generation_prompt, made.continue_final_message) == (None, None)


@pytest.mark.parametrize("content", ["", [], [text("")], [{"type": "redacted_thinking", "data": "x"}]])
def test_an_answer_that_has_not_begun_is_left_out(content):
    made = chat(USER, {"role": "assistant", "content": content})
    assert [message.role for message in made.messages] == ["user"]
    assert (made.add_generation_prompt, made.continue_final_message) == (None, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stream": True}, {"temperature": 0.5, "top_k": 3}),
        ({"metadata": {"user_id": "ann"}}, {"user": "ann"}),
        ({"tools": [{"name": "f"}]}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (
            {"tools": [{"type": "custom", "name": "f", "description": "d", "input_schema": {}, "strict": True}]},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "description": "d", "strict": True, "parameters": {}},
                    }
                ]
            },
        ),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": None}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False},
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, {"thinking_token_budget": 50}),
        ({"thinking": {"type": "disabled"}}, {"include_reasoning": False}),
        ({"thinking": {"type": "adaptive"}}, {"thinking_token_budget": None, "include_reasoning": None}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"include_reasoning": None}),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            {"include_reasoning": False, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}},
            {"include_reasoning": False, "thinking_token_budget": 5},
        ),
        (
            {"thinking": {"type": "between_tools"}},
            {"include_reasoning": False, "chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        (
            {"thinking": {"type": "between_tools"}, "tools": [{"name": "f", "input_schema": {}}]},
            {"include_reasoning": None, "chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": 3}},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": 3}},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_fields_have_their_counterparts(fields, expected):
    made = chat(USER, **fields)
    assert {name: getattr(made, name) for name in expected} == expected
    assert made.max_tokens == 9


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": -1}, "max_tokens", "at least 1, got -1"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages", "has the type None"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages", "of the role 'user' this server takes"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages", "'tool_result'"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages", r"\[1\].content\[0\].text"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": 5}]}]},
            "messages",
            r"content\[0\].content must be text",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]},
            "messages",
            r"content\[0\].content\[0\].source must be an object",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "document"}]}]}]},
            "messages",
            r"content\[0\].content\[0\] must be a block of the type 'text' or 'image', got 'document'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [IMAGE]}]},
            "messages",
            "'image'; in a message of the role 'as",
        ),
        ({"system": [IMAGE]}, "system", r"system\[0\] must be a block of the type 'text', got 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages", "tool_use_id must be"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "is_error": "yes"}]}]},
            "messages",
            r"messages\[0\].content\[0\].is_error must be true or false, got 'yes'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**CALL, "input": "{}"}]}]},
            "messages",
            "input must be an ob",
        ),
        ({"system": [{"type": "image"}]}, "system", r"system\[0\] must be a block"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools", "tools.0..type is 'bash_20250124'"),
        ({"tools": [{"name": "f", "description": ["a"]}]}, "tools", r"tools\[0\].description must be a string"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}},
            "tool_choice",
            "disable_parallel_tool_use must be true or false, got 'no'",
        ),
        ({"tool_choice": {}}, "tool_choice", "must be auto, any, tool"),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice", "must be auto, any, tool"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking", "budget_tokens must be a whole number"),
        ({"thinking": {"type": "deep"}}, "thinking", "adaptive, between_tools or disabled, got 'deep'"),
        ({"thinking": {"type": "adaptive", "display": "full"}}, "thinking", "summarized or omitted, got 'full'"),
        ({"output_config": {"effort": "most"}}, "output_config", "effort must be one of none, minimal"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config", "must have the type 'json_schema'"),
        ({"metadata": {"user_id": 5}}, "metadata", "user_id must be a string"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported yet; this server calls no other"),
        ({"context_management": {"edits": 5}}, "context_management", "edits must be a list, got 5"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
            r"edits\[0\].type must be clear_thinking_20251015, got 'clear_tool_uses_20250919'",
        ),
        (
            {"context_management": {"edits": [{**CLEAR, "keep": "all"}, {**CLEAR, "keep": {"value": 2}}]}},
            "context_management",
            r"edits\[1\].keep must be \"all\" or",
        ),
        (
            {"context_management": {"edits": [{**CLEAR, "keep": {"type": "thinking_turns", "value": 0}}]}},
            "context_management",
            "with N of at least 1, got {'type': 'thinking_turns', 'value': 0}",
        ),
        (
            {"messages": [{"role": "system", "content": [IMAGE]}]},
            "messages",
            "'image'; in a message of the role 'system' this server takes blocks of the type text",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else str(value)[:20],
)
def test_what_cannot_be_done_is_refused_in_the_words_of_the_body(fields, param, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        chat(**{"messages": [USER], **fields}) if "messages" not in fields else chat(
            *fields["messages"], **{name: value for name, value in fields.items() if name != "messages"}
        )
    assert caught.value.param == param


def test_a_whole_answer_has_its_blocks_in_the_order_of_the_stream():
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    deltas = [
        {"reasoning": "I "},
        {"reasoning": "see."},
        {"content": "A"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{**call, "index": 1, "id": "d"}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"cut": '}}]},
        {"content": "B"},
    ]
    assert message_content(deltas) == [
        {"type": "thinking", "thinking": "I see.", "signature": ""},
        {"type": "text", "text": "A", "citations": None},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "d", "name": "f", "input": {}},
        {"type": "text", "text": "B", "citations": None},
    ]
    assert message_content([{"content": ""}]) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": NaN, "b": [-Infinity, 1e999, 1.5]}', {"a": None, "b": [None, None, 1.5]}),
        ('{"a": "\\ud800", "\\uDC00": "\\ud83d\\ude00"}', {"a": "\ufffd", "\ufffd": "\U0001f600"}),
        ('{"a": "\\\\ud800"}', {"a": "\\ud800"}),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", {}),
        ('{"a": ' + "[" * 100_000, {}),
        ('{"a": [' + "[]," * 300 + "[]]}", {"a": [[]] * 301}),
        ('{"a": ' + "9" * 5000 + "}", {}),
        ("[1]", {}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_whatever_a_model_writes_as_arguments_an_answer_can_be_sent(arguments, expected):
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [block] = message_content([{"tool_calls": [call]}])
    assert block["input"] == expected
    json.dumps(block, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("ending", "reason", "sequence"),
    [
        (Ending("stop", None, has_calls=False, is_as_long_as_asked=True), "end_turn", None),
        (Ending("stop", 5, has_calls=False, is_as_long_as_asked=False), "end_turn", None),
        (Ending("stop", "x", has_calls=False, is_as_long_as_asked=False), "stop_sequence", "x"),
        (Ending("stop", "x", has_calls=True, is_as_long_as_asked=False), "stop_sequence", "x"),
        (Ending("stop", None, has_calls=True, is_as_long_as_asked=False), "tool_use", None),
        (Ending("length", None, has_calls=True, is_as_long_as_asked=True), "max_tokens", None),
        (Ending("length", None, has_calls=False, is_as_long_as_asked=False), "model_context_window_exceeded", None),
        (Ending("abort", None, has_calls=True, is_as_long_as_asked=False), None, None),
    ],
    ids=lambda value: value.finish_reason if isinstance(value, Ending) else str(value),
)
def test_why_a_message_ended(ending, reason, sequence):
    assert ending.as_dict() == {"stop_reason": reason, "stop_sequence": sequence}
