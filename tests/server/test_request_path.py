"""How many of the package's files a request passes before the core has it, and that no check is made twice."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "request_path.py"


def request_path(*flags: str) -> tuple[list[str], dict[str, int]]:
    """The files in their order, and how often each check was made."""
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    files = re.findall(r"^ *\d+ (\S+)$", done.stdout, re.MULTILINE)
    checks = re.findall(r"^ *(\d+) x (\S.*)$", done.stdout, re.MULTILINE)
    return files, {name: int(times) for times, name in checks}


@pytest.mark.parametrize(
    ("flags", "most"), [((), 20), (("--stream",), 23), (("--endpoint", "completions"), 21)], ids=str
)
def test_a_request_passes_few_files_and_each_check_once(flags: tuple[str, ...], most: int) -> None:
    files, checks = request_path(*flags)
    assert files[0] == "server/http/limited_protocol.py"
    assert {"server/endpoints/pipeline.py", "engine/input_processor.py", "engine/request_table.py"} <= set(files)
    assert len(files) <= most, files
    assert {name.partition(":")[0] for name in checks} >= {"server/state.py", "engine/input_processor.py"}
    assert {name: times for name, times in checks.items() if times > 1} == {}
