"""Sentence templates: how the corpus generator turns one written pattern into many sentences.

A template is text with four marks:

* ``{a|b|c}`` is a choice; choices nest and an empty alternative is allowed;
* ``#class`` draws a fresh word of that class from the lexicon;
* ``$slot`` is a value the caller has fixed, the same wherever it appears;
* ``a^`` is the indefinite article that agrees with the word after it.

The first letter of every sentence is set in upper case at the end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from tiny_model.lexicon import CLASSES

Exchange = tuple[str, str]  # a request, without its final mark, and the answer to it

_CHOICE = re.compile(r"\{([^{}]*)\}")
_CLASS = re.compile(r"#([a-z_]+)")
_SLOT = re.compile(r"\$([a-z_0-9]+)")
_ARTICLE = re.compile(r"\b([Aa])\^ ([\"']?)(\w+)")
_SENTENCE_START = re.compile(r"(^|[.!?] |[.!?]\" (?!(?:said|asked|cried) )|\n|[:,] \")(\"?(?!rustvllm)[a-z])")
_SPACES = re.compile(r" {2,}")
_CONSONANT_SOUND = ("uni", "use", "one", "eu", "ut")
_VOWEL_SOUND = ("hour", "honest")


def article(word: str) -> str:
    """Return "a" or "an", whichever goes before ``word``."""
    lowered = word.lower()
    if lowered.startswith(_VOWEL_SOUND):
        return "an"
    return "an" if lowered[:1] in "aeiou" and not lowered.startswith(_CONSONANT_SOUND) else "a"


def with_article(words: str) -> str:
    """Return ``words`` with its indefinite article in front."""
    return f"{article(words)} {words}"


def capitalise(text: str) -> str:
    """Set the first letter of the text in upper case and leave the rest alone; so does the name rustvllm stay."""
    return text if text.startswith("rustvllm") else text[:1].upper() + text[1:]


def join_words(words: Sequence[str]) -> str:
    """Return the words as an English list: ``a``, ``a and b``, ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " and " + words[-1]


def expand(rng: random.Random, template: str, slots: Mapping[str, str] | None = None) -> str:
    """Return one sentence (or several) made from ``template``.

    Args:
        rng: source of every choice.
        template: the pattern, see the module's first lines.
        slots: values of the ``$slot`` marks. A mark without a value is an error.

    Raises:
        KeyError: a slot or a word class that does not exist.
    """
    values = slots or {}
    text = template
    while "{" in text:
        text, count = _CHOICE.subn(lambda match: rng.choice(match.group(1).split("|")), text)
        if not count:
            raise ValueError(f"unbalanced braces in template {template!r}")
    text = _CLASS.sub(lambda match: rng.choice(CLASSES[match.group(1)]), text)
    text = _SLOT.sub(lambda match: values[match.group(1)], text)
    text = _SPACES.sub(" ", text).replace(" ,", ",").replace(" .", ".").strip(" ")
    text = _ARTICLE.sub(_agree, text)
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)


def pick(rng: random.Random, templates: Sequence[str], slots: Mapping[str, str] | None = None) -> str:
    """Expand one of several templates."""
    return expand(rng, rng.choice(templates), slots)


def _agree(match: re.Match[str]) -> str:
    chosen = article(match.group(3))
    if match.group(1) == "A":
        chosen = capitalise(chosen)
    return f"{chosen} {match.group(2)}{match.group(3)}"
