"""What reaches the engine: prompts in every shape, limits, defaults, seeds; and every way a request can be wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.engine.input_processor import InputProcessor, logger
from rustvllm.engine.request.default_params import default_sampling_params
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import PromptOnlyParams, SamplingParams
from rustvllm.text.tokenizer import Tokenizer

EOS, EXTRA_EOS, MAX_LEN = 256, ord("~"), 64


@pytest.fixture
def make(toy_config):
    def build(**changes):
        config = toy_config(**changes)
        path = config.model.tokenizer_path
        return InputProcessor(config, None if path is None else Tokenizer.from_folder(path))

    return build


@pytest.fixture
def processor(make):
    return make()


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("ab", "ab", [97, 98]),
        ("é", "é", [0xC3, 0xA9]),
        ([97, 98], None, [97, 98]),
        ((97,), None, [97]),
        (np.array([97, 98]), None, [97, 98]),
        ([np.int64(5)], None, [5]),
        ({"prompt": "ab"}, "ab", [97, 98]),
        ({"prompt_token_ids": [1, 2]}, None, [1, 2]),
        ({"prompt_token_ids": [1, 2], "prompt": "shown"}, "shown", [1, 2]),
        ({"prompt": "a", "cache_salt": "mine"}, "a", [97]),
    ],
    ids=repr,
)
def test_prompts(processor, prompt, text, ids):
    request = processor.process(prompt, SamplingParams())
    assert request.prompt == text
    assert request.prompt_token_ids == ids
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ([257], r"token id 257 at position 0 is not in the vocabulary \(0 to 256\)"),
        ([1, -1], "token id -1 at position 1"),
        ([10**30], "a number of"),
        ([True], "must be integers, got True"),
        ([1.0], "must be integers, got 1.0"),
        (["a", "b"], "must be integers, got 'a'"),
        ([None], "must be integers"),
        (None, "must be text"),
        (5, "must be text"),
        (b"ab", "must be text"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": 5}, "must be text, got int"),
        ({"text": "a"}, "got text"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be 1 to 128"),
        ({"prompt": "a", "cache_salt": "a/b"}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "a" * 129}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
        ("\ud800", "not valid Unicode"),
        ("a" * 64, "maximum context length is 64 tokens .* your prompt contains 64 input tokens: at most 63 fit"),
        ([1] * 1000, "contains 1000 input tokens"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_prompts(processor, prompt, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        processor.process(prompt, SamplingParams())
    assert caught.value.param is not None


def test_too_long_names_input_tokens(processor):
    with pytest.raises(InvalidRequestError) as caught:
        processor.process([1] * 64, SamplingParams())
    assert caught.value.param == "input_tokens"


def test_a_full_prompt_may_be_run_without_output(processor):
    assert processor.process([1] * 64, PromptOnlyParams(max_tokens=0)).max_tokens == 0


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"), [(60, 16, 4), (60, None, 4), (60, 3, 3), (63, 2**31 - 1, 1)]
)
def test_max_tokens_is_clamped_to_the_room(processor, num_prompt, max_tokens, expected):
    assert processor.process([1] * num_prompt, SamplingParams(max_tokens=max_tokens)).max_tokens == expected


@pytest.mark.parametrize(
    ("keep", "side", "expected"),
    [(2, "left", [8, 9]), (2, "right", [0, 1]), (100, "left", None), (10, "left", list(range(10)))],
)
def test_truncation(processor, keep, side, expected):
    params = SamplingParams(truncate_prompt_tokens=keep, truncation_side=side)
    if expected is None:
        with pytest.raises(InvalidRequestError, match=r"is 64 tokens .* but truncate_prompt_tokens is 100"):
            processor.process(list(range(10)), params)
    else:
        assert processor.process(list(range(10)), params).prompt_token_ids == expected


def test_truncation_to_the_models_limit_leaves_room_for_a_token(processor):
    request = processor.process([1] * 500, SamplingParams(truncate_prompt_tokens=-1))
    assert (len(request.prompt_token_ids), request.max_tokens) == (63, 1)


def test_eos_ids(processor):
    request = processor.process("a", SamplingParams(stop_token_ids=[5, EXTRA_EOS]))
    assert request.eos_token_id == EOS
    assert request.stop_token_ids == (5, EXTRA_EOS)
    assert request.hidden_stop_ids == frozenset()  # the caller asked for it, so it is named
    request = processor.process("a", SamplingParams())
    assert request.stop_token_ids == (EXTRA_EOS,)
    assert request.hidden_stop_ids == {EXTRA_EOS}
    request = processor.process("a", SamplingParams(ignore_eos=True))
    assert (request.eos_token_id, request.stop_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("params", "priority", "message"),
    [
        (SamplingParams(stop_token_ids=[257]), 0, "stop_token_ids holds 257"),
        (SamplingParams(), 1, "priority is 1, but requests are scheduled in order of arrival"),
        (SamplingParams(), True, "priority must be an integer"),
        (SamplingParams(), "high", "priority must be an integer"),
        ({"n": 1}, 0, "sampling_params must be a SamplingParams, got dict"),
    ],
)
def test_wrong_parameters(processor, params, priority, message):
    with pytest.raises(InvalidRequestError, match=message):
        processor.process("a", params, priority)


def test_priority_policy(make):
    processor = make(scheduling_policy="priority")
    assert processor.process("a", SamplingParams(), -5).priority == -5
    with pytest.raises(InvalidRequestError, match="32 bits"):
        processor.process("a", SamplingParams(), 2**31)


@pytest.fixture
def changed_model(toy_model, tmp_path):
    """The toy model with another ``tokenizer_config.json`` and further special tokens in its tokenizer."""

    def change(added, config):
        import tokenizers

        folder = tmp_path / "changed"
        shutil.copytree(toy_model, folder)
        tokenizer = tokenizers.Tokenizer.from_file(str(Path(toy_model) / "tokenizer.json"))
        tokenizer.add_special_tokens(added)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return str(folder)

    return change


def test_a_token_that_only_the_tokenizer_has_is_refused(changed_model, make):
    processor = make(model=changed_model(["<tool>"], {"eos_token": "<eos>"}))
    assert processor.process("a<eos>", SamplingParams()).prompt_token_ids == [97, EOS]
    with pytest.raises(InvalidRequestError, match=r"'<tool>' \(id 257\).* vocabulary is 0 to 256") as caught:
        processor.process("a<tool>b", SamplingParams())
    assert caught.value.param == "prompt"


def test_an_eos_that_only_the_tokenizer_has_is_ignored_with_a_warning(changed_model, make, monkeypatch):
    warnings = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: warnings.append(text % args))
    processor = make(model=changed_model(["<end>"], {"eos_token": "<end>"}))
    assert processor.eos_token_ids == (EOS, EXTRA_EOS)
    assert processor.process("a", SamplingParams(min_tokens=2)).eos_token_id == EOS
    assert warnings == [
        "ignoring the tokenizer's end-of-sequence token: its id 257 is outside the vocabulary (0 to 256)"
    ]


def test_empty_text_is_refused_though_a_bos_token_is_added(changed_model, make):
    config = {"bos_token": "<eos>", "eos_token": "<eos>", "add_bos_token": True}
    processor = make(model=changed_model([], config))
    assert processor.process("a", SamplingParams()).prompt_token_ids == [EOS, 97]
    for prompt in ("", {"prompt": ""}):
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            processor.process(prompt, SamplingParams())


def test_without_a_tokenizer(make):
    processor = make(skip_tokenizer_init=True)
    assert processor.process([1], SamplingParams()).prompt_token_ids == [1]
    with pytest.raises(InvalidRequestError, match="give the prompt as token ids"):
        processor.process("a", SamplingParams())
    with pytest.raises(InvalidRequestError, match="use stop_token_ids"):
        processor.process([1], SamplingParams(stop="x"))


def test_seeds(make):
    first, again, other = make(), make(), make(seed=1)
    seeds = [first.process("a", SamplingParams()).seed for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds[:50] == [again.process("a", SamplingParams()).seed for _ in range(50)]
    assert not set(seeds) & {other.process("a", SamplingParams()).seed for _ in range(1000)}
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    given_seed = first.process("a", SamplingParams(seed=2**63 - 1))
    assert [given_seed.seed_of(index) for index in (0, 1)] == [2**63 - 1, -(2**63)]


def test_defaults_of_the_model(toy_config, tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 5, "top_p": 7, "max_new_tokens": 3, "do_sample": false}')
    model = toy_config(generation_config=str(file)).model
    params = default_sampling_params(model)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 5, 1.0, 3)
    assert default_sampling_params(model, temperature=0).is_greedy
    assert default_sampling_params(toy_config().model) == SamplingParams()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80) | st.binary(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=80)
            | st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "cache_salt", "x"]), inner)
        ),
        max_leaves=100,
    )
)
def test_any_prompt_gives_a_request_or_the_one_error(shared_processor, prompt):
    try:
        request = shared_processor.process(prompt, SamplingParams())
    except InvalidRequestError:
        return
    assert 0 < len(request.prompt_token_ids) < MAX_LEN
    assert len(request.prompt_token_ids) + request.max_tokens <= MAX_LEN
    assert all(0 <= token_id <= EOS for token_id in request.prompt_token_ids)


@pytest.fixture(scope="module")
def shared_processor(toy_model):
    from rustvllm.config.engine_args import EngineArgs

    config = EngineArgs(model=toy_model, device="cpu").create_engine_config()
    return InputProcessor(config, Tokenizer.from_folder(config.model.tokenizer_path))
