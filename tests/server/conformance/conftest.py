"""Fixtures of the conformance suite: one real server with the embedded model for all of it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from server_process import REAL, ServerProcess


@pytest.fixture(scope="session")
def conformance_server() -> Iterator[ServerProcess]:
    """A server of the embedded model under two names, which computes long prompts in pieces.

    Streamed and whole must have the same bits, though a busy machine may put their prompts into steps of other company.
    """
    command = [*REAL, "--served-model-name", "tiny", "alias/tiny", "--port", "0", "--max-num-seqs", "16"]
    command += ["--max-num-batched-tokens", "128", "--trust-request-chat-template", "--batch-invariant"]
    with ServerProcess(command) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="session")
def client(conformance_server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of it, which keeps its connection."""
    with httpx.Client(base_url=conformance_server.url, timeout=60) as http:
        yield http
