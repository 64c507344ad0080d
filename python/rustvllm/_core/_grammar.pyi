"""Types of structured output in ``rustvllm._core``, where they are found; there is no module of this name."""

from collections.abc import Callable
from typing import Self, final

import numpy as np
import numpy.typing as npt

from rustvllm._core import Scheduler, SchedulerOutput
from rustvllm._core._tokenizer import Tokenizer

@final
class GrammarSpec:
    """What the output of a request must be; immutable, and shared by its samples."""

    def __new__(
        cls,
        kind: str,
        text: str = "",
        *,
        whitespace_pattern: str | None = None,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = False,
        thinking: tuple[int, int, bool, int | None, list[int]] | None = None,
    ) -> Self:
        """A grammar of kind ``json`` (the text of a schema), ``json_object`` (no text), ``regex``, ``choice`` (the JSON
        text of a list of texts), ``grammar`` (Lark, or GBNF where ``::=`` occurs) or ``anything`` (no text). Raises
        ``ValueError`` for others.

        ``thinking``: thoughts come before what it holds. The ids that begin and end them, whether the output begins
        within them, the most tokens of them (None: any number), and the ids that come once these are spent.
        """
    def check(self, param: str) -> None:
        """Raise InvalidRequestError, about ``param``, when it cannot be enforced.

        Compiles it, without the interpreter: a millisecond for most schemas, some hundred for the largest.
        """

    def relaxed(self, param: str) -> tuple[Self, list[str], int]:
        """As much of it as can be enforced: of a schema that ``check`` refuses for a keyword, all but these keywords.

        Also the JSON pointers of the first ones that were left out, and how many were. Raises as ``check`` does where
        nothing that is left out would help.
        """

    def in_messages(self, param: str, ids: dict[str, int], begins_within: bool) -> Self:
        """The same for the last message of an answer in messages (gpt-oss), behind thoughts, which are free.

        ``ids``: the marks that are one token each. ``begins_within``: the prompt ends within thoughts. Raises
        InvalidRequestError, about ``param``, if it is not a grammar or becomes too long.
        """

    def accepts(self, text: str) -> bool:
        """Whether a text obeys it as a whole; for tests and measurements. Raises ``ValueError`` as ``check`` does."""

def grammar_as_lark(text: str) -> str:
    """A grammar in Lark, out of Lark or of GBNF, which has ``::=``. Raises ``ValueError`` about GBNF that is none."""

@final
class MaskTimer:
    """A vocabulary on which grammars are measured, for ``benches/python/structured_output.py``."""

    def __new__(cls, tokenizer: Tokenizer, eos_token_ids: list[int], vocab_size: int) -> Self:
        """``vocab_size`` is the width of the logits."""
    def time(self, spec: GrammarSpec, token_ids: list[int]) -> tuple[float, list[float], list[float], bool]:
        """Microseconds to compile ``spec``, those of each mask along a text, and whether all its tokens were taken.

        The first list is of the first request with ``spec``, the second of the next one; processor time of the thread.
        Raises ``ValueError`` when it cannot be enforced. Releases the interpreter.
        """

    def forced(self, spec: GrammarSpec, text: str) -> tuple[int, int, int, bool]:
        """Of a text: its tokens, those that ``spec`` leaves no choice about, how many rows of these there are, and
        whether the text was taken. Raises as ``time`` does.
        """

@final
class Grammars:
    """The grammars of an engine's requests, compiled and made into masks by threads of the core.

    Belongs to the thread that steps the engine.
    """

    def __new__(
        cls,
        scheduler: Scheduler,
        load_tokenizer: Callable[[], tuple[Tokenizer, list[int]]],
        vocab_size: int,
        bitmask: npt.NDArray[np.int32],
        columns: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]],
        *,
        fast_forward: bool = True,
    ) -> Self:
        """Start the threads; ``load_tokenizer`` is called in one of them when the first grammar is compiled, and gives
        the ids that end an answer too.

        The arrays are those that ``take_masks`` writes: int32 ``[n, ceil(vocab_size / 32)]``, and in ``columns`` its
        ``places``, ``depths`` and ``verdicts``, int32 ``[n]``.
        ``fast_forward``: tokens that have to follow are appended.
        """
    def take_news(self) -> None:
        """Have the grammars of requests compiled that came, and drop those of requests that left."""
    def look_ahead(self) -> None:
        """Append tokens that have to follow, and end requests whose grammars are complete; before a step is planned.
        Releases the interpreter.
        """
    def hold_slow(self) -> bool:
        """Hold requests back that were withheld or whose masks take long, while these are not there; True while one is.
        Before a step is planned.
        """
    def release_slow(self) -> None:
        """Let all of them run: nothing else does."""
    def begin_masks(self, output: SchedulerOutput) -> None:
        """Have the masks of a step computed, as far as its tokens are known."""
    def take_masks(self, output: SchedulerOutput) -> int:
        """Write the masks of a step to the arrays and withhold the samples whose masks are not there, unless the
        step has no other rows; returns how many rows were written.

        Row ``i`` of ``bitmask`` is for the token behind ``depths[i]`` drafts of the step's sample ``places[i]``, unless
        ``verdicts[i]`` is not 0: that number stands for the token then.
        """
    def wait_for_masks(self, output: SchedulerOutput, limit_ns: int) -> bool:
        """Wait for the masks of a step, so long or, if their tokens have just come, up to a millisecond from then; True
        once they are there.
        """
