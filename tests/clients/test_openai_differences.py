"""docs/openai-differences.md lists every difference that is found, and none that is not."""

import re

import pytest

pytestmark = pytest.mark.timeout(300)


def test_the_list_of_differences_is_complete_and_true(python_of, run_program, repository, shared_dir, request):
    python_of("schemas")  # skips before a server is started
    url = request.getfixturevalue("url")
    done = run_program(
        "schemas",
        repository / "scripts" / "openai_differences.py",
        "--url",
        url,
        "--document",
        shared_dir / "data" / "openai-openapi" / "openapi.yaml",
        "--against",
        repository / "docs" / "openai-differences.md",
        ok=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = int(re.search(r"^(\d+) differences found", done.stdout, re.MULTILINE)[1])
    assert found > 50


def test_every_difference_has_its_reason(repository):
    rows = [
        line
        for line in (repository / "docs" / "openai-differences.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) > 50
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4
        assert len(cells[3]) > 10, row
