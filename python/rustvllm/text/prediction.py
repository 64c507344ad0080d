"""Predictions: the answer that a caller expects, as token ids, which the engine uses as drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rustvllm import _core
from rustvllm.exceptions import InvalidRequestError

if TYPE_CHECKING:
    from rustvllm.text.tokenizer import Tokenizer

_OFF_LOOP_CHARS = 2048
_PARAM = "prediction"


@contextmanager
def _refused_as_prediction() -> Iterator[None]:
    """Make errors of the tokenizer, which blame the prompt, blame the prediction."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param == _PARAM:
            raise
        raise InvalidRequestError("prediction contains lone surrogates, which are not characters", _PARAM) from None


class PredictionReader:
    """Checks predictions and turns them into token ids.

    Args:
        tokenizer: The model's tokenizer; None: predictions must be token ids.
        vocab_size: Number of token ids of the model.
        max_model_len: Most tokens of a prediction, because no answer can be longer.
        max_token_chars: Characters of the longest token; 0 if it is unknown.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int, max_token_chars: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._max_tokens = vocab_size, max_model_len
        self._max_chars = max_model_len * max_token_chars

    def read(self, given: object) -> _core.TokenIds | None:
        """Return the token ids of a prediction; None without a prediction or for an empty text.

        Args:
            given: Text, token ids or None.

        Raises:
            InvalidRequestError: The prediction has another type, is longer than any answer, or has token ids that the
                model lacks.
        """
        if given is None or given == "":
            return None
        if not isinstance(given, str):
            return self._given_ids(given)
        with _refused_as_prediction():
            ids = self._text_tokenizer(given).encode_ids(given, add_special_tokens=False)
        return self._checked(ids)

    async def read_off_loop(self, given: object) -> _core.TokenIds | None:
        """Do the same as :meth:`read`, but tokenise a long text in another thread than the event loop's.

        Raises:
            InvalidRequestError: See :meth:`read`.
            QueueFullError: Too much text waits to be tokenised.
        """
        if not isinstance(given, str) or len(given) <= _OFF_LOOP_CHARS:
            return self.read(given)
        with _refused_as_prediction():
            ids = await self._text_tokenizer(given).encode_off_loop(given, add_special_tokens=False)
        return self._checked(ids)

    def _text_tokenizer(self, text: str) -> Tokenizer:
        """Return the tokenizer, after checking that there is one and that the text is not too long."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                "there is no tokenizer (skip_tokenizer_init): give the prediction as token ids", _PARAM
            )
        if self._max_chars and len(text) > self._max_chars:
            raise InvalidRequestError(
                f"prediction has {len(text)} characters, which is more than {self._max_tokens} tokens, the longest "
                "answer, can have: shorten it",
                _PARAM,
            )
        return self._tokenizer

    def _given_ids(self, given: object) -> _core.TokenIds:
        if not isinstance(given, list | tuple | _core.TokenIds):
            raise InvalidRequestError(
                f"prediction must be text or a list of token ids, got {type(given).__name__}", _PARAM
            )
        if len(given) > self._max_tokens:
            raise self._too_long(len(given))
        try:
            return _core.TokenIds(list(given), self._vocab_size)
        except (ValueError, TypeError, OverflowError):
            raise InvalidRequestError(
                f"prediction must only contain token ids from 0 to {self._vocab_size - 1}", _PARAM
            ) from None

    def _checked(self, ids: _core.TokenIds) -> _core.TokenIds:
        """Check the ids that the tokenizer returned."""
        if len(ids) > self._max_tokens:
            raise self._too_long(len(ids))
        if (largest := ids.largest()) >= self._vocab_size:
            raise InvalidRequestError(
                f"prediction has the token id {largest}, which the tokenizer has but the model does not: the model's "
                f"vocabulary is 0 to {self._vocab_size - 1}",
                _PARAM,
            )
        return ids

    def _too_long(self, num_tokens: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"prediction has {num_tokens} tokens, but an answer has at most {self._max_tokens}: shorten it", _PARAM
        )
