"""Conversations in ShareGPT's form as prompts: the first turn is sent, the second says how long the answer is."""

import json
import random
from pathlib import Path
from typing import Any, Final

from rustvllm import _core
from rustvllm.exceptions import ConfigError

MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS, MIN_TOKENS = 1024, 2048, 4
"""Conversations outside these are left out when a tokenizer counts, as other users of this data set do."""
MAX_CHARS: Final = 1 << 20


def read_sharegpt(
    path: str, count: int, seed: int, output_len: int | None, tokenizer_folder: str | None
) -> list[tuple[str, int]]:
    """Prompts with the lengths of their answers, in an order that the seed decides.

    Args:
        path: JSON: a list of objects with ``conversations``, a list of turns with ``value``.
        count: So many at most.
        seed: Of the order.
        output_len: Of every answer; None: that of the recorded one, counted by the tokenizer.
        tokenizer_folder: With ``tokenizer.json``.

    Raises:
        ConfigError: The file cannot be read or has no conversation; or nothing says how long answers are.
    """
    tokenizer = _read_tokenizer(tokenizer_folder)
    if output_len is None and tokenizer is None:
        raise ConfigError(
            "--dataset-name sharegpt needs --sharegpt-output-len N or --tokenizer FOLDER to know how long answers are"
        )
    pairs = _read_pairs(Path(path))
    random.Random(seed).shuffle(pairs)
    chosen: list[tuple[str, int]] = []
    for prompt, answer in pairs:
        if len(chosen) == count:
            break
        length = output_len
        if tokenizer is not None:
            num_prompt_tokens = len(tokenizer.encode(prompt))
            num_answer_tokens = len(tokenizer.encode(answer)) if length is None else length
            if not (
                MIN_TOKENS <= num_prompt_tokens <= MAX_PROMPT_TOKENS
                and (length is not None or num_answer_tokens >= MIN_TOKENS)
                and num_prompt_tokens + num_answer_tokens <= MAX_TOTAL_TOKENS
            ):
                continue
            length = num_answer_tokens
        chosen.append((prompt, length or MIN_TOKENS))
    if not chosen:
        raise ConfigError(f"{path} has no usable conversation of two turns")
    return chosen


def _read_tokenizer(folder: str | None) -> _core.Tokenizer | None:
    if folder is None:
        return None
    path = Path(folder).expanduser() / "tokenizer.json"
    try:
        return _core.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error


def _read_pairs(path: Path) -> list[tuple[str, str]]:
    """First and second turn of every conversation that has both."""
    try:
        entries: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path} must hold a list of conversations, not {type(entries).__name__}")
    pairs = []
    for entry in entries:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        prompt, answer = texts
        if isinstance(prompt, str) and isinstance(answer, str) and 0 < len(prompt) <= MAX_CHARS:
            pairs.append((prompt, answer))
    return pairs
