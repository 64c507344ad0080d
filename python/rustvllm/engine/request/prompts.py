"""Prompts: the shapes in which callers give them, and their token ids, as many as are kept and fit the context."""

import operator
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from rustvllm import _core
from rustvllm.config import ModelConfig
from rustvllm.engine.request.core_request import EngineParams
from rustvllm.engine.request.images import read_media
from rustvllm.engine.request.pooling import num_appended_tokens
from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import is_valid_unicode, shown
from rustvllm.text.tokenizer import Tokenizer, max_token_chars

PROMPT_KEYS = frozenset(
    {"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", "prediction", "multi_modal_data"}
)

UNBUILT_KEYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "images are processed as the model's folder says"),
    "multi_modal_uuids": "images are named by their pixels",
    "prompt_embeds": "give text or token ids",
    "token_type_ids": "models that generate text take none",
    "prompt_token_offsets": "nothing needs the places of tokens in the text",
    "encoder_prompt": "models have no encoder; give the whole prompt as 'prompt'",
    "decoder_prompt": "models have no encoder; give the whole prompt as 'prompt'",
}
"""vLLM's other keys, and why they are refused; one that is None or empty is let through."""


class TextPrompt(TypedDict, total=False):
    """A prompt as text; ``add_special_tokens`` (default True) lets the tokenizer add its beginning of sequence.

    ``prediction`` is what the answer is expected to be: with speculative decoding an answer that follows it is faster.
    ``multi_modal_data`` is ``{"image": images}``: one Pillow image or several, each with a placeholder in the text.
    """

    prompt: str
    cache_salt: str
    add_special_tokens: bool
    prediction: str | Sequence[int] | None
    multi_modal_data: Mapping[str, Any] | None


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, optionally with the text they stand for."""

    prompt_token_ids: Sequence[int] | _core.TokenIds
    prompt: str
    cache_salt: str
    prediction: str | Sequence[int] | None
    multi_modal_data: Mapping[str, Any] | None


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt


def with_tokenization(prompts: list[PromptType], options: Mapping[str, Any]) -> list[PromptType]:
    """Text prompts with ``tokenization_kwargs`` of a call; prompts of token ids stay as they are.

    Raises:
        InvalidRequestError: An option is not known.
    """
    if not isinstance(options, Mapping):
        raise InvalidRequestError(
            f"tokenization_kwargs must be a dict, got {type(options).__name__}", "tokenization_kwargs"
        )
    if unknown := sorted(map(str, set(options) - {"add_special_tokens"})):
        raise InvalidRequestError(
            f"tokenization_kwargs may only have add_special_tokens, got {', '.join(unknown)}",
            "tokenization_kwargs",
        )
    changed: list[Any] = []  # what the dicts hold is checked with the rest of the request
    for prompt in prompts:
        if isinstance(prompt, str):
            changed.append({"prompt": prompt, **options})
        elif isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt:
            changed.append({**options, **prompt})
        else:
            changed.append(prompt)
    return changed


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """What a prompt says, in whatever shape it was given.

    Attributes:
        text: None if it has only token ids.
        token_ids: Not checked yet; None if it has only a text.
        cache_salt: Only prompts with the same one share cached blocks.
        add_special_tokens: Whether the tokenizer adds its own to the text.
        prediction: What the answer is expected to be, not checked yet.
        images: In the order of their placeholders, not checked yet.
    """

    text: str | None = None
    token_ids: object = None
    cache_salt: str | None = None
    add_special_tokens: bool = True
    prediction: object = None
    images: tuple[object, ...] = ()


def read_prompt(prompt: object) -> GivenPrompt:
    """Read a prompt of any shape.

    Raises:
        InvalidRequestError: It has no such shape, or a key of it has a wrong value.
    """
    if isinstance(prompt, str):
        return GivenPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        if prompt is None:
            raise InvalidRequestError("a prompt must be text, a list of token ids or a dict, got NoneType", "prompt")
        return GivenPrompt(token_ids=prompt)
    unknown = sorted(str(key) for key in prompt if key not in PROMPT_KEYS)
    for key in [key for key in unknown if key in UNBUILT_KEYS]:
        if isinstance(value := prompt[key], Sized) and not isinstance(value, str) and not len(value):
            value = None
        if value is not None:
            raise InvalidRequestError(f"{key} of a prompt is not supported yet: {UNBUILT_KEYS[key]}", "prompt")
        unknown.remove(key)
    if unknown:
        raise InvalidRequestError(
            f"a prompt dict may have the keys {', '.join(sorted(PROMPT_KEYS))}, got {', '.join(unknown)}", "prompt"
        )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"prompt must be text, got {type(text).__name__}", "prompt")
    if salt is not None:
        _check_cache_salt(salt)
    if ids is None and text is None:
        raise InvalidRequestError("a prompt dict needs 'prompt' or 'prompt_token_ids'", "prompt")
    special = prompt.get("add_special_tokens", True)
    if not isinstance(special, bool):
        raise InvalidRequestError(f"add_special_tokens must be True or False, got {shown(special)}", "prompt")
    media = prompt.get("multi_modal_data")
    images = () if media is None else read_media(media)
    return GivenPrompt(text, ids, salt, special, prompt.get("prediction"), images)


def _check_cache_salt(salt: object) -> None:
    if (
        not isinstance(salt, str)
        or not 0 < len(salt) <= 128
        or any(char in "@/\\\0" for char in salt)
        or not is_valid_unicode(salt)
    ):
        raise InvalidRequestError(
            f"cache_salt must be 1 to 128 characters without '@', '/', '\\' and NUL, got {shown(salt)}",
            "cache_salt",
        )


class PromptIds:
    """Checks prompts against one model.

    Args:
        model: Its vocabulary and its longest context are the limits.
        tokenizer: Of the texts that become ids; None if prompts are ids.

    Attributes:
        max_token_chars: Most characters of a text that one token stands for; None if that is not known.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.max_token_chars = max_token_chars(tokenizer)

    def encoded(
        self, ids: _core.TokenIds, params: EngineParams, *, add_special_tokens: bool, is_whole: bool = False
    ) -> _core.TokenIds:
        """The ids that a text became, as many as are kept.

        Args:
            ids: All of them.
            params: Of the request.
            add_special_tokens: Whether the tokenizer added its own.
            is_whole: The prompt has images and is not cut.

        Raises:
            InvalidRequestError: An id is not in the vocabulary, or too many are left.
        """
        largest, limit = ids.largest(), self._model.vocab_size
        if largest >= limit:  # tokenizers may have tokens added that the model was never given
            assert self._tokenizer is not None
            [token] = self._tokenizer.convert_ids_to_tokens([largest])
            raise InvalidRequestError(
                f"the prompt has the token {token!r:.80} (id {largest}), which the tokenizer has but the model does "
                f"not: the model's vocabulary is 0 to {limit - 1}",
                "prompt",
            )
        if is_whole:
            self.check_length(len(ids), params, is_whole=True)
            return ids
        ends = params.pooling is not None and params.truncation_side == "right" and add_special_tokens
        keeps_end = ends and params.truncate_prompt_tokens is not None
        return self._fit(ids, params, num_appended_tokens(self._tokenizer) if keeps_end and self._tokenizer else 0)

    def given(self, ids: object, params: EngineParams, *, is_whole: bool = False) -> _core.TokenIds:
        """The ids that a caller gave, as many as are kept.

        Args:
            ids: Whatever was given.
            params: Of the request.
            is_whole: The prompt has images and is not cut.

        Raises:
            InvalidRequestError: They are not a list of ids, an id is not in the vocabulary, or too many are left.
        """
        if isinstance(ids, list | _core.TokenIds) and (is_whole or params.truncate_prompt_tokens is None):
            self.check_length(len(ids), params, is_whole=is_whole)  # before each of them is looked at
            return self._known(ids)
        known = self._known(ids)
        if is_whole:
            self.check_length(len(known), params, is_whole=True)
            return known
        return self._fit(known, params)

    def check_chars(self, num_chars: int, params: EngineParams, *, is_whole: bool = False) -> None:
        """Refuse a text that cannot fit whatever its tokens are, instead of tokenising megabytes to find that out.

        Args:
            num_chars: Of the text.
            params: Of the request.
            is_whole: The prompt has images and is not cut.

        Raises:
            InvalidRequestError: Names the length and the limit.
        """
        at_least = num_chars // self.max_token_chars if self.max_token_chars else 0
        longest = self._longest(params)
        if (is_whole or params.truncate_prompt_tokens is None) and at_least > longest:
            contents = f"at least {at_least} input tokens ({num_chars} characters): at most {longest} fit"
            raise self._too_long(contents, is_cut=is_whole and params.truncate_prompt_tokens is not None)

    def check_length(self, num_tokens: int, params: EngineParams, *, is_whole: bool = False) -> None:
        """Refuse a prompt without tokens, or with more than fit.

        Args:
            num_tokens: Of the prompt.
            params: Of the request.
            is_whole: The prompt has images, and all of it has to fit what ``truncate_prompt_tokens`` leaves.

        Raises:
            InvalidRequestError: Names the length and the limit.
        """
        if not num_tokens:
            raise InvalidRequestError("the prompt is empty: at least one token is needed", "prompt")
        longest, keep = self._longest(params), params.truncate_prompt_tokens
        if is_whole and keep is not None and keep > self._model.max_model_len:
            raise self._keeps_too_many(keep)
        if num_tokens > longest:
            contents = f"{num_tokens} input tokens: at most {longest} fit"
            raise self._too_long(contents, is_cut=is_whole and keep is not None)
        if is_whole and keep is not None and 0 <= keep < num_tokens:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {keep}, but the prompt has {num_tokens} tokens, and one with images is not "
                "cut: raise truncate_prompt_tokens, or shorten the prompt",
                "truncate_prompt_tokens",
            )

    def context_length(self) -> str:
        """The limit as errors say it."""
        together = "" if self._model.pooler is not None else " (prompt and output together)"
        return f"This model's maximum context length is {self._model.max_model_len} tokens{together}"

    def _known(self, ids: object) -> _core.TokenIds:
        """Ids of the vocabulary; what is wrong with them is looked for only when something is."""
        limit = self._model.vocab_size
        if isinstance(ids, list | _core.TokenIds):
            try:
                return _core.TokenIds(ids, limit)
            except ValueError:
                if isinstance(ids, _core.TokenIds):  # a walk through all of them only to say where would take long
                    raise InvalidRequestError(
                        f"token id {ids.largest()} is not in the vocabulary (0 to {limit - 1})", "prompt"
                    ) from None
        if isinstance(ids, bytes | bytearray | Mapping | set | frozenset) or not hasattr(ids, "__iter__"):
            raise InvalidRequestError(
                f"a prompt must be text, a list of token ids or a dict, got {type(ids).__name__}", "prompt"
            )
        checked = []
        for position, token_id in enumerate(ids):
            try:
                if isinstance(token_id, bool):
                    raise TypeError
                value = operator.index(token_id)  # numpy's integers too
            except TypeError:
                raise InvalidRequestError(
                    f"token ids must be integers, got {token_id!r} ({type(token_id).__name__}) at position {position}",
                    "prompt",
                ) from None
            if not 0 <= value < limit:
                shown = value if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
                raise InvalidRequestError(
                    f"token id {shown} at position {position} is not in the vocabulary (0 to {limit - 1})", "prompt"
                )
            checked.append(value)
        return _core.TokenIds(checked)

    def _fit(self, ids: _core.TokenIds, params: EngineParams, num_kept_at_end: int = 0) -> _core.TokenIds:
        """The ids cut as the request says, and then not too many.

        Args:
            ids: Of the prompt.
            params: Of the request.
            num_kept_at_end: If the end is cut off: so many of the last ids stay, such as the one that ends a text and
                whose hidden state is its embedding.
        """
        keep = params.truncate_prompt_tokens
        if keep == -1:
            keep = self._longest(params)
        elif keep is not None and keep > self._model.max_model_len:
            raise self._keeps_too_many(keep)
        if keep is not None and len(ids) > keep >= num_kept_at_end > 0:
            start, end = ids[: keep - num_kept_at_end], ids[len(ids) - num_kept_at_end :]
            ids = _core.TokenIds([*start, *end])
        elif keep is not None and len(ids) > keep:
            ids = ids[:keep] if params.truncation_side == "right" else ids[len(ids) - keep :]
        self.check_length(len(ids), params)
        return ids

    def _longest(self, params: EngineParams) -> int:
        return self._model.max_model_len - (params.max_tokens != 0)

    def _too_long(self, contents: str, *, is_cut: bool = False) -> InvalidRequestError:
        what = "Shorten it, or set truncate_prompt_tokens."
        if is_cut:
            what = "Shorten it: truncate_prompt_tokens does not cut a prompt with images."
        return InvalidRequestError(
            f"{self.context_length()}, but your prompt contains {contents}. {what}", "input_tokens"
        )

    def _keeps_too_many(self, keep: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self.context_length()}, but truncate_prompt_tokens is {keep}.", "truncate_prompt_tokens"
        )
