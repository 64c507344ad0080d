"""``thinking_token_budget`` of engines in Python: exact for every sample, however the prompt leaves its thoughts."""

import json
import shutil
import threading
from pathlib import Path

import pytest

import rustvllm
from rustvllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputsParams
from rustvllm.engine import input_processor
from rustvllm.engine.request.thinking import ThinkingGates
from rustvllm.exceptions import ConfigError, InvalidRequestError
from rustvllm.sampling_params import RequestOutputKind

OPEN, CLOSE = 1, 2
TEMPLATE = (
    "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}<think>{% endif %}"
)
CHAT = [{"role": "user", "content": "A fox?"}]
FREE = SamplingParams(max_tokens=30, seed=1, ignore_eos=True, logit_bias={CLOSE: -100.0})
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "block_size": 8, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The embedded model, two of whose special tokens mark thoughts, in which its answers begin."""
    folder = tmp_path_factory.mktemp("thinking")
    for file in (Path(rustvllm.__file__).parent / "assets" / "tiny").iterdir():
        shutil.copyfile(file, folder / file.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<|system|>", "<think>").replace("<|user|>", "</think>"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def ids_of(output, sample=0):
    return list(output.outputs[sample].token_ids)


@pytest.mark.parametrize("budget", [0, 1, 7, 29])
def test_a_chat_thinks_as_many_tokens_as_its_budget(llm, budget):
    [free] = llm.chat(CHAT, FREE, use_tqdm=False)
    [held] = llm.chat(CHAT, FREE.clone(thinking_token_budget=budget), use_tqdm=False)
    assert CLOSE not in ids_of(free)
    assert ids_of(held)[: budget + 1] == [*ids_of(free)[:budget], CLOSE]
    assert len(ids_of(held)) == 30


@pytest.mark.parametrize("budget", [None, -1, 30, 2**31 - 1])
def test_no_budget_and_one_that_is_not_spent_change_nothing(llm, budget):
    [free] = llm.chat(CHAT, FREE, use_tqdm=False)
    [held] = llm.chat(CHAT, FREE.clone(thinking_token_budget=budget), use_tqdm=False)
    assert ids_of(held) == ids_of(free)


def test_prompts_of_every_shape_begin_where_their_last_marker_says(llm):
    tokenizer = llm.llm_engine.get_tokenizer()
    params = FREE.clone(thinking_token_budget=3, max_tokens=8)
    within = ["Once<think>", "Once<think> upon", "Once<think></think> a<think>"]
    behind = ["Once", "Once<think></think>", "Once<think> upon</think> a time"]
    far = [OPEN] + [300] * 40
    prompts = [*within, *behind]
    every = prompts + [{"prompt_token_ids": tokenizer.encode(prompt)} for prompt in prompts]
    every += [{"prompt_token_ids": far}, {"prompt_token_ids": [*far, CLOSE, *far[1:]]}]
    expected = ([True] * 3 + [False] * 3) * 2 + [True, False]
    forbidden = params.clone(logit_bias={CLOSE: -100.0, OPEN: -100.0})
    for output, begins_within in zip(llm.generate(every, forbidden, use_tqdm=False), expected, strict=True):
        assert (CLOSE in ids_of(output)) == begins_within, output.prompt
        assert not begins_within or ids_of(output).index(CLOSE) == 3
    opening = params.clone(logit_bias={CLOSE: -100.0, OPEN: 100.0}, max_tokens=12)
    [output] = llm.generate("Once", opening, use_tqdm=False)
    assert ids_of(output)[:5] == [OPEN] * 4 + [CLOSE], "thoughts that the answer begins itself are limited, too"


def test_what_is_cut_off_the_prompt_does_not_count(llm):
    params = FREE.clone(thinking_token_budget=2, max_tokens=6, logit_bias={CLOSE: -100.0, OPEN: -100.0})
    prompt = "<think></think> Once upon a time there was a<think>"
    for side, begins_within in (("left", True), ("right", False)):
        cut = params.clone(truncate_prompt_tokens=5, truncation_side=side)
        [output] = llm.generate(prompt, cut, use_tqdm=False)
        assert (CLOSE in ids_of(output)) == begins_within


def test_samples_and_requests_next_to_each_other_have_their_own(llm):
    every = [
        FREE.clone(thinking_token_budget=4, n=3, temperature=1.0),
        FREE,
        FREE.clone(thinking_token_budget=9, stop_token_ids=[CLOSE]),
        FREE.clone(thinking_token_budget=0, detokenize=False),
    ]
    three, free, stopped, none = llm.chat([CHAT] * 4, every, use_tqdm=False)
    assert [ids_of(three, sample).index(CLOSE) for sample in range(3)] == [4, 4, 4]
    assert CLOSE not in ids_of(free)
    assert (len(ids_of(stopped)), stopped.outputs[0].stop_reason) == (10, CLOSE)
    assert ids_of(none)[0] == CLOSE
    assert none.outputs[0].text == ""


def test_what_the_output_must_be_comes_behind_the_thoughts(llm):
    wanted = StructuredOutputsParams(choice=["yes", "no"])
    params = FREE.clone(ignore_eos=False, structured_outputs=wanted, thinking_token_budget=5)
    [output] = llm.chat(CHAT, params, use_tqdm=False)
    assert ids_of(output)[5] == CLOSE
    assert output.outputs[0].text.endswith(("yes", "no"))
    ended = llm.chat(CHAT, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    assert ended[0].outputs[0].text in ("yes", "no")
    by_ids = [{"prompt_token_ids": ids} for ids in (ended[0].prompt_token_ids, output.prompt_token_ids)]
    behind, within = llm.generate(by_ids, params, use_tqdm=False)
    assert (ids_of(behind), ids_of(within)) == (ids_of(ended[0]), ids_of(output))


def test_a_model_that_marks_no_reasoning_has_no_budget():
    with LLM(**OPTIONS) as plain:
        for budget in (0, 5):
            with pytest.raises(
                InvalidRequestError, match=rf"thinking_token_budget \({budget}\) needs a model"
            ) as caught:
                plain.generate("Once", SamplingParams(thinking_token_budget=budget), use_tqdm=False)
            assert caught.value.param == "thinking_token_budget"
        plain.generate("Once", SamplingParams(thinking_token_budget=-1, max_tokens=1), use_tqdm=False)


def test_a_search_has_no_budget():
    with pytest.raises(InvalidRequestError, match="thinking_token_budget cannot be used with use_beam_search"):
        SamplingParams(n=2, use_beam_search=True, thinking_token_budget=3)
    SamplingParams(n=2, use_beam_search=True, thinking_token_budget=-1)


def test_the_format_may_be_named(folder):
    params = FREE.clone(thinking_token_budget=2, logit_bias={CLOSE: -100.0, OPEN: -100.0})
    with pytest.raises(ConfigError, match="reasoning_parser has no format 'wise'; the formats are auto, none, "):
        LLM(folder, reasoning_parser="wise")
    with LLM(folder, reasoning_parser="none", **OPTIONS) as llm, pytest.raises(InvalidRequestError, match="needs"):
        llm.generate("Once", params, use_tqdm=False)
    with LLM(folder, reasoning_parser="deepseek_r1", **OPTIONS) as llm:  # answers begin within thoughts
        assert ids_of(llm.generate("Once", params, use_tqdm=False)[0])[2] == CLOSE


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
async def test_an_asynchronous_engine_holds_to_it(monkeypatch, folder, process):
    monkeypatch.setenv("RUSTVLLM_ENABLE_MULTIPROCESSING", str(int(process)))
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **OPTIONS))
    try:
        params = FREE.clone(thinking_token_budget=6, output_kind=RequestOutputKind.FINAL_ONLY)
        [output] = [output async for output in engine.generate("A fox?<think>", params, "r")]
        assert ids_of(output).index(CLOSE) == 6
        wanted = params.clone(structured_outputs=StructuredOutputsParams(choice=["yes"]), ignore_eos=False)
        [output] = [output async for output in engine.generate({"prompt_token_ids": [300, OPEN]}, wanted, "s")]
        assert output.outputs[0].text.endswith("yes")
    finally:
        engine.shutdown()


async def test_the_marks_of_a_long_prompt_are_looked_for_in_another_thread(monkeypatch, folder):
    threads, look = [], ThinkingGates.gate
    monkeypatch.setattr(
        ThinkingGates, "gate", lambda *args: (threads.append(threading.current_thread()), look(*args))[1]
    )
    monkeypatch.setattr(input_processor, "_FEW_IDS", 2)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **OPTIONS))
    try:
        params = FREE.clone(thinking_token_budget=6, output_kind=RequestOutputKind.FINAL_ONLY)
        for prompt in ([300, OPEN], [300, 301, OPEN]):
            [output] = [output async for output in engine.generate({"prompt_token_ids": prompt}, params, str(prompt))]
            assert ids_of(output).index(CLOSE) == 6
    finally:
        engine.shutdown()
    assert [thread is threading.current_thread() for thread in threads] == [True, False]
