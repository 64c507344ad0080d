"""What `openai_differences.py` asks: requests whose answers show all fields, and a value for each field of requests."""

from typing import Any

BASES: dict[str, dict[str, Any]] = {
    "/completions": {"prompt": "Once upon a time"},
    "/chat/completions": {"messages": [{"role": "user", "content": "Once upon a time"}]},
    "/responses": {"input": "Once upon a time"},
}
"""The least that each endpoint needs in addition to a model."""

LENGTHS = {"/completions": "max_tokens", "/chat/completions": "max_tokens", "/responses": "max_output_tokens"}
"""Which field says how long an answer may be."""

OPENAI_SCHEMAS = {
    "/completions": "CreateCompletionRequest",
    "/chat/completions": "CreateChatCompletionRequest",
    "/responses": "CreateResponse",
}
OUR_SCHEMAS = {
    "/completions": "CompletionRequest",
    "/chat/completions": "ChatCompletionRequest",
    "/responses": "ResponsesRequest",
}
"""What a request's schema is called in each document."""

_RESPONSE_TOOLS = [{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}]
_STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_OURS: dict[str, Any] = {"timings": True, "return_token_ids": True, "prompt_logprobs": 1}
_OURS_STREAMED: dict[str, Any] = {
    "timings_per_token": True,
    "return_progress": True,
    "return_token_ids": True,
    **_STREAM,
}
ANSWERS: list[tuple[str, str, dict[str, Any]]] = [
    ("/completions", "completions", {}),
    ("/completions", "completions", {"n": 2, "max_tokens": 8, "stop": ["e"]}),
    ("/completions", "completions", {"logprobs": 2}),
    ("/completions", "completions", {"echo": True, "logprobs": 2}),
    ("/completions", "completions", _OURS),
    ("/completions", "streamed completions", {"stream": True, "logprobs": 1}),
    ("/completions", "streamed completions", {"echo": True, "logprobs": 1, **_STREAM}),
    ("/completions", "streamed completions", _OURS_STREAMED),
    ("/chat/completions", "chat", {}),
    ("/chat/completions", "chat", {"n": 2, "max_tokens": 8, "stop": ["e"]}),
    ("/chat/completions", "chat", {"logprobs": True, "top_logprobs": 2}),
    ("/chat/completions", "chat", _OURS),
    ("/chat/completions", "streamed chat", {"stream": True}),
    ("/chat/completions", "streamed chat", {"logprobs": True, "top_logprobs": 2, **_STREAM}),
    ("/chat/completions", "streamed chat", _OURS_STREAMED),
    ("/responses", "response", {}),
    (
        "/responses",
        "response",
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}, "metadata": {"a": "b"}},
    ),
    ("/responses", "response", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("/responses", "response", {"tools": _RESPONSE_TOOLS, "reasoning": {"effort": "low"}}),
    ("/responses", "streamed response", {"stream": True}),
    ("/responses", "streamed response", {"stream": True, "max_output_tokens": 500, "tools": _RESPONSE_TOOLS}),
    (
        "/responses",
        "streamed response",
        {"stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    ("/models", "models", {}),
    ("/models/{model}", "models", {}),
]
"""Path, name in the list of differences, and fields in addition to the base."""

_FUNCTION = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
FIELDS: dict[str, dict[str, Any]] = {
    name: fields if isinstance(fields, dict) else {name: fields}
    for name, fields in {
        "audio": {"audio": {"voice": "alloy", "format": "wav"}, "modalities": ["text", "audio"]},
        "best_of": 2,
        "echo": True,
        "frequency_penalty": 0.5,
        "function_call": {"function_call": "auto", "functions": [_FUNCTION]},
        "functions": [_FUNCTION],
        "logit_bias": {"logit_bias": {"5": 1}},
        "logprobs": 1,
        "max_completion_tokens": 2,
        "max_tokens": 2,
        "metadata": {"metadata": {"a": "b"}},
        "modalities": ["text", "audio"],
        "moderation": {"moderation": {"model": "omni-moderation-latest"}},
        "n": 2,
        "parallel_tool_calls": {"parallel_tool_calls": False, "tools": _TOOLS},
        "prediction": {"prediction": {"type": "content", "content": "Once"}},
        "presence_penalty": 0.5,
        "prompt_cache_key": "a",
        "prompt_cache_options": {"prompt_cache_options": {"mode": "implicit"}},
        "prompt_cache_retention": "24h",
        "reasoning_effort": "low",
        "response_format": {"response_format": {"type": "json_object"}},
        "safety_identifier": "a",
        "seed": 1,
        "service_tier": "auto",
        "stop": ["a"],
        "store": True,
        "stream": True,
        "stream_options": _STREAM,
        "suffix": " the end",
        "temperature": 0.5,
        "tool_choice": {"tool_choice": "auto", "tools": _TOOLS},
        "tools": _TOOLS,
        "top_logprobs": {"top_logprobs": 2, "logprobs": True},
        "top_p": 0.5,
        "user": "a",
        "verbosity": "low",
        "web_search_options": {"web_search_options": {"search_context_size": "low"}},
    }.items()
}
"""For each field of OpenAI's requests a value that asks for something, with the other fields that it needs."""

RESPONSE_FIELDS: dict[str, dict[str, Any]] = {
    name: fields if isinstance(fields, dict) else {name: fields}
    for name, fields in {
        "background": True,
        "context_management": [{"type": "compaction"}],
        "conversation": "conv_1",
        "include": ["message.output_text.logprobs"],
        "instructions": "Be brief.",
        "max_output_tokens": 16,
        "max_tool_calls": 1,
        "parallel_tool_calls": {"parallel_tool_calls": False, "tools": _RESPONSE_TOOLS},
        "previous_response_id": "resp_1",
        "prompt": {"prompt": {"id": "pmpt_1"}},
        "reasoning": {"reasoning": {"effort": "low"}},
        "stream_options": {"stream": True, "stream_options": {"include_obfuscation": False}},
        "text": {"text": {"format": {"type": "json_object"}}},
        "tool_choice": {"tool_choice": "none", "tools": _RESPONSE_TOOLS},
        "tools": [_RESPONSE_TOOLS[0]],
        "top_logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        "truncation": "auto",
    }.items()
}
"""The same for a response, where they differ."""


def probe(path: str, name: str) -> dict[str, Any] | None:
    """A field of the requests of a path, with the other fields that it needs; None: there is no value for it."""
    return RESPONSE_FIELDS.get(name, FIELDS.get(name)) if path == "/responses" else FIELDS.get(name)
