"""Tool calls of the embedded model, which has learnt none: a call that must come is valid, or cut by ``length``."""

import json
import logging
import os
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from message_deltas import joined
from server_process import REAL, ServerProcess

logger = logging.getLogger(__name__)
NUM_QUESTIONS = int(os.environ.get("RUSTVLLM_TEST_FUNCTIONS", "30"))
CHAT = "/v1/chat/completions"
FORMATS = ["hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "pythonic", "deepseek_v31"]
MESSAGES = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def start(*argv):
    return ServerProcess([*REAL, "--port", "0", "--max-num-seqs", "8", "--max-model-len", "480", *argv])


@pytest.fixture(scope="module")
def server():
    with start("--tool-call-parser", "hermes", "--enable-auto-tool-choice") as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def is_weather(arguments):
    days, note = arguments["days"], arguments.get("note", "")
    return (
        arguments.keys() <= {"city", "days", "note"}
        and arguments["city"] in ("Paris", "Rome")
        and type(days) is int
        and 1 <= days <= 9
        and len(note) <= 5
    )


def body(**fields):
    return {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 220, "parallel_tool_calls": False, **fields}


def called(url, asked):
    """Calls and end of a whole answer."""
    response = httpx.post(url + CHAT, json=asked, timeout=60)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["message"].get("tool_calls", []), choice["finish_reason"], choice["message"]["content"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_what_must_be_called_is_called_with_valid_arguments(server, choice):
    num_whole = 0
    for seed in range(4):
        calls, end, content = called(server.url, body(tool_choice=choice, seed=seed))
        assert content is None
        if end == "length":
            continue
        assert end == ("tool_calls" if choice == "required" else "stop")
        [call] = calls
        assert call["function"]["name"] == "get_weather"
        assert is_weather(json.loads(call["function"]["arguments"]))
        num_whole += 1
    assert num_whole > 0


def test_several_samples_are_read_each_by_itself(server):
    response = httpx.post(server.url + CHAT, json=body(tool_choice="required", n=3, seed=1), timeout=60).json()
    calls = [call for choice in response["choices"] for call in choice["message"].get("tool_calls", [])]
    assert len(response["choices"]) == 3
    assert len({call["id"] for call in calls}) == len(calls) > 0
    assert any(choice["finish_reason"] == "tool_calls" for choice in response["choices"])


def test_a_free_choice_of_a_model_that_calls_nothing_is_text(server):
    strict = [{"type": "function", "function": {"name": "f", "parameters": WEATHER, "strict": True}}]
    asked = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    plain = called(server.url, asked)
    assert plain[0] == []
    assert len(plain[2]) > 10
    assert called(server.url, asked | {"tools": TOOLS}) == plain
    assert called(server.url, asked | {"tools": strict}) == plain, "a grammar that allows all text changes none"


def test_a_schema_that_no_text_obeys_is_refused_under_tools(server):
    never = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": never}}]
    for stream in (False, True):
        response = httpx.post(server.url + CHAT, json=body(tools=tools, tool_choice="required", stream=stream))
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "tools"


def test_the_clients_stream_of_a_call_is_its_whole_answer(client):
    asked = {"model": "rustvllm-tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 3}
    asked |= {"max_tokens": 220, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert len(pieces) > 3
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    functions = [choice.message.tool_calls[0].function for choice in (whole, streamed)]
    assert functions[0].name == functions[1].name == "get_weather"
    assert functions[0].arguments == functions[1].arguments


def test_the_clients_stream_of_a_call_in_a_response_is_its_whole_answer(client):
    tool = {"type": "function", **TOOLS[0]["function"], "strict": True}
    asked = {"model": "rustvllm-tiny", "input": MESSAGES, "tools": [tool], "tool_choice": "required"}
    asked |= {"max_output_tokens": 220, "parallel_tool_calls": False, "extra_body": {"seed": 3}}
    [whole] = client.responses.create(**asked).output
    with client.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        [streamed] = stream.get_final_response().output
    assert len(pieces) > 3
    assert "".join(pieces) == streamed.arguments == whole.arguments
    assert whole.name == streamed.name == "get_weather"
    assert is_weather(json.loads(whole.arguments))


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {}, {"tool_choice": "required", "n": 2}])
def test_streams_of_the_core_say_what_those_with_token_ids_say(server, fields):
    """The core renders the first kind, Python the second; both may wait for several tokens."""
    said = []
    for more in (
        {},
        {"return_token_ids": True},
        {"stream_interval": 9},
        {"return_token_ids": True, "stream_interval": 9},
    ):
        asked = body(seed=5, stream=True, stream_options={"include_usage": True}, max_tokens=120, **fields, **more)
        lines = httpx.post(server.url + CHAT, json=asked, timeout=60).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        usage = events.pop()["usage"]
        choices = {choice["index"] for event in events for choice in event["choices"]}
        apart = [
            [{"choices": [choice for choice in event["choices"] if choice["index"] == index]} for event in events]
            for index in sorted(choices)
        ]
        said.append(([joined(of_choice) for of_choice in apart], usage["completion_tokens"]))
    assert all(one == said[0] for one in said)
    messages = [message for message, _ in said[0][0]]
    assert len(messages) == fields.get("n", 1)
    assert all(message.get("tool_calls") if "tool_choice" in fields else message["content"] for message in messages)


def test_the_client_parses_strict_calls(client):
    strict = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}]
    parsed = client.chat.completions.parse(
        model="rustvllm-tiny", messages=MESSAGES, tools=strict, tool_choice=NAMED, max_tokens=220, seed=3
    )
    assert is_weather(parsed.choices[0].message.tool_calls[0].function.parsed_arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_obeys(name):
    with start("--tool-call-parser", name) as process:
        url = process.wait_until_ready()
        num_whole = 0
        for seed in range(6):
            calls, end, _ = called(url, body(tool_choice="required", seed=seed, parallel_tool_calls=True))
            whole = calls if end == "tool_calls" else calls[:-1]
            assert end in ("tool_calls", "length")
            assert all(is_weather(json.loads(call["function"]["arguments"])) for call in whole)
            num_whole += len(whole)
        assert num_whole > 0


SHORT = {
    "object": {"additionalProperties": False},
    "array": {"maxItems": 2},
    "string": {"maxLength": 8},
    "integer": {"minimum": 0, "maximum": 999},
}
"""The model does not know when to end."""
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def as_schema(value):
    """A schema of the data, which has Python's names of types, in JSON's."""
    if isinstance(value, list):
        return [as_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    fixed = {key: as_schema(item) for key, item in value.items() if key not in ("default", "format", "optional")}
    if not isinstance(kind, str):
        return fixed
    kind = TYPES.get(kind, kind)
    # Some functions of the data require members that they do not describe, and have choices that are long.
    is_closed = set(fixed.get("required", ())) <= set(fixed.get("properties", ()))
    is_open = "enum" in fixed or (kind == "object" and not is_closed)
    short = {} if is_open else SHORT.get(kind, {})
    return {**short, **fixed, "type": kind}


def is_of(schema, value):
    """Whether a value has the types, members and choices that a schema of the data names."""
    checks = {
        "object": lambda: (
            isinstance(value, dict)
            and all(name in value for name in schema.get("required", ()))
            and all(is_of(part, value[name]) for name, part in schema.get("properties", {}).items() if name in value)
        ),
        "array": lambda: isinstance(value, list) and all(is_of(schema.get("items", {}), item) for item in value),
        "string": lambda: isinstance(value, str),
        "boolean": lambda: isinstance(value, bool),
        "integer": lambda: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
        "number": lambda: isinstance(value, int | float) and not isinstance(value, bool),
    }
    return checks.get(schema.get("type"), lambda: True)() and value in schema.get("enum", [value])


@pytest.mark.slow
def test_functions_of_the_field_are_called_with_valid_arguments(server, shared_dir):
    folder = shared_dir / "data" / "bfcl"
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    seed = random.randrange(1 << 32)
    chosen = random.Random(seed).sample(lines, min(NUM_QUESTIONS, len(lines)))

    def ask(number):
        """Whether the call of a question, that must be some or that must be of the first function, is whole."""
        functions = json.loads(chosen[number // 2])["function"]
        schemas = {function["name"]: as_schema(function["parameters"]) for function in functions}
        tools = [{"type": "function", "function": {"name": name, "parameters": it}} for name, it in schemas.items()]
        named = {"type": "function", "function": {"name": functions[0]["name"]}}
        choice = ["required", named][number % 2]
        calls, end, _ = called(server.url, body(tools=tools, tool_choice=choice, seed=number, max_tokens=400))
        if end == "length":
            return False
        assert end == ["tool_calls", "stop"][number % 2], (seed, chosen[number // 2])
        [call] = calls
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert number % 2 == 0 or name == functions[0]["name"]
        assert is_of(schemas[name], arguments), (seed, chosen[number // 2], arguments)
        return True

    with ThreadPoolExecutor(8) as pool:
        num_whole = sum(pool.map(ask, range(2 * len(chosen))))
    logger.info("%d of %d calls are whole and valid, the others were cut by length", num_whole, 2 * len(chosen))
    assert num_whole > len(chosen) // 3
