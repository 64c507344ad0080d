"""vLLM's methods and arguments of engines that are not built here, each with the reason or with what works instead."""

from collections.abc import Mapping
from typing import Any, Final

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import shown

_POOLING = "LLM has embed, classify, score and encode, and AsyncLLM has encode"
_REWARD = "rustvllm has no reward models; LLM.classify with use_activation=False gives what the last layer gives"
_SLEEP = "an engine cannot sleep; shutdown() frees the memory of the model, and a new engine loads it again"
_PROFILE = "trace=True, trace_file and step_trace_file show where the time goes"
_WORKERS = "workers run no functions of the caller; logits_processors change what is sampled"
_WEIGHTS = "an engine reads its weights once; make a new engine to serve others"
_KV_ELSEWHERE = "KV blocks stay in their engine"

_METHODS: Final[Mapping[str, str]] = {
    # the reason, or what works instead -> the methods
    _POOLING: "encode embed classify score",
    _REWARD: "reward",
    _SLEEP: "sleep wake_up is_sleeping release_kv_cache_memory checkpoint_prepare checkpoint_restore",
    _PROFILE: "start_profile stop_profile",
    _WORKERS: "apply_model collective_rpc",
    _WEIGHTS: "init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update "
    "start_draft_weight_update update_weights finish_weight_update update_weight_version get_weight_version "
    "set_weight_version compute_weight_checksums",
    _KV_ELSEWHERE: "get_kv_event_sources notify_kv_transfer_request_rejected",
    "max_cpu_loras adapters stay loaded; make it as large as there are adapters": "pin_lora",
    "rustvllm serve --data-parallel-size N starts N engines": "scale_elastic_ep has_unfinished_requests_dp",
    "health() says how each engine is, and rustvllm serve --restart-engine replaces one that died": "handle_fault "
    "get_status",
    "an engine calls its stat_loggers every few seconds": "do_log_stats_with_interval",
    "add_request raises QueueFullError where there is no room": "check_admission get_num_queued_tokens",
    "get_tokenizer() makes token ids of texts, and LLM.chat() makes prompts of conversations": "renderer",
}
METHODS: Final[Mapping[str, str]] = {name: why for why, names in _METHODS.items() for name in names.split()}
"""Why each method or attribute is not there."""

ARGUMENTS: Final[Mapping[str, str]] = {
    "data_parallel_rank": "rustvllm serve --data-parallel-size N chooses the engine of each request",
    "session_id": "the prefix cache finds by itself what requests have in common",
    "kv_hints": _KV_ELSEWHERE,
    "prompt_text": 'give the text and its token ids as {"prompt": ..., "prompt_token_ids": ...}',
    "reasoning_ended": "only the server parses reasoning",
    "reasoning_parser_kwargs": "only the server parses reasoning",
}
"""Why each argument of a request is not there; None, its default, is let through."""


def check_arguments(call: str, given: Mapping[str, Any]) -> None:
    """Let through vLLM's arguments of a request that ask for nothing.

    Args:
        call: What they were given to.
        given: The arguments that ``call`` has no parameter for.

    Raises:
        InvalidRequestError: One asks for what is not built.
        TypeError: There is no such argument.
    """
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise InvalidRequestError(f"{name} is not supported yet (got {shown(value)}): {ARGUMENTS[name]}", name)
