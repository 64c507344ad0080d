"""What this API has elsewhere and this server does not have yet: refused by name, never ignored.

A request field in these tables may be sent with a value that asks for nothing (null, false, the default): that is what
many clients do. Anything else gets a 400 naming it. Fields in no table and in no model are accepted and ignored, which
the log says once per name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

_MAX_NAMES_LOGGED = 256
_logged_names: set[str] = set()


def _nothing(value: Any) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {}


def _one(value: Any) -> bool:
    return value is None or (value == 1 and value is not True)


def _text_format(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and value.get("type") == "text")


def _text_modality(value: Any) -> bool:
    return value is None or value == ["text"]


def _no_tool(value: Any) -> bool:
    return value is None or value == "none"


Refusals = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Field -> whether a value asks for nothing, and what to do instead (may be empty)."""

_SHARED: Refusals = {
    "use_beam_search": (_nothing, ""),
    "length_penalty": (_one, "it is for beam search"),
    "early_stopping": (_nothing, "it is for beam search"),
    "response_format": (_text_format, "only the type 'text' is"),
    "structured_outputs": (_nothing, ""),
    "guided_json": (_nothing, ""),
    "guided_regex": (_nothing, ""),
    "guided_choice": (_nothing, ""),
    "guided_grammar": (_nothing, ""),
    "guided_decoding_backend": (_nothing, ""),
    "guided_whitespace_pattern": (_nothing, ""),
    "prompt_embeds": (_nothing, "send text or token ids"),
    "logprob_token_ids": (_nothing, ""),
    "logits_processors": (_nothing, "use those that the server was started with, by vllm_xargs"),
    "kv_transfer_params": (_nothing, ""),
    "ec_transfer_params": (_nothing, ""),
    "repetition_detection": (_nothing, ""),
    "lora_request": (_nothing, ""),
}
COMPLETION_REFUSALS: Refusals = {
    **_SHARED,
    "suffix": (_nothing, ""),
}
CHAT_REFUSALS: Refusals = {
    **_SHARED,
    "tool_choice": (_no_tool, "leave it out to have tools shown to the model and answered as text"),
    "functions": (_nothing, "send them as tools"),
    "function_call": (_no_tool, "send functions as tools"),
    "audio": (_nothing, "answers are text"),
    "modalities": (_text_modality, "answers are text"),
    "prediction": (_nothing, ""),
    "web_search_options": (_nothing, ""),
    "thinking_token_budget": (_nothing, ""),
    "mm_processor_kwargs": (_nothing, ""),
    "media_io_kwargs": (_nothing, ""),
}

UNBUILT_ENDPOINTS: tuple[tuple[str, str], ...] = tuple(
    tuple(line.split())  # type: ignore[misc]
    for line in """
    POST /v1/embeddings
    POST /v1/responses
    GET /v1/responses/{rest:path}
    POST /v1/responses/{rest:path}
    POST /v1/messages
    POST /v1/messages/count_tokens
    POST /v1/moderations
    POST /v1/audio/speech
    POST /v1/audio/transcriptions
    POST /v1/audio/translations
    POST /v1/images/generations
    POST /v1/images/edits
    POST /v1/score
    POST /v1/rerank
    POST /v2/rerank
    GET /v1/files
    POST /v1/files
    GET /v1/batches
    POST /v1/batches
    POST /v1/load_lora_adapter
    POST /v1/unload_lora_adapter
    POST /v1/chat/completions/render
    POST /v1/completions/render
    POST /pooling
    POST /classify
    POST /score
    POST /rerank
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
    POST /stop_profile
    """.splitlines()
    if line.strip()
)
"""Method and path of endpoints that clients of this API may call and that answer 501 with their name."""


def refuse_unbuilt(request: BaseModel, refusals: Refusals) -> None:
    """Raise for a field of ``request`` that asks for something not built yet, and log the fields that are ignored.

    Args:
        request: A parsed request; fields unknown to its model count too.
        refusals: One of the tables above.

    Raises:
        InvalidRequestError: With ``param`` naming the field.
    """
    for name in sorted(request.model_fields_set & refusals.keys()):
        asks_nothing, instead = refusals[name]
        if not asks_nothing(getattr(request, name)):
            hint = f"; {instead}" if instead else ""
            raise InvalidRequestError(f"{name} is not supported yet{hint}.", name)
    for name in request.model_extra or ():
        if name not in refusals and name not in _logged_names and len(_logged_names) < _MAX_NAMES_LOGGED:
            _logged_names.add(name)
            logger.warning("request field %.64r is not known and is ignored (said once)", name)
