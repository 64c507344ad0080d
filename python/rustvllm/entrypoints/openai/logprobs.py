"""Log-probabilities as the API shows them: one object per choice for completions, one per token for chat."""

from collections.abc import Callable
from typing import Any

from rustvllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from rustvllm.exceptions import InvalidRequestError
from rustvllm.outputs import CompletionOutput, Logprob
from rustvllm.sampling_params import MAX_LOGPROBS

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

LogprobsRenderer = Callable[[CompletionOutput], dict[str, Any]]


def completion_logprobs(request: CompletionRequest) -> LogprobsRenderer | None:
    """How a completions request wants its log-probabilities; None: not at all.

    Raises:
        InvalidRequestError: Those of the prompt are asked for as well.
    """
    if request.logprobs is None:
        return None
    if request.echo:
        raise InvalidRequestError(
            "logprobs with echo needs the log-probabilities of the prompt, which are not supported yet; "
            "leave one of them out.",
            "logprobs",
        )
    as_ids = bool(request.return_tokens_as_token_ids)

    def render(output: CompletionOutput) -> dict[str, Any]:
        sampled, top = [], []
        for token_id, position in zip(output.token_ids, output.logprobs or (), strict=True):
            own = position.get(token_id)
            sampled.append((_token(token_id, own, as_ids), None if own is None else _clamped(own)))
            top.append({_token(other, logprob, as_ids): _clamped(logprob) for other, logprob in position.items()})
        return {
            "text_offset": list(output.text_offsets or ()),
            "token_logprobs": [logprob for _, logprob in sampled],
            "tokens": [token for token, _ in sampled],
            "top_logprobs": top,
        }

    return render


def chat_logprobs(request: ChatCompletionRequest) -> LogprobsRenderer | None:
    """How a chat request wants its log-probabilities; None: not at all.

    Raises:
        InvalidRequestError: ``top_logprobs`` without ``logprobs``, or out of its range.
    """
    num_top = request.top_logprobs or 0
    if num_top and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true.", "top_logprobs")
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {num_top}.", "top_logprobs")
    if not request.logprobs:
        return None
    as_ids = bool(request.return_tokens_as_token_ids)

    def entry(token_id: int, logprob: Logprob | None) -> dict[str, Any]:
        raw = None if logprob is None or logprob.decoded_bytes is None else list(logprob.decoded_bytes)
        value = None if logprob is None else _clamped(logprob)
        return {"token": _token(token_id, logprob, as_ids), "logprob": value, "bytes": raw}

    def render(output: CompletionOutput) -> dict[str, Any]:
        content = []
        for token_id, position in zip(output.token_ids, output.logprobs or (), strict=True):
            likeliest = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
            top = [entry(other, logprob) for other, logprob in likeliest]
            content.append({**entry(token_id, position.get(token_id)), "top_logprobs": top})
        return {"content": content}

    return render


def _token(token_id: int, logprob: Logprob | None, as_ids: bool) -> str:
    if as_ids or logprob is None or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token


def _clamped(logprob: Logprob) -> float:
    value = logprob.logprob
    return max(LEAST_LOGPROB, value)  # NaN too
