"""What a package index shows of the project is true, and pictures of the README are found there."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_readmes_pictures_are_absolute_once_there_is_an_address(repository: Path, project: dict[str, Any]) -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (repository / "README.md").read_text(encoding="utf-8"))
    assert pictures, "a picture says what the words do not"
    relative = [picture for picture in pictures if not picture.startswith("https://")]
    assert not (project.get("urls") and relative), "an index shows no picture by a relative link"
    assert all((repository / picture).is_file() for picture in relative)
    assert len(relative) in (0, len(pictures))


def test_no_address_is_made_up(repository: Path, project: dict[str, Any]) -> None:
    manifest = tomllib.loads((repository / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]["package"]
    assert manifest.get("repository") == project.get("urls", {}).get("Repository"), (
        "Cargo.toml and pyproject.toml agree"
    )


def test_versions_of_python_and_files_of_rules_are_there(repository: Path, project: dict[str, Any]) -> None:
    classifiers = project["classifiers"]
    assert len(classifiers) == len(set(classifiers))
    lowest = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in classifiers
    assert not [each for each in classifiers if each.startswith("License ::")], "the licence is an expression"
    security = (repository / "SECURITY.md").read_text(encoding="utf-8")
    assert "## Reporting" in security
    assert "## Supported versions" in security
    assert "## Names that go away" in (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_wheel_and_the_build_script_name_the_same_c_library(repository: Path) -> None:
    check = (repository / "scripts/check_wheel.py").read_text(encoding="utf-8")
    build = (repository / "crates/rustvllm-py/build.rs").read_text(encoding="utf-8")
    (version,) = re.findall(r'MANYLINUX = "manylinux_(\d+_\d+)"', check)
    assert f"glibc {version.replace('_', '.')}" in build
    limit = tuple(map(int, version.split("_")))
    named = {tuple(map(int, each.split(".")))[:2] for each in re.findall(r'"GLIBC_([\d.]+)"', build)}
    assert named
    assert max(named) <= limit
