"""The keys of the API: those of ``--api-key`` or its variable and those of ``--api-key-file``, each with its weight."""

import argparse
import os
import re
from pathlib import Path

from rustvllm.exceptions import ConfigError
from rustvllm.tenant import MAX_WEIGHT

API_KEY_VARIABLE = "RUSTVLLM_API_KEY"
MAX_KEYS = 10_000
"""Keys in a file: every request's key is compared with all of them."""
_NUMBER = re.compile(r"[-+0-9.eE]{1,12}")
"""What may be shown of a line: anything else might be a key."""


def api_keys(args: argparse.Namespace) -> dict[str, int]:
    """Each key's weight: of the keys given, else of those in the environment, and of those in the file.

    Raises:
        ConfigError: A key is empty, given twice, or holds what a header cannot, a weight is wrong, or the file cannot
            be read or holds no key.
    """
    if args.api_key is None:
        keys = dict.fromkeys(os.environ.get(API_KEY_VARIABLE, "").split(), 1)
    else:
        for number, key in enumerate(args.api_key, 1):
            _check(key, f"--api-key: key {number}")
        keys = dict.fromkeys(args.api_key, 1)
    if args.api_key_file is not None:
        of_file = read_api_key_file(args.api_key_file)
        for number, key in enumerate(keys, 1):
            if key in of_file:
                raise ConfigError(
                    f"--api-key-file {args.api_key_file}: it repeats key {number} of --api-key; give each key in one "
                    "place"
                )
        keys |= of_file
    return keys


def read_api_key_file(path: str) -> dict[str, int]:
    """Each key's weight, from a file with a key in each line, and its weight behind it; ``#`` begins a comment.

    Raises:
        ConfigError: Names the file, the line and what is wrong with it, and shows no key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a byte order mark would be part of the first key
    except (OSError, UnicodeDecodeError) as exc:  # an error of decoding shows bytes of the file: its reason does not
        reason = exc.strerror if isinstance(exc, OSError) else exc.reason
        raise ConfigError(f"cannot read --api-key-file {path}: {reason}") from None
    keys: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"--api-key-file {path}: line {number}"
        key, *others = words
        _check(key, f"{where}: the key")
        if len(others) > 1:
            raise ConfigError(f"{where}: has {len(words)} words, but a line has one key, and optionally its weight")
        if key in keys:
            raise ConfigError(f"{where}: repeats the key of line {lines[key]}; each key has one weight")
        keys[key], lines[key] = _weight(others[0], where) if others else 1, number
    if not keys:
        raise ConfigError(f"--api-key-file {path}: the file has no key; leave the flag out to serve without a key")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"--api-key-file {path}: it has {len(keys)} keys; the limit is {MAX_KEYS}")
    return keys


def _weight(word: str, where: str) -> int:
    if word.isascii() and word.isdigit() and len(word) <= 4 and 1 <= int(word) <= MAX_WEIGHT:
        return int(word)
    shown = repr(word) if _NUMBER.fullmatch(word) else "another word"
    raise ConfigError(f"{where}: the weight must be a whole number from 1 to {MAX_WEIGHT}, got {shown}")


def _check(key: str, what: str) -> None:
    if not key:
        raise ConfigError(
            f"{what} is empty, perhaps because a variable is not set; leave the flag out to serve without a key"
        )
    if any(character.isspace() or not character.isprintable() for character in key):
        raise ConfigError(f"{what} contains a space or a control character, which no client can send")
