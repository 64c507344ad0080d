"""What this API has elsewhere and this server does not have yet: refused by name, never ignored.

A request field in these tables may be sent with a value that asks for nothing (null, false, the default): that is what
many clients do. Anything else gets a 400 naming it. Fields in no table and in no model are accepted and ignored, which
the log says once per name.
"""

from collections.abc import Callable, Mapping
from typing import Any


def _nothing(value: Any) -> bool:
    return value is None or value is False or value == "" or value == [] or value == {}


def _text_modality(value: Any) -> bool:
    return value is None or value == ["text"]


def _one(value: Any) -> bool:
    return value is None or value == 1


def _no_tool(value: Any) -> bool:
    return value is None or value == "none"


def _no_padding(value: Any) -> bool:
    return value is None or value == "do_not_pad"


def _float32(value: Any) -> bool:
    return value is None or value == "float32"


def _native(value: Any) -> bool:
    return value is None or value in ("native", "little")


def _classify(value: Any) -> bool:
    return value is None or value == "classify"


def _zero(value: Any) -> bool:
    return value is None or (value == 0 and not isinstance(value, bool))


def _embed(value: Any) -> bool:
    return value is None or value == "embed"


Refusals = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Field -> whether a value asks for nothing, and what to do instead (may be empty)."""

_SHARED: Refusals = {
    "early_stopping": (_nothing, "a beam search ends as with false"),
    "guided_json": (_nothing, "send structured_outputs with json"),
    "guided_json_object": (_nothing, "send structured_outputs with json_object"),
    "guided_regex": (_nothing, "send structured_outputs with regex"),
    "guided_choice": (_nothing, "send structured_outputs with choice"),
    "guided_grammar": (_nothing, "send structured_outputs with grammar"),
    "guided_decoding_backend": (_nothing, "there is only one backend"),
    "guided_whitespace_pattern": (_nothing, "send structured_outputs with whitespace_pattern"),
    "prompt_embeds": (_nothing, "send text or token ids"),
    "prompt_logprob_token_ids": (_nothing, "LLM and AsyncLLM take it in SamplingParams"),
    "prompt_logprob_start": (_nothing, "LLM and AsyncLLM take it in SamplingParams"),
    "logits_processors": (_nothing, "use those that the server was started with, by vllm_xargs"),
    "kv_transfer_params": (_nothing, ""),
    "ec_transfer_params": (_nothing, ""),
    "lora_request": (_nothing, ""),
    "mm_processor_kwargs": (_nothing, "images are processed as the model's folder says"),
}
COMPLETION_REFUSALS: Refusals = {
    **_SHARED,
    "suffix": (_nothing, ""),
}
CHAT_REFUSALS: Refusals = {
    **_SHARED,
    "functions": (_nothing, "send them as tools"),
    "function_call": (_no_tool, "send functions as tools"),
    "audio": (_nothing, "answers are text"),
    "modalities": (_text_modality, "answers are text"),
    "web_search_options": (_nothing, ""),
    "media_io_kwargs": (_nothing, ""),
}
_STATELESS = "this server stores no answers: send the items of the conversation as input"
RESPONSES_REFUSALS: Refusals = {
    "previous_response_id": (_nothing, _STATELESS),
    "conversation": (_nothing, _STATELESS),
    "background": (_nothing, "wait for the answer, or stream it"),
    "prompt": (_nothing, "send the text of the template as instructions and input"),
    "context_management": (_nothing, "send fewer items"),
    "moderation": (_nothing, ""),
    "n": (_one, "a response has one answer: send the request again"),
    "mm_processor_kwargs": (_nothing, "images are processed as the model's folder says"),
    "media_io_kwargs": (_nothing, ""),
    "kv_transfer_params": (_nothing, ""),
    "ec_transfer_params": (_nothing, ""),
    "enable_response_messages": (_nothing, ""),
    "previous_input_messages": (_nothing, _STATELESS),
}
EMBEDDING_REFUSALS: Refusals = {
    "messages": (_nothing, "send texts as input; POST /tokenize makes token ids of a conversation"),
    "normalize": (_nothing, "it is called use_activation"),
    "padding": (_no_padding, "an input is computed as it is"),
    "embed_dtype": (_float32, "embeddings are float32"),
    "endianness": (_native, "base64 is little-endian"),
    "task": (_embed, "POST /classify classifies"),
    "mm_processor_kwargs": (_nothing, "inputs are text"),
}
MESSAGES_REFUSALS: Refusals = {
    "mcp_servers": (_nothing, "this server calls no other; run the tools yourself"),
    "container": (_nothing, "this server runs no code"),
    "output_format": (_nothing, "send output_config with format"),
}
_POOLED: Refusals = {
    "dimensions": (_nothing, "POST /v1/embeddings takes it"),
    "normalize": (_nothing, "it is called use_activation"),
    "padding": (_no_padding, "a text is computed as it is"),
    "mm_processor_kwargs": (_nothing, "texts alone are classified and scored"),
}
CLASSIFICATION_REFUSALS: Refusals = {
    **_POOLED,
    "messages": (_nothing, "send texts as input; POST /tokenize makes token ids of a conversation"),
    "task": (_classify, "POST /v1/embeddings makes embeddings"),
}
SCORING_REFUSALS: Refusals = {
    **_POOLED,
    "max_tokens_per_query": (_zero, "truncate_prompt_tokens cuts the whole prompt of a pair"),
    "max_tokens_per_doc": (_zero, "truncate_prompt_tokens cuts the whole prompt of a pair"),
    "max_chunks_per_doc": (_nothing, "a document is one text"),
    "rank_fields": (_nothing, "send each document as a text"),
}
