"""Log-probabilities as the API shows them: one object per choice for completions, one per token for chat."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rustvllm.exceptions import InvalidRequestError
from rustvllm.logprobs import FlatLogprobs, Logprob, PromptLogprobs
from rustvllm.outputs import CompletionOutput
from rustvllm.server.schemas.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from rustvllm.server.state import ServedModel

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

LogprobsRenderer = Callable[[CompletionOutput], dict[str, Any]]


def completion_logprobs(request: CompletionRequest) -> LogprobsRenderer | None:
    """How a completions request wants its log-probabilities; None: not at all."""
    if request.logprobs is None:
        return None
    as_ids = bool(request.return_tokens_as_token_ids)
    num_logprobs = -1 if request.logprob_token_ids else request.logprobs  # what was named is shown

    def render(output: CompletionOutput) -> dict[str, Any]:
        return completion_places(
            output.token_ids, output.logprobs or (), output.text_offsets or (), num_logprobs, as_ids=as_ids
        )

    return render


def completion_places(
    token_ids: Sequence[int],
    places: Sequence[Mapping[int, Logprob] | None],
    text_offsets: Sequence[int],
    num_logprobs: int,
    *,
    as_ids: bool,
    texts: Sequence[str] = (),
) -> dict[str, Any]:
    """Consecutive places as completions show them.

    Args:
        token_ids: The tokens there.
        places: What the model thought of each; None if unknown.
        text_offsets: Where each begins in the text.
        num_logprobs: Candidates to show in addition to the token itself; -1: all.
        as_ids: Show ids instead of text.
        texts: The tokens' text, for places of which nothing is known.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for index, (token_id, place) in enumerate(zip(token_ids, places, strict=True)):
        own = None if place is None else place.get(token_id)
        known = texts[index] if texts and not as_ids else None
        tokens.append(_token(token_id, own, as_ids) if known is None else known)
        logprobs.append(None if own is None else _clamped(own))
        shown = None if place is None else _likeliest(token_id, place, num_logprobs)
        top.append(None if shown is None else {_token(other, of, as_ids): _clamped(of) for other, of in shown.items()})
    return {"text_offset": list(text_offsets), "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": top}


def num_prompt_logprobs(request: GenerationRequest, echoed: int | None = None) -> int | None:
    """How many candidates are needed for each place of the prompt; None if the request asks for none.

    Args:
        request: For ``prompt_logprobs``.
        echoed: The ``logprobs`` of a request that echoes its prompt.

    Raises:
        InvalidRequestError: ``prompt_logprobs`` of a stream.
    """
    asked = request.prompt_logprobs
    if asked is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs cannot be used with stream=true.", "prompt_logprobs")
    both = [number for number in (asked, echoed) if number is not None]
    if not both:
        return None
    return -1 if -1 in both else max(both)


def shown_prompt_logprobs(
    request: GenerationRequest, prompt_token_ids: list[int], logprobs: PromptLogprobs | FlatLogprobs | None
) -> list[dict[str, dict[str, Any]] | None]:
    """``prompt_logprobs`` of an answer: for each place candidates by token id, the prompt's own first."""
    asked = request.prompt_logprobs
    shown: list[dict[str, dict[str, Any]] | None] = []
    for token_id, place in zip(prompt_token_ids, logprobs or (), strict=False):  # shorter when it was aborted
        if place is None or asked is None:
            shown.append(None)
            continue
        shown.append(
            {
                str(other): {"logprob": _clamped(of), "rank": of.rank, "decoded_token": of.decoded_token}
                for other, of in _likeliest(token_id, place, asked).items()
            }
        )
    return shown


def chat_logprobs(request: ChatCompletionRequest, model: ServedModel) -> LogprobsRenderer | None:
    """How a chat request wants its log-probabilities; None: not at all.

    Raises:
        InvalidRequestError: ``top_logprobs`` without ``logprobs``, or out of its range.
    """
    num_top = request.top_logprobs or 0
    if num_top and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true.", "top_logprobs")
    if num_top < -1:
        raise InvalidRequestError(f"top_logprobs must be at least 0, or -1 for all, got {num_top}.", "top_logprobs")
    model.check_num_logprobs("top_logprobs", num_top)
    if not request.logprobs:
        return None
    as_ids, shows_all = bool(request.return_tokens_as_token_ids), bool(request.logprob_token_ids)

    def entry(token_id: int, logprob: Logprob | None) -> dict[str, Any]:
        raw = None if logprob is None or logprob.decoded_bytes is None else list(logprob.decoded_bytes)
        value = None if logprob is None else _clamped(logprob)
        return {"token": _token(token_id, logprob, as_ids), "logprob": value, "bytes": raw}

    def render(output: CompletionOutput) -> dict[str, Any]:
        content = []
        for token_id, position in zip(output.token_ids, output.logprobs or (), strict=True):
            shown = list(position.items())
            if not shows_all:
                shown = sorted(shown, key=lambda item: item[1].rank or 0)[: None if num_top == -1 else num_top]
            top = [entry(other, logprob) for other, logprob in shown]
            content.append({**entry(token_id, position.get(token_id)), "top_logprobs": top})
        return {"content": content}

    return render


def _likeliest(token_id: int, place: Mapping[int, Logprob], count: int) -> Mapping[int, Logprob]:
    """A place's own token and ``count`` of the likeliest (-1: all), in their order."""
    if count == -1:
        return place
    return {other: logprob for other, logprob in place.items() if other == token_id or (logprob.rank or 0) <= count}


def _token(token_id: int, logprob: Logprob | None, as_ids: bool) -> str:
    if as_ids or logprob is None or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token


def _clamped(logprob: Logprob) -> float:
    value = logprob.logprob
    return max(LEAST_LOGPROB, value)  # NaN too
