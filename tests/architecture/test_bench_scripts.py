"""What a script of ``benches/python`` takes from another one is there: most of them are run by hand, and seldom."""

import ast

import pytest


def top_level_names(tree):
    names = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names |= {each.asname or each.name for each in imported}
    return names


@pytest.fixture(scope="module")
def scripts(repository):
    return {path.stem: ast.parse(path.read_text()) for path in (repository / "benches/python").glob("*.py")}


def test_what_scripts_take_from_each_other_is_there(scripts):
    taken = [
        (name, node.module, each.name)
        for name, tree in scripts.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in scripts
        for each in node.names
    ]
    assert len(taken) > 50
    missing = [(name, other, what) for name, other, what in taken if what not in top_level_names(scripts[other])]
    assert missing == []


def test_a_name_that_is_not_there_is_missed():
    assert top_level_names(ast.parse("A, B = 1, 2\nC: int = 3\ndef d(): x = 1\nfrom e import f as g")) == {
        "A", "B", "C", "d", "g",
    }  # fmt: skip
