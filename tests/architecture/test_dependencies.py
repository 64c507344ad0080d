"""Foreign crates keep to deny.toml: permissive licences, the public registry, one version where two would hurt."""

import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def policy(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "deny.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def resolved(cargo_metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Packages in the dependency graph of the platform we build for."""
    used = {node["id"] for node in cargo_metadata["resolve"]["nodes"]}
    packages = [package for package in cargo_metadata["packages"] if package["id"] in used]
    assert len(packages) > 20
    return packages


def licence_allowed(expression: str, allowed: set[str]) -> bool:
    """Whether the allowed licences meet an SPDX expression (AND binds stronger than OR; `/` is an old OR)."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def alternatives() -> bool:
        met = together()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            met = together() or met
        return met

    def together() -> bool:
        met = term()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            met = term() and met
        return met

    def term() -> bool:
        token = tokens.pop(0)
        if token == "(":
            met = alternatives()
            assert tokens.pop(0) == ")"
            return met
        if tokens and tokens[0] == "WITH":
            tokens.pop(0)
            token = f"{token} WITH {tokens.pop(0)}"
        return token in allowed

    met = alternatives()
    assert not tokens, f"{expression}: {tokens} left over"
    return met


@pytest.mark.parametrize(
    ("expression", "met"),
    [
        ("MIT", True),
        ("GPL-3.0", False),
        ("MIT OR GPL-3.0", True),
        ("MIT AND GPL-3.0", False),
        ("GPL-3.0/MIT", True),
        ("GPL-3.0 OR MIT AND ISC", True),
        ("(GPL-3.0 OR MIT) AND ISC", True),
        ("(GPL-3.0 OR MIT) AND LGPL-2.1", False),
        ("Apache-2.0 WITH LLVM-exception", False),
    ],
)
def test_licence_expressions_are_read_right(expression: str, met: bool) -> None:
    assert licence_allowed(expression, {"MIT", "ISC"}) is met


def test_every_licence_is_allowed(policy: dict[str, Any], resolved: list[dict[str, Any]]) -> None:
    allowed = set(policy["licenses"]["allow"])
    refused = {
        f"{package['name']} {package['version']}": package["license"] or package["license_file"]
        for package in resolved
        if not package["license"] or not licence_allowed(package["license"], allowed)
    }
    assert refused == {}


def test_every_foreign_crate_comes_from_the_registry(policy: dict[str, Any], resolved: list[dict[str, Any]]) -> None:
    registries = {f"registry+{address}" for address in policy["sources"]["allow-registry"]}
    foreign = [package for package in resolved if package["source"] is not None]
    assert len(foreign) > 20
    assert {package["source"] for package in foreign} <= registries


def test_banned_crates_and_doubled_crates_are_absent(policy: dict[str, Any], resolved: list[dict[str, Any]]) -> None:
    versions = defaultdict(set)
    for package in resolved:
        versions[package["name"]].add(package["version"])
    assert versions["pyo3"], "pyo3 is not found: the graph is not the one we think it is"
    for ban in policy["bans"]["deny"]:
        limit = 1 if ban.get("deny-multiple-versions") else 0
        found = versions.get(ban["crate"], set())
        assert len(found) <= limit, f"{ban['crate']}: {sorted(found)}"


def test_our_crates_have_our_licence_and_are_not_published(cargo_metadata: dict[str, Any]) -> None:
    members = set(cargo_metadata["workspace_members"])
    ours = [package for package in cargo_metadata["packages"] if package["id"] in members]
    assert len(ours) >= 5
    assert {package["license"] for package in ours} == {"Apache-2.0"}
    assert all(package["publish"] == [] for package in ours)
