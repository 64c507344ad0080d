"""Fields of an answer in which nothing is said: null where vLLM sends null, so that clients may read them unasked.

What fills one of them replaces it. Streams have fewer: an event says what is new, and its nulls are constant bytes.
"""

from typing import Any

_ANSWER: dict[str, Any] = {
    "service_tier": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
COMPLETION_ANSWER = _ANSWER
CHAT_ANSWER = {**_ANSWER, "prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}

_CHOICE: dict[str, Any] = {"token_ids": None, "routed_experts": None}
COMPLETION_CHOICE = {**_CHOICE, "prompt_logprobs": None, "prompt_token_ids": None}
CHAT_CHOICE = _CHOICE

CHAT_MESSAGE: dict[str, Any] = {
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "reasoning": None,
}
"""``tool_calls`` is absent where there are none, there as here."""

USAGE: dict[str, Any] = {"prompt_tokens_details": None, "completion_tokens_details": None}
