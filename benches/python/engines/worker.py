"""The loop of an engine's process in ``compare_offline.py``: one JSON line in, one out, until the input ends.

Runs under the interpreter of the engine's own environment, so it needs nothing but the standard library.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and the number of tokens to draw greedily after each → those tokens; the end-of-text id ends nothing."""
_PR_SET_PDEATHSIG = 1


def adapter_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """What engines with vLLM's arguments are called with for the adapters that are asked for."""
    if "adapters" not in settings:
        return {}
    return {"enable_lora": True, "max_loras": len(settings["adapters"]), "max_lora_rank": settings["adapter_rank"]}


def vllm_drafts(settings: dict[str, Any]) -> dict[str, Any]:
    """What engines with vLLM's arguments are called with for the drafts that are asked for."""
    return {"speculative_config": settings["drafts"]} if settings.get("drafts") else {}


def serve(load: Callable[[dict[str, Any]], Generate]) -> None:
    """Load an engine as the first line says, then answer.

    Each further line is ``{"prompts": [[id, …], …], "max_tokens": n}``; the answer has the seconds it took, the
    processor's seconds of this process and the tokens.
    """
    # Stopped as it mostly is, it would not see that its input has ended.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What an engine prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    began = time.perf_counter()
    generate = load(settings)
    print(json.dumps({"load_seconds": time.perf_counter() - began}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        processor_before = time.process_time()
        began = time.perf_counter()
        token_ids = generate(order["prompts"], order["max_tokens"])
        seconds = time.perf_counter() - began
        answer = {"seconds": seconds, "processor_seconds": time.process_time() - processor_before}
        print(json.dumps({**answer, "token_ids": token_ids}), file=answers, flush=True)
