"""The modules of a crate stand above each other: none of them names one that names it again, by whatever way."""

import re
from collections import Counter
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

# Crates without a cycle among their modules, with a module that each must have and one that this one names.
CRATES = {
    "cpu-kernels": ("kernel", "finish"),
    "drafting": ("drafter", "history"),
    "gguf": ("file", "header"),
    "grammar": ("grammars", "sample"),
    "ipc": ("router", "client"),
    "kvblocks": ("pool", "block"),
    "loadgen": ("replay", "replay_target"),
    "output": ("output_processor", "tokenizer"),
    "rustvllm-py": ("handle", "errors"),
    "scheduler": ("scheduler", "steps"),
    "step-channel": ("writer", "control"),
}

MAX_MODULES = 20

TESTS = re.compile(r"^#\[cfg\((?:all\()?(?:test|loom)\b.*\]\n(?:#\[.*\]\n)*mod \w+ \{.*?^\}", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"//.*")


@dataclass(frozen=True)
class Crate:
    """The modules of one crate, by their paths from its root, with the code of each."""

    code: dict[tuple[str, ...], str]

    @classmethod
    def read(cls, folder: Path) -> "Crate":
        code = {}
        for path in sorted((folder / "src").rglob("*.rs")):
            parts = path.relative_to(folder / "src").with_suffix("").parts
            text = COMMENT.sub("", path.read_text(encoding="utf-8"))
            code[() if parts == ("lib",) else parts] = TESTS.sub("", text)
        return cls(code)

    def owner(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """The module that defines what `path` leads to, through what modules on the way publish of their children."""
        module: tuple[str, ...] = ()
        for name in path:
            if (*module, name) in self.code:
                module = (*module, name)
                continue
            for source in re.finditer(r"^pub(?:\(crate\))? use (.*?);", self.code[module], re.MULTILINE | re.DOTALL):
                for published in leaves(source[1]):
                    if published[-1] == name and (*module, published[0]) in self.code:
                        return (*module, published[0])
            break
        return module

    def uses(self, module: tuple[str, ...]) -> set[tuple[str, ...]]:
        """Modules that `module` names; those that contain it are not counted."""
        found = set()
        for use in re.finditer(
            r"\b((?:crate|super)(?:::super)*)::(\w+(?:::\w+)*(?:::(?=\{))?|(?=\{))", self.code[module]
        ):
            ups = use[1].count("super")
            base = module[: len(module) - ups] if ups else ()
            rest = use[2]
            if use.string.startswith("{", use.end()):
                rest += group(use.string, use.end())
            for leaf in leaves(rest):
                owner = self.owner((*base, *leaf))
                if owner != module[: len(owner)]:
                    found.add(owner)
        return found


def group(text: str, start: int) -> str:
    """The text from the brace at `start` to the one that closes it."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start : index + 1]
    raise AssertionError("a brace is not closed")


def leaves(tree: str) -> list[tuple[str, ...]]:
    """Paths of a use tree: `a::{b, c::d as e}` gives `a::b` and `a::c::d`."""
    tree = tree.strip()
    if "{" not in tree:
        return [tuple(name for name in tree.split(" as ")[0].strip().split("::") if name != "self")]
    head, inner = tree.split("{", 1)
    prefix = tuple(name for name in head.strip().split("::") if name)
    parts, depth, part = [], 0, ""
    for letter in inner.rsplit("}", 1)[0]:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    return [(*prefix, *leaf) for part in [*parts, part] if part.strip() for leaf in leaves(part)]


def cycle_of(edges: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[str]:
    """The names along one cycle; empty when there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return ["::".join(module) for module in error.args[1]]
    return []


@pytest.mark.parametrize("name", sorted(CRATES))
def test_no_cycle_among_the_modules_of_a_crate(repository: Path, name: str) -> None:
    crate = Crate.read(repository / "crates" / name)
    edges = {module: crate.uses(module) for module in crate.code if module}
    module, below = CRATES[name]
    assert (below,) in edges[module,], f"{module} of {name} does not name {below}: the parser has missed it"
    assert cycle_of(edges) == []


def test_every_crate_is_listed(repository: Path) -> None:
    present = {path.parent.name for path in repository.glob("crates/*/Cargo.toml")}
    assert present == set(CRATES)


def test_no_folder_of_a_crate_is_crowded(repository: Path) -> None:
    """As in the Python package: a newcomer takes a folder in at a glance, or it is two."""
    folders = Counter(path.parent for path in repository.glob("crates/*/src/**/*.rs") if path.name != "lib.rs")
    assert len(folders) >= len(CRATES)
    assert {str(folder): count for folder, count in folders.items() if count > MAX_MODULES} == {}


def test_the_fields_of_the_scheduler_are_its_own(repository: Path) -> None:
    """They are private, so that only the modules below `scheduler` reach them."""
    source = (repository / "crates" / "scheduler" / "src" / "scheduler.rs").read_text(encoding="utf-8")
    fields = re.search(r"^pub struct Scheduler \{\n(.*?)^\}", source, re.MULTILINE | re.DOTALL)
    assert fields, "the struct is not where it was"
    assert "    requests: Requests,\n" in fields[1]
    assert not re.search(r"^    pub", fields[1], re.MULTILINE)


def test_the_parser_sees_every_form_of_a_use() -> None:
    code = {
        (): "pub use low::Thing;",
        ("low",): "",
        ("folder",): "pub(crate) use inner::Part;",
        ("folder", "inner"): "use super::super::low; use super::other::X;",
        ("folder", "other"): "",
        ("high",): "use crate::{\n    folder::{self, Part},\n    Thing,\n};\nfn f() { crate::mid::g() }",
        ("mid",): "use crate::high::H as G;",
    }
    crate = Crate(code)
    assert crate.uses(("folder", "inner")) == {("low",), ("folder", "other")}
    assert crate.uses(("high",)) == {("folder",), ("folder", "inner"), ("low",), ("mid",)}
    assert crate.uses(("mid",)) == {("high",)}
    assert set(cycle_of({module: crate.uses(module) for module in code if module})) == {"high", "mid"}


def test_code_of_tests_and_comments_count_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "lib.rs").write_text("mod a;\nmod b;\n")
    (tmp_path / "src" / "a.rs").write_text("use crate::b::B; // crate::c::C\n")
    (tmp_path / "src" / "b.rs").write_text("struct B;\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n")
    crate = Crate.read(tmp_path)
    assert crate.uses(("a",)) == {("b",)}
    assert crate.uses(("b",)) == set()
