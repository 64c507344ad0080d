"""What scripts written for vLLM call offline: the same names do the same here."""

import json

import pytest

import rustvllm
from rustvllm import LLM, EngineArgs, SamplingParams
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.config.hub import embedded_model_path
from rustvllm.exceptions import InvalidRequestError, ModelLoadError
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


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({}, "give either prompts or prompt_token_ids"),
        ({"prompts": "a", "prompt_token_ids": [1]}, "give either prompts or prompt_token_ids"),
        ({"prompts": "a", "tokenization_kwargs": {"padding": True}}, "may hold add_special_tokens, got padding"),
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
