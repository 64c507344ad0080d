"""The rules of every sampling parameter: what is accepted, what is normalised, what is refused and how it says so."""

import dataclasses
import math
from copy import copy, deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.engine.request.core_request import engine_params
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import PromptOnlyParams, RequestOutputKind, SamplingParams, SamplingType
from rustvllm.sampling_params.unbuilt import NOT_SUPPORTED_YET

NAN, INF = float("nan"), float("inf")

VALID = [
    {"n": 1},
    {"n": 16384},
    {"temperature": 0},
    {"temperature": 2.0},
    {"temperature": 1e-5},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": 10**9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"top_n_sigma": -1},
    {"top_n_sigma": 0.0},
    {"top_n_sigma": 1.5},
    {"top_n_sigma": 1e300},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"seed": None},
    {"max_tokens": None},
    {"max_tokens": 2**31 - 1},
    {"min_tokens": 16},
    {"min_tokens": 10**6, "max_tokens": None},
    {"stop": None},
    {"stop": "\n"},
    {"stop": ["a"] * 100},
    {"stop": "日本🙂"},
    {"stop_token_ids": None},
    {"stop_token_ids": [0, 2**31 - 1]},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 1},
    {"truncation_side": "right"},
    {"output_kind": RequestOutputKind.DELTA},
    {"presence_penalty": -2},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1e-3},
    {"logprobs": None},
    {"bad_words": []},
    {"logit_bias": {}},
    {"logits_processors": []},
    {"logits_processors": [print]},
    {"logit_bias": {0: 1, 2**31 - 1: -1e300, 7: float("inf")}},
    {"allowed_token_ids": (3, 1, 3)},
    {"bad_words": ["a b", " c", "x" * 1024]},
    {"extra_args": {"a": 1, "b": ["x", None, 2.5]}},
    {"extra_args": {}},
    {"length_penalty": 1},
    {"use_beam_search": True, "n": 64, "length_penalty": -0.5},
    {"skip_reading_prefix_cache": True},
    {"thinking_token_budget": -1},
    {"thinking_token_budget": 0},
    {"thinking_token_budget": 2**31 - 1, "detokenize": False},
    {"stream_interval": 1},
    {"stream_interval": 2**31 - 1},
    {"skip_reading_prefix_cache": False, "prompt_logprobs": 1},
]

INVALID = [
    ("n", 0, "at least 1"),
    ("n", -1, "at least 1"),
    ("n", 16385, "at most 16384"),
    ("n", 1.0, "integer"),
    ("n", True, "integer"),
    ("n", "1", "integer"),
    pytest.param("n", 10**5000, "bits", id="n-huge"),
    ("temperature", -0.1, r"\[0, 2\]"),
    ("temperature", 2.1, r"\[0, 2\]"),
    ("temperature", NAN, "finite"),
    ("temperature", INF, "finite"),
    ("temperature", -INF, "finite"),
    pytest.param("temperature", 10**400, "finite", id="temperature-huge"),
    ("temperature", "0.5", "number"),
    ("temperature", True, "number"),
    ("temperature", None, "number"),
    ("top_p", 0.0, r"\(0, 1\]"),
    ("top_p", 1.0001, r"\(0, 1\]"),
    ("top_p", NAN, "finite"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.5, "integer"),
    ("top_k", False, "integer"),
    ("min_p", -0.01, r"\[0, 1\]"),
    ("min_p", 1.01, r"\[0, 1\]"),
    ("min_p", NAN, "finite"),
    ("top_n_sigma", -1.01, "at least -1, got -1.01"),
    ("top_n_sigma", INF, "finite"),
    ("top_n_sigma", "1", "number"),
    ("presence_penalty", 2.5, r"\[-2, 2\]"),
    ("presence_penalty", NAN, "finite"),
    ("frequency_penalty", -2.5, r"\[-2, 2\]"),
    ("frequency_penalty", "x", "number"),
    ("repetition_penalty", 0, "greater than 0"),
    ("repetition_penalty", -1, "greater than 0"),
    ("repetition_penalty", INF, "finite"),
    ("seed", 2**63, "at most"),
    ("seed", -(2**63) - 1, "at least"),
    ("seed", 1.5, "integer"),
    ("seed", True, "integer"),
    ("max_tokens", -1, "at least 1"),
    ("max_tokens", 0, "at least 1, got 0"),
    ("max_tokens", 2**31, "at most"),
    ("max_tokens", 16.0, "integer"),
    ("max_tokens", True, "integer"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, r"at most max_tokens \(16\)"),
    ("stop", "", "empty string"),
    ("stop", ["a", ""], "empty string"),
    ("stop", [1], "string"),
    ("stop", 5, "list"),
    ("stop", "\ud800", "Unicode"),
    ("stop_token_ids", [-1], "at least 0"),
    ("stop_token_ids", ["a"], "integer"),
    ("stop_token_ids", [True], "integer"),
    ("stop_token_ids", 5, "list"),
    ("stop_token_ids", "12", "list"),
    ("ignore_eos", 1, "true or false"),
    ("skip_special_tokens", None, "true or false"),
    ("spaces_between_special_tokens", "no", "true or false"),
    ("include_stop_str_in_output", 0, "true or false"),
    ("detokenize", None, "true or false"),
    ("truncate_prompt_tokens", 0, "at least 1"),
    ("truncate_prompt_tokens", -2, "at least -1"),
    ("truncation_side", "middle", "'left' or 'right'"),
    ("output_kind", "delta", "RequestOutputKind"),
    ("logprobs", -2, "at least -1"),
    ("logprobs", True, "integer"),
    ("prompt_logprobs", 1.5, "integer"),
    ("prompt_logprobs", -2, "at least -1"),
    ("logprob_token_ids", list(range(129)), "has 129 entries; the limit is 128"),
    ("logprob_token_ids", False, "logprob_token_ids must be"),
    ("logprob_token_ids", 5, "logprob_token_ids must be"),
    ("logprob_token_ids", [3, -1], "at least 0, got -1"),
    ("logprob_token_ids", [2.0], "integer"),
    ("logprob_token_ids", [None], "integer"),
    ("logprob_token_ids", [[3]], "integer"),
    ("logprob_token_ids", [10**20], "at most 2147483647"),
    ("allowed_token_ids", [], "must not be empty"),
    ("allowed_token_ids", [1, -1], "at least 0, got -1"),
    ("allowed_token_ids", [2**31], "at most 2147483647"),
    ("allowed_token_ids", ["1"], "integer"),
    ("allowed_token_ids", "12", "list"),
    ("logit_bias", [1], "map token ids to numbers"),
    ("logit_bias", {-1: 0.0}, "at least 0, got -1"),
    ("logit_bias", {"1": 0.0}, "integer, got '1'"),
    ("logit_bias", {5: "x"}, r"logit_bias\[5\] must be a number, got 'x'"),
    ("logit_bias", {5: float("nan")}, r"logit_bias\[5\] must be a number, got nan"),
    ("logit_bias", {5: True}, r"logit_bias\[5\] must be a number"),
    ("bad_words", ["ok", ""], "empty word"),
    ("bad_words", ["  "], "that is only spaces"),
    ("bad_words", "word", "list"),
    ("bad_words", [5], "list of strings, got 5"),
    ("bad_words", ["x" * 1025], "1025 characters; the limit is 1024"),
    ("bad_words", ["\ud800"], "valid Unicode"),
    ("logits_processors", [print, 3], "callables, got 3"),
    ("logits_processors", print, "list"),
    ("extra_args", [1], "map names"),
    ("extra_args", {"a": object()}, "JSON"),
    ("extra_args", {"a": float("nan")}, "JSON"),
    ("extra_args", {"a": "x" * (1 << 20)}, "the limit is 1048576"),
    ("guided_decoding", {"json": {}}, "use structured_outputs=StructuredOutputsParams"),
    ("structured_outputs", {"regex": "a"}, "must be a StructuredOutputsParams"),
    ("best_of", 0, "at least 1"),
    ("best_of", True, "integer"),
    ("thinking_token_budget", -2, "at least -1, got -2"),
    ("thinking_token_budget", 2**31, "at most 2147483647"),
    ("thinking_token_budget", False, "integer"),
    ("thinking_token_budget", 5.0, "integer"),
    ("thinking_token_budget", NAN, "integer"),
    ("thinking_token_budget", "5", "integer"),
    pytest.param("thinking_token_budget", 10**5000, "bits", id="thinking-token-budget-huge"),
    ("stream_interval", 0, "at least 1"),
    ("stream_interval", -1, "at least 1"),
    ("stream_interval", 2**31, "at most 2147483647"),
    ("stream_interval", True, "integer"),
    ("stream_interval", 2.0, "integer"),
    ("stream_interval", NAN, "integer"),
    ("stream_interval", "2", "integer"),
    pytest.param("stream_interval", 10**5000, "bits", id="stream-interval-huge"),
    ("repetition_detection", {}, "must be a RepetitionDetectionParams, got {} \\(dict\\)"),
    ("repetition_detection", 5, "must be a RepetitionDetectionParams, got 5 \\(int\\)"),
    ("repetition_detection", (4, 0, 3), "must be a RepetitionDetectionParams"),
    ("repetition_detection", False, "must be a RepetitionDetectionParams"),
    ("skip_reading_prefix_cache", 1, "must be True, False or None, got 1"),
    ("skip_reading_prefix_cache", 0.0, "must be True, False or None"),
    ("skip_reading_prefix_cache", NAN, "must be True, False or None"),
    ("skip_reading_prefix_cache", "no", "must be True, False or None"),
]

UNSUPPORTED = {
    "routed_experts_prompt_start": 1,
    "trace_decode_token_ids": [1],
    "watermarking": True,
}


@pytest.mark.parametrize("values", VALID, ids=repr)
def test_accepts(values):
    params = SamplingParams(**values)
    assert isinstance(params, SamplingParams)


@pytest.mark.parametrize(("name", "value", "message"), INVALID)
def test_refuses_and_names_parameter_and_limit(name, value, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_yet_is_refused_by_name(name):
    with pytest.raises(InvalidRequestError, match=f"^{name} is not supported yet") as caught:
        SamplingParams(**{name: UNSUPPORTED[name]})
    assert caught.value.param == name


@pytest.mark.parametrize("n", [1, 3])
def test_best_of_n_of_n_is_n_samples(n):
    assert engine_params(SamplingParams(n=n, best_of=n)) == engine_params(SamplingParams(n=n))
    with pytest.raises(InvalidRequestError, match=r"best_of must be at least n \(3\), got 2"):
        SamplingParams(n=3, best_of=2)


def test_best_of_is_known_at_the_end():
    params = engine_params(SamplingParams(n=2, best_of=5))
    assert (params.num_samples, params.output_kind) == (5, RequestOutputKind.FINAL_ONLY)
    assert SamplingParams(n=2).num_samples == 2
    with pytest.raises(InvalidRequestError, match=r"must be n \(1\) when the answer is streamed, got 2"):
        SamplingParams(best_of=2, output_kind=RequestOutputKind.DELTA)
    with pytest.raises(InvalidRequestError, match="best_of must be 1 when using greedy sampling, got 2"):
        SamplingParams(best_of=2, temperature=0)
    with pytest.raises(InvalidRequestError, match="best_of must be at most 16384, got 16385"):
        SamplingParams(best_of=16385)


@pytest.mark.parametrize(
    ("name", "value"), [(name, one) for name, (every, _) in NOT_SUPPORTED_YET.items() for one in every]
)
def test_what_asks_for_nothing_passes(name, value):
    assert getattr(SamplingParams(**{name: value}), name) is value


@pytest.mark.parametrize("value", [1, 1.0, True, "yes", float("nan"), []], ids=repr)
def test_values_that_are_equal_to_a_neutral_one_and_of_another_type_are_refused(value):
    with pytest.raises(InvalidRequestError, match=r"^watermarking is not supported yet"):
        SamplingParams(watermarking=value)


def test_names_that_vllms_own_code_uses():
    assert SamplingParams(temperature=0).sampling_type is SamplingType.GREEDY
    assert SamplingParams().sampling_type is SamplingParams(seed=-1).sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=5).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(logprobs=3).num_logprobs == 3
    assert SamplingParams(skip_clone=True, output_text_buffer_length=4).clone(n=2).skip_clone is True
    for name in ("verify", "update_from_tokenizer", "eos_token_id"):
        assert not hasattr(SamplingParams(), name)
        with pytest.raises(AttributeError, match=f"SamplingParams.{name} is not supported yet: an engine takes"):
            getattr(SamplingParams(), name)
    with pytest.raises(AttributeError, match="'SamplingParams' object has no attribute 'nothing'"):
        SamplingParams().nothing  # noqa: B018 -- the access is the test
    for name in ("flat_logprobs", "skip_clone"):
        with pytest.raises(InvalidRequestError, match=f"{name} must be true or false, got 1"):
            SamplingParams(**{name: 1})


def test_every_unsupported_parameter_exists_and_is_tested():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(NOT_SUPPORTED_YET) <= fields
    assert set(NOT_SUPPORTED_YET) == set(UNSUPPORTED)


def test_defaults_are_those_of_the_api():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.ignore_eos, params.skip_special_tokens, params.spaces_between_special_tokens) == (False, True, True)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_greedy_makes_filters_neutral():
    params = engine_params(SamplingParams(temperature=1e-6, top_p=0.5, top_k=5, min_p=0.2, top_n_sigma=1.0))
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    assert params.top_n_sigma == 0.0


@pytest.mark.parametrize(("given", "used"), [(1e-5, 0.01), (0.005, 0.01), (0.01, 0.01), (0.02, 0.02)])
def test_low_temperatures_are_raised(given, used):
    assert engine_params(SamplingParams(temperature=given)).temperature == used


def test_greedy_with_several_samples_is_refused():
    with pytest.raises(InvalidRequestError, match="n must be 1 when using greedy sampling, got 3"):
        SamplingParams(n=3, temperature=0)


def test_normalised_forms():
    assert engine_params(SamplingParams(seed=-1)).seed is None
    assert engine_params(SamplingParams(top_k=-1)).top_k == 0
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop_strings == ("x", "y")
    assert SamplingParams(stop=None).stop_strings == ()


def test_stop_strings_need_text():
    with pytest.raises(InvalidRequestError, match="need detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_n_limit_follows_the_environment(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_MAX_N", "4")
    with pytest.raises(InvalidRequestError, match="at most 4, got 5"):
        SamplingParams(n=5)


def test_fields_keep_what_they_were_given():
    values = {"temperature": 0.0, "top_p": 0.5, "top_k": -1, "seed": -1, "stop": "x", "bad_words": ["b", "a", "b"]}
    params = SamplingParams(2, **{**values, "temperature": 0.001})
    made = engine_params(params)
    assert {name: getattr(params, name) for name in values} == {**values, "temperature": 0.001}
    assert params.n == 2
    assert (made.temperature, made.top_k, made.seed, made.stop, made.bad_words) == (0.01, 0, None, ("x",), ("b", "a"))


def test_what_is_changed_is_checked_when_a_request_is_made():
    params = SamplingParams(max_tokens=5, stop=["a"])
    first = engine_params(params)
    assert engine_params(params) is first, "made once for as long as nothing changes"
    params.max_tokens = 6
    params.stop.append("b")
    second = engine_params(params)
    assert (first.max_tokens, first.stop) == (5, ("a",))
    assert (second.max_tokens, second.stop) == (6, ("a", "b"))
    params.temperature = 7
    with pytest.raises(InvalidRequestError, match=r"temperature must be in \[0, 2\], got 7"):
        engine_params(params)
    params.temperature = 1.0
    assert engine_params(params).max_tokens == 6


@pytest.mark.parametrize(
    ("name", "value", "change", "made"),
    [
        ("stop", [], lambda value: value.append("x"), ("x",)),
        ("stop_token_ids", [], lambda value: value.append(3), (3,)),
        ("bad_words", ["a"], lambda value: value.append("b"), ("a", "b")),
        ("allowed_token_ids", [1], lambda value: value.append(2), (1, 2)),
        ("logit_bias", {1: 2.0}, lambda value: value.update({3: 4.0}), {1: 2.0, 3: 4.0}),
        ("logits_processors", [], lambda value: value.append(print), (print,)),
        ("extra_args", {"a": {"b": 1}}, lambda value: value["a"].update(b=2), {"a": {"b": 2}}),
    ],
)
def test_a_list_that_is_changed_in_place_counts_from_the_next_request_on(name, value, change, made):
    params = SamplingParams(**{name: value})
    before, twin = engine_params(params), params.clone()
    was = deepcopy(getattr(before, name))
    change(getattr(params, name))
    assert getattr(engine_params(params), name) == made
    assert getattr(before, name) == was != made
    assert engine_params(twin) == before, "a clone has lists of its own"


def test_the_default_lists_are_not_shared():
    params = SamplingParams()
    params.stop.append("x")
    params.stop_token_ids.append(1)
    assert (SamplingParams().stop, SamplingParams().stop_token_ids) == ([], [])
    assert engine_params(params).stop_strings == ("x",)


def test_the_engines_copy_never_changes():
    made = engine_params(SamplingParams(max_tokens=5))
    with pytest.raises(AttributeError, match="max_tokens of a request that was made cannot be changed"):
        made.max_tokens = 6
    mine = made.clone(max_tokens=7)
    mine.max_tokens = 8
    assert (made.max_tokens, type(mine)) == (5, PromptOnlyParams)


def test_an_array_in_place_of_a_list_is_refused_by_name():
    params = SamplingParams(stop_token_ids=[1, 2])
    params.stop_token_ids = np.array([1, 2])
    with pytest.raises(InvalidRequestError, match="stop_token_ids must be a list"):
        engine_params(params)


def test_parameters_can_be_copied():
    params = SamplingParams(max_tokens=5, stop=["a"])
    made = engine_params(params)
    for same in (copy(params), deepcopy(params)):
        assert same == params
        same.max_tokens = 6
        assert engine_params(same).max_tokens == 6
    assert deepcopy(made) == made == engine_params(params)


def test_clone_checks():
    params = SamplingParams(max_tokens=5)
    assert params.clone(max_tokens=7).max_tokens == 7
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        params.clone(max_tokens=-1)


def test_from_optional_takes_none_for_the_default_and_texts_for_token_ids():
    params = SamplingParams.from_optional(n=None, temperature=None, max_tokens=None, logit_bias={"5": 1.5}, stop="x")
    assert params == SamplingParams(logit_bias={5: 1.5}, stop="x", max_tokens=None)
    with pytest.raises(InvalidRequestError, match="a token id must be an integer, got 'five'"):
        SamplingParams.from_optional(logit_bias={"five": 1.0})


def test_only_a_prompt_alone_may_have_no_output():
    assert engine_params(PromptOnlyParams(max_tokens=0)).max_tokens == 0
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 0, got -1"):
        PromptOnlyParams(max_tokens=-1)


NUMERIC = (
    "temperature",
    "top_p",
    "min_p",
    "top_n_sigma",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.binary(max_size=4)
)


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(SamplingParams) if field.name != "output_kind"]),
        ANYTHING,
        max_size=4,
    )
)
def test_any_value_is_accepted_or_refused_with_a_message(values):
    """Whatever comes from a client ends in parameters within their limits, or in the one error."""
    params = refused = None
    try:
        params = engine_params(SamplingParams(**values))
    except InvalidRequestError as error:
        refused = error
    if params is None:
        assert refused.param in values
        return
    assert 0 <= params.temperature <= 2
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert params.top_k >= 0
    assert all(math.isfinite(getattr(params, name)) for name in NUMERIC)
    assert params.max_tokens is None or 0 <= params.min_tokens <= params.max_tokens


def test_lists_are_normalised():
    params = engine_params(
        SamplingParams(logit_bias={1: 500, 2: -1e9, 3: 0.5}, allowed_token_ids=[3, 1, 3], bad_words=["b", "a", "b"])
    )
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 0.5}
    assert params.allowed_token_ids == (3, 1)
    assert params.bad_words == ("b", "a")


def test_what_32_bits_cannot_hold_counts_as_the_nearest_that_they_can():
    tiny = engine_params(SamplingParams(top_p=5e-324, repetition_penalty=5e-324))
    huge = engine_params(SamplingParams(repetition_penalty=1e308))
    assert (tiny.top_p, tiny.repetition_penalty, huge.repetition_penalty) == (1e-30, 1e-30, 1e30)
    assert engine_params(SamplingParams(top_p=1e-9, repetition_penalty=1e9)).repetition_penalty == 1e9
