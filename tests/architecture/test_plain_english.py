"""Words that hide the actor, or that readers stumble over, are kept out of sources and documents."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

BANNED = {
    # Names of tests and functions count, too.
    r"(?<![a-z])(?:whoever|whomever|somebody|someone|nobody|anybody|anyone|everybody)(?![a-z])": (
        "name the caller, client or user"
    ),
    r"(?<![a-z])beside(?![a-z])": 'say "next to", "with", "in addition to" or "besides"',
    r"\b(?:is|are|was|were|be|being) no (?!longer\b|more than\b|less than\b|fewer\b|\w+er than\b)": (
        'say "is not a", or "there is no"'
    ),
    r"\b(?:is|are|was|were|be|been|being) told\b(?! apart)": "say what it receives, or what is called",
    r"\bNone: (?:nobody|nothing|none)\b": 'say what None does: "None disables …", "None if …"',
    r'"""The same,': "say what it does, in full",
    r"(?m)^[ \t]*//[/!] (?:The same(?:[,.;]| for| by| with)|As above\b)": "say what it does, in full",
    r"""\b(?:has|have) not[.,;:)"']""": 'say "lacks", or "without"',
    r"\bin (?:any |the )?company\b": 'say "in any batch", or "with other requests"',
}

# Files and folders that keep to it; others are added as they are cleaned.
CLEAN = [
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "scripts",
    "benches",
    "examples",
    "crates/cpu-kernels/src/*.rs",
    "crates/cpu-kernels/src/decoder",
    "crates/cpu-kernels/src/lora",
    "crates/cpu-kernels/src/packed",
    "crates/cpu-kernels/src/roofline",
    "crates/cpu-kernels/tests",
    "crates/drafting",
    "crates/gguf",
    "crates/grammar",
    "crates/ipc",
    "crates/kvblocks",
    "crates/loadgen",
    "crates/output",
    "crates/rustvllm-py",
    "crates/scheduler",
    "crates/step-channel",
    "tests",
    "python/rustvllm/*.py",
    "python/rustvllm/_core",
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
    "python/rustvllm/server/*.py",
    "python/rustvllm/server/answers",
    "python/rustvllm/server/endpoints",
    "python/rustvllm/server/flags",
    "python/rustvllm/server/http",
    "python/rustvllm/server/launch",
    "python/rustvllm/server/schemas",
    "python/rustvllm/server/stream",
    "python/rustvllm/text",
    "python/rustvllm/worker",
]
SUFFIXES = {".py", ".pyi", ".md", ".rs", ".sh"}
RUST_COMMENT = re.compile(r"^([ \t]*)//([/!]?)", re.MULTILINE)
EXEMPT = {
    "tests/architecture/test_plain_english.py",  # lists the words
    "docs/embedded-model.md",  # quotes the model
    "docs/flags.md",  # written from the sources
}


def read(path: Path) -> str:
    """The text of a file; in Rust without what begins a comment's line, so that sentences go over the ends of lines."""
    text = path.read_text(encoding="utf-8")
    return RUST_COMMENT.sub(_without_slashes, text) if path.suffix == ".rs" else text


def _without_slashes(begin: re.Match[str]) -> str:
    """The beginning of a comment's line: that of an item's documentation keeps its slashes."""
    before = begin.string[: begin.start()].rstrip("\n").rpartition("\n")[2]
    is_first = begin[2] and not before.lstrip().startswith("//")
    return begin[0] if is_first else begin[1]


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
        for number, words, advice in complaints(read(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("Called by whoever comes first.", "whoever"),
        ("The file lies beside the weights.", "beside"),
        ("def test_it_harms_nobody():", "nobody"),
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


def test_a_comment_in_rust_is_read_over_its_lines(tmp_path: Path) -> None:
    source = tmp_path / "lib.rs"
    source.write_text(
        "//! A file that is\n//! no socket.\n\n    /// Read by\n    /// nobody.\nfn f() {} // there is\n"
        "/// The same, with a limit.\nfn g() {}\n"
    )
    found = [(number, words) for number, words, _ in complaints(read(source))]
    assert found == [(5, "nobody"), (1, "is no"), (7, "/// The same,")]


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
