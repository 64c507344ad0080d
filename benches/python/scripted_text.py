"""Texts for measuring drafts, as token ids: the prompt of a request, and its answer.

A model that ``write_gpt2_small`` made with a script says them after any prompt. All texts are made from a seed, except
those from files.
"""

import difflib
import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPT_LEN = 96
NUM_IDS = 2_000
"""Every tokenizer has at least this many ids."""
EDITED_LEN = 480
"""How many tokens of a file's old version the prompt shows."""
STAGGER = 7
"""How many tokens each stream is ahead of the previous one, so that they do not say the same at the same time."""


@dataclass(frozen=True)
class Text:
    """A prompt, and the answer of the model.

    Attributes:
        prompt: The ids of the prompt.
        answer: The ids of the answer.
        expected: The ids that a caller who knows the prompt would predict; may be empty.
    """

    prompt: list[int]
    answer: list[int]
    expected: tuple[int, ...] = ()

    def script(self) -> list[int]:
        """What the model says after each place."""
        return [0] * (len(self.prompt) - 1) + self.answer

    def of_stream(self, index: int) -> list[int]:
        """The prompt of one of several streams, which includes the beginning of the answer."""
        return self.prompt + self.answer[: STAGGER * index]


def repeating(seed: int, length: int) -> Text:
    """Fifty ids that repeat, which the prompt shows once."""
    source = random.Random(seed)
    piece = _random_ids(source, 50)
    return Text(piece, (piece * (length // 50 + 1))[:length])


def drawn(seed: int, length: int) -> Text:
    """Random ids, which nothing can predict."""
    source = random.Random(seed)
    return Text(_random_ids(source, PROMPT_LEN), _random_ids(source, length))


def alternating(seed: int, length: int, part: int = 200) -> Text:
    """Parts that repeat themselves, alternating with random parts."""
    source = random.Random(seed)
    answer: list[int] = []
    prompt = _random_ids(source, 50)
    while len(answer) < length:
        is_random = len(answer) // part % 2
        answer += _random_ids(source, part) if is_random else (prompt * (part // 50 + 1))[:part]
    return Text(prompt, answer[:length])


def twelve(seed: int, length: int) -> Text:
    """The same twelve ids over and over, each time followed by another id."""
    source = random.Random(seed)
    piece = _random_ids(source, 12)
    ids: list[int] = []
    while len(ids) < PROMPT_LEN + length:
        ids += [*piece, source.randrange(NUM_IDS)]
    return Text(ids[:PROMPT_LEN], ids[PROMPT_LEN : PROMPT_LEN + length])


def liar(seed: int, length: int) -> Text:
    """Two ids; each time the one that did not follow the longest match, so that every guess is wrong."""
    source = random.Random(seed)
    ids = [source.randrange(2) for _ in range(PROMPT_LEN)]
    while len(ids) < PROMPT_LEN + length:
        ids.append(1 - _after_longest_match(ids))
    names = source.sample(range(NUM_IDS), 2)
    named = [names[each] for each in ids]
    return Text(named[:PROMPT_LEN], named[PROMPT_LEN:])


def edited(seed: int, length: int) -> Text:
    """A source file's text, and its next version in the history."""
    versions = _edits()
    before, after = versions[seed % len(versions)]
    return Text(before, after[:length], tuple(before))


def from_file(path: Path, seed: int, length: int) -> Text:
    """A passage of a book."""
    ids = encode(path.read_text(encoding="utf-8")[:200_000])
    start = random.Random(seed).randrange(len(ids) - PROMPT_LEN - length)
    ids = ids[start : start + PROMPT_LEN + length]
    return Text(ids[:PROMPT_LEN], ids[PROMPT_LEN:])


_encode: list[Callable[[str], list[int]]] = []


def encode(text: str) -> list[int]:
    """The ids of a text with the tokenizer of ``use_tokenizer``."""
    return _encode[0](text)


def use_tokenizer(folder: Path) -> None:
    """Set the tokenizer of texts to that of a folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _encode[:] = [lambda text: list(tokenizer.encode(text).ids)]


def texts(corpus: Path | None = None) -> dict[str, Callable[[int, int], Text]]:
    """Functions by name that make a text from a seed and a length."""
    made: dict[str, Callable[[int, int], Text]] = {
        "repeating": repeating,
        "random": drawn,
        "alternating": alternating,
        "twelve": twelve,
        "liar": liar,
        "edited": edited,
    }
    return made if corpus is None else made | {"ordinary": partial(from_file, corpus)}


def _random_ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(NUM_IDS) for _ in range(count)]


def _after_longest_match(ids: Sequence[int]) -> int:
    best, follows = -1, 0
    for end in range(len(ids) - 1, 0, -1):
        length = 0
        while length < min(end, 24) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length > best:
            best, follows = length, ids[end]
    return follows


_found: list[tuple[list[int], list[int]]] = []


def _edits() -> list[tuple[list[int], list[int]]]:
    """Beginnings of this project's files, before and after a commit that changed 2 to 20 % of them."""
    if _found:
        return _found
    for path in (
        "python/rustvllm/engine/core.py",
        "python/rustvllm/llm.py",
        "crates/scheduler/src/scheduler.rs",
        "python/rustvllm/worker/model_runner.py",
        "python/rustvllm/sample/sampler.py",
        "crates/kvblocks/src/pool.rs",
    ):
        commits = _git("log", "--format=%h", "--", path).split()[:12]
        for newer, older in pairwise(commits):
            before, after = (encode(_git("show", f"{commit}:{path}"))[:EDITED_LEN] for commit in (older, newer))
            ratio = difflib.SequenceMatcher(None, before, after, autojunk=False).ratio()
            if len(before) == EDITED_LEN and 0.8 <= ratio <= 0.98:
                _found.append((before, after))
                break
    if not _found:
        raise SystemExit("the history of this clone has no commit that changed a file: fetch it whole")
    return _found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""
