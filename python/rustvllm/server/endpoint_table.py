"""The table of endpoints: a row for each, from which follow the routes, the guards and the OpenAPI document.

``docs/adding-an-endpoint.md`` says what a new row needs besides.
"""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.server.dashboard import routes as dashboard
from rustvllm.server.endpoints import (
    adapters,
    chat,
    completions,
    front_page,
    health,
    messages,
    metrics,
    models,
    tokenization,
)
from rustvllm.server.endpoints import responses as responses_api
from rustvllm.server.endpoints.pooling import classification, embeddings, scoring
from rustvllm.server.errors import NotSupportedYetError
from rustvllm.server.http.endpoint import Endpoint
from rustvllm.server.schemas import messages as message_schemas
from rustvllm.server.schemas import protocol, responses, responses_answer, responses_request
from rustvllm.server.schemas import scoring as scoring_schemas

_WITH_BODY = (400, 404, 413, 415, 500)

ENDPOINTS: Final = (
    Endpoint(
        "POST",
        "/v1/completions",
        completions.create_completion,
        takes=(protocol.CompletionRequest,),
        answer=responses.CompletionResponse,
        chunk=responses.CompletionChunk,
        errors=_WITH_BODY,
        generates=True,
        is_direct=True,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat.create_chat_completion,
        takes=(protocol.ChatCompletionRequest,),
        answer=responses.ChatCompletionResponse,
        chunk=responses.ChatCompletionChunk,
        errors=_WITH_BODY,
        generates=True,
        is_direct=True,
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        messages.create_message,
        takes=(message_schemas.MessagesRequest,),
        answer=message_schemas.MessageResponse,
        chunk=message_schemas.MessageEvent,
        errors=_WITH_BODY,
        error=message_schemas.MessageError,
        names_events=True,
        generates=True,
        is_direct=True,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        takes=(message_schemas.CountTokensRequest,),
        answer=message_schemas.CountTokensResponse,
        errors=_WITH_BODY,
        error=message_schemas.MessageError,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses_api.create_response,
        takes=(responses_request.ResponsesRequest,),
        answer=responses_answer.ResponseObject,
        chunk=responses_answer.ResponseEvent,
        errors=_WITH_BODY,
        names_events=True,
        generates=True,
        is_direct=True,
    ),
    # Not 501: clients try again what ends in a 5xx.
    Endpoint("GET", "/v1/responses/{response_id:path}", responses_api.stored_response, is_documented=False),
    Endpoint("DELETE", "/v1/responses/{response_id:path}", responses_api.stored_response, is_documented=False),
    Endpoint("POST", "/v1/responses/{response_id:path}/cancel", responses_api.stored_response, is_documented=False),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings.create_embeddings,
        takes=(protocol.EmbeddingRequest,),
        answer=responses.EmbeddingResponse,
        errors=_WITH_BODY,
        generates=True,
        is_direct=True,
    ),
    Endpoint(
        "POST",
        "/classify",
        classification.classify,
        takes=(scoring_schemas.ClassificationRequest,),
        answer=responses.ClassificationResponse,
        errors=_WITH_BODY,
        generates=True,
        is_direct=True,
    ),
    *(
        Endpoint(
            "POST",
            path,
            scoring.create_scores,
            takes=(scoring_schemas.ScoreRequest,),
            answer=responses.ScoreResponse,
            errors=_WITH_BODY,
            generates=True,
            is_direct=True,
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        Endpoint(
            "POST",
            path,
            scoring.rerank,
            takes=(scoring_schemas.RerankRequest,),
            answer=responses.RerankResponse,
            errors=_WITH_BODY,
            generates=True,
            is_direct=True,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Endpoint("GET", "/v1/models", models.list_models, answer=responses.ModelList),
    Endpoint("GET", "/v1/models/{model_id:path}", models.get_model, answer=responses.ModelCard, errors=(404,)),
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        adapters.load_adapter,
        takes=(protocol.LoadAdapterRequest,),
        media_types=("text/plain",),
        errors=_WITH_BODY,
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        adapters.unload_adapter,
        takes=(protocol.UnloadAdapterRequest,),
        media_types=("text/plain",),
        errors=_WITH_BODY,
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokenization.tokenize,
        takes=(protocol.TokenizeRequest, protocol.TokenizeChatRequest),
        answer=responses.TokenizeResponse,
        errors=_WITH_BODY,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        tokenization.detokenize,
        takes=(protocol.DetokenizeRequest,),
        answer=responses.DetokenizeResponse,
        errors=_WITH_BODY,
    ),
    Endpoint(
        "GET",
        "/health",
        health.health,
        answer=responses.HealthResponse,
        unavailable=responses.HealthResponse,
        is_open=True,
        is_answered_when_full=True,
        is_direct=True,
    ),
    Endpoint(
        "GET",
        "/ping",
        health.ping,
        answer=responses.HealthResponse,
        unavailable=responses.HealthResponse,
        is_open=True,
        is_answered_when_full=True,
    ),
    Endpoint("POST", "/ping", health.ping, is_documented=False, is_open=True, is_answered_when_full=True),
    Endpoint(
        "GET",
        "/version",
        health.version,
        answer=responses.VersionResponse,
        is_open=True,
        is_answered_when_full=True,
    ),
    Endpoint("GET", "/", front_page.front_page, is_documented=False, is_open=True),
    Endpoint("GET", "/load", health.load, is_answered_when_full=True),
    Endpoint(
        "GET", "/metrics", metrics.metrics, media_types=("text/plain", metrics.OPENMETRICS), is_answered_when_full=True
    ),
    # The page has no data in it, so it needs no key.
    Endpoint("GET", "/dashboard", dashboard.dashboard, is_documented=False, is_open=True),
    Endpoint("GET", "/dashboard/", dashboard.dashboard_with_a_slash, is_documented=False, is_open=True),
    Endpoint("GET", "/dashboard/events", dashboard.events, is_documented=False, is_watching=True),
    Endpoint("GET", "/dashboard/history", dashboard.history, is_documented=False),
    Endpoint("GET", "/dashboard/journey", dashboard.journey, is_documented=False, is_watching=True),
)
"""A path's guards hold for all its methods, so the rows of one path agree on them."""

_UNBUILT = """
    POST /v1/responses/{rest:path}
    POST /v1/moderations
    POST /v1/audio/speech
    POST /v1/audio/transcriptions
    POST /v1/audio/translations
    POST /v1/images/generations
    POST /v1/images/edits
    GET /v1/files
    POST /v1/files
    GET /v1/batches
    POST /v1/batches
    POST /v1/chat/completions/render
    POST /v1/completions/render
    POST /pooling
    POST /invocations
    POST /inference/v1/generate
    GET /server_info
    GET /tokenizer_info
    POST /reset_prefix_cache
    POST /sleep
    POST /wake_up
    GET /is_sleeping
    POST /collective_rpc
    POST /scale_elastic_ep
    POST /start_profile
    POST /generative_scoring
    POST /abort_requests
    POST /pause
    POST /resume
    GET /is_paused
    GET /v1/realtime
    POST /v1/realtime/sessions
    POST /v1/uploads
    POST /v1/uploads/{rest:path}
    POST /v1/chat/completions/batch
    POST /v1/chat/completions/derender
    POST /v1/completions/derender
    POST /v1/messages/render
    POST /v1/systemone
    POST /v2/embed
    POST /cohere/v2/chat
    GET /get_world_size
    POST /reset_mm_cache
    POST /reset_encoder_cache
    POST /release_kv_cache_memory
    GET /kv_event_sources
    POST /init_weight_transfer_engine
    POST /shutdown_weight_transfer_engine
    POST /start_weight_update
    POST /start_draft_weight_update
    POST /update_weights
    POST /update_weight_version
    POST /finish_weight_update
    GET /weight_checker
    GET /weight_info
    POST /fault_tolerance/apply
    GET /fault_tolerance/status
    POST /is_scaling_elastic_ep
    POST /stop_profile
"""


async def _not_built(request: Request) -> Response:
    raise NotSupportedYetError(
        f"The endpoint {request.method} {request.url.path[:256]} is not supported yet by this server."
    )


UNBUILT_ENDPOINTS: Final = tuple(
    Endpoint(method, path, _not_built, is_documented=False)
    for method, path in (line.split() for line in _UNBUILT.splitlines() if line.strip())
)
"""Endpoints that clients of this API may call and that answer 501 with their name."""
