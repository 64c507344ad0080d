"""What a tokenizer puts around and between a pair of texts, for models that were trained on pairs.

It is in the post-processor of ``tokenizer.json``, unless ``tokenizer_config.json`` replaces that by its own affixes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rustvllm.config.checkpoint.gguf_file import GgufFile, is_gguf
from rustvllm.exceptions import ModelLoadError
from rustvllm.text import gguf_tokenizer
from rustvllm.text.tokenizer import Tokenizer
from rustvllm.text.tokenizer_json import load_tokenizer_json

_PLAIN = ("ByteLevel",)
"""Post-processors that add no token."""


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """Special tokens of a pair.

    Attributes:
        before: Ids before the first text.
        between: Ids between the two.
        behind: Ids behind the second.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def join(self, first: Sequence[int], second: Sequence[int], keep: int | None = None) -> list[int]:
        """The ids of a pair.

        Args:
            first: Ids of the first text, without special tokens.
            second: Those of the second.
            keep: Most ids; the longer text loses its end until both fit, as with ``longest_first`` in transformers.
                None: all.
        """
        if keep is not None:
            num_special = len(self.before) + len(self.between) + len(self.behind)
            num_first, num_second = _lengths(len(first), len(second), max(0, keep - num_special))
            first, second = first[:num_first], second[:num_second]
        return [*self.before, *first, *self.between, *second, *self.behind]


def _lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two lists is kept."""
    if first + second <= room:
        return first, second
    short, half = min(first, second), room // 2
    kept = (short, room - short) if short <= half else (half, room - half)
    return kept if first <= second else (kept[1], kept[0])


def read_pair_template(place: Path, tokenizer: Tokenizer) -> PairTemplate:
    """Read the template of a model folder or a GGUF file.

    Args:
        place: Where the tokenizer is.
        tokenizer: That was read from there.

    Raises:
        ModelLoadError: The tokenizer says nothing of pairs that is understood.
    """
    if (affixes := tokenizer.own_affixes) is not None:
        prefix, suffix = affixes
        return PairTemplate(tuple(prefix), (*suffix, *prefix), tuple(suffix))
    if is_gguf(place):
        content = json.loads(gguf_tokenizer.tokenizer_json(GgufFile(place)))
    else:
        content = load_tokenizer_json(place, lambda path: json.loads(path.read_bytes()))
    try:
        return _template_of(content.get("post_processor"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"the tokenizer in {place} does not say how it makes a pair of two texts: {error}"
        ) from None


def _template_of(processor: Mapping[str, Any] | None) -> PairTemplate:
    parts = [] if processor is None else processor["processors"] if processor["type"] == "Sequence" else [processor]
    parts = [part for part in parts if part["type"] not in _PLAIN]
    if not parts:
        return PairTemplate()
    if len(parts) > 1:
        raise ValueError("it has several post-processors that add tokens")
    [part] = parts
    if part["type"] in ("BertProcessing", "RobertaProcessing"):
        begin, end = int(part["cls"][1]), int(part["sep"][1])
        between = (end,) if part["type"] == "BertProcessing" else (end, end)
        return PairTemplate((begin,), between, (end,))
    if part["type"] != "TemplateProcessing":
        raise ValueError(f"its post-processor is {part['type']!r:.40}")
    return _pieces(part["pair"], part["special_tokens"])


def _pieces(pair: Sequence[Mapping[str, Any]], special: Mapping[str, Any]) -> PairTemplate:
    """The three places of a TemplateProcessing."""
    places: list[list[int]] = [[]]
    names = []
    for piece in pair:
        if "Sequence" in piece:
            names.append(piece["Sequence"]["id"])
            places.append([])
        else:
            places[-1] += [int(token_id) for token_id in special[piece["SpecialToken"]["id"]]["ids"]]
    if names != ["A", "B"]:
        raise ValueError(f"its post-processor has the texts {', '.join(map(str, names))}, not A and B")
    before, between, behind = places
    return PairTemplate(tuple(before), tuple(between), tuple(behind))
