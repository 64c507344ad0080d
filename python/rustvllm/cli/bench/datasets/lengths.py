"""Lengths of the prompts and answers of ``rustvllm bench serve``, chosen to fit into the server's context."""

import math
from dataclasses import dataclass
from typing import Final

from rustvllm.exceptions import ConfigError

DEFAULT_INPUT_LEN: Final = 1024
DEFAULT_OUTPUT_LEN: Final = 128
DEFAULT_PREFIX_LEN: Final = 256
"""Of the data set ``prefix``."""
TOKENS_PER_WORD: Final = 4
"""A word of a prompt that is sent as text takes at most about this many tokens of a small vocabulary."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts and answers of a random data set.

    Attributes:
        input_len: Tokens of a prompt after its shared prefix.
        output_len: Tokens of an answer.
        note: A sentence about defaults that were shortened; empty if none was.
    """

    input_len: int
    output_len: int
    note: str = ""


def choose_lengths(
    input_len: int | None,
    output_len: int | None,
    *,
    prefix_len: int,
    range_ratio: float,
    is_text: bool,
    context_len: int | None,
    default_input_len: int = DEFAULT_INPUT_LEN,
) -> Lengths:
    """Take the lengths that the user gave, and shorten defaults until a request fits into the context.

    Args:
        input_len: ``--random-input-len``; None: not given.
        output_len: ``--random-output-len``; None: not given.
        prefix_len: Tokens that prompts share before that.
        range_ratio: The share of itself by which a length varies.
        is_text: Prompts are words, of which the server makes a number of tokens that only the server knows.
        context_len: The server's ``max_model_len``, in tokens; None: the server does not say.
        default_input_len: Where ``input_len`` is None and the context has room.

    Raises:
        ConfigError: A request with the given lengths cannot fit.
    """
    wanted = Lengths(
        default_input_len if input_len is None else input_len, DEFAULT_OUTPUT_LEN if output_len is None else output_len
    )
    if context_len is None:
        return wanted

    def longest(length: int) -> int:
        return math.ceil(length * (1 + range_ratio))

    needed = prefix_len + longest(wanted.input_len) + longest(wanted.output_len)
    if needed > context_len and input_len is not None and output_len is not None:
        raise ConfigError(
            f"a request needs up to {needed} tokens (prefix {prefix_len}, prompt {longest(input_len)}, answer "
            f"{longest(output_len)}), but the server's context length is {context_len}: lower --random-input-len, "
            "--random-output-len or --prefix-len"
        )
    per_word = TOKENS_PER_WORD if is_text else 1
    if prefix_len * per_word + longest(wanted.input_len) * per_word + longest(wanted.output_len) <= context_len:
        return wanted
    share = 1 + range_ratio
    if output_len is None:
        output_len = min(DEFAULT_OUTPUT_LEN, max(1, int(context_len / 4 / share)))
    if input_len is None:
        room = (context_len - longest(output_len)) // per_word - prefix_len
        input_len = min(default_input_len, int(room / share))
    if input_len < 1 or (not is_text and prefix_len + longest(input_len) + longest(output_len) > context_len):
        raise ConfigError(
            f"a prefix of {prefix_len}, a prompt of {longest(max(1, input_len))} and an answer of "
            f"{longest(output_len)} tokens do not fit into the server's context length of {context_len}: lower "
            "--random-input-len, --random-output-len or --prefix-len"
        )
    if (input_len, output_len) == (wanted.input_len, wanted.output_len):
        return wanted
    unit = "words" if is_text else "tokens"
    note = (
        f"the server's context has {context_len} tokens: prompts of {input_len} {unit} and answers of {output_len} "
        f"tokens instead of {wanted.input_len} and {wanted.output_len}"
    )
    return Lengths(input_len, output_len, note)


def default_prefix_len(context_len: int | None, *, is_text: bool) -> int:
    """Tokens (or words) of a prefix whose length the user did not give: at most half of the context.

    Args:
        context_len: The server's ``max_model_len``, in tokens; None: the server does not say.
        is_text: Prefixes are words, each of up to :data:`TOKENS_PER_WORD` tokens.
    """
    if context_len is None:
        return DEFAULT_PREFIX_LEN
    return max(1, min(DEFAULT_PREFIX_LEN, context_len // 2 // (TOKENS_PER_WORD if is_text else 1)))
