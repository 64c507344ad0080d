"""Prompts as the engine takes them: text that it tokenises itself, or token ids. It checks them against its limits."""

from typing import TYPE_CHECKING

from rustvllm.entrypoints.openai.state import ServedModel
from rustvllm.exceptions import InvalidRequestError

if TYPE_CHECKING:
    from rustvllm.engine.input_processor import TextPrompt, TokensPrompt


def engine_prompt(
    model: ServedModel,
    prompt: str | list[int],
    *,
    add_special_tokens: bool,
    truncated: bool,
    cache_salt: str | None,
    param: str,
) -> "TextPrompt | TokensPrompt":
    """One prompt for the engine.

    Args:
        model: The served model.
        prompt: Text or token ids.
        add_special_tokens: Let the tokenizer add its beginning-of-sequence token and the like.
        truncated: The request has its prompt cut to fit, so that its length cannot be wrong.
        cache_salt: Keeps this prompt's cached blocks apart from those of other salts.
        param: The request's field, for messages.

    Raises:
        InvalidRequestError: Empty text, text without a tokenizer, or a prompt that is too long whatever its tokens.
    """
    if not isinstance(prompt, str):
        if not truncated and len(prompt) > model.max_model_len:
            raise _too_long(model.max_model_len, f"{len(prompt)} input tokens")
        return _tokens_prompt(prompt, cache_salt)
    if model.tokenizer is None:
        raise InvalidRequestError(
            "This server has no tokenizer (skip_tokenizer_init); send the prompt as token ids.", param
        )
    if not prompt:
        raise InvalidRequestError(f"{param} must not be empty.", param)
    if not truncated:
        check_text_length(model, prompt)
    text_prompt: TextPrompt = {"prompt": prompt, "add_special_tokens": add_special_tokens}
    if cache_salt is not None:
        text_prompt["cache_salt"] = cache_salt
    return text_prompt


def _tokens_prompt(ids: list[int], cache_salt: str | None) -> "TokensPrompt":
    return {"prompt_token_ids": ids} if cache_salt is None else {"prompt_token_ids": ids, "cache_salt": cache_salt}


def check_text_length(model: ServedModel, text: str) -> None:
    """Refuse a text that cannot fit whatever its tokens are, without tokenising megabytes to find that out.

    Raises:
        InvalidRequestError: Names the limit and the least number of tokens the text has.
    """
    at_least = len(text) // model.max_token_chars if model.max_token_chars else 0
    if at_least > model.max_model_len:
        raise _too_long(model.max_model_len, f"at least {at_least} input tokens ({len(text)} characters)")


def _too_long(max_model_len: int, size: str) -> InvalidRequestError:
    """The engine's own words for what it would find after more work."""
    return InvalidRequestError(
        f"This model's maximum context length is {max_model_len} tokens (prompt and output together), "
        f"but your prompt contains {size}. Shorten it, or set truncate_prompt_tokens.",
        "input_tokens",
    )
