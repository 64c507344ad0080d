"""Which Python module may import what; the layers themselves are import-linter contracts in pyproject.toml."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

# Modules (with all below them) that may import the compiled core. Everything else is plain Python.
CORE_IMPORTERS = (
    "rustvllm.engine",
    "rustvllm.worker",
    "rustvllm.executor",
    "rustvllm.entrypoints.cli.bench",
    "rustvllm.entrypoints.cli.collect_env",
    "rustvllm.attention.cpu_backend",
    "rustvllm.attention.selector",
    "rustvllm.layers.cpu_linear",
    "rustvllm.layers.cpu_linear_packer",
    "rustvllm.layers.cpu_norm",
    "rustvllm.sample.cpu_draw",
    "rustvllm.metrics",
    "rustvllm.exceptions",
)
VERSION_LOOKUP = "rustvllm"  # `__version__` comes from the core, which needs no torch


def within(name: str, folders: tuple[str, ...]) -> bool:
    return any(name == folder or name.startswith(f"{folder}.") for folder in folders)


def test_the_core_is_imported_only_where_it_belongs(python_modules: list[Any]) -> None:
    importers = {
        module.name
        for module in python_modules
        if any(within(name, ("rustvllm._core",)) for name in module.imports(type_checking=True))
    }
    assert "rustvllm.engine.core" in importers, "the engine core imports the Rust core, or this test is blind"
    strangers = {name for name in importers if name != VERSION_LOOKUP and not within(name, CORE_IMPORTERS)}
    assert strangers == set()


def test_no_entry_point_imports_torch(python_modules: list[Any]) -> None:
    entry_points = [module for module in python_modules if within(module.name, ("rustvllm.entrypoints",))]
    assert len(entry_points) >= 5
    for module in entry_points:
        heavy = {name for name in module.imports() if within(name, ("torch", "triton", "transformers"))}
        assert heavy == set(), module.path


def test_torch_is_found_where_it_is_used(python_modules: list[Any]) -> None:
    """The search above can find something."""
    users = {module.name for module in python_modules if any(within(name, ("torch",)) for name in module.imports())}
    assert any(within(name, ("rustvllm.worker",)) for name in users)
    assert any(within(name, ("rustvllm.models",)) for name in users)


def test_every_package_and_module_has_its_layer(repository: Path, python_modules: list[Any]) -> None:
    """A new module directly under `rustvllm` needs a place in the layers, or import-linter never looks at it."""
    contracts = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (contract for contract in contracts["contracts"] if contract["type"] == "layers")
    placed = {part.strip(" ()") for layer in layers["layers"] for part in layer.split(":")}
    top = {".".join(module.name.split(".")[:2]) for module in python_modules if "." in module.name}
    assert len(top) >= 10
    assert top <= placed, f"no layer for {sorted(top - placed)}"


@pytest.mark.parametrize("contract", ["Imports go downwards only"])
def test_import_linter_passes(repository: Path, contract: str) -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter], cwd=repository, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contract in done.stdout
