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

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
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
