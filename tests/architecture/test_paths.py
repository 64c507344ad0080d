"""Files and folders that the documents name exist; README's map has every crate and package, the old paths are gone."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = r"[\w*.-]+(?:/[\w*.-]+)*\.(?:py|pyi|rs|md|sh|js|css|html|toml|txt)"
FOLDER = r"(?:crates|python|docs|tests|benches|scripts|examples|tools|\.ci)(?:/[\w*.-]+)*/?"
NAMED = re.compile(rf"`({FILE}|{FOLDER})`")
# Columns with paths of vLLM, or until 0.1.0, and files that a reader is to make.
EXEMPT = {"docs/from-vllm.md", "docs/old-paths.md", "CHANGELOG.md"}
TO_BE_MADE = re.compile("NAME")


@pytest.fixture(scope="module")
def documents(repository: Path) -> dict[str, str]:
    paths = [*repository.glob("*.md"), *(repository / "docs").rglob("*.md")]
    return {str(path.relative_to(repository)): path.read_text(encoding="utf-8") for path in paths}


def missing(text: str, bases: list[Path], tracked: list[str]) -> Iterator[str]:
    """Paths in backquotes that lie below none of `bases`, and that no tracked file ends with."""
    for name in NAMED.findall(text):
        place = name.rstrip("/")
        if TO_BE_MADE.search(name) or any(list(base.glob(place)) for base in bases):
            continue
        if not any(f"/{file}".endswith(f"/{place}") for file in tracked):
            yield name


def test_what_the_documents_name_exists(documents: dict[str, str], repository: Path, tracked_files: list[Path]) -> None:
    tracked = [path.relative_to(repository).as_posix() for path in tracked_files]
    bases = [repository, repository / "python" / "rustvllm", repository / "tests"]
    named = sum(len(NAMED.findall(text)) for text in documents.values())
    assert named >= 400, "the documents name files in another way"
    wrong = {
        name: found
        for name, text in documents.items()
        if name not in EXEMPT and (found := sorted(set(missing(text, bases, tracked))))
    }
    assert wrong == {}


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "crates").mkdir()
    text = "`crates/` and `a/b.py` are there, `crates/gone` and `b/gone.rs` are not; neither is `make test`."
    assert list(missing(text, [tmp_path], ["python/a/b.py"])) == ["crates/gone", "b/gone.rs"]


def test_the_map_in_the_readme_has_every_crate_and_package(documents: dict[str, str], repository: Path) -> None:
    _, found, rest = documents["README.md"].partition("## Where things are\n")
    assert found
    named = set(re.findall(r"`([^`]+)`", rest.partition("\n## ")[0]))
    crates = {f"crates/{path.parent.name}" for path in repository.glob("crates/*/Cargo.toml")}
    package = repository / "python" / "rustvllm"
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    assert crates - named == set()
    assert packages - {name.removeprefix("python/rustvllm/") for name in named} == set()


def test_old_paths_are_gone_and_lead_to_new_ones(documents: dict[str, str], repository: Path) -> None:
    package = repository / "python" / "rustvllm"
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", documents["docs/old-paths.md"], re.MULTILINE)
    assert len(rows) >= 100
    assert [old for old, _ in rows if (package / old).exists()] == []
    targets = {name for _, new in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", new)}
    assert len(targets) >= 90
    assert {name for name in targets if not (package / name).exists()} == set()
