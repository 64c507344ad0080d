"""``GrammarMasks``: the masks of an engine's steps, between the core's threads that compute them and the executor."""

from collections.abc import Callable

import numpy as np

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.logger import init_logger
from rustvllm.sample.grammar_output import GrammarOutput
from rustvllm.text.tokenizer import Tokenizer

logger = init_logger(__name__)


class GrammarMasks:
    """Belongs to the thread that steps the engine; costs nothing while no request has a grammar."""

    def __init__(self, config: EngineConfig, scheduler: _core.Scheduler) -> None:
        num_words = -(-config.model.vocab_size // 32)
        num_drafts = 0 if config.speculation is None else config.speculation.num_speculative_tokens
        num_rows = config.scheduler.max_num_seqs * (1 + num_drafts)
        self._bitmask = np.zeros((num_rows, num_words), np.int32)
        self._places = np.zeros(num_rows, np.int32)
        self._depths = np.zeros(num_rows, np.int32)
        self._verdicts = np.zeros(num_rows, np.int32)
        self._wait_ns = int(1e6 * config.scheduler.grammar_mask_wait_ms)
        path, eos_token_ids = config.model.tokenizer_path, list(config.model.eos_token_ids)

        def load_tokenizer() -> tuple[_core.Tokenizer, list[int]]:
            """In a thread of the core, when the first grammar is compiled."""
            if path is None:
                raise ValueError("there is no tokenizer")
            try:
                tokenizer = Tokenizer.from_folder(path)
            except Exception as error:
                # The request itself gets only the error that its grammar could not be compiled.
                logger.error(  # noqa: TRY400 -- the message says all
                    "every request with structured output will be refused, because the tokenizer of %s cannot be read "
                    "now: %s; put it back and restart the engine",
                    path,
                    error,
                )
                raise
            own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            return tokenizer.core, [*eos_token_ids, *own]

        self._core = _core.Grammars(
            scheduler,
            load_tokenizer,
            config.model.vocab_size,
            self._bitmask,
            (self._places, self._depths, self._verdicts),
            fast_forward=config.scheduler.structured_outputs_fast_forward,
        )

    def take_news(self) -> None:
        """Have the grammars of new requests compiled, and drop those of requests that have left."""
        self._core.take_news()

    def look_ahead(self) -> None:
        """Append tokens that have to follow, and end requests whose grammars are complete: before a step is planned."""
        self._core.look_ahead()

    def hold_slow(self) -> bool:
        """Hold requests back that were withheld or whose masks take long, while these are not there; True if one is."""
        return self._core.hold_slow()

    def release_slow(self) -> None:
        """Let all requests run: their step has no other rows that would wait for their masks."""
        self._core.release_slow()

    def begin(self, output: _core.SchedulerOutput) -> None:
        """Have a step's masks computed while it executes."""
        if output.num_structured_output_reqs:
            self._core.begin_masks(output)

    def of_step(self, output: _core.SchedulerOutput, forward_ns_left: Callable[[], int]) -> GrammarOutput | None:
        """The masks of a step, once the steps before it are updated; None where every sample may be any token.

        Samples whose masks are not there when the model is done with the step, or ``grammar_mask_wait_ms`` later, are
        withheld.
        """
        if not output.num_structured_output_reqs:
            return None
        is_there, left = False, 1
        while left and not is_there:
            left = forward_ns_left()
            is_there = self._core.wait_for_masks(output, left)
        if self._wait_ns and not is_there:
            self._core.wait_for_masks(output, self._wait_ns)
        count = self._core.take_masks(output)
        if not count:
            return None
        return GrammarOutput(self._bitmask[:count], self._places[:count], self._verdicts[:count], self._depths[:count])
