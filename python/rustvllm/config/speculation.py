"""``--speculative-config``: which drafts an engine makes, under vLLM's names, and which methods it lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from rustvllm.exceptions import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from rustvllm.config.engine_config import EngineConfig
    from rustvllm.config.model import ModelConfig

METHODS: Final = ("ngram", "suffix", "auto", "draft_model")
"""``auto`` is the best method without a model: ``suffix`` with more drafts per token of the match."""
MAX_SPECULATIVE_TOKENS: Final = 64
MAX_MATCH_TOKENS: Final = 64
MAX_NGRAM_LENGTHS: Final = 16
"""The most lengths for ``ngram``, which keeps one index per length."""
_AUTO_TOKENS: Final = 32
_AUTO_SPEC_FACTOR: Final = 4.0
"""The controller withholds drafts that do not pay, so it is safe to find more."""
_MOST: Final = 2**31 - 1
_NEEDS_MODEL: Final = (
    "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash", "ngram_gpu", "custom_class",
)  # fmt: skip
"""vLLM's methods that rustvllm lacks."""
_NGRAM: Final = ("prompt_lookup_min", "prompt_lookup_max")
_SUFFIX: Final = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
_KEYS: Final = (
    "method", "model", "revision", "num_speculative_tokens", *_NGRAM, *_SUFFIX, "num_speculative_tokens_per_batch_size",
    "disable_by_batch_size", "rejection_sample_method", "adaptive",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Drafts, which sampling verifies: the scheduler makes them from tokens that it has, or a draft model does.

    Attributes:
        method: ``ngram``, ``suffix`` or ``draft_model``.
        model: Name of the second model; None: there is none.
        revision: Of it, on the hub.
        num_speculative_tokens: Drafts per request and step at most.
        prompt_lookup_min: Shortest suffix that ``ngram`` looks for.
        prompt_lookup_max: Longest.
        suffix_decoding_max_tree_depth: Tokens that ``suffix`` compares, at most.
        suffix_decoding_max_spec_factor: Drafts per token of the match, at most.
        suffix_decoding_min_token_prob: Share of the matches that must agree on a draft and those before it.
        suffix_decoding_max_cached_requests: About how many requests' answers ``suffix`` keeps for other requests.
        caps: First and last number of running requests, and drafts per request while so many run.
        adaptive: Fewer drafts, or none, where more would not pay.
    """

    method: Literal["ngram", "suffix", "draft_model"]
    num_speculative_tokens: int
    model: str | None = None
    revision: str | None = None
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_requests: int = 10_000
    caps: tuple[tuple[int, ...], ...] = ()
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method not in ("ngram", "suffix", "draft_model"):
            raise ConfigError(f"speculative_config: method must be ngram, suffix or draft_model, got {self.method!r}")
        _require_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        _require_int("prompt_lookup_max", longest, 1, MAX_MATCH_TOKENS)
        _require_int("prompt_lookup_min", shortest, 1, MAX_MATCH_TOKENS)
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={shortest} must be <= prompt_lookup_max={longest}"
            )
        if longest - shortest >= MAX_NGRAM_LENGTHS:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={shortest} to prompt_lookup_max={longest} are "
                f"{longest - shortest + 1} lengths, but the limit is {MAX_NGRAM_LENGTHS}"
            )
        _require_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1, MAX_MATCH_TOKENS)
        _require_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0, 1000)
        _require_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0, 1)
        _require_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0, _MOST)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_config: adaptive must be true or false, got {self.adaptive!r}")


def make_speculation_config(given: object) -> SpeculationConfig | None:
    """The configuration from the keys of vLLM's ``speculative_config``; None if drafts are off.

    Raises:
        ConfigError: A key is unknown, a value out of range, or the method needs what is not there.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be an object such as {{'method': 'ngram'}}, got {given!r:.200}")
    if unknown := [key for key in given if key not in _KEYS]:
        raise ConfigError(f"speculative_config: unknown key {unknown[0]!r}; the keys are {', '.join(_KEYS)}")
    method = _method_of(given)
    _refuse_what_is_not_there(given)
    numbers: dict[str, Any] = {key: given[key] for key in _SUFFIX if given.get(key) is not None}
    if method == "auto":
        numbers.setdefault("suffix_decoding_max_spec_factor", _AUTO_SPEC_FACTOR)
    shortest, longest = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if shortest is not None or longest is not None:
        numbers["prompt_lookup_min"] = longest if shortest is None else shortest
        numbers["prompt_lookup_max"] = shortest if longest is None else longest
    num_tokens = given.get("num_speculative_tokens")
    if num_tokens is None and method == "auto":
        num_tokens = _AUTO_TOKENS
    if num_tokens is None and method == "suffix":
        num_tokens = numbers.get("suffix_decoding_max_tree_depth", SpeculationConfig.suffix_decoding_max_tree_depth)
    if num_tokens is None:
        raise ConfigError(
            f"speculative_config: {method} needs num_speculative_tokens, the largest number of drafts per request and "
            "step"
        )
    return SpeculationConfig(
        method="suffix" if method == "auto" else cast("Literal['ngram', 'suffix', 'draft_model']", method),
        num_speculative_tokens=num_tokens,
        model=given["model"] if method == "draft_model" else None,
        revision=given.get("revision"),
        caps=_caps_of(given),
        adaptive=given.get("adaptive", True),
        **numbers,
    )


def check_draft_model(config: EngineConfig, draft: ModelConfig) -> None:
    """Refuse a draft model with another vocabulary, and combinations that draft models do not support.

    Raises:
        ConfigError: Says what contradicts ``draft_model``, and what to do.
    """
    name, target, parallel = f"speculative_config: draft_model {draft.model!r}", config.model, config.parallel
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{name} has {draft.vocab_size} token ids, but {target.model!r} has {target.vocab_size}: both must have "
            "the same vocabulary"
        )
    vocabularies = [_vocabulary(path) for path in (draft.path, target.path)]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"{name} and {target.model!r} have different vocabularies: their tokenizers must give each token the same "
            "id"
        )
    if draft.max_model_len < target.max_model_len:
        raise ConfigError(
            f"{name} supports at most {draft.max_model_len} tokens, but max_model_len is {target.max_model_len}: set "
            f"max_model_len to {draft.max_model_len} or less"
        )
    refused = {
        f"device={config.device.device}: so far, a draft model only runs on the CPU": config.device.device != "cpu",
        "executor=sim, which has no models": config.sim is not None,
        "tensor_parallel_size or pipeline_parallel_size above 1: ranks cannot share a draft model": parallel.num_ranks
        > 1,
        "async_scheduling: a draft model needs the token of the step before": config.scheduler.async_scheduling,
    }
    for reason, is_asked in refused.items():
        if is_asked:
            raise ConfigError(f"{name} cannot be combined with {reason}; leave one out")


def _vocabulary(path: Path) -> Any:
    """The ids of a folder's tokenizer, and None where none is found there."""
    try:
        content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        return content["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _method_of(given: Mapping[Any, Any]) -> str:
    method, model = given.get("method"), given.get("model")
    if method is None and model in ("ngram", "[ngram]"):
        return "ngram"
    if method is None:
        method = "draft_model" if model is not None else None
    if method in METHODS:
        if method == "draft_model":
            if not isinstance(model, str) or not model:
                raise ConfigError(
                    f"speculative_config: draft_model needs model, the name or folder of the draft model, got {model!r}"
                )
        elif model not in (None, "ngram", "[ngram]"):
            raise ConfigError(f"speculative_config: {method} does not use a model, got model {model!r}: leave it out")
        return str(method)
    there = f"rustvllm has {', '.join(METHODS)}"
    if method in _NEEDS_MODEL:
        raise ConfigError(f"speculative_config: method {method!r} is not supported yet; {there}")
    raise ConfigError(f"speculative_config: method must be one of {', '.join(METHODS)}, got {method!r}")


def _refuse_what_is_not_there(given: Mapping[Any, Any]) -> None:
    sampling = given.get("rejection_sample_method")
    if sampling not in (None, "standard", "strict"):
        raise ConfigError(
            f"speculative_config: rejection_sample_method {sampling!r} is not supported; rustvllm only has standard: "
            "it keeps drafts while they equal the sampled tokens"
        )


def _caps_of(given: Mapping[Any, Any]) -> tuple[tuple[int, ...], ...]:
    caps: list[tuple[int, ...]] = []
    limit = given.get("disable_by_batch_size")
    if limit is not None:
        _require_int("disable_by_batch_size", limit, 1, _MOST)
        caps.append((limit, _MOST, 0))
    table = given.get("num_speculative_tokens_per_batch_size")
    if table is None:
        return tuple(caps)
    name = "num_speculative_tokens_per_batch_size"
    if not isinstance(table, list | tuple):
        raise ConfigError(f"speculative_config: {name} must be [[first, last, k], …], got {table!r:.200}")
    for row in table:
        is_row = isinstance(row, list | tuple) and len(row) == 3
        if not is_row or any(isinstance(each, bool) or not isinstance(each, int) for each in row):
            raise ConfigError(f"speculative_config: {name} must be [[first, last, k], …], got the row {row!r:.200}")
        first, last, num_tokens = row
        _require_int(f"{name}: first", first, 1, _MOST)
        _require_int(f"{name}: last", last, first, _MOST)
        _require_int(f"{name}: k", num_tokens, 0, MAX_SPECULATIVE_TOKENS)
        caps.append((first, last, num_tokens))
    return tuple(caps)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"speculative_config: {name} must be an integer between {low} and {high}, got {value!r}")


def _require_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"speculative_config: {name} must be a number between {low} and {high}, got {value!r}")
