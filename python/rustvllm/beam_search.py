"""What a beam search gives back: :class:`BeamSearchOutput` with its best sequences, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rustvllm.logprobs import Logprob
from rustvllm.sampling_params import BeamSearchParams as BeamSearchParams  # noqa: PLC0414 -- where callers look for it

if TYPE_CHECKING:
    from rustvllm.lora.request import LoRARequest
    from rustvllm.outputs import CompletionOutput, RequestOutput
    from rustvllm.text.tokenizer import Tokenizer


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the sequences that a search found.

    Attributes:
        tokens: Token ids of prompt and output. The token that ended the output is among them only with
            ``include_stop_str_in_output``.
        logprobs: For each token of the output, the one that ended it included, its log-probability by its id.
        lora_request: The adapter that the search used.
        cum_logprob: Sum of the log-probabilities of the output, without the length penalty.
        text: Text of ``tokens``; None without a tokenizer.
        finish_reason: ``stop`` when a token ended the output, ``length`` when it was as long as it might be.
        stop_reason: The stop token id that ended it; None for EOS and for every other end.
    """

    tokens: list[int]
    logprobs: list[Mapping[int, Logprob]] = field(default_factory=list)
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What a search found for one prompt.

    Attributes:
        sequences: ``beam_width`` of them, best first.
    """

    sequences: list[BeamSearchSequence]


def beam_search_outputs(
    outputs: Sequence[RequestOutput],
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
    lora_requests: Sequence[LoRARequest | None] | None = None,
) -> list[BeamSearchOutput]:
    """Make what ``LLM.beam_search`` returns of what the engine gave, one for each prompt."""
    adapters = [None] * len(outputs) if lora_requests is None else lora_requests
    return [
        BeamSearchOutput([_sequence(output, beam, params, tokenizer, adapter) for beam in output.outputs])
        for output, adapter in zip(outputs, adapters, strict=True)
    ]


def _sequence(
    output: RequestOutput,
    beam: CompletionOutput,
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
    adapter: LoRARequest | None,
) -> BeamSearchSequence:
    shown = beam.token_ids
    if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
        shown = shown[:-1]
    tokens = [*output.prompt_token_ids, *shown]
    return BeamSearchSequence(
        tokens,
        list(beam.logprobs or ()),
        adapter,
        beam.cumulative_logprob or 0.0,
        None if tokenizer is None else tokenizer.decode(tokens, params.skip_special_tokens),
        beam.finish_reason,
        beam.stop_reason,
    )
