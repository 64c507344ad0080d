"""How one request is sampled and when it stops: :class:`SamplingParams`, checked when it is made.

What the engine cannot do yet is refused by name in :data:`NOT_SUPPORTED_YET` and nowhere else: supporting a parameter
means taking its line out.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from rustvllm import envs
from rustvllm.exceptions import InvalidRequestError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this mean greedy sampling."""
LOWEST_TEMPERATURE: Final = 1e-2
"""Lower temperatures that are not greedy are raised to this: logits divided by less overflow float16."""
SMALLEST: Final = 1e-30
LARGEST: Final = 1e30
"""A smaller ``top_p`` counts as the smallest, a ``repetition_penalty`` beyond the two as the nearer: they have 32
bits where they are computed."""
MAX_TOKENS_LIMIT: Final = 2**31 - 1
MAX_BIAS: Final = 100.0
"""Biases are clamped to it and to its negative."""
MAX_BAD_WORD_CHARS: Final = 1024
MAX_EXTRA_ARGS_CHARS: Final = 1 << 20
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class RequestOutputKind(Enum):
    """What each output of a request holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """Nothing until the end, then everything."""


NOT_SUPPORTED_YET: Final[Mapping[str, Callable[[Any], bool]]] = {
    # parameter -> is this value the neutral one, which changes nothing and is let through
    "logprob_token_ids": lambda v: v is None,
    "use_beam_search": lambda v: not v,
    "length_penalty": lambda v: v == 1,
    "guided_decoding": lambda v: v is None,
    "structured_outputs": lambda v: v is None,
    "repetition_detection": lambda v: v is None,
}
"""Parameters whose rules are checked below but which the engine cannot honour yet."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with the names and defaults of the OpenAI API and its extensions.

    Every parameter is checked here and then normalised (``stop`` to a tuple, a greedy request to neutral filters), so
    that the engine reads plain numbers. Instances never change; use :meth:`clone` for a variant.

    Attributes:
        n: Samples per prompt, 1 to 16384; greedy sampling allows 1 only.
        temperature: 0 to 2; below 1e-5 is greedy, from there to 0.01 counts as 0.01.
        top_p: Keep the smallest set of tokens whose probabilities sum to this, in (0, 1].
        top_k: Keep this many tokens; 0 and -1 keep all.
        min_p: Keep tokens with at least this share of the best one's probability, in [0, 1].
        presence_penalty: -2 to 2, for tokens that occur in the output.
        frequency_penalty: -2 to 2, per occurrence in the output.
        repetition_penalty: Positive; over 1 discourages tokens of prompt and output.
        seed: 64-bit seed; sample i of n uses seed + i. None and -1: derived from the engine's seed.
        max_tokens: Most tokens to generate; None: as many as fit. 0 runs the prompt and generates nothing.
        min_tokens: EOS, stop ids and stop strings are ignored until this many tokens exist.
        stop: Strings that end the text, which is cut before them.
        stop_token_ids: Token ids that end the text.
        ignore_eos: Go on past the end-of-sequence token.
        include_stop_str_in_output: Cut after the stop string instead of before.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Put spaces between special tokens that are shown.
        detokenize: Make text at all.
        truncate_prompt_tokens: Keep this many tokens of the prompt; -1: as many as the model can hold.
        truncation_side: Which end of the prompt is cut off, ``left`` (default) or ``right``.
        output_kind: What each output holds, see :class:`RequestOutputKind`.
        logprobs: Log-probabilities of the sampled and this many of the likeliest tokens at each place, at most as many
            as the engine's ``max_logprobs``; -1: of the whole vocabulary, which must not be larger.
        prompt_logprobs: The same for each token of the prompt but the first. The prompt is computed whole, whatever of
            it is cached.
        prompt_progress: Give outputs while the prompt is computed, one for each piece of it; nobody sees them with an
            ``output_kind`` of final outputs only.
        logprob_token_ids: Log-probabilities of these tokens, at most 128.
        logit_bias: Added to the logits of these token ids, clamped to [-100, 100].
        allowed_token_ids: Only these tokens may be sampled.
        bad_words: Words that must not be generated, with or without a space before them: the last token of one is not
            sampled where the output ends with its others.
        logits_processors: Callables that change the logits before the temperature, each given the ids generated so far
            and the row of logits (or, with three parameters, the ids of the prompt first); returns the row. Only for an
            engine in this process.
        best_of: Samples to draw, at least n, of which the n with the highest cumulative log-probability are returned,
            best first; n counts as None. They are known at the end only: cumulative outputs become final ones, and
            deltas are refused.
        use_beam_search: Search with n beams instead of sampling.
        length_penalty: Exponent of the length in a beam's score.
        guided_decoding: Grammar to follow.
        structured_outputs: Grammar to follow.
        repetition_detection: Ends output that repeats itself.
        extra_args: Arguments for logits processors that the engine was started with; what JSON can say.

    Raises:
        InvalidRequestError: A ``ValueError`` that names the parameter, its value and the limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_progress: bool = False
    logprob_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    guided_decoding: Any = None
    structured_outputs: Any = None
    repetition_detection: Any = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._check_sampling()
        self._check_length()
        self._check_stop()
        self._check_logprobs()
        self._check_token_rules()
        self._check_processors()
        for name, is_neutral in NOT_SUPPORTED_YET.items():
            if not is_neutral(getattr(self, name)):
                raise InvalidRequestError(f"{name} is not supported yet (got {_short(getattr(self, name))})", name)
        self._normalise()

    @property
    def is_greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """Samples that are drawn: ``best_of``, else ``n``."""
        return self.best_of or self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return self.stop if isinstance(self.stop, tuple) else _as_strings(self.stop)

    def clone(self, **changes: Any) -> "SamplingParams":
        """A checked copy with some parameters changed."""
        return dataclasses.replace(self, **changes)

    def _check_sampling(self) -> None:
        _int("n", self.n, 1, envs.max_n())
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _int("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _number("length_penalty", self.length_penalty, -math.inf, math.inf)
        if self.seed is not None:
            _int("seed", self.seed, _INT64_MIN, _INT64_MAX)
        if self.is_greedy and self.n > 1 and not self.use_beam_search:
            raise InvalidRequestError(f"n must be 1 when using greedy sampling, got {self.n}.", "n")
        if self.best_of is not None:
            self._check_best_of(self.best_of)

    def _check_best_of(self, best_of: int) -> None:
        _int("best_of", best_of, 1, envs.max_n())
        if best_of < self.n:
            raise InvalidRequestError(f"best_of must be at least n ({self.n}), got {best_of}", "best_of")
        if best_of == self.n:  # all of them are returned: there is nothing to choose
            object.__setattr__(self, "best_of", None)
        elif self.is_greedy:
            raise InvalidRequestError(f"best_of must be 1 when using greedy sampling, got {best_of}", "best_of")
        elif self.output_kind is RequestOutputKind.DELTA:
            raise InvalidRequestError(
                f"best_of must be n ({self.n}) when the answer is streamed, got {best_of}: "
                "the best are known at the end",
                "best_of",
            )
        elif self.output_kind is RequestOutputKind.CUMULATIVE:
            object.__setattr__(self, "output_kind", RequestOutputKind.FINAL_ONLY)

    def _check_length(self) -> None:
        if self.max_tokens is not None:
            _int("max_tokens", self.max_tokens, 0, MAX_TOKENS_LIMIT)
        _int("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
            )
        if self.truncate_prompt_tokens is not None:
            _int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS_LIMIT)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError(
                    "truncate_prompt_tokens must be at least 1, or -1 for the model's limit, got 0",
                    "truncate_prompt_tokens",
                )
        if self.truncation_side not in ("left", "right"):
            raise InvalidRequestError(
                f"truncation_side must be 'left' or 'right', got {_short(self.truncation_side)}", "truncation_side"
            )

    def _check_stop(self) -> None:
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
            "prompt_progress",
            "use_beam_search",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, got {_short(getattr(self, name))}", name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError(
                f"output_kind must be a RequestOutputKind, got {_short(self.output_kind)}", "output_kind"
            )
        stop = _as_strings(self.stop)
        if stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings are found in the text and so need detokenize=True; use stop_token_ids without it", "stop"
            )
        for token_id in _as_list("stop_token_ids", self.stop_token_ids):
            _int("stop_token_ids", token_id, 0, MAX_TOKENS_LIMIT)

    def _check_logprobs(self) -> None:
        if self.logprobs is not None:
            _int("logprobs", self.logprobs, -1)
        if self.prompt_logprobs is not None:
            _int("prompt_logprobs", self.prompt_logprobs, -1)
        if self.logprob_token_ids is not None:
            num_ids = len(_as_list("logprob_token_ids", self.logprob_token_ids))
            if num_ids > 128:
                raise InvalidRequestError(
                    f"logprob_token_ids must hold at most 128 ids, got {num_ids}", "logprob_token_ids"
                )

    def _check_token_rules(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidRequestError(
                    f"logit_bias must map token ids to numbers, got {_short(self.logit_bias)}", "logit_bias"
                )
            for token_id, bias in self.logit_bias.items():
                _int("logit_bias", token_id, 0, MAX_TOKENS_LIMIT)
                if not _is_number(bias):
                    raise InvalidRequestError(
                        f"logit_bias[{token_id}] must be a number, got {_short(bias)}", "logit_bias"
                    )
        if self.allowed_token_ids is not None:
            ids = _as_list("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise InvalidRequestError("allowed_token_ids must not be empty", "allowed_token_ids")
            for token_id in ids:
                _int("allowed_token_ids", token_id, 0, MAX_TOKENS_LIMIT)
        for word in _as_list("bad_words", self.bad_words):
            if not isinstance(word, str):
                raise InvalidRequestError(
                    f"bad_words must be a list of strings, got {_short(word)} ({type(word).__name__})", "bad_words"
                )
            if not word.strip():
                raise InvalidRequestError(
                    f"bad_words must not contain an empty word, or one of spaces alone, got {_short(word)}", "bad_words"
                )
            if len(word) > MAX_BAD_WORD_CHARS:
                raise InvalidRequestError(
                    f"a word of bad_words has {len(word)} characters, at most {MAX_BAD_WORD_CHARS} are possible",
                    "bad_words",
                )
            if not is_valid_unicode(word):
                raise InvalidRequestError(f"bad_words must be valid Unicode, got {_short(word)}", "bad_words")

    def _check_processors(self) -> None:
        for call in _as_list("logits_processors", self.logits_processors):
            if not callable(call):
                raise InvalidRequestError(
                    f"logits_processors must be callables, got {_short(call)} ({type(call).__name__})",
                    "logits_processors",
                )
        if self.extra_args is None:
            return
        if not isinstance(self.extra_args, Mapping):
            raise InvalidRequestError(
                f"extra_args must map names to values, got {_short(self.extra_args)}", "extra_args"
            )
        try:
            text = json.dumps(dict(self.extra_args), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"extra_args must be what JSON can say: {error}", "extra_args") from None
        if len(text) > MAX_EXTRA_ARGS_CHARS:
            raise InvalidRequestError(
                f"extra_args has {len(text)} characters as JSON, at most {MAX_EXTRA_ARGS_CHARS} are possible",
                "extra_args",
            )

    def _normalise(self) -> None:
        set_ = object.__setattr__  # the dataclass is frozen for everybody else
        set_(self, "stop", _as_strings(self.stop))
        set_(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.logit_bias is not None:
            clamped = {i: float(min(MAX_BIAS, max(-MAX_BIAS, bias))) for i, bias in self.logit_bias.items()}
            set_(self, "logit_bias", clamped)
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
        if self.bad_words is not None:
            set_(self, "bad_words", tuple(dict.fromkeys(self.bad_words)))
        if self.seed == -1:
            set_(self, "seed", None)
        if self.top_k == -1:
            set_(self, "top_k", 0)
        if self.top_p < SMALLEST:
            set_(self, "top_p", SMALLEST)
        if not SMALLEST <= self.repetition_penalty <= LARGEST:
            set_(self, "repetition_penalty", min(max(self.repetition_penalty, SMALLEST), LARGEST))
        if self.is_greedy:
            # Filters cannot change the most probable token.
            set_(self, "temperature", 0.0)
            set_(self, "top_p", 1.0)
            set_(self, "top_k", 0)
            set_(self, "min_p", 0.0)
        elif self.temperature < LOWEST_TEMPERATURE:
            logger.warning("temperature %g is raised to %g: lower ones overflow", self.temperature, LOWEST_TEMPERATURE)
            set_(self, "temperature", LOWEST_TEMPERATURE)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if type(value) is float and low < value < high:  # nearly always
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, got {_short(value)} ({type(value).__name__})", name)
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} must be finite, got {_short(value)}", name)
    if number > high or number < low or (open_low and number == low):
        if high == math.inf:
            limits = f"greater than {low:g}" if open_low else f"at least {low:g}"
        else:
            limits = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidRequestError(f"{name} must be {limits}, got {_short(value)}", name)


def _int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {_short(value)} ({type(value).__name__})", name)
    if value < low:
        raise InvalidRequestError(f"{name} must be at least {low}, got {_short(value)}", name)
    if high is not None and value > high:
        raise InvalidRequestError(f"{name} must be at most {high}, got {_short(value)}", name)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not (isinstance(value, float) and math.isnan(value))


def is_valid_unicode(text: str) -> bool:
    """False for text with lone surrogates, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: object) -> str:
    """``repr`` of what a client sent, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits, which Python refuses to print
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _as_list(name: str, value: object) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name} must be a list, got {_short(value)} ({type(value).__name__})", name)
    return list(value)


def _as_strings(stop: object) -> tuple[str, ...]:
    if not stop and isinstance(stop, tuple | None):
        return ()
    strings = [stop] if isinstance(stop, str) else _as_list("stop", stop)
    for string in strings:
        if not isinstance(string, str):
            raise InvalidRequestError(
                f"stop must be a string or a list of strings, got {_short(string)} ({type(string).__name__})", "stop"
            )
        if not string:
            raise InvalidRequestError("stop must not contain an empty string", "stop")
        if not is_valid_unicode(string):
            raise InvalidRequestError(f"stop must be valid Unicode, got {_short(string)}", "stop")
    return tuple(strings)
