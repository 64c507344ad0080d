"""The loop of an engine's process in ``compare_offline.py``: reads a JSON line and writes one, until its input ends.

It runs with the interpreter of the engine's own environment, so it needs only the standard library.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Takes prompts and how many tokens to generate greedily after each, and returns these; end-of-text ids end nothing."""
_PR_SET_PDEATHSIG = 1


def adapter_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments for adapters, for engines with vLLM's arguments."""
    if "adapters" not in settings:
        return {}
    return {"enable_lora": True, "max_loras": len(settings["adapters"]), "max_lora_rank": settings["adapter_rank"]}


def vllm_drafts(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments for drafts, for engines with vLLM's arguments."""
    return {"speculative_config": settings["drafts"]} if settings.get("drafts") else {}


def vllm_generate(llm: Any, sampling_params: Any, lora_request: Any, settings: dict[str, Any]) -> Generate:
    """Generate with an engine that has vLLM's interface.

    Args:
        llm: Its ``LLM``.
        sampling_params: Its class ``SamplingParams``.
        lora_request: Its class ``LoRARequest``.
        settings: With ``adapters``, requests take these folders in turn.
    """
    folders = enumerate(settings.get("adapters", ()), 1)
    adapters = [lora_request(Path(path).name, number, path) for number, path in folders]

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = sampling_params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        of_each = [adapters[index % len(adapters)] for index in range(len(prompts))] if adapters else None
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=of_each)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def serve(load: Callable[[dict[str, Any]], Generate]) -> None:
    """Load an engine according to the first line, then answer.

    Each further line is ``{"prompts": [[id, …], …], "max_tokens": n}``; the answer has the seconds it took, the
    processor time of this process in seconds, and the tokens.
    """
    # The process is stopped most of the time, so it would not notice that its input has ended.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # An engine's own output must not mix with the answers.
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
