"""Where an answer is made: on the event loop if that takes a moment, else in a thread, so that others need not wait."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from rustvllm.outputs import CompletionOutput, RequestOutput

FEW_PARTS = 128
"""Choices, or candidates with log-probabilities, that become JSON in well under 5 ms."""
_CANDIDATES_PER_PLACE = 8
TURN_SECONDS = 0.001
"""After so much time with one stream others get their turn on the event loop."""
FEW_CHARS = 1 << 18
"""Characters, or token ids times eight, that become JSON in well under 5 ms."""
T = TypeVar("T")


async def at_answer_size(
    last: Sequence[RequestOutput], samples: Sequence[CompletionOutput], make: Callable[[], T]
) -> T:
    """What ``make`` makes of the outputs of a request, which nothing else changes meanwhile.

    Args:
        last: The last output of each prompt.
        samples: The choices.
        make: Makes the whole answer, JSON included.
    """
    if is_large(last, samples):
        return await asyncio.to_thread(make)
    return make()


def is_large(last: Sequence[RequestOutput], samples: Sequence[CompletionOutput]) -> bool:
    """Whether an answer has so many parts that making it would hold up the event loop."""
    num_parts = max(len(last), len(samples))
    if num_parts > FEW_PARTS:
        return True
    num_parts += sum(sum(map(len, sample.logprobs or ())) for sample in samples)
    num_parts += sum(_CANDIDATES_PER_PLACE * len(output.prompt_logprobs or ()) for output in last)
    num_chars = sum(len(sample.text) + 8 * len(sample.token_ids) for sample in samples)
    # Each choice may repeat its prompt, as text and as ids.
    num_chars += sum(len(output.prompt or "") + 8 * len(output.prompt_token_ids) for output in last) * max(
        len(samples) // max(len(last), 1), 1
    )
    return num_parts > FEW_PARTS or num_chars > FEW_CHARS
