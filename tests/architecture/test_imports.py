"""Which Python module may import what; the layers themselves are import-linter contracts in pyproject.toml."""

import importlib
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Modules (with all below them) that may import the compiled core. Everything else is plain Python.
CORE_IMPORTERS = (
    "rustvllm.attention.cpu_backend",
    "rustvllm.attention.selector",
    "rustvllm.cli.bench",
    "rustvllm.cli.collect_env",
    "rustvllm.cli.token_time",
    "rustvllm.config.checkpoint.gguf_file",
    "rustvllm.distributed",
    "rustvllm.engine",
    "rustvllm.executor",
    "rustvllm.layers",
    "rustvllm.lora.layers",
    "rustvllm.lora.store",
    "rustvllm.model_loader.reading",
    "rustvllm.observe",
    "rustvllm.process.health",
    "rustvllm.sample.cpu_draw",
    "rustvllm.sampling_params.table",
    "rustvllm.sampling_params.structural_format",
    "rustvllm.text",
    "rustvllm.worker",
)
VERSION_LOOKUP = "rustvllm"  # `__version__` comes from the core, which needs no torch
# Programs that measure; the command line starts them, and nothing else imports them.
MEASURING = ("rustvllm.cli.bench.kernel_bench", "rustvllm.cli.bench.transformers_generate")
ENTRY_POINTS = ("rustvllm.batch", "rustvllm.cli", "rustvllm.llm", "rustvllm.offline", "rustvllm.server")


MAX_MODULES = 20


def layers_of(repository: Path) -> list[str]:
    """The rooms of the package from top to bottom, as import-linter's first contract says."""
    contracts = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers, *_ = (contract for contract in contracts["contracts"] if contract["type"] == "layers")
    assert "containers" not in layers
    return layers["layers"]


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
    unused = {name for name in CORE_IMPORTERS if not any(within(importer, (name,)) for importer in importers)}
    assert unused == set(), "these need not import the core any more: take them off the list"


def test_the_folder_of_stubs_does_not_hide_the_core(repository: Path) -> None:
    """A file of Python in it would make it a package, which comes before the extension module."""
    stubs = [path for path in (repository / "python" / "rustvllm" / "_core").iterdir() if path.is_file()]
    assert {path.suffix for path in stubs} == {".pyi"}
    assert "__init__.pyi" in {path.name for path in stubs}
    assert str(importlib.import_module("rustvllm._core").__file__).endswith(".so")
    with pytest.raises(ModuleNotFoundError, match="is not a package"):
        importlib.import_module("rustvllm._core._linear")


def test_no_entry_point_imports_torch(python_modules: list[Any]) -> None:
    entry_points = [module for module in python_modules if within(module.name, ENTRY_POINTS)]
    assert len(entry_points) >= 50
    for module in entry_points:
        if module.name in MEASURING:
            continue
        heavy = {name for name in module.imports() if within(name, ("torch", "triton", "transformers"))}
        assert heavy == set(), module.path


def test_torch_is_found_where_it_is_used(python_modules: list[Any]) -> None:
    """The search above can find something."""
    users = {module.name for module in python_modules if any(within(name, ("torch",)) for name in module.imports())}
    assert any(within(name, ("rustvllm.worker",)) for name in users)
    assert any(within(name, ("rustvllm.models",)) for name in users)


def test_every_package_and_module_has_its_layer(repository: Path, python_modules: list[Any]) -> None:
    """A new module directly under `rustvllm` needs a place in the layers, or import-linter never looks at it."""
    placed = {part.strip(" ()") for layer in layers_of(repository) for part in layer.split(":")}
    top = {".".join(module.name.split(".")[:2]) for module in python_modules if "." in module.name}
    assert len(top) >= 10
    assert top <= placed, f"no layer for {sorted(top - placed)}"


def test_no_folder_is_crowded(python_modules: list[Any]) -> None:
    """A newcomer takes a room in at a glance, or it is two rooms."""
    rooms = Counter(module.path.parent for module in python_modules if module.path.name != "__init__.py")
    assert len(rooms) >= 20
    assert {str(room): count for room, count in rooms.items() if count > MAX_MODULES} == {}


def test_no_import_goes_upwards_even_for_a_type(repository: Path, python_modules: list[Any]) -> None:
    """import-linter leaves out what only a type checker reads; here it counts too."""
    layers = layers_of(repository)
    level = {part.strip(" ()"): number for number, layer in enumerate(layers) for part in layer.split(":")}
    upwards, num_seen = set(), 0
    for module in python_modules:
        importer = ".".join(module.name.split(".")[:2])
        for name in module.imports(type_checking=True):
            imported = ".".join(name.split(".")[:2])
            if importer in level and imported in level:
                num_seen += 1
                if level[imported] < level[importer]:
                    upwards.add(f"{module.name} -> {name}")
    assert num_seen >= 500
    assert upwards == set()


@pytest.mark.parametrize("contract", ["Imports go downwards only", "No import goes round in a circle"])
def test_import_linter_passes(repository: Path, contract: str) -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter], cwd=repository, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contract in done.stdout


def test_the_drawing_of_imports_is_what_the_code_says(repository: Path) -> None:
    drawing = repository / "scripts" / "import_drawing.py"
    done = subprocess.run(
        [sys.executable, drawing, "--check"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    page = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "    server --> engine\n" in page
