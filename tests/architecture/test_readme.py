"""What the documents tell people to type exists, and the README's test command is the one CI runs."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "rustvllm"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks in one language."""
    return [body for found, body in FENCE.findall(text) if found == language]


def commands(text: str) -> list[list[str]]:
    """Every command of the shell blocks, comments removed and continued lines joined."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="module")
def documents(repository: Path) -> dict[str, str]:
    paths = [*repository.glob("*.md"), *(repository / "docs").rglob("*.md")]
    texts = {str(path.relative_to(repository)): path.read_text(encoding="utf-8") for path in paths}
    assert {"README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/testing.md"} <= set(texts)
    return texts


@pytest.fixture(scope="module")
def make_targets(repository: Path) -> set[str]:
    text = (repository / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):(?!=)", text, re.MULTILINE))
    assert {"help", "setup", "serve", "test", "lint", "bench", "wheel", "all", "clean"} <= targets
    return targets


def test_every_target_explains_itself(repository: Path, make_targets: set[str]) -> None:
    printed = subprocess.run(["make"], cwd=repository, capture_output=True, text=True, check=True).stdout
    assert {target for target in make_targets if f"make {target} " not in printed} == set()


def test_every_make_command_in_the_documents_exists(documents: dict[str, str], make_targets: set[str]) -> None:
    named = {
        (name, word)
        for name, text in documents.items()
        for words in commands(text)
        if "make" in words
        for word in words[words.index("make") + 1 :]
        if "=" not in word and not word.startswith("-")
    }
    assert {("README.md", "serve"), ("README.md", "test")} <= named
    assert {(name, word) for name, word in named if word not in make_targets} == set()


def test_every_rustvllm_command_in_the_documents_exists(documents: dict[str, str]) -> None:
    used: dict[tuple[str, ...], set[str]] = {}
    for text in documents.values():
        for words in commands(text):
            if Path(words[0]).name == "rustvllm" and len(words) > 1 and not words[1].startswith("-"):
                flags = {word.split("=")[0] for word in words[2:] if word.startswith("--")}
                subcommand = tuple(words[1:3] if words[1] == "bench" else words[1:2])
                used.setdefault(subcommand, set()).update(flags)
    assert {("serve",), ("bench", "step"), ("bench", "trace")} <= set(used)
    for subcommand, flags in used.items():
        done = subprocess.run([COMMAND, *subcommand, "--help"], capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, f"rustvllm {subcommand}: {done.stderr}"
        assert {flag for flag in flags if flag not in done.stdout} == set(), subcommand


def test_python_examples_name_what_the_package_has(documents: dict[str, str]) -> None:
    import rustvllm
    import rustvllm._core  # a submodule is an attribute only once it was imported

    examples = [body for text in documents.values() for body in blocks(text, "python")]
    assert examples
    names = set()
    for body in examples:
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and node.module == "rustvllm":
                names.update(alias.name for alias in node.names)
    assert "LLM" in names
    assert {name for name in names if not hasattr(rustvllm, name)} == set()


def test_every_relative_link_leads_somewhere(documents: dict[str, str], repository: Path) -> None:
    links = [
        (name, target.split("#")[0])
        for name, text in documents.items()
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))
        if not target.startswith(("http://", "https://", "#"))
    ]
    assert len(links) >= 4
    assert [(name, target) for name, target in links if not (repository / name).parent.joinpath(target).exists()] == []


def test_lines_of_the_documents_fit(repository: Path) -> None:
    """Outside of tables and examples a line has at most 140 characters."""
    quoting = {"docs/embedded-model.md"}  # answers of the model, one a line
    paths = [repository / "README.md", repository / "CONTRIBUTING.md", *(repository / "docs").rglob("*.md")]
    assert len(paths) > 25
    long = []
    for path in paths:
        name = str(path.relative_to(repository))
        prose = FENCE.sub("", path.read_text(encoding="utf-8"))
        if name not in quoting:
            long += [f"{name}: {line[:60]}…" for line in prose.splitlines() if len(line) > 140 and line[0] != "|"]
    assert long == []


def test_ci_runs_the_test_command_of_the_readme(documents: dict[str, str], repository: Path) -> None:
    assert ["make", "test"] in commands(documents["README.md"])
    steps = re.findall(r"\bstep \w+ (make [\w-]+)", (repository / ".ci" / "run").read_text(encoding="utf-8"))
    assert steps == ["make setup", "make lint", "make test", "make test-long", "make wheel"]
    assert re.search(r"^all:.*\n\t@bash \.ci/run$", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
