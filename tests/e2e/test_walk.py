"""A newcomer's walk through README.md and docs/: what they tell people to type is run (`scripts/walk.py`)."""

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from rustvllm.cli.serve import parse_args


def load_walk():
    path = Path(__file__).resolve().parents[2] / "scripts" / "walk.py"
    spec = importlib.util.spec_from_file_location("walk", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["walk"] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


WALK = load_walk()
PLAN = WALK.Plan.read()
EXAMPLES = [example for path in WALK.documents() for example in WALK.examples_of(path)]


@pytest.fixture(scope="module")
def walk():
    with WALK.Walk(PLAN) as walk:
        yield walk


def test_every_document_is_walked():
    found = {example.document for example in EXAMPLES}
    assert {"README.md", "docs/api.md", "docs/benchmarks.md", "docs/processes.md"} <= found
    assert len(EXAMPLES) >= 50


def test_what_the_plan_says_is_about_something():
    assert PLAN.stale(EXAMPLES) == []


@pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if PLAN.fate(example)[0] == "run"],
    ids=lambda example: str(example)[:60],
)
def test_what_people_are_told_to_type_works(walk, example):
    program = example.text.split()[0]
    if program in {"curl", "openssl"} and shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    walk.enter(example.document)
    walk.run(example)


def test_every_server_that_is_shown_has_flags_that_exist(walk, monkeypatch):
    monkeypatch.chdir(walk.folder)
    shown = 0
    for example in EXAMPLES:
        if example.language == "bash" and WALK.SERVER.match(example.text) and "--help" not in example.text:
            words = shlex.split(example.text.replace("\\\n", " "), comments=True)
            walk.enter(example.document)
            parse_args([word for word in words[words.index("serve") + 1 :] if word != "&"])
            shown += 1
    assert shown >= 6


def test_commands_are_read_as_a_shell_reads_them():
    body = (
        "one 'a\nb'   # why\n# nothing\n\ntwo \\\n  more # why\ncat > f <<'END'\nrustvllm x\nEND\nX=1 three && four &\n"
    )
    assert [command for _, command in WALK.commands_of(body)] == [
        "one 'a\nb'   # why",
        "two \\\n  more # why",
        "cat > f <<'END'\nrustvllm x\nEND",
        "X=1 three && four &",
    ]
    assert list(WALK.commands_of("$ one \\\n  two\nprinted\n$ three\n", prompted=True)) == [
        (0, "one \\\n  two"),
        (3, "three"),
    ]


def test_what_goes_wrong_is_found(walk):
    for language, text in (
        ("bash", "false"),
        ("bash", "rustvllm serve --no-such-flag"),
        ("bash", "curl http://127.0.0.1:8000/v1/nothing"),
        ("python", "import rustvllm.nothing"),
    ):
        with pytest.raises(WALK.WalkError):
            walk.run(WALK.Example("README.md", 1, language, text))
