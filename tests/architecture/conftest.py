"""What the structural tests look at: the cargo graph, the Python modules, the tracked files."""

import ast
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class PythonModule:
    """One source file of the package: its dotted name, its tree and what it imports."""

    name: str
    path: Path
    tree: ast.Module

    def imports(self, *, type_checking: bool = False) -> set[str]:
        """Dotted names of all the file imports; those under `if TYPE_CHECKING:` only when asked."""
        skipped: set[ast.AST] = set()
        if not type_checking:
            for node in ast.walk(self.tree):
                if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
                    skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if node in skipped:
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}: relative import"
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"import_module", "importlib.import_module"}:
                found.update(arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
        return found


@pytest.fixture(scope="session")
def python_modules(repository: Path, tracked_files: list[Path]) -> list[PythonModule]:
    """Every module of the package `rustvllm` that is under version control, or new and not ignored."""
    package = repository / "python" / "rustvllm"
    modules = []
    for path in sorted(path for path in tracked_files if path.suffix == ".py" and path.is_relative_to(package)):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(PythonModule(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    names = {module.name for module in modules}
    expected = {"rustvllm", "rustvllm.engine.core", "rustvllm.cli.main", "rustvllm.sampling_params"}
    assert names >= expected, f"the package has moved: {sorted(expected - names)} not found under {package}"
    return modules


@pytest.fixture(scope="session")
def cargo_metadata(repository: Path) -> dict[str, Any]:
    """`cargo metadata` of the workspace, for the platform wheels are built for."""
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def tracked_files(repository: Path) -> list[Path]:
    """Every file under version control, and new ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout
    files = [repository / name for name in listed.split("\0") if name and (repository / name).is_file()]
    assert repository / "pyproject.toml" in files
    return files
