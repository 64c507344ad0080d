"""Thoughts that tokens mark, over HTTP: budgets, answers that are held to a schema behind them, and what usage says."""

import json
import shutil
from pathlib import Path

import httpx
import pytest
from response_stream import check_whole, events_of, joined, without_ids
from server_process import REAL, ServerProcess

import rustvllm

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["bird", "beast"]}, "note": {"const": "<think>"}},
    "required": ["kind", "note"],
    "additionalProperties": False,
}
WANTED = {"json": SCHEMA, "disable_any_whitespace": True}
NEVER_CLOSES = {"2": -100}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TEMPLATE = (
    "{{ tools if tools else '' }}<|user|>{{ messages[-1].content }}<|end|><|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The embedded model, two of whose special tokens mark thoughts, in which its answers begin."""
    folder = tmp_path_factory.mktemp("thinking")
    for file in (Path(rustvllm.__file__).parent / "assets" / "tiny").iterdir():
        shutil.copyfile(file, folder / file.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        text = text.replace("<|system|>", "<think>").replace("<|user|>", "</think>")
        (folder / name).write_text(text)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    argv = [*REAL, str(folder), "--port", "0", "--max-num-seqs", "8", "--tool-call-parser", "hermes"]
    with ServerProcess([*argv, "--default-thinking-token-budget", "7"]) as process:
        process.wait_until_ready()
        yield process


def asked(server, status=200, **fields):
    body = {
        "messages": [{"role": "user", "content": "A fox?"}],
        "max_tokens": 60,
        "seed": 1,
        "logit_bias": NEVER_CLOSES,
        **fields,
    }
    response = httpx.post(server.url + CHAT, json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


def num_thought(answer):
    return answer["usage"]["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("budget", [0, 1, 12])
def test_thoughts_have_as_many_tokens_as_their_budget(server, budget):
    answer = asked(server, thinking_token_budget=budget, return_token_ids=True, ignore_eos=True)
    [choice] = answer["choices"]
    assert num_thought(answer) == budget
    assert choice["token_ids"].index(2) == budget
    assert (choice["message"]["reasoning"] is not None) == (budget > 0)
    assert "think>" not in choice["message"]["content"]


def test_the_servers_budget_holds_where_a_request_has_none(server):
    assert num_thought(asked(server, ignore_eos=True)) == 7
    assert num_thought(asked(server, thinking_token_budget=-1, max_tokens=30, ignore_eos=True)) == 30


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "thinking_token_budget", "cannot be used with use_beam_search: it is 7, send -1"),
        ({"thinking_token_budget": 3}, "thinking_token_budget", "it is 3, send -1"),
        ({"structured_outputs": WANTED}, "structured_outputs", "structured_outputs cannot be used"),
        ({"tools": [TOOL]}, "tools", "tools cannot be used with use_beam_search: leave it out"),
        ({"tools": [TOOL], "tool_choice": "required", "thinking_token_budget": -1}, "tools", "tools cannot be used"),
    ],
)
def test_a_search_is_refused_by_the_name_of_what_it_has_no_use_for(server, fields, param, says):
    error = asked(server, 400, use_beam_search=True, n=2, logit_bias=None, **fields)["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert len(error["message"]) < 120


def test_an_answer_of_a_schema_comes_behind_thoughts_streamed_and_whole(server):
    fields = {"structured_outputs": WANTED, "thinking_token_budget": 5, "max_tokens": 120}
    answer = asked(server, **fields)
    message = answer["choices"][0]["message"]
    assert num_thought(answer) == 5
    assert message["reasoning"]
    assert json.loads(message["content"])["note"] == "<think>", "a marker in a text is text"
    said = {"content": "", "reasoning": ""}
    body = {"messages": [{"role": "user", "content": "A fox?"}], "seed": 1, "logit_bias": NEVER_CLOSES, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json={**body, **fields}, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    for name in said:
                        said[name] += choice["delta"].get(name) or ""
    assert said == {name: message[name] for name in said}


def test_a_response_has_thoughts_as_an_item_and_log_probabilities_of_its_text_alone(server):
    body = {
        "input": "A fox?",
        "seed": 1,
        "logit_bias": NEVER_CLOSES,
        "thinking_token_budget": 5,
        "max_output_tokens": 20,
        "ignore_eos": True,
        "include": ["message.output_text.logprobs"],
    }
    whole = httpx.post(server.url + RESPONSES, json=body, timeout=60)
    answer = whole.json()
    check_whole(answer)
    streamed = joined(events_of(httpx.post(server.url + RESPONSES, json={**body, "stream": True}, timeout=60)))
    thought, message = answer["output"]
    assert (thought["type"], message["type"]) == ("reasoning", "message")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    [part] = message["content"]
    assert len(part["logprobs"]) == 20 - 5 - 1, "five tokens of thoughts, and the one that ends them"
    shown = b"".join(bytes(place["bytes"]) for place in part["logprobs"]).decode(errors="ignore")
    assert shown.strip().startswith(part["text"].strip()[:10])
    assert without_ids(streamed) == without_ids(answer)


def test_a_schema_holds_from_the_first_token_where_the_prompt_has_ended_thoughts(server):
    answer = asked(server, structured_outputs=WANTED, reasoning_effort="none", max_tokens=120)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] is None
    assert json.loads(message["content"])["kind"] in ("bird", "beast")


def test_a_call_that_must_come_comes_behind_thoughts(server):
    answer = asked(server, tools=[TOOL], tool_choice="required", thinking_token_budget=3, max_tokens=200)
    message = answer["choices"][0]["message"]
    assert num_thought(answer) == 3
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["note"] == "<think>"


@pytest.mark.parametrize("budget", [-2, 2**31, 1.5, "many", [1]])
def test_a_budget_that_is_none_is_refused_by_name(server, budget):
    error = asked(server, status=400, thinking_token_budget=budget)["error"]
    assert error["param"] == "thinking_token_budget"
    assert num_thought(asked(server, thinking_token_budget=2)) == 2


def test_messages_think_as_far_as_their_budget(server):
    body = {"messages": [{"role": "user", "content": "A fox?"}], "max_tokens": 40, "seed": 1}
    kinds = []
    for thinking in ({"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}):
        answer = httpx.post(server.url + "/v1/messages", json={**body, "thinking": thinking}, timeout=60).json()
        kinds.append([block["type"] for block in answer["content"]])
        lines = httpx.post(
            server.url + "/v1/messages", json={**body, "thinking": thinking, "stream": True}, timeout=60
        ).text
        events = [json.loads(line.removeprefix("data: ")) for line in lines.splitlines() if line.startswith("data")]
        said = {"thinking": "", "text": ""}
        for event in events:
            if event["type"] == "content_block_delta":
                kind = event["delta"]["type"].removesuffix("_delta")
                said[kind] += event["delta"][kind]
        assert {block["type"]: block[block["type"]] for block in answer["content"]} == {
            k: v for k, v in said.items() if v
        }
    assert kinds[0][0] == "thinking"
    assert "thinking" not in kinds[1]


def completed(server, status=200, **fields):
    body = {
        "max_tokens": 12,
        "seed": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "logit_bias": {"1": -100, "2": -100},
    }
    response = httpx.post(server.url + "/v1/completions", json={**body, **fields}, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


def test_completions_have_a_budget_where_their_prompts_leave_thoughts_open(server):
    answer = completed(server, prompt=["Once<think>", "Once", "Once<think> a"], thinking_token_budget=3)
    ids = [choice["token_ids"] for choice in answer["choices"]]
    assert [3 if 2 in one and one.index(2) == 3 else None for one in ids] == [3, None, 3]
    assert all(len(one) == 12 for one in ids)
    for budget in (None, -1):
        [choice] = completed(server, prompt="Once<think>", thinking_token_budget=budget)["choices"]
        assert 2 not in choice["token_ids"], "the server's own is for chats"


@pytest.mark.parametrize("budget", [-2, 2**31, 1.5, "many", [1]])
def test_a_budget_of_completions_that_is_none_is_refused_by_name(server, budget):
    error = completed(server, 400, prompt="Once", thinking_token_budget=budget)["error"]
    assert error["param"] == "thinking_token_budget"
