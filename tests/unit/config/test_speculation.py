"""``speculative_config``: vLLM's keys, their defaults and limits, and what is refused by name."""

import pytest

from rustvllm.config import EngineConfig, SpeculationConfig
from rustvllm.config.engine_args import EngineArgs
from rustvllm.config.speculation import make_speculation_config
from rustvllm.exceptions import ConfigError
from rustvllm.process.config_json import dump_config, load_config

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def test_nothing_is_asked_for_by_default():
    assert make_speculation_config(None) is None


def test_defaults_of_each_method():
    assert make_speculation_config(NGRAM) == SpeculationConfig(method="ngram", num_speculative_tokens=4)
    assert make_speculation_config({"model": "[ngram]", "num_speculative_tokens": 2}).method == "ngram"
    assert make_speculation_config({"method": "suffix"}).num_speculative_tokens == 24
    assert (
        make_speculation_config({"method": "suffix", "suffix_decoding_max_tree_depth": 8}).num_speculative_tokens == 8
    )
    auto = make_speculation_config({"method": "auto"})
    assert (auto.method, auto.num_speculative_tokens, auto.adaptive) == ("suffix", 32, True)
    assert auto.suffix_decoding_max_spec_factor == 4.0
    once = make_speculation_config({"method": "auto", "suffix_decoding_max_spec_factor": 1.0})
    assert once.suffix_decoding_max_spec_factor == 1.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_one_length_of_the_suffix_stands_for_the_other(given, expected):
    config = make_speculation_config(NGRAM | given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


@pytest.mark.parametrize(("given", "expected"), [({}, 10_000), ({"suffix_decoding_max_cached_requests": 0}, 0)])
def test_how_many_answers_are_kept(given, expected):
    assert make_speculation_config({"method": "suffix"} | given).suffix_decoding_max_cached_requests == expected
    assert make_speculation_config({"method": "auto"} | given).suffix_decoding_max_cached_requests == expected


def test_caps_are_read_in_their_order():
    config = make_speculation_config(
        NGRAM | {"disable_by_batch_size": 8, "num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 9, 1]]}
    )
    assert config.caps == ((8, 2**31 - 1, 0), (1, 2, 4), (3, 9, 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "must be an object"),
        (NGRAM | {"num_tokens": 3}, "unknown key 'num_tokens'; the keys are method, model"),
        ({"method": "ngram"}, "ngram needs num_speculative_tokens"),
        ({"num_speculative_tokens": 3}, "method must be one of ngram, suffix, auto, draft_model, got None"),
        ({"method": "lookahead"}, "method must be one of ngram, suffix, auto, draft_model, got 'lookahead'"),
        ({"method": "eagle"}, "method 'eagle' is not supported yet; rustvllm has ngram, suffix, auto"),
        ({"model": "some/model"}, "draft_model needs num_speculative_tokens"),
        ({"method": "mtp"}, "method 'mtp' is not supported yet"),
        (NGRAM | {"model": "some/model"}, "ngram does not use a model"),
        (NGRAM | {"num_speculative_tokens": 65}, "num_speculative_tokens must be an integer between 1 and 64, got 65"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        (
            NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min=5 must be <= prompt_lookup_max=4",
        ),
        (NGRAM | {"prompt_lookup_min": 1, "prompt_lookup_max": 17}, "17 lengths, but the limit is 16"),
        (NGRAM | {"prompt_lookup_max": 0}, "prompt_lookup_max must be an integer between 1 and 64, got 0"),
        (
            {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 0},
            "max_tree_depth must be an integer between 1 and 64",
        ),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1}, "max_spec_factor must be a number between 0"),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
            "min_token_prob must be a number between 0 and 1",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": -1},
            "suffix_decoding_max_cached_requests must be an integer between 0 and 2147483647, got -1",
        ),
        (NGRAM | {"rejection_sample_method": "synthetic"}, "rejection_sample_method 'synthetic' is not supported"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 2]]}, "got the row"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[4, 2, 1]]}, "last must be an integer between 4"),
        (NGRAM | {"disable_by_batch_size": 0}, "disable_by_batch_size must be an integer between 1"),
        (NGRAM | {"adaptive": 1}, "adaptive must be true or false, got 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(given, message):
    with pytest.raises(ConfigError) as raised:
        make_speculation_config(given)
    assert message in str(raised.value)


def test_it_reaches_the_engine_and_another_process():
    config = EngineArgs(speculative_config=NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4, 2]]})
    made = config.create_engine_config()
    assert made.speculation == SpeculationConfig(method="ngram", num_speculative_tokens=4, caps=((1, 4, 2),))
    again: EngineConfig = load_config(dump_config(made))
    assert again.speculation == made.speculation
    assert EngineArgs().create_engine_config().speculation is None
