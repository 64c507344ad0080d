"""Checks of the lists that a request may give: token ids, biases, words."""

from collections.abc import Callable, Mapping
from typing import Final

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import as_list, check_int, is_number, is_valid_unicode, shown

MAX_TOKEN_ID: Final = 2**31 - 1
MAX_WORD_CHARS: Final = 1024


def check_biases(name: str, biases: object) -> None:
    """Refuse what does not map token ids to numbers."""
    if not isinstance(biases, Mapping):
        raise InvalidRequestError(f"{name} must map token ids to numbers, got {shown(biases)}", name)
    for token_id, bias in biases.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError(
                f"{name} must map token ids to numbers: a token id must be an integer, got {shown(token_id)} "
                f"({type(token_id).__name__})",
                name,
            )
        check_int(name, token_id, 0, MAX_TOKEN_ID)
        if not is_number(bias):
            raise InvalidRequestError(f"{name}[{token_id}] must be a number, got {shown(bias)}", name)


def check_ids(name: str, ids: object) -> None:
    """Refuse what is not a list of token ids."""
    for token_id in as_list(name, ids):
        check_int(name, token_id, 0, MAX_TOKEN_ID)


def check_words(name: str, words: object) -> None:
    """Refuse what is not a list of words that a text can contain."""
    for word in as_list(name, words):
        if not isinstance(word, str):
            raise InvalidRequestError(
                f"{name} must be a list of strings, got {shown(word)} ({type(word).__name__})", name
            )
        if not word.strip():
            raise InvalidRequestError(
                f"{name} must not contain an empty word or a word that is only spaces, got {shown(word)}", name
            )
        if len(word) > MAX_WORD_CHARS:
            raise InvalidRequestError(
                f"a word of {name} has {len(word)} characters; the limit is {MAX_WORD_CHARS}", name
            )
        if not is_valid_unicode(word):
            raise InvalidRequestError(f"{name} must be valid Unicode, got {shown(word)}", name)


LIST_CHECKS: Final[Mapping[str, Callable[[str, object], None]]] = {
    "ids": check_ids,
    "biases": check_biases,
    "words": check_words,
}
"""What refuses the entries of a list, by its kind in the table."""
