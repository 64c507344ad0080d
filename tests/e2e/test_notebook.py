"""The notebook of ``examples/`` runs from its first cell to its last, and prints what the text around them says."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NAME = "one_request.ipynb"


@pytest.fixture(scope="module")
def printed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each cell of code prints."""
    notebook = nbformat.read(repository / "examples" / NAME, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(folder)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = [[each["text"] for each in cell.outputs if each.get("name") == "stdout"] for cell in cells]
    return ["".join(texts) for texts in said]


def test_it_is_stored_without_outputs_and_listed(repository: Path) -> None:
    notebook = nbformat.read(repository / "examples" / NAME, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert f"`{NAME}`" in (repository / "examples" / "README.md").read_text(encoding="utf-8")


def test_it_walks_through_scheduler_runner_and_sampler(printed: list[str]) -> None:
    text = "\n".join(printed)
    for part in (
        "'waiting': ['fox']",
        "tokens of the step: {'fox': 16}",
        "to be sampled:      [] (the prompt is not at its end)",
        "slot_mapping  [16 17",
        "outputs: []",
        "sampled: '",
        "'new_token_id': ",
        "length",
        "'num_computed_tokens': 16",
    ):
        assert part in text, text
