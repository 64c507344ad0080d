"""The version, the CHANGELOG and the transport's protocol move together."""

import re
import tomllib
from pathlib import Path

import pytest

HEADING = re.compile(r"^## \[(Unreleased|\d+\.\d+\.\d+)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
PROTOCOL = re.compile(r"\bTransport protocol: version (\d+)\.$", re.MULTILINE)


@pytest.fixture(scope="module")
def sections(repository: Path) -> dict[str, str]:
    """Sections of the CHANGELOG by their release, newest first."""
    text = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = list(HEADING.finditer(text))
    assert len(headings) == len(re.findall(r"^## ", text, re.MULTILINE)) >= 3, "a heading of another form"
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    return {heading[1]: text[heading.end() : end] for heading, end in zip(headings, ends, strict=True)}


@pytest.fixture(scope="module")
def version(repository: Path) -> str:
    """Of the workspace; the wheel and ``rustvllm.__version__`` have it from there."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]
    found = tomllib.loads((repository / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]["package"]["version"]
    assert isinstance(found, str)
    return found


def protocol_of(section: str) -> int | None:
    found = PROTOCOL.findall(section)
    assert len(found) <= 1
    return int(found[0]) if found else None


def test_unreleased_comes_first_and_then_releases_downwards(sections: dict[str, str]) -> None:
    first, *releases = sections
    assert first == "Unreleased"
    numbers = [tuple(map(int, release.split("."))) for release in releases]
    assert numbers == sorted(set(numbers), reverse=True)


def test_the_version_is_the_newest_release(sections: dict[str, str], version: str) -> None:
    assert version == list(sections)[1]


def test_the_sample_of_the_tracing_page_has_the_version(repository: Path, version: str) -> None:
    page = (repository / "docs" / "tracing.md").read_text(encoding="utf-8")
    assert re.findall(r", pid \d+, version (\S+)$", page, re.MULTILINE) == [version]


def test_every_crate_has_the_version(repository: Path, version: str) -> None:
    manifests = [*repository.glob("crates/*/Cargo.toml"), repository / "benches" / "Cargo.toml"]
    packages = [tomllib.loads(path.read_text(encoding="utf-8"))["package"] for path in manifests]
    assert len(packages) >= 8
    assert [package["name"] for package in packages if package["version"] != {"workspace": True}] == []
    lock = tomllib.loads((repository / "Cargo.lock").read_text(encoding="utf-8"))["package"]
    locked = {package["name"]: package["version"] for package in lock if "source" not in package}
    assert locked == {package["name"]: version for package in packages}


def test_the_protocol_rises_only_with_a_line(repository: Path, sections: dict[str, str]) -> None:
    source = (repository / "crates" / "ipc" / "src" / "handshake.rs").read_text(encoding="utf-8")
    found = re.findall(r"^pub const PROTOCOL_VERSION: u16 = (\d+);$", source, re.MULTILINE)
    assert len(found) == 1
    named = {release: protocol_of(section) for release, section in sections.items()}
    releases = [named[release] for release in list(named)[1:]]
    assert None not in releases, "a release names the version of its protocol: `Transport protocol: version N.`"
    newest = named["Unreleased"] or releases[0]
    assert int(found[0]) == newest, "a new protocol version needs its line under [Unreleased]"
    if named["Unreleased"] is not None:
        assert named["Unreleased"] == (releases[0] or 0) + 1, "one step from release to release"
