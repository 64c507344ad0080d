"""What scripts written for vLLM call offline: the same names do the same here."""

import asyncio
import json
import logging

import pytest

import rustvllm
from rustvllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    SamplingParams,
    StructuredOutputsParams,
)
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.config.hub import embedded_model_path
from rustvllm.exceptions import InvalidRequestError, ModelLoadError
from rustvllm.logprobs import FlatLogprobs
from rustvllm.text.transformers_tokenizer import load_transformers_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6)
SMALL = {"num_gpu_blocks_override": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as llm:
        yield llm


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_parsed_flags_are_keywords_of_llm():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(max_num_seqs=4)
    parser.add_argument("--max-tokens", type=int)
    args = vars(
        parser.parse_args(["--num-gpu-blocks-override", "64", "--max-tokens", "3", "--tensor-parallel-size", "1"])
    )
    max_tokens = args.pop("max_tokens")
    assert "num_gpu_blocks_override" in args
    with LLM(**args) as llm:
        [output] = llm.generate("Once", SamplingParams(max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        assert llm.llm_engine.vllm_config.scheduler.max_num_seqs == 4


def test_an_llm_from_engine_arguments():
    with LLM.from_engine_args(EngineArgs(**SMALL)) as llm:
        assert llm.llm_engine.vllm_config.cache.num_gpu_blocks_override == 64
        assert llm.llm_engine.model_config.max_model_len == 512
        assert llm.get_world_size() == 1


def test_requests_are_numbered(llm):
    first = [int(output.request_id) for output in llm.generate(["a", "b"], GREEDY, use_tqdm=False)]
    assert first == [first[0], first[0] + 1]
    assert int(llm.generate("c", GREEDY, use_tqdm=False)[0].request_id) == first[1] + 1


def test_the_tokenizer_is_that_of_transformers(llm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    texts = ["Once upon a time", "naïve 中文\n\ttabs"]
    assert [tokenizer.encode(text) for text in texts] == [llm.llm_engine.get_tokenizer().encode(text) for text in texts]
    assert tokenizer.batch_decode([tokenizer.encode(texts[0])], skip_special_tokens=True) == [texts[0]]
    assert len(tokenizer.get_vocab()) >= 256
    messages = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].prompt == rendered


def test_a_tokenizer_that_transformers_cannot_read(tmp_path):
    class Broken:
        tokenizer_path, trust_remote_code = tmp_path, False

    with pytest.raises(ModelLoadError, match="transformers cannot load the tokenizer in"):
        load_transformers_tokenizer(Broken())


def test_prompts_in_every_form(llm):
    text = "Once upon a time"
    tokens = llm.llm_engine.get_tokenizer().encode(text)
    forms = [
        rustvllm.TextPrompt(prompt=text),
        rustvllm.TokensPrompt(prompt_token_ids=tokens),
    ]
    expected = ids(llm.generate([text], GREEDY, use_tqdm=False)) * 2
    assert ids(llm.generate(forms, sampling_params=GREEDY, use_tqdm=False)) == expected
    assert ids(llm.generate(prompt_token_ids=[tokens, tokens], sampling_params=GREEDY, use_tqdm=False)) == expected
    assert rustvllm.AsyncLLMEngine is rustvllm.AsyncLLM


def test_tokenization_keywords(tmp_path):
    for file in embedded_model_path().glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True, "bos_token": "<|endoftext|>"}))
    with LLM(tokenizer=str(tmp_path), **SMALL) as llm:
        tokenizer = llm.llm_engine.get_tokenizer()
        [output] = llm.generate("Once", GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == [tokenizer.bos_token_id, *tokenizer.encode("Once", add_special_tokens=False)]
        prompts = ["Once", {"prompt": "Once"}, {"prompt": "Once", "add_special_tokens": True}, [5]]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
        plain = output.prompt_token_ids[1:]
        assert [each.prompt_token_ids for each in outputs] == [plain, plain, output.prompt_token_ids, [5]]


def test_chat_takes_its_arguments_in_vllms_order(llm):
    messages = [{"role": "user", "content": "Hi"}]
    [output] = llm.chat(messages, GREEDY, False, None, None, "{{ messages[0].content }}", "string", False)
    assert output.prompt == "Hi"


def test_tokenization_keywords_of_chat(tmp_path):
    for file in embedded_model_path().glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True, "bos_token": "<|endoftext|>"}))
    messages = [{"role": "user", "content": "Hi"}]
    template = {"chat_template": "{{ messages[0].content }}", "use_tqdm": False}
    with LLM(tokenizer=str(tmp_path), **SMALL) as llm:
        plain = llm.llm_engine.get_tokenizer().encode("Hi", add_special_tokens=False)
        bos = llm.llm_engine.get_tokenizer().bos_token_id
        for special, expected in ((None, plain), (False, plain), (True, [bos, *plain])):
            given = None if special is None else {"add_special_tokens": special}
            [output] = llm.chat(messages, GREEDY, **template, tokenization_kwargs=given)
            assert (output.prompt, output.prompt_token_ids) == ("Hi", expected)
        with pytest.raises(InvalidRequestError, match="may only have add_special_tokens, got padding"):
            llm.chat(messages, GREEDY, **template, tokenization_kwargs={"padding": True})
        with pytest.raises(InvalidRequestError, match="tokenization_kwargs must be a dict, got str"):
            llm.chat(messages, GREEDY, **template, tokenization_kwargs="no")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({}, "give either prompts or prompt_token_ids"),
        ({"prompts": "a", "prompt_token_ids": [1]}, "give either prompts or prompt_token_ids"),
        ({"prompts": "a", "tokenization_kwargs": {"padding": True}}, "may only have add_special_tokens, got padding"),
        ({"prompts": "a", "tokenization_kwargs": {"add_special_tokens": 1}}, "must be True or False, got 1"),
    ],
)
def test_calls_that_are_refused(llm, call, says):
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(**call, sampling_params=GREEDY, use_tqdm=False)


def test_keywords_of_images_are_refused(llm):
    messages = [{"role": "user", "content": "Hi"}]
    assert llm.chat(messages, GREEDY, use_tqdm=False, mm_processor_kwargs=None)
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs is not supported"):
        llm.chat(messages, GREEDY, use_tqdm=False, mm_processor_kwargs={"num_crops": 4})


def test_prompts_are_queued_now_and_answered_later(llm):
    expected = ids(llm.generate(["Once", "The dog", "A cat"], GREEDY, use_tqdm=False))
    first = llm.enqueue(["Once", "The dog"], GREEDY, use_tqdm=False)
    second = llm.enqueue({"prompt": "A cat"}, sampling_params=GREEDY, priority=0, mm_processor_kwargs=None)
    assert [int(each) for each in [*first, *second]] == list(range(int(first[0]), int(first[0]) + 3))
    assert llm.llm_engine.get_num_unfinished_requests() == 3, "they are in the engine, and have not run"
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == [*first, *second]
    assert ids(outputs) == expected
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_a_call_in_between_gives_its_own_outputs_alone(llm):
    queued = llm.enqueue(["Once", "The dog"], GREEDY)
    [own] = llm.generate("A cat", GREEDY, use_tqdm=False)
    assert own.request_id not in queued
    assert [output.request_id for output in llm.wait_for_completion(rustvllm.RequestOutput, use_tqdm=False)] == queued


def test_queued_conversations_are_prompts_of_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    [expected] = llm.chat(messages, GREEDY, use_tqdm=False)
    llm.enqueue_chat(messages, GREEDY, chat_template_kwargs={})
    [output] = llm.wait_for_completion(use_tqdm=False)
    assert (output.prompt, output.outputs[0].token_ids) == (expected.prompt, expected.outputs[0].token_ids)


def test_more_is_queued_than_the_engine_takes(llm):
    with LLM(executor="sim", max_model_len=64, num_gpu_blocks_override=64, max_num_queued_reqs=2) as small:
        queued = small.enqueue([[5]] * 9, GREEDY)
        assert small.llm_engine.num_unfinished_samples() == 2
        assert [output.request_id for output in small.wait_for_completion(use_tqdm=False)] == queued


def test_what_is_wrong_queues_nothing_and_an_error_ends_what_is_queued(llm, monkeypatch):
    with pytest.raises(InvalidRequestError, match="prompt 1"):
        llm.enqueue(["Once", ""], GREEDY)
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs is not supported"):
        llm.enqueue("Once", GREEDY, mm_processor_kwargs={"num_crops": 4})
    with pytest.raises(TypeError, match="output_type must be RequestOutput"):
        llm.wait_for_completion(str)
    assert not llm.llm_engine.has_unfinished_requests()
    llm.enqueue("Once", GREEDY)
    step = llm.llm_engine.step

    def interrupted():
        step()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.llm_engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.wait_for_completion(use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_outputs_that_the_caller_steps_for_are_the_callers(llm):
    [queued] = llm.enqueue("Once", GREEDY)
    finished = []
    while llm.llm_engine.has_unfinished_requests():
        finished += [output.request_id for output in llm.llm_engine.step() if output.finished]
    assert finished == [queued]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_the_line_of_statistics_on_demand(llm, caplog):
    caplog.set_level(logging.INFO, "rustvllm")
    logger = logging.getLogger("rustvllm")
    logger.addHandler(caplog.handler)
    try:
        llm.llm_engine.do_log_stats()
        caplog.clear()
        llm.generate("Once", GREEDY, use_tqdm=False)
        llm.llm_engine.do_log_stats()
        llm.llm_engine.do_log_stats()  # nothing has happened since
    finally:
        logger.removeHandler(caplog.handler)
    [line] = [record.getMessage() for record in caplog.records if "generation throughput" in record.getMessage()]
    assert line.startswith("Engine 000: Avg prompt throughput:")


def test_the_prefix_cache_is_forgotten_on_demand(llm):
    prompt = [7] * 40
    llm.generate([prompt], GREEDY, use_tqdm=False)
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache() is True
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_an_asynchronous_engine_has_the_names_too(monkeypatch):
    async def main():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(executor="sim", max_model_len=64, num_gpu_blocks_override=8))
        try:
            assert engine.vllm_config is engine.config
            assert engine.model_config.max_model_len == 64
            aborted = []
            monkeypatch.setattr(engine._requests, "abort", aborted.append)
            await engine.abort(["a", "b"])
            await engine.abort("cd")
            assert aborted == [["a", "b"], "cd"]
            await engine.do_log_stats()
        finally:
            engine.shutdown()

    asyncio.run(main())


def test_flat_logprobs_have_the_same_numbers(llm):
    plain = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    [expected] = llm.generate("Once upon a time", plain, use_tqdm=False)
    [flat] = llm.generate("Once upon a time", plain.clone(flat_logprobs=True), use_tqdm=False)
    sample, wanted = flat.outputs[0].logprobs, expected.outputs[0].logprobs
    assert type(sample) is type(flat.prompt_logprobs) is FlatLogprobs
    assert len(sample) == len(wanted) == 4

    def numbers(places):
        return [
            {token: (entry.logprob, entry.rank, entry.decoded_token) for token, entry in (place or {}).items()}
            for place in places
        ]

    assert numbers(sample) == numbers(wanted)
    assert numbers(flat.prompt_logprobs) == numbers(expected.prompt_logprobs)
    assert flat.prompt_logprobs[0] == {}
    assert numbers(sample[1:3]) == numbers(wanted[1:3])
    assert (sample[-1], sample[::-1][0], len(sample[9:])) == (sample[3], sample[3], 0)
    assert sample.token_ids == [token for place in wanted for token in place]
    assert sample.logprobs == [entry.logprob for place in wanted for entry in place.values()]
    assert (sample.start_indices[0], sample.end_indices[0]) == (0, len(wanted[0]))
    with pytest.raises(IndexError):
        sample[4]


def test_beams_by_position_and_with_what_vllm_has(llm):
    params = BeamSearchParams(2, 3, True, 0.0, 1.0, False, None, True, False)
    [output] = llm.beam_search("a", params)
    assert len(output.sequences) == 2
    for wrong in ({"watermarking": True}, {"structured_outputs": StructuredOutputsParams(regex="a")}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            llm.beam_search("a", BeamSearchParams(2, 3, **wrong))
