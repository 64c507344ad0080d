"""``Seats``: how many may look at something at once."""

from rustvllm.server.errors import UnavailableError


class Seats:
    """A number of seats; each is taken before its stream begins, so that no more streams begin than there are seats.

    Args:
        count: How many there are.
        refusal: What to say when all are taken.
    """

    def __init__(self, count: int, refusal: str) -> None:
        self._count, self._refusal = count, refusal
        self._num_taken = 0

    def take(self) -> None:
        """Take a seat.

        Raises:
            UnavailableError: All are taken.
        """
        if self._num_taken >= self._count:
            raise UnavailableError(self._refusal, retry_after=5)
        self._num_taken += 1

    def leave(self) -> None:
        """Give a seat back."""
        self._num_taken -= 1
