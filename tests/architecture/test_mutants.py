"""The mutants of `tests/mutation` fit the sources that they break, so that none of them dies unnoticed."""

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tester(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation_test", repository / "scripts" / "mutation_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_mutant_applies(tester: ModuleType) -> None:
    mutants = tester.read_mutants()
    assert len(mutants) >= 90
    tester.check_texts(mutants)


@pytest.mark.parametrize(
    "bug",
    [
        "a block freed twice",
        "a hit on a withdrawn registration",
        "a stale output counted",
        "a row reused while a step in flight names it",
        "an off-by-one in placeholders",
    ],
)
def test_the_five_bugs_that_must_be_found_are_there(tester: ModuleType, bug: str) -> None:
    assert [mutant for mutant in tester.read_mutants() if mutant.required and mutant.bug.startswith(bug)]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [("no such text", "", "occurs 0 times"), ("use", "", "times in"), ("mod pool;", "mod pool;", "changes nothing")],
)
def test_a_mutant_that_does_not_fit_is_an_error(tester: ModuleType, old: str, new: str, complaint: str) -> None:
    file, test = "crates/kvblocks/src/lib.rs", "kvblocks:random_operations"
    mutant = tester.Mutant(name="lost", bug="none", file=file, old=old, new=new, test=test)
    with pytest.raises(tester.TesterError, match=complaint):
        tester.check_texts([mutant])


def test_copies_are_built_with_the_profile_of_the_tester(
    tester: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tester, "BUILD", tmp_path)
    tree = tester.Tree(0)
    tree.folder.mkdir(parents=True)
    tree.refresh()
    profile = tomllib.loads((tree.folder / "Cargo.toml").read_text(encoding="utf-8"))["profile"]["dev"]
    assert (profile["opt-level"], profile["debug"], profile["package"]["loom"]) == (0, 0, {"opt-level": 2})
