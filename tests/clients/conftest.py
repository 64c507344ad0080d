"""One real server for all tests of this folder, and the environments of the client programs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test folders are not packages: what tests share is imported by name.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "server")]

from embedded_server import COMMAND, MODEL, wait_until_idle  # noqa: E402 (found by the line above)
from server_process import ServerProcess  # noqa: E402

ENVIRONMENTS = Path(os.environ.get("RUSTVLLM_TEST_CLIENTS") or Path(sys.prefix) / "clients")
PROGRAM_SECONDS = 280


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server that is well at the end of all tests, and has logged no traceback."""
    with ServerProcess(COMMAND) as process:
        process.wait_until_ready()
        yield process
        assert process.process.poll() is None, process.output
        assert "Traceback" not in process.output


@pytest.fixture
def url(server: ServerProcess) -> Iterator[str]:
    """Its base URL; after the test nothing of it may be left running."""
    yield server.url
    wait_until_idle(server.url)


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], Path]:
    """The interpreter of a client environment; skips the test where that was not made."""

    def find(name: str) -> Path:
        python = ENVIRONMENTS / name / "bin" / "python"
        if not (ENVIRONMENTS / name / "made_of").exists():
            pytest.skip(f"no environment {name}: scripts/client_environments.sh makes it in {ENVIRONMENTS}")
        return python

    return find


@pytest.fixture(scope="session")
def run_program(python_of: Callable[[str], Path]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a Python program in a client environment; a clean one, in which nothing reaches the network."""

    def run(environment: str, *arguments: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [python_of(environment), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            check=False,
            env={
                "PATH": os.environ["PATH"],
                "HOME": os.environ.get("HOME", "/"),
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "true",
                "LANGCHAIN_TRACING_V2": "false",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        assert not ok or done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return done

    return run


@pytest.fixture(scope="module")
def answers_of(
    python_of: Callable[[str], Path],
    run_program: Callable[..., subprocess.CompletedProcess[str]],
    request: pytest.FixtureRequest,
) -> Callable[[str], dict[str, Any]]:
    """What a program of `programs/` got from the server, by the name of each call: the last line it prints, as JSON."""

    def run(program: str) -> dict[str, Any]:
        python_of("sdks")  # skips before a server is started
        server: ServerProcess = request.getfixturevalue("server")
        done = run_program("sdks", HERE / "programs" / program, server.url, MODEL)
        answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answers

    return run
