"""What a caller asks for, checked and turned into what the core takes: token ids and plain numbers.

Everything that can be wrong with a request is found here, before any of it reaches the engine.
"""

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, TypedDict

from rustvllm import _core
from rustvllm.config import EngineConfig, ModelConfig
from rustvllm.engine.sampling_extras import make_sampling_extras
from rustvllm.engine.tokenizer import Tokenizer
from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.sampling_params import MAX_TOKENS_LIMIT, SamplingParams

logger = init_logger(__name__)

_GENERATION_DEFAULTS = {
    # name in generation_config.json -> sampling parameter
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens"})
_MASK64 = 2**64 - 1
MAX_PROMPT_LOGPROBS = 1 << 26
"""Most log-probabilities of one prompt, candidates times places: half a GiB of numbers."""


class TextPrompt(TypedDict, total=False):
    """A prompt as text; ``add_special_tokens`` (default True) lets the tokenizer add its beginning of sequence."""

    prompt: str
    cache_salt: str
    add_special_tokens: bool


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, optionally with the text they stand for."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """One request, ready for ``EngineHandle.add_request``; it becomes ``params.num_samples`` requests there.

    Attributes:
        prompt: Prompt text; None when only token ids were given.
        prompt_token_ids: Checked ids, at least one.
        params: Checked parameters.
        max_tokens: Most tokens to generate, clamped to the room that the prompt leaves.
        eos_token_id: Ends a sample without a stop reason; None: nothing does.
        stop_token_ids: Ids that end a sample, further EOS ids included.
        hidden_stop_ids: Those of ``stop_token_ids`` that stand for EOS.
        num_logprobs: Candidates whose log-probabilities are wanted beside the sampled token's; −1: not even its own.
        num_prompt_logprobs: The same for each place of the prompt but the first.
        seed: Of the first sample, 64-bit signed; sample i has ``seed + i``.
        priority: Lower is sooner, with the priority policy.
        cache_salt: Keeps this prompt's cached blocks apart from those of other salts.
        sampling_extras: Parameters that are lists; None without.
        arrival_ns: When it came to its front end (nanoseconds of CLOCK_MONOTONIC); its latencies count from then.
        began_ns: When the check began, in nanoseconds of ``time.monotonic_ns``.
        processed_ns: When it was done.
    """

    prompt: str | None
    prompt_token_ids: _core.TokenIds
    params: SamplingParams
    max_tokens: int
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    hidden_stop_ids: frozenset[int]
    num_logprobs: int
    num_prompt_logprobs: int
    seed: int
    priority: int
    cache_salt: str | None
    sampling_extras: _core.SamplingExtras | None = None
    arrival_ns: int = field(default_factory=monotonic_ns)
    began_ns: int = 0
    processed_ns: int = 0

    def seed_of(self, index: int) -> int:
        """Seed of sample ``index``, wrapped to 64 bits."""
        return _to_int64(self.seed + index)


class InputProcessor:
    """Checks requests against one model and gives them what they leave open."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._model = config.model
        self._priority_allowed = config.scheduler.scheduling_policy == "priority"
        self._tokenizer = tokenizer
        self._seed_numbers = itertools.count(1)  # next() is atomic: requests may be checked in several threads
        eos_ids = list(config.model.eos_token_ids)  # checked where the configuration was read
        own_eos = None if tokenizer is None else tokenizer.eos_token_id
        if own_eos is not None and own_eos >= config.model.vocab_size:
            logger.warning(
                "the tokenizer's end-of-sequence token is ignored: its id %d is outside the vocabulary (0 to %d)",
                own_eos,
                config.model.vocab_size - 1,
            )
        elif own_eos is not None and own_eos not in eos_ids:
            eos_ids.insert(0, own_eos)
        self.eos_token_ids = tuple(eos_ids)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._model.max_model_len

    def process(
        self,
        prompt: PromptType,
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        encoded: _core.TokenIds | None = None,
    ) -> EngineCoreRequest:
        """Check one request.

        Args:
            prompt: Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``.
            params: None for the model's own defaults.
            priority: Lower is sooner; needs the priority policy unless 0.
            encoded: What the tokenizer made of the prompt's text, when that was done already (see
                :meth:`long_text`).

        Raises:
            InvalidRequestError: Names the parameter, the value and the limit.
        """
        began_ns = monotonic_ns()
        params = self._checked_params(params, priority)
        text, ids, cache_salt = self._read_prompt(prompt)
        if ids is None:
            ids = self._check_encoded(self._encode(text or "", _adds_special_tokens(prompt), encoded))
        ids = self._truncate(ids, params)
        self._check_length(ids, params)
        num_prompt_logprobs = self._num_logprobs(params.prompt_logprobs)
        _check_num_prompt_logprobs(num_prompt_logprobs, len(ids))
        room = self.max_model_len - len(ids)
        extra_eos = () if params.ignore_eos else self.eos_token_ids[1:]
        stop_token_ids = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *extra_eos)))
        eos_token_id = None if params.ignore_eos or not self.eos_token_ids else self.eos_token_ids[0]
        ending_ids = stop_token_ids if eos_token_id is None else (eos_token_id, *stop_token_ids)
        return EngineCoreRequest(
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_token_id=eos_token_id,
            stop_token_ids=stop_token_ids,
            hidden_stop_ids=frozenset(extra_eos).difference(params.stop_token_ids or ()),
            # What is drawn and not returned is chosen by its log-probabilities.
            num_logprobs=max(self._num_logprobs(params.logprobs), -1 if params.best_of is None else 0),
            num_prompt_logprobs=num_prompt_logprobs,
            seed=self._next_seed() if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
            sampling_extras=make_sampling_extras(params, self._model, self._tokenizer, ending_ids),
            began_ns=began_ns,
            processed_ns=monotonic_ns(),
        )

    def long_text(
        self, prompt: PromptType, params: SamplingParams | None, priority: int, num_chars: int
    ) -> tuple[str, bool] | None:
        """What of a prompt is to be tokenised off the event loop: its text and whether to add special tokens.

        Args:
            prompt: As for :meth:`process`.
            params: Checked here, so that nothing is tokenised for a request that is wrong.
            priority: Likewise.
            num_chars: Shorter texts are better tokenised where they are.

        Returns:
            None when there is nothing long to be tokenised.

        Raises:
            InvalidRequestError: As :meth:`process` does.
        """
        given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(given, str) or len(given) <= num_chars or self._tokenizer is None:
            return None
        self._checked_params(params, priority)
        text, ids, _ = self._read_prompt(prompt)
        return None if text is None or ids is not None else (text, _adds_special_tokens(prompt))

    def _checked_params(self, params: SamplingParams | None, priority: object) -> SamplingParams:
        if params is None:
            params = default_sampling_params(self._model)
        elif not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be a SamplingParams, got {type(params).__name__}", "sampling_params"
            )
        self._check_params(params, priority)
        return params

    def _read_prompt(self, prompt: object) -> tuple[str | None, _core.TokenIds | None, str | None]:
        """Text, ids and cache salt of a prompt in any of its shapes; ids of None are still to be made."""
        if isinstance(prompt, str):
            return prompt, None, None
        if not isinstance(prompt, Mapping):
            return None, self._check_ids(prompt), None
        unknown = sorted(str(key) for key in prompt if key not in _PROMPT_KEYS)
        if unknown:
            raise InvalidRequestError(
                f"a prompt dict may have the keys {', '.join(sorted(_PROMPT_KEYS))}, got {', '.join(unknown)}", "prompt"
            )
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"prompt must be text, got {type(text).__name__}", "prompt")
        if salt is not None:
            _check_cache_salt(salt)
        if ids is None and text is None:
            raise InvalidRequestError("a prompt dict needs 'prompt' or 'prompt_token_ids'", "prompt")
        special = prompt.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise InvalidRequestError(f"add_special_tokens must be True or False, got {special!r:.80}", "prompt")
        return text, None if ids is None else self._check_ids(ids), salt

    def _encode(self, text: str, add_special_tokens: bool, encoded: _core.TokenIds | None) -> _core.TokenIds:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "there is no tokenizer (skip_tokenizer_init): give the prompt as token ids", "prompt"
            )
        if not text:  # a tokenizer that adds a beginning-of-sequence token would make a prompt of it
            raise InvalidRequestError("the prompt is empty: at least one character is needed", "prompt")
        return self._tokenizer.encode_ids(text, add_special_tokens) if encoded is None else encoded

    def _check_encoded(self, ids: _core.TokenIds) -> _core.TokenIds:
        largest, limit = ids.largest(), self._model.vocab_size
        if largest >= limit:  # tokenizers may have tokens added that the model was never given
            assert self._tokenizer is not None
            [token] = self._tokenizer.convert_ids_to_tokens([largest])
            raise InvalidRequestError(
                f"the prompt has the token {token!r:.80} (id {largest}), which the tokenizer knows and the model does "
                f"not: its vocabulary is 0 to {limit - 1}",
                "prompt",
            )
        return ids

    def _check_ids(self, ids: object) -> _core.TokenIds:
        """Token ids that are there; what is wrong with them is looked for only when something is."""
        limit = self._model.vocab_size
        if isinstance(ids, list | _core.TokenIds):
            try:
                return _core.TokenIds(ids, limit)
            except ValueError:
                pass
        if isinstance(ids, bytes | bytearray | Mapping | set | frozenset) or not hasattr(ids, "__iter__"):
            raise InvalidRequestError(
                f"a prompt must be text, a list of token ids or a dict, got {type(ids).__name__}", "prompt"
            )
        checked = []
        for position, token_id in enumerate(ids):
            try:
                if isinstance(token_id, bool):
                    raise TypeError
                value = operator.index(token_id)  # numpy's integers too
            except TypeError:
                raise InvalidRequestError(
                    f"token ids must be integers, got {token_id!r} ({type(token_id).__name__}) at position {position}",
                    "prompt",
                ) from None
            if not 0 <= value < limit:
                shown = value if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
                raise InvalidRequestError(
                    f"token id {shown} at position {position} is not in the vocabulary (0 to {limit - 1})", "prompt"
                )
            checked.append(value)
        return _core.TokenIds(checked)

    def _truncate(self, ids: _core.TokenIds, params: SamplingParams) -> _core.TokenIds:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep == -1:
            keep = self.max_model_len - (params.max_tokens != 0)
        elif keep > self.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {keep}, more than the maximum context length of "
                f"{self.max_model_len} tokens",
                "truncate_prompt_tokens",
            )
        if len(ids) <= keep:
            return ids
        return ids[:keep] if params.truncation_side == "right" else ids[len(ids) - keep :]

    def _check_length(self, ids: _core.TokenIds, params: SamplingParams) -> None:
        if not ids:
            raise InvalidRequestError("the prompt is empty: at least one token is needed", "prompt")
        longest = self.max_model_len - (params.max_tokens != 0)
        if len(ids) > longest:
            raise InvalidRequestError(
                f"This model's maximum context length is {self.max_model_len} tokens (prompt and output together), "
                f"but your prompt contains {len(ids)} input tokens: at most {longest} fit. Shorten it, or set "
                "truncate_prompt_tokens.",
                "input_tokens",
            )

    def _check_params(self, params: SamplingParams, priority: object) -> None:
        for token_id in params.stop_token_ids or ():
            if token_id >= self._model.vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids holds {token_id}, which is not in the vocabulary "
                    f"(0 to {self._model.vocab_size - 1})",
                    "stop_token_ids",
                )
        self._model.check_num_logprobs("logprobs", params.logprobs)
        self._model.check_num_logprobs("prompt_logprobs", params.prompt_logprobs)
        if params.best_of is not None and not self._model.logprobs_mode.endswith("_logprobs"):
            raise InvalidRequestError(
                f"best_of ({params.best_of}) chooses by log-probabilities, and this engine gives "
                f"{self._model.logprobs_mode} in their place (logprobs_mode)",
                "best_of",
            )
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequestError(
                "there is no tokenizer (skip_tokenizer_init), so stop strings cannot be found: use stop_token_ids",
                "stop",
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority must be an integer, got {priority!r}", "priority")
        if priority and not self._priority_allowed:
            raise InvalidRequestError(
                f"priority is {priority}, but requests are scheduled in order of arrival; "
                "set scheduling_policy='priority'",
                "priority",
            )
        if not -(2**31) <= priority < 2**31:
            raise InvalidRequestError("priority must fit into 32 bits", "priority")

    def _num_logprobs(self, asked: int | None) -> int:
        """Candidates per place; −1: not even its own token."""
        if asked is None:
            return -1
        return self._model.vocab_size if asked == -1 else min(asked, self._model.vocab_size)

    def _next_seed(self) -> int:
        """A seed of its own for each request that has none: a hash of the engine's seed and a count.

        The finaliser is SplitMix64's (Steele, Lea and Flood 2014), so neighbouring counts share nothing.
        """
        z = (self._model.seed * 0xD1342543DE82EF95 + next(self._seed_numbers) * 0x9E3779B97F4A7C15) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        return _to_int64(z ^ (z >> 31))


def default_sampling_params(model: ModelConfig, **overrides: Any) -> SamplingParams:
    """The model's own defaults from its generation_config, without what the engine cannot honour (said once per value).

    Args:
        model: For its ``generation_config``.
        overrides: Parameters that win over the model's.
    """
    values: dict[str, Any] = {}
    for source, name in _GENERATION_DEFAULTS.items():
        value = model.generation_config.get(source)
        if value is None or (name == "max_tokens" and value == 0):
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            warning = (source, repr(value))
            if warning not in _warned:
                _warned.add(warning)
                logger.warning("generation_config.json is not followed in %s=%r: %s", source, value, error)
        else:
            values[name] = value
    return SamplingParams(**{**values, **overrides})


_warned: set[tuple[str, str]] = set()


def _check_num_prompt_logprobs(num_prompt_logprobs: int, num_prompt_tokens: int) -> None:
    num_all = (1 + num_prompt_logprobs) * num_prompt_tokens
    if num_all > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs of {num_prompt_tokens} tokens with {num_prompt_logprobs} candidates each are {num_all} "
            f"log-probabilities, one request may ask for {MAX_PROMPT_LOGPROBS}: ask for at most "
            f"{MAX_PROMPT_LOGPROBS // num_prompt_tokens - 1} candidates, or send a shorter prompt",
            "prompt_logprobs",
        )


def _adds_special_tokens(prompt: object) -> bool:
    return not isinstance(prompt, Mapping) or bool(prompt.get("add_special_tokens", True))


def _check_cache_salt(salt: object) -> None:
    if not isinstance(salt, str) or not 0 < len(salt) <= 128 or any(char in "@/\\\0" for char in salt):
        raise InvalidRequestError(
            f"cache_salt must be 1 to 128 characters without '@', '/', '\\' and NUL, got {salt!r:.80}",
            "cache_salt",
        )


def _to_int64(value: int) -> int:
    value &= _MASK64
    return value - 2**64 if value >= 2**63 else value


assert MAX_TOKENS_LIMIT < 2**31  # the core counts tokens in 32 bits
