"""lm-evaluation-harness through the server finds what it finds with transformers on the same checkpoint."""

import json
from itertools import chain
from pathlib import Path

import pytest
from embedded_server import MODEL

import rustvllm

HERE = Path(__file__).parent
TOLERANCE = {"abs": 1e-4, "rel": 1e-6}
"""Both compute in float32, whose single log-probabilities differ by about 1e-6; these are sums of up to 900 of them,
which the transformers backend also adds in float32 (a sum of -10,000 is rounded to 1e-3)."""
THROUGH_THE_SERVER = ["ids", "texts", "batches"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(python_of, run_program, request, tmp_path_factory):
    python_of("lm_eval")  # skips before a server is started
    server = request.getfixturevalue("server")
    checkpoint = Path(rustvllm.__file__).parent / "assets" / "tiny"
    caches = tmp_path_factory.mktemp("huggingface")
    program = HERE / "programs" / "lm_eval_tasks.py"
    done = run_program("lm_eval", program, server.url, MODEL, checkpoint, HERE / "lm_eval_tasks", caches)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", THROUGH_THE_SERVER)
def test_log_likelihoods_and_greedy_flags(found, how):
    ours, theirs = found[how]["local_choices"], found["transformers"]["local_choices"]
    assert [len(sample) for sample in ours] == [len(sample) for sample in theirs] == [3] * 5
    flags = []
    for (our, our_greedy), (their, their_greedy) in zip(chain(*ours), chain(*theirs), strict=True):
        assert our == pytest.approx(their, **TOLERANCE)
        assert our_greedy is their_greedy
        flags.append(our_greedy)
    assert {True, False} == set(flags)


@pytest.mark.parametrize("how", THROUGH_THE_SERVER)
def test_rolling_log_likelihoods(found, how):
    ours, theirs = found[how]["local_stories"], found["transformers"]["local_stories"]
    assert len(ours) == len(theirs) == 3
    for (our,), (their,) in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, **TOLERANCE)
        assert our < -10


@pytest.mark.parametrize("how", THROUGH_THE_SERVER)
def test_generated_texts(found, how):
    texts = [text for (text,) in found[how]["local_continuations"]]
    assert texts == [text for (text,) in found["transformers"]["local_continuations"]]
    assert len(texts) == 3
    assert all(texts)
