"""How one request is sampled and when it stops: :class:`SamplingParams`, checked when it is made and when a request is.

What the engine cannot do yet is refused by name in ``unbuilt.py`` and nowhere else: supporting a parameter
means taking its line out.
"""

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from copy import copy, deepcopy
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, ClassVar, Final, Self

from rustvllm import envs
from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import as_list, as_strings, check_int, check_number, shown
from rustvllm.sampling_params.beam_rules import MAX_BEAM_WIDTH, check_beams
from rustvllm.sampling_params.list_checks import LIST_CHECKS, check_ids
from rustvllm.sampling_params.repetition_detection import RepetitionDetectionParams
from rustvllm.sampling_params.structured_outputs import StructuredOutputsParams
from rustvllm.sampling_params.table import SAMPLING_LISTS, SAMPLING_NUMBERS, SamplingNumber
from rustvllm.sampling_params.unbuilt import UNBUILT_DEFAULTS, check_unbuilt, refuse_name, unbuilt_values

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this mean greedy sampling."""
MAX_TOKENS_LIMIT: Final = 2**31 - 1
MAX_EXTRA_ARGS_CHARS: Final = 1 << 20
MAX_STOP_STRINGS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 1024
"""As many as a step of the scheduler carries for one request."""
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class SamplingType(IntEnum):
    """How tokens are chosen, with vLLM's names."""

    GREEDY = 0
    """Always the most probable one."""
    RANDOM = 1
    """Drawn, with a seed that follows from the engine's."""
    RANDOM_SEED = 2
    """Drawn, with the request's own seed."""


class RequestOutputKind(Enum):
    """What each output of a request holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """Nothing until the end, then everything."""


MAX_ENTRIES: Final[Mapping[str, int]] = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    **{row.name: row.max_entries for row in SAMPLING_LISTS.values()},
}
"""Most entries of the parameters that are lists; counted before anything looks at an entry."""

_LISTS: Final = ("stop", "stop_token_ids", *SAMPLING_LISTS, "logits_processors")


def _default(name: str) -> Any:
    return SAMPLING_NUMBERS[name].default


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with the names and defaults of the OpenAI API and its extensions.

    Every parameter is checked here, keeps what it was given, and may be changed: it is checked again when a request is
    made with it. An engine works with a copy of its own, which later changes do not reach
    (:func:`~rustvllm.engine.request.core_request.engine_params`). :meth:`clone` makes a variant.

    Attributes:
        LEAST_MAX_TOKENS: The least ``max_tokens``.
        checked_values: The parameters as they were checked last.
        engine_copy: What an engine made of them; kept by ``rustvllm.engine.request.core_request``.
        n: Samples per prompt, 1 to 16384; greedy sampling allows 1 only.
        temperature: 0 to 2; below 1e-5 is greedy, from there to 0.01 counts as 0.01.
        top_p: Keep the smallest set of tokens whose probabilities sum to this, in (0, 1].
        top_k: Keep this many tokens; 0 and -1 keep all.
        top_n_sigma: Keep tokens whose logits are within so many standard deviations of the largest; at least -1, 0 and
            less keep all.
        min_p: Keep tokens with at least this share of the best one's probability, in [0, 1].
        presence_penalty: -2 to 2, for tokens that occur in the output.
        frequency_penalty: -2 to 2, per occurrence in the output.
        repetition_penalty: Positive; over 1 discourages tokens of prompt and output.
        seed: 64-bit seed; sample i of n uses seed + i. None and -1: derived from the engine's seed.
        max_tokens: Most tokens to generate, at least 1; None: as many as fit.
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
        prompt_progress: Give outputs while the prompt is computed, one for each piece of it; they are not given with an
            ``output_kind`` of final outputs only.
        flat_logprobs: Give log-probabilities as :class:`~rustvllm.logprobs.FlatLogprobs`: few objects, however many
            tokens there are.
        logprob_token_ids: Log-probabilities of exactly these tokens at each place, at most 128, in addition to the
            sampled one's and instead of the likeliest ones'; ``logprobs`` must be None or their number. A token named
            twice counts once. Of these tokens only the sampled one has a rank.
        prompt_logprob_token_ids: Log-probabilities of exactly these tokens at places of the prompt, an array of
            integers ``[num_rows, num_ids]`` or lists of ids; -1 pads a row. Row i is about the token behind place
            ``prompt_logprob_start + i``, so a prompt has as many rows as tokens from there on, less one. They come as
            ``RequestOutput.prompt_token_id_logprobs``. It is kept as an array that cannot be changed.
        prompt_logprob_start: The place of the first row; None: 0. What is before it is computed, but not scored.
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
        use_beam_search: Search with n beams, at most 64, instead of sampling; all of them are returned when the search
            is over, best first. ``temperature`` must be 0 or 1, and no other parameter may change the probabilities.
        length_penalty: A beam's score is divided by the length of its output to the power of this.
        guided_decoding: The old name of structured_outputs, which is refused.
        structured_outputs: What the output must be.
        repetition_detection: End an output at the token with which it repeats itself so, but not before ``min_tokens``.
            Its finish reason is ``repetition``, its stop reason ``repetition_detected``. Other ends come first.
        extra_args: Arguments for logits processors that the engine was started with; what JSON can say.
        skip_reading_prefix_cache: Compute the prompt whole, whatever of it is cached; later requests may share its
            blocks. If it is preempted, it does not find its own blocks either, but those that were moved to CPU memory
            come back. Its n samples share one prompt. With ``prompt_logprobs`` a prompt is computed whole in any case.
        stream_interval: Tokens per output, where each is read as it comes; the first and the last come at once. A
            smaller number than the engine's ``stream_interval`` counts as that, and so does None. Outputs of whole
            answers do not change.
        thinking_token_budget: Most tokens of reasoning that each sample generates, then the marker that ends it is
            forced; -1 and None: no limit. Needs a model that marks its reasoning with single tokens.
        trace_decode_token_ids: The tokens to generate.
        watermarking: Mark the text.
        routed_experts_prompt_start: The first token of the prompt whose experts are returned.
        skip_clone: No effect: an engine copies parameters once, however many requests use them.
        output_text_buffer_length: No effect: text that a stop string may begin in is held back anyway.

    Raises:
        InvalidRequestError: A ``ValueError`` that names the parameter, its value and the limit.
    """

    __slots__ = ("__dict__", "__weakref__", "checked_values", "engine_copy")
    LEAST_MAX_TOKENS: ClassVar[int] = 1

    n: int = field(default=1, kw_only=False)
    temperature: float = _default("temperature")
    top_p: float = _default("top_p")
    top_k: int = _default("top_k")
    top_n_sigma: float = _default("top_n_sigma")
    min_p: float = _default("min_p")
    presence_penalty: float = _default("presence_penalty")
    frequency_penalty: float = _default("frequency_penalty")
    repetition_penalty: float = _default("repetition_penalty")
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = field(default_factory=list)
    stop_token_ids: Sequence[int] | None = field(default_factory=list)
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
    flat_logprobs: bool = False
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    guided_decoding: Any = None
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    extra_args: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    stream_interval: int | None = None
    thinking_token_budget: int | None = None
    trace_decode_token_ids: Sequence[int] | None = None
    watermarking: bool | None = None
    routed_experts_prompt_start: int = 0
    skip_clone: bool = False
    output_text_buffer_length: int = 0

    def __post_init__(self) -> None:
        self.engine_copy: Any = None
        self._check()

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Parameters of which None means the default (of ``max_tokens``: as many as fit).

        The token ids of ``logit_bias`` may be texts.

        Raises:
            InvalidRequestError: As for the class itself.
        """
        values = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            values["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
        return cls(**values)

    def recheck(self) -> bool:
        """Check the parameters again if one of them changed since they were checked last; whether one did.

        Raises:
            InvalidRequestError: A parameter is wrong now.
        """
        try:
            is_unchanged = vars(self) == self.checked_values
        except ValueError:  # an array, which a comparison does not settle
            is_unchanged = False
        if is_unchanged:
            return False
        self._check()
        return True

    def _check(self) -> None:
        self._check_counts()
        self._check_sampling()
        self._check_length()
        self._check_stop()
        self._check_logprobs()
        self._check_token_rules()
        self._check_processors()
        self._check_structured_outputs()
        if self.use_beam_search or self.length_penalty != 1:
            check_beams(self)
        if not all(map(operator.is_, unbuilt_values(vars(self)), UNBUILT_DEFAULTS)):
            check_unbuilt(vars(self))
        self.checked_values = {**vars(self), **self._copied_lists()}

    def _copied_lists(self) -> dict[str, Any]:
        """Copies of the parameters that can be changed without being set again."""
        values = vars(self)
        lists = {name: values[name] for name in _LISTS}
        copies: dict[str, Any] = {name: copy(of) for name, of in lists.items() if isinstance(of, list | dict)}
        if self.extra_args is not None:
            copies["extra_args"] = deepcopy(self.extra_args)
        return copies

    @property
    def is_greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def sampling_type(self) -> SamplingType:
        """How tokens are chosen."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed in (None, -1) else SamplingType.RANDOM_SEED

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs``, or how many tokens ``logprob_token_ids`` names: vLLM's name for what the sampler is to give."""
        return len(self.logprob_token_ids) if self.logprobs is None and self.logprob_token_ids else self.logprobs

    @property
    def num_samples(self) -> int:
        """Samples that are drawn: ``best_of``, else ``n``."""
        return self.best_of or self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return () if _is_empty(self.stop) else as_strings(self.stop)

    def clone(self, **changes: Any) -> "SamplingParams":
        """A checked copy with some parameters changed; its lists are its own."""
        return type(self)(**{**vars(self), **self._copied_lists(), **changes})

    def __getattr__(self, name: str) -> Any:
        """Say of what is not built yet that it is not, in place of a bare name."""
        refuse_name(self, name)

    def _check_counts(self) -> None:
        for name, limit in MAX_ENTRIES.items():
            value = getattr(self, name)
            if isinstance(value, Sized) and not isinstance(value, str) and len(value) > limit:
                raise InvalidRequestError(f"{name} has {len(value)} entries; the limit is {limit}: send fewer", name)

    def _check_sampling(self) -> None:
        if self.n != 1 or type(self.n) is not int:  # the limit is read from the environment
            check_int("n", self.n, 1, envs.max_n())
        for number in SAMPLING_NUMBERS.values():
            _refuse_outside(number, getattr(self, number.name))
        if type(self.length_penalty) is not float or not math.isfinite(self.length_penalty):
            check_number("length_penalty", self.length_penalty, -math.inf, math.inf)
        if self.seed is not None:
            check_int("seed", self.seed, _INT64_MIN, _INT64_MAX)
        if self.is_greedy and self.n > 1 and not self.use_beam_search:
            raise InvalidRequestError(f"n must be 1 when using greedy sampling, got {self.n}.", "n")
        if self.best_of is not None:
            self._check_best_of(self.best_of)

    def _check_best_of(self, best_of: int) -> None:
        check_int("best_of", best_of, 1, envs.max_n())
        if best_of < self.n:
            raise InvalidRequestError(f"best_of must be at least n ({self.n}), got {best_of}", "best_of")
        if best_of == self.n:  # all of them are returned: there is nothing to choose
            return
        if self.is_greedy:
            raise InvalidRequestError(f"best_of must be 1 when using greedy sampling, got {best_of}", "best_of")
        if self.output_kind is RequestOutputKind.DELTA:
            raise InvalidRequestError(
                f"best_of must be n ({self.n}) when the answer is streamed, got {best_of}: the best samples are only "
                "known at the end",
                "best_of",
            )

    def _check_length(self) -> None:
        if self.max_tokens is not None:
            _check_num_tokens("max_tokens", self.max_tokens, self.LEAST_MAX_TOKENS)
        _check_num_tokens("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
            )
        if self.truncate_prompt_tokens is not None:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS_LIMIT)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError(
                    "truncate_prompt_tokens must be at least 1, or -1 for the model's limit, got 0",
                    "truncate_prompt_tokens",
                )
        if self.truncation_side not in ("left", "right"):
            raise InvalidRequestError(
                f"truncation_side must be 'left' or 'right', got {shown(self.truncation_side)}", "truncation_side"
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
            "flat_logprobs",
            "skip_clone",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, got {shown(getattr(self, name))}", name)
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, -1, MAX_TOKENS_LIMIT)
        if self.stream_interval is not None:
            check_int("stream_interval", self.stream_interval, 1, MAX_TOKENS_LIMIT)
        name = "skip_reading_prefix_cache"
        if not isinstance(getattr(self, name), bool | None):
            raise InvalidRequestError(f"{name} must be True, False or None, got {shown(getattr(self, name))}", name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError(
                f"output_kind must be a RequestOutputKind, got {shown(self.output_kind)}", "output_kind"
            )
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            raise InvalidRequestError(
                f"repetition_detection must be a RepetitionDetectionParams, got {shown(self.repetition_detection)} "
                f"({type(self.repetition_detection).__name__})",
                "repetition_detection",
            )
        stop = self.stop_strings
        if stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings are found in the text, so they need detokenize=True; without it, use stop_token_ids",
                "stop",
            )
        if not _is_empty(self.stop_token_ids):
            check_ids("stop_token_ids", self.stop_token_ids)

    def _check_logprobs(self) -> None:
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, -1)
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, -1)
        if self.prompt_logprob_token_ids is not None:
            from rustvllm.sampling_params.prompt_tokens import prompt_token_rows  # it loads numpy

            self.prompt_logprob_token_ids = prompt_token_rows(self.prompt_logprob_token_ids)
        if self.prompt_logprob_start is not None:
            check_int("prompt_logprob_start", self.prompt_logprob_start, 0, MAX_TOKENS_LIMIT)
            if self.prompt_logprob_token_ids is None:
                raise InvalidRequestError(
                    f"prompt_logprob_start needs prompt_logprob_token_ids (got {self.prompt_logprob_start})",
                    "prompt_logprob_start",
                )

    def _check_token_rules(self) -> None:
        for name, row in SAMPLING_LISTS.items():
            if (entries := getattr(self, name)) is not None:
                LIST_CHECKS[row.kind](name, entries)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        if self.logprob_token_ids and self.logprobs is not None and self.logprobs != len(self.logprob_token_ids):
            raise InvalidRequestError(
                f"logprob_token_ids names {len(self.logprob_token_ids)} tokens, but logprobs is {self.logprobs}: leave "
                "logprobs out, or give that number",
                "logprob_token_ids",
            )

    def _check_structured_outputs(self) -> None:
        if self.guided_decoding is not None:
            raise InvalidRequestError(
                "guided_decoding has been replaced: use structured_outputs=StructuredOutputsParams(json=..., "
                "regex=..., choice=... or grammar=...)",
                "guided_decoding",
            )
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise InvalidRequestError(
                f"structured_outputs must be a StructuredOutputsParams, got {shown(self.structured_outputs)} "
                f"({type(self.structured_outputs).__name__})",
                "structured_outputs",
            )
        if self.structured_outputs is not None and not self.detokenize:
            raise InvalidRequestError(
                "structured_outputs applies to text, so it needs detokenize=True", "structured_outputs"
            )

    def _check_processors(self) -> None:
        for call in () if self.logits_processors is None else as_list("logits_processors", self.logits_processors):
            if not callable(call):
                raise InvalidRequestError(
                    f"logits_processors must be callables, got {shown(call)} ({type(call).__name__})",
                    "logits_processors",
                )
        if self.extra_args is None:
            return
        if not isinstance(self.extra_args, Mapping):
            raise InvalidRequestError(
                f"extra_args must map names to values, got {shown(self.extra_args)}", "extra_args"
            )
        try:
            text = json.dumps(dict(self.extra_args), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"extra_args must only hold values that JSON can express: {error}", "extra_args"
            ) from None
        if len(text) > MAX_EXTRA_ARGS_CHARS:
            raise InvalidRequestError(
                f"extra_args has {len(text)} characters as JSON; the limit is {MAX_EXTRA_ARGS_CHARS}",
                "extra_args",
            )


@dataclass
class BeamSearchParams:
    """How ``LLM.beam_search`` searches, with vLLM's names. Checked when a search begins.

    Attributes:
        beam_width: Beams that go on in each step, and sequences that are returned; 1 to 64.
        max_tokens: Most tokens of an output.
        ignore_eos: Go on past the end-of-sequence token.
        temperature: 0 or 1, which are the same here: beams are compared by the model's own probabilities.
        length_penalty: The score of an output is the sum of its log-probabilities divided by its length to the power of
            this, as in transformers. vLLM counts the tokens of the prompt too.
        include_stop_str_in_output: Leave the token that ended an output in its ``tokens``.
        structured_outputs: Must be None: beams cannot follow a grammar.
        skip_special_tokens: Leave special tokens out of the text.
        watermarking: Must be None or False: text is not marked.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None

    def sampling_params(self) -> SamplingParams:
        """The same as parameters of a request, whose outputs are the search's best.

        Raises:
            InvalidRequestError: A parameter is wrong.
        """
        check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            structured_outputs=self.structured_outputs,
            skip_special_tokens=self.skip_special_tokens,
            watermarking=self.watermarking,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


class PromptOnlyParams(SamplingParams):
    """Parameters whose ``max_tokens`` may be 0: the prompt runs and nothing is generated, as ``echo`` asks for."""

    LEAST_MAX_TOKENS = 0


def _token_id(key: object) -> object:
    """A token id that may be a text, as JSON has it; anything else as it is, for the check to name."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def _is_empty(given: object) -> bool:
    """Whether a list was left out, or has nothing in it."""
    return given is None or (type(given) in (list, tuple) and not given)


def _check_num_tokens(name: str, value: object, low: int) -> None:
    if type(value) is not int or not low <= value <= MAX_TOKENS_LIMIT:
        check_int(name, value, low, MAX_TOKENS_LIMIT)


def _refuse_outside(number: SamplingNumber, value: object) -> None:
    """Refuse a value outside the range of the table of sampling parameters."""
    if (
        isinstance(value, int if number.is_integer else (int, float))
        and not isinstance(value, bool)
        and (value == number.default or number.low < value < number.high)
    ):  # nearly always
        return
    if number.is_integer:
        check_int(number.name, value, int(number.low), None if number.high == math.inf else int(number.high))
    else:
        check_number(number.name, value, number.low, number.high, open_low=number.is_low_excluded)
