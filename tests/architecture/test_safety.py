"""Every `SAFETY:` comment names what must hold; none only points elsewhere."""

import re
from pathlib import Path

import pytest

EMPTY = re.compile(
    r"^(?:(?:by )?the caller's promises?(?: is passed on)?|as above|the same|see above|numbers|passed on)\b\W*"
    r"(?:is passed on|and nothing else|;.*)?\W*$",
    re.IGNORECASE,
)


def safety_comments(text: str) -> list[str]:
    """The text of each comment that begins with `SAFETY:`, its lines joined."""
    found = re.finditer(r"^[ \t]*// SAFETY:((?:.*\n)(?:[ \t]*//(?! SAFETY:).*\n)*)", text, re.MULTILINE)
    return [" ".join(line.strip().removeprefix("//").strip() for line in match[1].splitlines()) for match in found]


@pytest.fixture(scope="module")
def comments(repository: Path) -> dict[str, list[str]]:
    """The comments of each file below `crates` that has some."""
    found = {}
    for path in sorted(repository.glob("crates/*/src/**/*.rs")):
        texts = safety_comments(path.read_text(encoding="utf-8"))
        if texts:
            found[str(path.relative_to(repository))] = texts
    assert "crates/cpu-kernels/src/attention/tile.rs" in found, "the kernels have moved"
    assert sum(map(len, found.values())) >= 150, "the comments have another form"
    return found


def test_every_safety_comment_names_what_must_hold(comments: dict[str, list[str]]) -> None:
    empty = {name: [text for text in texts if EMPTY.match(text)] for name, texts in comments.items()}
    assert {name: texts for name, texts in empty.items() if texts} == {}


@pytest.mark.parametrize(
    "text",
    [
        "the caller's promise.",
        "the caller's promise is passed on.",
        "as above.",
        "as above; `&mut self` is the only reference.",
        "numbers.",
    ],
)
def test_an_empty_comment_is_found(text: str) -> None:
    (read,) = safety_comments(f"    // SAFETY: {text}\n    unsafe {{ f() }}\n")
    assert EMPTY.match(read)


def test_a_comment_is_read_over_its_lines() -> None:
    text = "// SAFETY: as above,\n// but for `b`, which the caller checked.\nf()\n// SAFETY: it is only read.\ng()\n"
    assert safety_comments(text) == ["as above, but for `b`, which the caller checked.", "it is only read."]
    assert not any(EMPTY.match(read) for read in safety_comments(text))
