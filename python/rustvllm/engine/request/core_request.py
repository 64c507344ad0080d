"""A request as the core takes it: its prompt is checked, and its parameters are a copy that nothing changes."""

from copy import deepcopy
from dataclasses import dataclass, field
from time import monotonic_ns, time_ns
from typing import Any, ClassVar, Final, NoReturn

from rustvllm import _core
from rustvllm.engine.request.pooling import FilledPooling
from rustvllm.logger import init_logger
from rustvllm.lora.request import LoRARequest
from rustvllm.parameter_checks import check_number
from rustvllm.sampling_params import PromptOnlyParams, RequestOutputKind, SamplingParams
from rustvllm.sampling_params.table import FILTERS, SAMPLING_LISTS
from rustvllm.tenant import Tenant

logger = init_logger(__name__)

LOWEST_TEMPERATURE: Final = 1e-2
"""Lower temperatures that are not greedy are raised to this: logits divided by less overflow float16."""
SMALLEST: Final = 1e-30
LARGEST: Final = 1e30
"""A smaller ``top_p`` counts as the smallest, a ``repetition_penalty`` beyond the two as the nearer: they have 32
bits where they are computed."""
MAX_BIAS: Final = 100.0
"""Biases are clamped to it and to its negative."""
MASK64: Final = 2**64 - 1


class EngineParams(SamplingParams):
    """Checked and normalised: tuples for lists, neutral filters for a greedy request. Made by :func:`engine_params`.

    Attributes:
        pooling: What is asked of the prompt's vector, with the model's defaults; None: the request generates.
    """

    pooling: ClassVar[FilledPooling | None] = None  # of an instance that :func:`pooling_params` made, its own

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} of a request that was made cannot be changed")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop``, which is a tuple already."""
        return self.stop  # type: ignore[return-value]

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy of its own for a caller, which may be changed."""
        own = {name: value for name, value in vars(self).items() if name != "pooling"}
        return PromptOnlyParams(**{**own, **changes})

    @property
    def num_prompt_token_ids(self) -> int:
        """Tokens that are named for each place of the prompt."""
        rows = self.prompt_logprob_token_ids
        return 0 if rows is None else int(rows.shape[1])

    @property
    def repetition_numbers(self) -> tuple[int, int, int] | None:
        """``repetition_detection`` as the core takes it."""
        return None if self.repetition_detection is None else self.repetition_detection.numbers

    def with_output_kind(self, kind: RequestOutputKind) -> "EngineParams":
        """The same with another ``output_kind``."""
        return self if self.output_kind is kind else _made_of({**vars(self), "output_kind": kind})


def engine_params(params: SamplingParams) -> EngineParams:
    """The engine's own copy of parameters, the same one for as long as they do not change.

    Raises:
        InvalidRequestError: They were changed to something wrong.
    """
    if isinstance(params, EngineParams):
        return params
    if params.recheck() or params.engine_copy is None:
        params.engine_copy = _normalised(params)
    made: EngineParams = params.engine_copy
    return made


def pooling_params(params: FilledPooling) -> EngineParams:
    """The parameters of a request that ends with the vector of its prompt.

    Args:
        params: With the model's defaults. It is not changed.
    """
    prompt_only = PromptOnlyParams(
        max_tokens=0,
        temperature=0.0,
        detokenize=False,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncation_side=params.truncation_side or "right",
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return _made_of({**vars(engine_params(prompt_only)), "pooling": params})


def _made_of(values: dict[str, Any]) -> EngineParams:
    made = EngineParams.__new__(EngineParams)
    vars(made).update(values)
    return made


def _normalised(params: SamplingParams) -> EngineParams:
    values = dict(vars(params))
    values["stop"] = params.stop_strings
    values["stop_token_ids"] = tuple(params.stop_token_ids or ())
    for name, row in SAMPLING_LISTS.items():
        given = values[name]
        if given is not None and row.kind == "biases":
            values[name] = {token_id: float(min(MAX_BIAS, max(-MAX_BIAS, by))) for token_id, by in given.items()}
        elif given is not None:
            values[name] = tuple(dict.fromkeys(given))
    if params.logits_processors is not None:
        values["logits_processors"] = tuple(params.logits_processors)
    if params.extra_args is not None:
        values["extra_args"] = deepcopy(params.extra_args)
    if params.seed == -1:
        values["seed"] = None
    if params.thinking_token_budget == -1:
        values["thinking_token_budget"] = None
    if params.repetition_detection is not None and params.repetition_detection.numbers is None:
        values["repetition_detection"] = None
    if params.top_k == -1:
        values["top_k"] = 0
    values["top_p"] = max(params.top_p, SMALLEST)
    values["repetition_penalty"] = min(max(params.repetition_penalty, SMALLEST), LARGEST)
    if params.best_of == params.n:  # all of them are returned: there is nothing to choose
        values["best_of"] = None
    elif params.best_of is not None and params.output_kind is RequestOutputKind.CUMULATIVE:
        values["output_kind"] = RequestOutputKind.FINAL_ONLY
    if params.is_greedy or params.use_beam_search:  # a search is drawn from nothing
        values["temperature"] = 0.0
        values.update((number.name, number.default) for number in FILTERS)  # cannot change the most probable token
    elif params.temperature < LOWEST_TEMPERATURE:
        logger.warning("temperature %g is raised to %g: lower ones overflow", params.temperature, LOWEST_TEMPERATURE)
        values["temperature"] = LOWEST_TEMPERATURE
    return _made_of(values)


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """One request, ready for ``EngineHandle.add_request``; it becomes ``params.num_samples`` requests there.

    Attributes:
        prompt: Prompt text; None when only token ids were given.
        prompt_token_ids: Checked ids, at least one.
        params: Checked parameters.
        max_tokens: Most tokens to generate, clamped to the room that the prompt leaves.
        eos_token_id: Ends a sample without a stop reason; None if no token does.
        stop_token_ids: Ids that end a sample, further EOS ids included.
        hidden_stop_ids: Those of ``stop_token_ids`` that stand for EOS.
        num_logprobs: Candidates that get log-probabilities in addition to the sampled token; −1: not even that one.
        num_prompt_logprobs: The same for each place of the prompt but the first; at least 0 with
            ``prompt_logprob_token_ids``.
        seed: Of the first sample, 64-bit signed; sample i has ``seed + i``.
        priority: Lower is sooner, with the priority policy.
        tenant: Whose share of the engine it is charged to, with the fair policy; None: the bucket of all without.
        cache_salt: Keeps this prompt's cached blocks apart from those of other salts.
        prediction: What the answer is expected to be; None if nothing is, or if no drafts are made.
        adapter, lora_request: The adapter whose weights are added, by its number and as it was asked for; 0 and None
            without.
        sampling_extras: Parameters that are lists; None without.
        grammar: What the output must be; None: anything.
        stop: Stop strings, which all samples look for; None without.
        multimodal: Offset, length, digest and content of each image.
        ends_after_call: How samples are read that end behind their first call of a tool; None: they do not.
        arrival_ns: When it came to its front end (nanoseconds of CLOCK_MONOTONIC); its latencies count from then.
        began_ns, processed_ns: When the check began and ended, in nanoseconds of ``time.monotonic_ns``.
    """

    prompt: str | None
    prompt_token_ids: _core.TokenIds
    params: EngineParams
    max_tokens: int
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    hidden_stop_ids: frozenset[int]
    num_logprobs: int
    num_prompt_logprobs: int
    seed: int
    priority: int
    cache_salt: str | None
    tenant: Tenant | None = None
    prediction: _core.TokenIds | None = None
    adapter: int = 0
    lora_request: LoRARequest | None = None
    sampling_extras: _core.SamplingExtras | None = None
    grammar: _core.GrammarSpec | None = None
    stop: _core.StopStrings | None = None
    multimodal: tuple[tuple[int, int, bytes, bytes], ...] = ()
    ends_after_call: _core.TurnReading | None = None
    arrival_ns: int = field(default_factory=monotonic_ns)
    began_ns: int = 0
    processed_ns: int = 0

    @property
    def num_image_bytes(self) -> int:
        """Bytes of all images."""
        return sum(len(content) for *_, content in self.multimodal)

    def seed_of(self, index: int) -> int:
        """Seed of sample ``index``, wrapped to 64 bits."""
        return to_int64(self.seed + index)


def arrival_ns_of(arrival_time: float) -> int:
    """When a request came, in nanoseconds of CLOCK_MONOTONIC; a time that is still to come counts as now.

    Args:
        arrival_time: In seconds of ``time.time``.

    Raises:
        InvalidRequestError: It is not a time.
    """
    check_number("arrival_time", arrival_time, 0, LARGEST)
    return monotonic_ns() - max(0, time_ns() - int(arrival_time * 1e9))


def to_int64(value: int) -> int:
    """The low 64 bits of a number, as a signed one."""
    value &= MASK64
    return value - 2**64 if value >= 2**63 else value
