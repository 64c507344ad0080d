"""The mutants of `tests/mutation` fit the sources that they break, so that none of them dies unnoticed."""

import importlib.util
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
