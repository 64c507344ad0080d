"""Parameters of a request that are lists, checked against the model and made into what the core carries."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rustvllm import _core
from rustvllm.config import ModelConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.sampling_params import SamplingParams
from rustvllm.sampling_params.table import SAMPLING_LISTS, SamplingList
from rustvllm.text.tokenizer import Tokenizer

logger = init_logger(__name__)

_FEW_IDS = 2048
_FEW_CHARS = 512
_FEW_IN_ARRAY = 1 << 17
_warned_of_arguments = False


def given_lists(params: SamplingParams) -> dict[str, Any]:
    """The parameters of ``SAMPLING_LISTS`` that have entries, by name: sequences, and mappings of biases."""
    return {name: entries for name in SAMPLING_LISTS if (entries := getattr(params, name))}


def is_long(params: SamplingParams) -> bool:
    """Whether lists, stop strings or a grammar take more than a millisecond or two to check: a thread does it then."""
    num_ids = num_chars = 0
    for name, entries in given_lists(params).items():
        if SAMPLING_LISTS[name].kind == "words":
            num_chars += sum(map(len, entries))
        else:
            num_ids += len(entries)
    rows = params.prompt_logprob_token_ids
    return (
        params.structured_outputs is not None
        or (rows is not None and rows.size > _FEW_IN_ARRAY)
        or num_ids > _FEW_IDS
        or num_chars > _FEW_CHARS
        or sum(map(len, params.stop_strings)) > _FEW_CHARS
        or sum(len(value) if isinstance(value, str | list) else 1 for value in (params.extra_args or {}).values())
        > _FEW_IDS
    )


def make_sampling_extras(
    params: SamplingParams, model: ModelConfig, tokenizer: Tokenizer | None, ending_ids: Iterable[int]
) -> _core.SamplingExtras | None:
    """What the core carries for a request; None for one without lists.

    Args:
        params: Checked.
        model: For the size of its vocabulary, and whether it was loaded with logits processors.
        tokenizer: Makes tokens of bad words; None with ``skip_tokenizer_init``.
        ending_ids: EOS and stop ids of the request, which are not sampled before ``min_tokens``.

    Raises:
        InvalidRequestError: An id is not in the vocabulary, a list is too long, or nothing is left to be sampled.
    """
    arguments = params.extra_args if model.logits_processors else None
    if params.extra_args and not model.logits_processors:
        _warn_of_arguments()
    lists = given_lists(params)
    if not (lists or params.logits_processors or arguments or params.prompt_logprob_token_ids is not None):
        return None
    for name, entries in lists.items():
        row = SAMPLING_LISTS[name]
        if row.kind == "words":
            lists[name] = _tokens_of_words(row, entries, tokenizer, model.vocab_size)
        else:
            _check_vocabulary(name, entries, model.vocab_size)
            lists[name] = list(entries.items() if row.kind == "biases" else entries)
    if params.allowed_token_ids:
        _check_something_is_left(params, params.allowed_token_ids, lists.get("bad_words", ()), ending_ids)
    return _core.SamplingExtras(
        **lists,
        arguments=None if not arguments else json.dumps(dict(arguments)),
        attachment=tuple(params.logits_processors) if params.logits_processors else None,
        prompt_tokens=_prompt_tokens(params, model.vocab_size),
    )


def _prompt_tokens(params: SamplingParams, vocab_size: int) -> tuple[int, bool, int, bytes] | None:
    """``prompt_logprob_token_ids`` as the core takes them; None without."""
    rows = params.prompt_logprob_token_ids
    if rows is None:
        return None
    if (largest := int(rows.max())) >= vocab_size:
        raise InvalidRequestError(
            f"prompt_logprob_token_ids holds {largest}, which is not in the vocabulary (0 to {vocab_size - 1})",
            "prompt_logprob_token_ids",
        )
    return params.prompt_logprob_start or 0, params.prompt_logprobs is None, rows.shape[1], rows.tobytes()


def _check_vocabulary(name: str, ids: Sequence[int] | dict[int, float], vocab_size: int) -> None:
    if len(ids) > vocab_size:
        raise InvalidRequestError(
            f"{name} has {len(ids)} entries, but the vocabulary has only {vocab_size} tokens: name each token once",
            name,
        )
    largest = max(ids, default=-1)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"{name} holds {largest}, which is not in the vocabulary (0 to {vocab_size - 1})", name
        )


def _tokens_of_words(
    row: SamplingList, words: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """The tokens of each word, within a text and after a space."""
    name = row.name
    if tokenizer is None:
        raise InvalidRequestError(
            f"there is no tokenizer (skip_tokenizer_init), so {name} cannot be turned into tokens: use logit_bias", name
        )
    if len(words) > row.max_entries:
        raise InvalidRequestError(f"{name} has {len(words)} entries; the limit is {row.max_entries}: send fewer", name)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids or max(ids) >= vocab_size:
                shown = "no tokens" if not ids else f"the token id {max(ids)}, which the model does not have"
                raise InvalidRequestError(f"the word {word[:80]!r} of {name} has {shown}", name)
            sequences[ids] = None
    return [list(ids) for ids in sequences]


def _check_something_is_left(
    params: SamplingParams, allowed: Sequence[int], words: Sequence[Sequence[int]], ending_ids: Iterable[int]
) -> None:
    left = set(allowed).difference(word[0] for word in words if len(word) == 1)
    if not left:
        raise InvalidRequestError(
            f"bad_words exclude all {len(allowed)} allowed_token_ids: no token could be sampled", "bad_words"
        )
    if params.min_tokens and not left.difference(ending_ids):
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, but each of the allowed_token_ids ends the output or is a bad word: "
            "no token could be sampled before that",
            "allowed_token_ids",
        )


def _warn_of_arguments() -> None:
    global _warned_of_arguments  # noqa: PLW0603 -- said once per process
    if not _warned_of_arguments:
        _warned_of_arguments = True
        logger.warning(
            "ignoring extra_args (vllm_xargs) of a request: the engine has no logits processor to read it "
            "(--logits-processors); logged once"
        )
