"""Prompts whose answers are foreseeable, for ``--dataset-name repeat`` and ``edit``: what drafts are measured with."""

import random
from typing import Final

DRAFT_DATASETS: Final = ("repeat", "edit")
_WORDS: Final = (
    "amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "knoll", "larch",
    "marsh", "north", "ocean", "pearl", "quarry", "ridge", "slate", "thorn", "umber", "vale", "willow", "yard",
)  # fmt: skip
_REPEATED: Final = 12
"""Words after which a text begins again."""


def known_texts(name: str, count: int, num_words: int, seed: int) -> list[str]:
    """Different texts of about so many words, the same for the same seed.

    Args:
        name: ``repeat``: a dozen words over and over, to be gone on with. ``edit``: a table that is asked for again
            with one word changed.
        count: How many.
        num_words: Of each prompt; at least those that it asks with.
        seed: Of the draws.
    """
    make = {"repeat": _repeat, "edit": _edit}[name]
    source = random.Random(seed)
    return [make(source, num_words) for _ in range(count)]


def _repeat(source: random.Random, num_words: int) -> str:
    words = source.choices(_WORDS, k=_REPEATED)
    return " ".join((words * (num_words // _REPEATED + 1))[: max(num_words, _REPEATED)])


def _edit(source: random.Random, num_words: int) -> str:
    old, new = source.sample(_WORDS, 2)
    asked = f"Write this table again, with {new} for {old}:\n"
    num_rows = max(1, (num_words - len(asked.split())) // 3)
    rows = [f"{row} {source.choice(_WORDS)} {source.choice((old, *_WORDS))}\n" for row in range(num_rows)]
    return asked + "".join(rows)
