"""``GrammarOutput``: the ids that a step's samples may take if they follow grammars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

WITHHELD: Final = -7
_COLUMNS: Final = ("places", "verdicts", "depths")


@dataclass(frozen=True, slots=True)
class GrammarOutput:
    """The ids that some samples of a step may take, also behind their drafts; other samples may take any id.

    Attributes:
        bitmask: int32 ``[n, ceil(vocab_size / 32)]``; bit ``i % 32`` of word ``i // 32`` is for id ``i``.
        places: int32 ``[n]``, the step's sample that each row of the mask is for.
        verdicts: int32 ``[n]``; 0, or a negative number for a sample without a token. −2: the grammar refuses the
            sampled tokens; −5: the grammar is complete; −6: there is no more room for the grammar; −7: the token is
            withheld, because its mask is late or because forced tokens take its place, and the request gets a token
            from a later step. Behind a draft, a verdict ends the tokens that the step gives.
        depths: int32 ``[n]``, how many of the sample's drafts precede the token.
    """

    bitmask: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    verdicts: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]

    def rows(self, first: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
        """The rows of logits for which these masks are, int64 ``[n]``.

        Args:
            first: int64 ``[num_sampled]``, the row of each sample that no draft precedes; None if there are no drafts.
        """
        return np.asarray((self.places if first is None else first[self.places]) + self.depths, np.int64)

    def drawn(self, num_sampled: int) -> npt.NDArray[np.int64] | None:
        """The samples of a step that are not withheld; None if none is withheld."""
        withheld = self.places[(self.verdicts == WITHHELD) & (self.depths == 0)]
        return np.delete(np.arange(num_sampled), withheld) if withheld.size else None

    def check(self, num_sampled: int, vocab_size: int) -> None:
        """Refuse arrays with a wrong dtype or shape.

        Raises:
            ValueError: An array is wrong; the message says what it is and what it should be.
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
