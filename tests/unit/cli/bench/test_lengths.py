"""The lengths that ``rustvllm bench serve`` chooses fit into the server's context, or the error names what to lower."""

import itertools
import math

import pytest

from rustvllm.cli.bench.datasets.lengths import TOKENS_PER_WORD, choose_lengths, default_prefix_len
from rustvllm.exceptions import ConfigError


def choose(given_input=None, given_output=None, *, prefix_len=0, range_ratio=0.0, is_text=False, context_len=None):
    return choose_lengths(
        given_input,
        given_output,
        prefix_len=prefix_len,
        range_ratio=range_ratio,
        is_text=is_text,
        context_len=context_len,
    )


@pytest.mark.parametrize("context_len", [None, 1152, 100_000])
def test_defaults_stay_where_they_fit(context_len):
    lengths = choose(context_len=context_len)
    assert (lengths.input_len, lengths.output_len, lengths.note) == (1024, 128, "")


def test_defaults_become_shorter_and_say_so():
    lengths = choose(context_len=512)
    assert (lengths.input_len, lengths.output_len) == (384, 128)
    assert "prompts of 384 tokens and answers of 128 tokens instead of 1024 and 128" in lengths.note


def test_chosen_lengths_always_fit():
    cases = itertools.product(
        (None, 1, 50), (None, 1, 50), (0, 30), (0.0, 0.5, 0.9), (False, True), (3, 16, 64, 513, 1151, 5000)
    )
    chosen = refused = 0
    for given_input, given_output, prefix_len, ratio, is_text, context_len in cases:
        try:
            lengths = choose(
                given_input,
                given_output,
                prefix_len=prefix_len,
                range_ratio=ratio,
                is_text=is_text,
                context_len=context_len,
            )
        except ConfigError:
            refused += 1
            continue
        chosen += 1
        assert lengths.input_len == (given_input or lengths.input_len)
        assert lengths.output_len == (given_output or lengths.output_len)
        per_word = TOKENS_PER_WORD if is_text and given_input is None else 1
        longest = (prefix_len + math.ceil(lengths.input_len * (1 + ratio))) * per_word
        if not is_text or given_input is None:
            assert longest + math.ceil(lengths.output_len * (1 + ratio)) <= context_len
    assert chosen > 100
    assert refused > 20


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"given_input": 500, "given_output": 100}, "up to 600 tokens"),
        ({"given_input": 512}, "do not fit into the server's context length of 512"),
        ({"given_output": 512}, "do not fit into the server's context length of 512"),
        ({"prefix_len": 512}, "do not fit into the server's context length of 512"),
    ],
)
def test_what_cannot_fit_is_refused_by_name(given, says):
    with pytest.raises(ConfigError, match="lower --random-input-len, --random-output-len or --prefix-len") as caught:
        choose(**given, context_len=512)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("context_len", "is_text", "length"),
    [(None, True, 256), (512, False, 256), (511, False, 255), (512, True, 64), (2048, True, 256), (1, True, 1)],
)
def test_a_default_prefix_takes_half_of_the_context_at_most(context_len, is_text, length):
    assert default_prefix_len(context_len, is_text=is_text) == length
