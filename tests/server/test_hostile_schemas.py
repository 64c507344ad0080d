"""Hostile schemas are answered, none with an error of the server's; large ones that are legal are served.

The cases are those of ``benches/python/hostile_schemas.py``, which sends more of them next to streams.
"""

import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from server_process import REAL, ServerProcess

sys.path.append(str(Path(__file__).parents[2] / "benches" / "python"))

from schema_bombs import HOSTILE, bombs

SEED = 7
NUM_CASES = 39
"""Two of three are hostile: each maker twice."""


@pytest.fixture(scope="module")
def server():
    with ServerProcess([*REAL, "--port", "0", "--max-num-seqs", "8", "--max-model-len", "256"]) as process:
        process.wait_until_ready()
        yield process


def test_hostile_schemas_are_answered_and_legal_ones_served(server):
    statuses: Counter[tuple[str, int]] = Counter()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for index, bomb in enumerate(bombs(SEED, NUM_CASES)):
            answer = client.post("/v1/completions", content=bomb.body, headers={"Content-Type": "application/json"})
            statuses[bomb.kind, answer.status_code] += 1
            assert answer.status_code in ((200,) if bomb.is_legal else (200, 400)), (
                f"seed {SEED}, case {index}, {bomb.kind}: {answer.status_code} {answer.text[:500]}"
            )
            if answer.status_code == 400:
                assert len(answer.json()["error"]["message"]) < 2000, f"case {index}, {bomb.kind}"
        assert client.get("/health").status_code == 200
    assert {kind for kind, _ in statuses} == {maker.__name__ for maker in HOSTILE} | {"large_but_legal"}
    assert sum(count for (_, status), count in statuses.items() if status == 400) >= len(HOSTILE) // 2


def test_the_same_seed_gives_the_same_cases():
    first, again, other = (list(bombs(seed, 6)) for seed in (SEED, SEED, SEED + 1))
    assert first == again
    assert first != other
