"""From a request's fields to ``SamplingParams``: the model's own defaults below what the client sent."""

import math
import re
from typing import Any

from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import PromptOnlyParams, RepetitionDetectionParams, RequestOutputKind, SamplingParams
from rustvllm.sampling_params.repetition_detection import PARAMETER as REPETITION_DETECTION
from rustvllm.sampling_params.table import SAMPLING_LISTS, SAMPLING_NUMBERS
from rustvllm.server.endpoints.structured import read_structured_outputs
from rustvllm.server.schemas.protocol import MAX_CHOICES, GenerationRequest, RepetitionDetection
from rustvllm.server.state import ServedModel

DEFAULT_COMPLETION_MAX_TOKENS = 16

_FIELDS = (
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    *SAMPLING_NUMBERS,
    "seed",
    "min_tokens",
    "stream_interval",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    *(row.name for row in SAMPLING_LISTS.values() if row.kind != "biases"),
    "truncate_prompt_tokens",
    "truncation_side",
)
_INTEGER = re.compile(r"-?[0-9]{1,18}")


def build_sampling_params(
    request: GenerationRequest,
    model: ServedModel,
    *,
    max_tokens: int | None,
    param: str = "max_tokens",
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters of a request; one instance serves all its prompts.

    Args:
        request: The parsed request.
        model: For its defaults and limits.
        max_tokens: Most tokens to generate, already defaulted; None: as many as fit.
        param: The field ``max_tokens`` came from, for messages.
        logprobs: How many candidates' log-probabilities to give; None if the request asks for none.
        prompt_logprobs: The same for each place of the prompt.

    Raises:
        InvalidRequestError: A value is out of its range; ``param`` names the field.
    """
    if max_tokens is not None:
        model.engine.input_processor.check_max_tokens(max_tokens, param)
    for row in SAMPLING_LISTS.values():
        entries = getattr(request, row.name)
        if row.kind != "words" and entries is not None and len(entries) > model.vocab_size:
            raise InvalidRequestError(
                f"{row.name} has {len(entries)} entries, but the vocabulary has only {model.vocab_size} tokens: name "
                "each token once.",
                row.name,
            )
    # How a model is best drawn from says nothing about a search.
    values: dict[str, Any] = {} if request.use_beam_search else dict(model.default_sampling)
    values.update((name, value) for name in _FIELDS if (value := getattr(request, name)) is not None)
    for row in SAMPLING_LISTS.values():
        if row.kind == "biases" and (biases := getattr(request, row.name)):
            values[row.name] = _biases(row.name, biases, model.vocab_size)
    if request.response_format is not None or request.structured_outputs is not None:
        values["structured_outputs"] = read_structured_outputs(request)
    if request.logprob_token_ids:
        if logprobs is None:
            raise InvalidRequestError(
                "logprob_token_ids needs logprobs (true for chat completions, a number for completions).",
                "logprob_token_ids",
            )
        logprobs = None  # these tokens come instead of the likeliest
    if request.repetition_detection is not None:
        values[REPETITION_DETECTION] = _repetition_detection(request.repetition_detection)
    if request.vllm_xargs:
        values["extra_args"] = _extra_args(request.vllm_xargs)
    kind = PromptOnlyParams if max_tokens == 0 else SamplingParams
    is_streamed = request.stream and not request.use_beam_search
    params = kind(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_progress=bool(request.stream and request.return_progress),
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
    )
    if request.stream and request.use_beam_search:
        raise InvalidRequestError(
            "use_beam_search cannot be streamed, because the best beams are only known at the end. Leave stream out.",
            "stream",
        )
    return params


def check_stream_options(request: GenerationRequest) -> None:
    """Refuse what only a stream can show where nothing is streamed; empty ``stream_options`` pass, as in vLLM."""
    if request.return_progress and not request.stream:
        raise InvalidRequestError("return_progress can only be used with stream=true.", "return_progress")
    options = request.stream_options
    if options is not None and not request.stream and (options.model_fields_set or options.model_extra):
        raise InvalidRequestError("stream_options can only be used with stream=true.", "stream_options")


def check_num_choices(num_prompts: int, params: SamplingParams) -> None:
    """Refuse a request for more answers than one request may have, those of ``best_of`` included."""
    num_samples = params.num_samples
    if num_prompts * num_samples > MAX_CHOICES:
        name = "n" if params.best_of is None else "best_of"
        raise InvalidRequestError(
            f"{num_prompts} prompts with {name}={num_samples} are {num_prompts * num_samples} choices; the limit per "
            f"request is {MAX_CHOICES}.",
            "prompt" if num_samples == 1 else name,
        )


def _biases(name: str, biases: dict[str, Any], vocab_size: int) -> dict[int, float]:
    """Keys as token ids, values clamped to [-100, 100]."""
    checked: dict[int, float] = {}
    for key, value in biases.items():
        if not _INTEGER.fullmatch(key) or not 0 <= int(key) < vocab_size:
            raise InvalidRequestError(
                f"{name} has the key {key[:32]!r}, but keys must be token ids from 0 to {vocab_size - 1}.", name
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise InvalidRequestError(f"{name}[{key}] must be a number.", name)
        checked[int(key)] = float(min(100.0, max(-100.0, value)))
    return checked


def _repetition_detection(asked: RepetitionDetection) -> RepetitionDetectionParams:
    """The same in Python's terms; a field that is misspelt would look for nothing."""
    fields = RepetitionDetection.model_fields
    if asked.model_extra:
        raise InvalidRequestError(
            f"{REPETITION_DETECTION} has the unknown field {min(asked.model_extra):.64}; the fields are "
            f"{', '.join(fields)}.",
            REPETITION_DETECTION,
        )
    return RepetitionDetectionParams(**{name: getattr(asked, name) for name in fields})


def _extra_args(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments for logits processors: texts, numbers, truth values, and lists of these."""
    for name, value in arguments.items():
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, str | int | float) or (isinstance(item, float) and not math.isfinite(item)):
                raise InvalidRequestError(
                    f"vllm_xargs[{name[:32]!r}] must be a string, a finite number, true or false, or a list of these.",
                    "vllm_xargs",
                )
            if isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise InvalidRequestError(
                    f"vllm_xargs[{name[:32]!r}] contains an integer that does not fit into 64 bits.", "vllm_xargs"
                )
    return arguments
