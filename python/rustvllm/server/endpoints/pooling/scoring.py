"""``POST /score`` and ``/rerank``: how well texts fit together, by embeddings or by a classifier of one label."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.engine.request.pairs import check_pair_chars, cosines, pairs_of
from rustvllm.server.answers.scores import rerank_response, score_response
from rustvllm.server.endpoints.pooling.call import PooledCall, salted
from rustvllm.server.schemas.refusals import SCORING_REFUSALS
from rustvllm.server.schemas.request_body import at_size, read_request, refuse_unbuilt
from rustvllm.server.schemas.scoring import RerankRequest, ScoreRequest, ScoringRequest
from rustvllm.server.stream.generation import unless_left
from rustvllm.text.chat_template import check_template_variables

if TYPE_CHECKING:
    from rustvllm.engine.request.prompts import PromptType

_FEW_PAIRS = 32
"""Cosines that are computed on the event loop: well under a millisecond."""


async def create_scores(raw_request: Request) -> Response:
    """Score each pair, in the order of the request."""
    request = await read_request(raw_request, ScoreRequest)
    call = await PooledCall.begin(raw_request, request, "score", "score-")
    names, firsts, seconds = request.sides()
    scores, usage = await _scores(call, request, names, firsts, seconds)
    header = {"id": call.request_id, "object": "list", "created": int(time.time()), "model": call.name}
    return score_response(scores, header, usage)


async def rerank(raw_request: Request) -> Response:
    """Score each document with the query; the best comes first."""
    request = await read_request(raw_request, RerankRequest)
    call = await PooledCall.begin(raw_request, request, "score", "score-")
    documents = request.documents
    scores, usage = await _scores(call, request, ("query", "documents"), [request.query], documents)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    texts = None if request.return_documents is False else documents
    header = {
        "id": call.request_id,
        "model": call.name,
        "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
    }
    return await rerank_response(scores, best, texts, header)


async def _scores(
    call: PooledCall, request: ScoringRequest, names: tuple[str, str], firsts: list[str], seconds: list[str]
) -> tuple[list[float], dict[str, Any]]:
    """A score for each pair, and the ``usage`` of all prompts."""
    refuse_unbuilt(request, SCORING_REFUSALS)
    variables = _variables(request)
    pairs = pairs_of(firsts, seconds, names)
    model, raw_request = call.model, call.raw_request
    if model.classifier is None:
        texts = await at_size(raw_request, lambda: list(dict.fromkeys(text for pair in pairs for text in pair)))
        prompts = [salted(text, request.cache_salt) for text in texts]

        def place_of(index: int) -> tuple[str, str]:
            """Where a text was first found in the request."""
            name, given = (names[0], firsts) if texts[index] in firsts else (names[1], seconds)
            return name, name if len(given) == 1 else f"element {given.index(texts[index])} of {name}"

        made_vectors, usage = await call.run(prompts, names[1], place_of)
        vectors = dict(zip(texts, made_vectors, strict=True))
        if len(pairs) <= _FEW_PAIRS:
            return cosines(pairs, vectors), usage
        return await asyncio.to_thread(cosines, pairs, vectors), usage
    check_pair_chars(pairs, names[1])
    assert model.pair_prompts is not None, "classifiers have it"
    making = model.pair_prompts.make_off_loop(pairs, call.params, model.score_renderer, variables)
    made = await unless_left(raw_request, making)
    prompts = await at_size(raw_request, partial(_salted, made, request.cache_salt))
    scores, usage = await call.run(prompts, names[1])
    return [float(score[0]) for score in scores], usage


def _salted(prompts: "list[PromptType]", salt: str | None) -> "list[PromptType]":
    return [salted(prompt, salt) for prompt in prompts]


def _variables(request: ScoringRequest) -> Mapping[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    check_template_variables(variables)
    if request.instruction is not None:
        variables.setdefault("instruction", request.instruction)
    return variables
