"""Words that hide the actor, or that readers stumble over, are kept out of sources and documents."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

BANNED = {
    r"\b(?:whoever|whomever|somebody|someone|nobody|anybody|anyone|everybody)\b": "name the caller, client or user",
    r"\bbeside\b": 'say "next to", "with", "in addition to" or "besides"',
    r"\b(?:is|are|was|were|be|being) no (?!longer\b|more than\b|less than\b|fewer\b|\w+er than\b)": (
        'say "is not a", or "there is no"'
    ),
    r"\b(?:is|are|was|were|be|been|being) told\b(?! apart)": "say what it receives, or what is called",
    r"\bNone: (?:nobody|nothing|none)\b": 'say what None does: "None disables …", "None if …"',
    r'"""The same,': "say what it does, in full",
    r"""\b(?:has|have) not[.,;:)"']""": 'say "lacks", or "without"',
    r"\bin (?:any |the )?company\b": 'say "in any batch", or "with other requests"',
}

# Files and folders that keep to it; others are added as they are cleaned.
CLEAN = [
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "scripts",
    "benches/python",
    "tests/*.py",
    "tests/architecture",
    "tests/clients",
    "tests/kernels",
    "tests/models",
    "python/rustvllm/*.py",
    "python/rustvllm/*.pyi",
    "python/rustvllm/attention",
    "python/rustvllm/batch",
    "python/rustvllm/cli",
    "python/rustvllm/config",
    "python/rustvllm/engine",
    "python/rustvllm/executor",
    "python/rustvllm/kernels",
    "python/rustvllm/layers",
    "python/rustvllm/model_loader",
    "python/rustvllm/models",
    "python/rustvllm/observe",
    "python/rustvllm/process",
    "python/rustvllm/sample",
    "python/rustvllm/text",
    "python/rustvllm/worker",
]
SUFFIXES = {".py", ".pyi", ".md", ".sh"}
EXEMPT = {
    "tests/architecture/test_plain_english.py",  # lists the words
    "docs/embedded-model.md",  # quotes the model
    "docs/flags.md",  # written from the sources
}


def complaints(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, words and advice of each banned expression; one may go over the end of a line."""
    for pattern, advice in BANNED.items():
        for found in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            if not text[: found.start()].rstrip().lower().endswith("there"):  # "there is no"
                yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), advice


@pytest.mark.parametrize("place", CLEAN)
def test_clean_places_stay_clean(repository: Path, place: str) -> None:
    matched = list(repository.glob(place))
    paths = [path for each in matched for path in (each.rglob("*") if each.is_dir() else [each])]
    files = [path for path in paths if path.suffix in SUFFIXES and "__pycache__" not in path.parts]
    assert files, f"nothing was found in {place}"
    wrong = [
        f"{name}:{number}: {words!r}: {advice}"
        for path in files
        if (name := str(path.relative_to(repository))) not in EXEMPT
        for number, words, advice in complaints(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Called by whoever comes first.", "whoever"),
        ("The file lies beside the weights.", "beside"),
        ("4 is no multiple of 3.", "is no"),
        ("a file that is\n    no socket", "is no"),
        ("The tracer is told of each step.", "is told"),
        ("tracer: Takes records; None: nobody does.", "None: nobody"),
        ('    """The same, with a limit."""', '"""The same,'),
        ("a tokenizer, which this server has not.", "has not."),
        ("the same bits in any company", "in any company"),
    ],
)
def test_each_pattern_finds_its_words(sentence: str, words: str) -> None:
    assert words in [found for _, found, _ in complaints(sentence)]


@pytest.mark.parametrize(
    "sentence",
    [
        "There is no folder.",
        "there\n    is no file",
        "It is no longer used.",
        "The two cannot be told apart.",
        "It is no shorter than 4.",
    ],
)
def test_plain_sentences_pass(sentence: str) -> None:
    assert list(complaints(sentence)) == []
