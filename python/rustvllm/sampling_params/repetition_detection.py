""":class:`RepetitionDetectionParams`: which outputs end because they repeat themselves."""

from dataclasses import dataclass
from typing import Final

from rustvllm.exceptions import InvalidRequestError
from rustvllm.parameter_checks import check_int
from rustvllm.sampling_params.table import MAX_PATTERN_SIZE

PARAMETER: Final = "repetition_detection"
MAX_COUNT: Final = 2**31 - 1


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """When an output counts as repeating itself, with vLLM's names: it ends at the token with which it does.

    Attributes:
        max_pattern_size: Most tokens of a pattern, at most 1024; 0: nothing is looked for.
        min_pattern_size: Fewest tokens of a pattern, at most ``max_pattern_size``; 0 means 1.
        min_count: How many times in a row the pattern must come, at least 2.

    Raises:
        InvalidRequestError: A ``ValueError`` that names the number, its value and the limit.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        self._check("max_pattern_size", 0, MAX_PATTERN_SIZE)
        self._check("min_pattern_size", 0, MAX_PATTERN_SIZE)
        self._check("min_count", 0, MAX_COUNT)
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequestError(
                f"min_pattern_size of {PARAMETER} must be at most max_pattern_size ({self.max_pattern_size}), got "
                f"{self.min_pattern_size}",
                PARAMETER,
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise InvalidRequestError(
                f"min_count of {PARAMETER} must be at least 2, got {self.min_count}; to look for no repetition, set "
                "max_pattern_size to 0",
                PARAMETER,
            )

    @property
    def numbers(self) -> tuple[int, int, int] | None:
        """Fewest and most tokens of a pattern, and how often it must come; None: nothing is looked for."""
        if self.max_pattern_size == 0:
            return None
        return max(1, self.min_pattern_size), self.max_pattern_size, self.min_count

    def _check(self, name: str, low: int, high: int) -> None:
        try:
            check_int(f"{name} of {PARAMETER}", getattr(self, name), low, high)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), PARAMETER) from None
