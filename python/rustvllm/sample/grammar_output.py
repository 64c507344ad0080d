"""``GrammarOutput``: what the samples of a step may be that obey grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

WITHHELD: Final = -7
_COLUMNS: Final = ("places", "verdicts", "depths")


@dataclass(frozen=True, slots=True)
class GrammarOutput:
    """Which ids some samples of a step may take, and what follows their drafts; the others may take any.

    Attributes:
        bitmask: int32 ``[n, ceil(vocab_size / 32)]``; bit ``i % 32`` of word ``i // 32`` is for id ``i``.
        places: int32 ``[n]``, which of the step's samples.
        verdicts: int32 ``[n]``; 0, or the negative number that stands for a sample without a token: −2 what was
            sampled is refused, −5 the grammar is complete, −6 there is no room for the grammar any more, −7 its mask is
            late, or tokens that have to follow have its place: it is withheld, and the request gets its token from a
            later step. Behind a draft it ends what the step gives.
        depths: int32 ``[n]``, behind how many of its drafts each token is.
    """

    bitmask: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    verdicts: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]

    def rows(self, first: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
        """The rows of logits that these are, int64 ``[n]``.

        Args:
            first: int64 ``[num_sampled]``, each sample's row that no draft comes before; None: there are no drafts.
        """
        return np.asarray((self.places if first is None else first[self.places]) + self.depths, np.int64)

    def drawn(self, num_sampled: int) -> npt.NDArray[np.int64] | None:
        """Which samples of a step are not withheld; None: all of them."""
        withheld = self.places[(self.verdicts == WITHHELD) & (self.depths == 0)]
        return np.delete(np.arange(num_sampled), withheld) if withheld.size else None

    def check(self, num_sampled: int, vocab_size: int) -> None:
        """Refuse arrays of another dtype or shape.

        Raises:
            ValueError: Names what they are and what they should be.
        """
        num_rows = self.places.shape[0]
        expected = {"bitmask": (num_rows, -(-vocab_size // 32)), **dict.fromkeys(_COLUMNS, (num_rows,))}
        for name, shape in expected.items():
            array = getattr(self, name)
            if array.dtype != np.int32 or array.shape != shape:
                raise ValueError(
                    f"the {name} of a GrammarOutput must be int32 of shape {shape}, got {array.dtype} of shape "
                    f"{array.shape}"
                )
        if num_rows and not 0 <= int(self.places.min()) <= int(self.places.max()) < num_sampled:
            raise ValueError(f"places of a GrammarOutput must be in 0 to {num_sampled - 1}, got {self.places.tolist()}")
