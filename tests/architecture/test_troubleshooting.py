"""What docs/troubleshooting.md says that the program prints stands in the sources."""

import re
from pathlib import Path

import pytest

ADJACENT = re.compile(r"""["']\s*\\?\n\s*(?:[rf]{0,2})["']""")
LITERAL_END = re.compile(r"\\\n\s*")


@pytest.fixture(scope="module")
def sources(repository: Path) -> dict[str, str]:
    """Python and Rust sources, with texts that are written in several pieces put together."""
    paths = [*(repository / "python").rglob("*.py"), *(repository / "crates").glob("*/src/**/*.rs")]
    assert len(paths) > 200
    return {str(path): LITERAL_END.sub("", ADJACENT.sub("", path.read_text(encoding="utf-8"))) for path in paths}


@pytest.fixture(scope="module")
def messages(repository: Path) -> list[str]:
    """The texts in `code` in the first column of the tables whose head says that they are printed."""
    text = (repository / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found, is_printed = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_printed = False
        elif line.startswith("| what it says"):
            is_printed = True
        elif is_printed and not line.startswith("|---"):
            found += re.findall(r"`([^`]+)`", line.split("|")[1])
    assert len(found) >= 20
    return found


def test_every_message_is_printed_by_something(messages: list[str], sources: dict[str, str]) -> None:
    strange = []
    for message in messages:
        parts = [part.strip() for part in message.split("…") if len(part.strip()) > 2]
        assert parts, message
        if not any(all(part in text for part in parts) for text in sources.values()):
            strange.append(message)
    assert strange == []


def test_a_message_without_a_source_is_found(sources: dict[str, str]) -> None:
    assert not any("no source prints " + "this line" in text for text in sources.values())


def test_every_flag_in_the_page_exists(repository: Path) -> None:
    from rustvllm.cli.serve import make_parser

    text = (repository / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    flags = set(re.findall(r"(--[a-z][a-z0-9-]+)", text))
    assert len(flags) >= 10
    known = {option for action in make_parser()._actions for option in action.option_strings}
    assert flags - known == set()
