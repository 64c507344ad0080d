"""Log-probabilities as callers see them: :class:`Logprob`, :class:`PromptLogprobs`, :class:`FlatLogprobs`.

A prompt is long, and an object for each candidate of each place would take some twenty times the room of its numbers.
So the numbers stay as they came, and a place becomes objects when a caller reads it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True)
class Logprob:
    """What the model thought of one token at one place, before temperature and penalties.

    Attributes:
        logprob: Natural logarithm of its probability; minus infinity is possible.
        rank: 1 for the likeliest token of the vocabulary; for equals the best place among them. None for a token that
            the request named (``logprob_token_ids``) and that was not sampled.
        decoded_token: Its text, with U+FFFD for bytes that do not form a whole character; None without text.
        decoded_bytes: The bytes that it adds to the text, which need not be whole characters; None without text.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None = None
    decoded_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive places: ``num_columns`` token ids and log-probabilities for each, and its rank; −1 ends a row.

    The last ``num_named`` columns are of tokens that the request names.
    """

    num_columns: int
    token_ids: "memoryview[int]"
    logprobs: "memoryview[float]"
    ranks: "memoryview[int]"
    num_named: int = 0


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """For each place of a prompt what the model thought of it, like a list of dictionaries; the first is None.

    A place's dictionary has its own token first, then the likeliest in their order, the own one not twice.

    Args:
        token_bytes: The bytes that a token adds to a text; None: there is no text.
        num_named: How many tokens the request names for each place, which :class:`PromptTokenLogprobs` keeps.
    """

    def __init__(self, token_bytes: Callable[[int], bytes] | None = None, num_named: int = 0) -> None:
        self._token_bytes, self._num_named = token_bytes, num_named
        self._chunks: list[_Chunk] = []
        self._starts: list[int] = []  # place of the first of each chunk
        self._length = 1

    def extend(self, first_position: int, num_columns: int, token_ids: bytes, logprobs: bytes, ranks: bytes) -> None:
        """Add the places that follow, as ``RequestDelta.new_prompt_logprobs`` has them.

        Raises:
            ValueError: They do not follow.
        """
        if first_position != self._length:
            raise ValueError(
                f"log-probabilities of place {first_position} of a prompt came after {self._length} others"
            )
        ids, values = memoryview(token_ids).cast("i"), memoryview(logprobs).cast("f")
        places = memoryview(ranks).cast("I")
        self._chunks.append(_Chunk(num_columns, ids, values, places, self._num_named))
        self._starts.append(first_position)
        self._length += len(places)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(index, slice):
            return [self._at(place) for place in range(*index.indices(self._length))]
        place = index + self._length if index < 0 else index
        if not 0 <= place < self._length:
            raise IndexError(f"the log-probabilities of a prompt have {self._length} places, there is no {index}")
        return self._at(place)

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return map(self._at, range(self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return repr(list(self))

    def _at(self, place: int) -> dict[int, Logprob] | None:
        if place == 0:
            return None
        which = bisect_right(self._starts, place) - 1
        chunk, row = self._chunks[which], place - self._starts[which]
        start = row * chunk.num_columns
        found: dict[int, Logprob] = {}
        for column in range(chunk.num_columns - chunk.num_named):
            token_id = chunk.token_ids[start + column]
            if token_id < 0:
                break
            if token_id not in found:
                raw = None if self._token_bytes is None else self._token_bytes(token_id)
                text = None if raw is None else raw.decode(errors="replace")
                rank = column or chunk.ranks[row]
                found[token_id] = Logprob(chunk.logprobs[start + column], rank, text, raw)
        return found


class PromptTokenLogprobs:
    """Log-probabilities of the tokens that a request names for places of its prompt (``prompt_logprob_token_ids``).

    Args:
        start: The place of the first row.
        num_rows: Rows of tokens.
        num_named: Tokens of each.
    """

    def __init__(self, start: int, num_rows: int, num_named: int) -> None:
        import numpy as np  # importing the package does not load it

        self._start = start
        self._values = np.empty((num_rows, num_named), np.float32)
        self._num_known = 0

    def extend(self, first_position: int, num_columns: int, _ids: bytes, logprobs: bytes, _ranks: bytes) -> None:
        """Add the places that follow; see ``PromptLogprobs.extend``."""
        import numpy as np

        num_rows, num_named = self._values.shape
        values = np.frombuffer(logprobs, np.float32).reshape(-1, num_columns)[:, num_columns - num_named :]
        first = first_position - 1 - self._start
        begin, end = max(first, 0), min(first + len(values), num_rows)
        if begin < end:
            self._values[begin:end] = values[begin - first : end - first]
            self._num_known += end - begin

    def whole(self) -> "npt.NDArray[np.float32] | None":
        """Float32 ``[num_rows, num_named]``, minus infinity where a row is padded; None while places are missing."""
        return self._values if self._num_known == len(self._values) else None


@dataclass
class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probabilities of many places in a few lists of numbers, with vLLM's names; reads like a list of dictionaries.

    A place without any, such as the first of a prompt, reads as an empty dictionary.

    Attributes:
        start_indices: Where each place begins in the other lists.
        end_indices: Where it ends.
        token_ids: Ids of the tokens, place by place.
        logprobs: Natural logarithms of their probabilities.
        ranks: Their ranks, 1 for the likeliest; None where it is not known.
        decoded_tokens: Their texts; None without text.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, places: Iterable[Mapping[int, Logprob] | None]) -> "FlatLogprobs":
        """The same numbers as those of other places."""
        made = cls()
        for place in places:
            made.append(place)
        return made

    def append(self, place: Mapping[int, Logprob] | None) -> None:
        """Add the place that follows."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (place or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "dict[int, Logprob] | FlatLogprobs":
        if isinstance(index, slice):
            return FlatLogprobs.of(self[place] for place in range(*index.indices(len(self))))
        entries = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[entry]: Logprob(self.logprobs[entry], self.ranks[entry], self.decoded_tokens[entry])
            for entry in entries
        }
