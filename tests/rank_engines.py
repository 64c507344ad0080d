"""Small engines of several ranks: what they are built from, what they are asked, and whether anything is left."""

import contextlib
import time
from typing import Any

import psutil

from rustvllm import LLM, SamplingParams

FOUR_HEADS = {"n_head": 4}
"""The model of the package in another shape: its three heads are odd."""
SMALL: dict[str, Any] = {
    "hf_overrides": FOUR_HEADS,
    "device": "cpu",
    "max_model_len": 96,
    "block_size": 8,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 25,
}
"""Blocks for two requests of full length."""
WORKER = "rustvllm.worker.process"
GONE_SECONDS = 10.0


def start(**options: Any) -> LLM:
    return LLM(**{**SMALL, **options})


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks that a process started, itself or by others, and that run."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if WORKER in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
    return found


def assert_gone(processes: list[psutil.Process], seconds: float = GONE_SECONDS) -> None:
    """Wait for the end of processes; some are collected by another process."""
    deadline = time.monotonic() + seconds
    while left := [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def executor_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.core.executor


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [3 + (7 * i + 11 * j) % 200 for j in range(5 + 3 * i)]} for i in range(count)]


def mixed_params() -> list[SamplingParams]:
    """For eight prompts: greedy and drawn, one and several samples, with and without penalties."""
    return [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.8,
            seed=i,
            max_tokens=24,
            ignore_eos=True,
            n=1 if i % 2 else 1 + i % 4,
            presence_penalty=0.3,
        )
        for i in range(8)
    ]


def tokens(llm: LLM, params: Any, given: Any) -> list[list[list[int]]]:
    """The ids of each sample of each prompt."""
    outputs = llm.generate(given, params, use_tqdm=False)
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def generate_without_end(llm: LLM) -> None:
    while True:
        tokens(llm, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), prompts(4))
