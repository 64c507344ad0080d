"""A server and an ``LLM`` whose model answers in the messages of gpt-oss, with marks that are tokens of its own."""

import json
import os
from pathlib import Path

import httpx
import pytest
from harmony_model import MARKS, harmony_model
from message_deltas import joined, without_ids
from server_process import REAL, ServerProcess

from rustvllm import LLM, SamplingParams, StructuredOutputsParams

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "A fox?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
THOUGHT = "<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>Hello, you.<|return|>"
CALL = (
    THOUGHT + "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)
SEEDS = (0, 3, 5, 6, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return harmony_model(tmp_path_factory.mktemp("harmony"))


@pytest.fixture(scope="module")
def server(folder):
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    flags = [folder, "--port", "0", "--max-num-seqs", "8", "--logits-processors", "processors_for_tests:Say"]
    with ServerProcess([*REAL, *flags], PYTHONPATH=path) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, device="cpu", dtype="float32", max_num_seqs=8) as llm:
        yield llm


def post(server, path, **body):
    answer = httpx.post(server.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def test_llm_chat_leaves_thoughts_free_as_the_server_does(server, llm):
    final = llm.llm_engine.get_tokenizer().encode("final", add_special_tokens=False)[0]
    bias = {MARKS["<|end|>"]: 6.0, final: 3.0}
    wanted = StructuredOutputsParams(choice=["yes", "no"])
    every = [
        SamplingParams(seed=seed, max_tokens=60, temperature=1.0, logit_bias=bias, structured_outputs=wanted)
        for seed in SEEDS
    ]
    outputs = llm.chat([[USER]] * len(SEEDS), every, use_tqdm=False)
    llm.enqueue_chat([[USER]] * len(SEEDS), every, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in llm.wait_for_completion(use_tqdm=False)] == [
        output.outputs[0].token_ids for output in outputs
    ]
    thought = 0
    for seed, output in zip(SEEDS, outputs, strict=True):
        [sample] = output.outputs
        sampling = {"seed": seed, "max_tokens": 60, "temperature": 1, "top_p": 1, "logit_bias": bias}
        body = {**sampling, "structured_outputs": {"choice": ["yes", "no"]}, "return_token_ids": True}
        [choice] = post(server, CHAT, messages=[USER], **body).json()["choices"]
        assert list(sample.token_ids) == choice["token_ids"]
        assert sample.token_ids[0] == MARKS["<|channel|>"], "a message begins with its head"
        thought += choice["message"]["reasoning"] is not None
        if choice["finish_reason"] == "stop":
            assert choice["message"]["content"] in ("yes", "no")
            assert sample.text.endswith(choice["message"]["content"])
    assert thought >= 2, "some thought before they answered"
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 3


def test_a_prompt_of_its_own_obeys_from_the_first_token_on(server, llm):
    prompt = "<|start|>user<|message|>A fox?<|end|><|start|>assistant"
    wanted = StructuredOutputsParams(choice=["yes", "no"])
    [output] = llm.generate(prompt, SamplingParams(max_tokens=9, structured_outputs=wanted), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")
    body = {"prompt": prompt, "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}}
    [choice] = post(server, COMPLETIONS, **body).json()["choices"]
    assert choice["text"] in ("yes", "no")


def test_a_chat_that_goes_on_with_an_answer_obeys_from_the_first_token_on(llm):
    wanted = StructuredOutputsParams(choice=["yes", "no"])
    [output] = llm.chat(
        [USER, {"role": "assistant", "content": "I say: "}],
        SamplingParams(max_tokens=9, structured_outputs=wanted),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output.outputs[0].text in ("yes", "no")


def test_without_a_format_of_thoughts_all_of_the_output_obeys(folder):
    wanted = StructuredOutputsParams(choice=["yes", "no"])
    with LLM(folder, device="cpu", dtype="float32", max_num_seqs=8, reasoning_parser="none") as llm:
        [output] = llm.chat([USER], SamplingParams(max_tokens=9, structured_outputs=wanted), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


# -- attacks on answers that the server reads ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(llm):
    tokenizer = llm.llm_engine.get_tokenizer()
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def said(server, ids, **fields):
    """The choice of a whole answer that says ``ids``; the same of a stream, put together, must say the same."""
    body = {"messages": [USER], "temperature": 0, "max_tokens": len(ids), "vllm_xargs": {"says": ids}, **fields}
    [choice] = post(server, CHAT, **body).json()["choices"]
    lines = post(server, CHAT, **body, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    message, end = joined(events)
    whole = without_ids({name: value for name, value in choice["message"].items() if value is not None})
    assert {name: value for name, value in message.items() if value is not None} == whole
    assert end == choice["finish_reason"]
    streamed = [
        one for event in events for one in ((event["choices"] or [{}])[0].get("logprobs") or {}).get("content") or ()
    ]
    assert streamed == ((choice["logprobs"] or {}).get("content") or [])
    return choice


@pytest.mark.parametrize("text", [ANSWER, CALL], ids=["answer", "call"])
@pytest.mark.parametrize("include_reasoning", [True, False])
def test_log_probabilities_are_those_of_every_token(server, tokens, text, include_reasoning):
    ids = tokens(text)
    fields = {"logprobs": True, "top_logprobs": 1, "include_reasoning": include_reasoning, "return_token_ids": True}
    choice = said(server, ids, tools=TOOLS, return_tokens_as_token_ids=True, **fields)
    assert choice["finish_reason"] == ("tool_calls" if text is CALL else "stop")
    if text is CALL:
        ids.remove(MARKS["<|call|>"])  # the grammar of calls ends the answer before it
    assert choice["token_ids"] == ids
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
    assert ("reasoning" in choice["message"] and choice["message"]["reasoning"] is not None) == include_reasoning


@pytest.mark.parametrize(
    ("stop", "reasoning", "content"),
    [
        ("greets", "The user", None),  # within the thoughts
        ("Hello", "The user greets.", ""),
        ("you", "The user greets.", "Hello,"),
        ("<|end|>", "The user greets.", None),  # a mark
        ("greets.<|end|>", "The user", None),  # across the end of a message
        ("<|message|>Hello", "The user greets.", None),  # across the head of one
        ("final", "The user greets.", None),  # within a head
        ("<|return|>", "The user greets.", "Hello, you."),
    ],
)
def test_stop_strings_are_found_in_thoughts_in_text_and_in_marks(server, tokens, stop, reasoning, content):
    choice = said(server, tokens(ANSWER), stop=[stop])
    message = choice["message"]
    assert choice["finish_reason"] == "stop"
    assert (message["reasoning"] or "").rstrip() == reasoning
    assert (message["content"] or "").rstrip() == (content or "")
    if stop != "<|return|>":
        assert choice["stop_reason"] == stop


def test_hidden_thoughts_leave_nothing_behind(server, tokens):
    choice = said(server, tokens(ANSWER), include_reasoning=False)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, "Hello, you.")


def test_each_of_several_answers_is_read_by_itself(server, tokens):
    body = {"messages": [USER], "max_tokens": 90, "n": 3, "vllm_xargs": {"says": tokens(CALL)}, "tools": TOOLS}
    choices = post(server, CHAT, **body).json()["choices"]
    assert len(choices) == 3
    for choice in choices:
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        assert choice["message"]["content"] == "Let me see."


def test_an_echo_comes_before_the_content_and_not_before_the_thoughts(server, tokens):
    messages = [USER, {"role": "assistant", "content": "Hel"}]
    fields = {"messages": messages, "echo": True, "continue_final_message": True, "add_generation_prompt": False}
    choice = said(server, tokens("lo.<|return|>"), **fields)
    assert choice["message"]["content"] == "Hello."


def test_completions_show_all_that_is_said(server, tokens):
    ids = tokens(ANSWER)
    body = {"prompt": "Once", "max_tokens": len(ids), "vllm_xargs": {"says": ids}, "temperature": 0, "logprobs": 0}
    [shown] = post(server, COMPLETIONS, **body, echo=True, skip_special_tokens=False).json()["choices"]
    assert shown["text"].startswith("Once" + ANSWER.removesuffix("<|return|>"))
    offsets, names = shown["logprobs"]["text_offset"], shown["logprobs"]["tokens"]
    for offset, name in zip(offsets, names, strict=True):
        assert shown["text"][offset:].startswith(name) or name == "<|return|>"
    [hidden] = post(server, COMPLETIONS, **body).json()["choices"]
    assert "<|" not in hidden["text"]
    assert hidden["text"] == "analysisThe user greets.assistantfinalHello, you."


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9, 10, 11, 12, 13])
def test_an_answer_that_is_cut_anywhere_shows_no_mark(server, tokens, length):
    choice = said(server, tokens(ANSWER), max_tokens=length, logprobs=True)
    assert choice["finish_reason"] == "length"
    assert "<|" not in json.dumps(choice["message"])
    assert len(choice["logprobs"]["content"]) == length


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_response_are_those_of_its_text(server, tokens, stream):
    ids, text = tokens(ANSWER), tokens("Hello, you.")
    body = {"vllm_xargs": {"says": ids}, "temperature": 0, "include": ["message.output_text.logprobs"]}
    answer = post(server, RESPONSES, input="A fox?", stream=stream, **body)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        streamed = [
            one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]
        ]
    output = events[-1]["response"]["output"] if stream else answer.json()["output"]
    thought, message = output
    assert thought["content"][0]["text"] == "The user greets."
    [part] = message["content"]
    assert part["text"] == "Hello, you."
    names = [one["token"] for one in part["logprobs"]]
    assert "".join(names) == "Hello, you."
    assert len(names) == len(text)
    assert not stream or [one["token"] for one in streamed] == names
