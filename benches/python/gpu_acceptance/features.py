"""Checks what engines support in addition to plain requests: drafts, adapters, grammars, quantized checkpoints."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from gpu_acceptance.engines import GRAPHS, checkpoint, count_replays, make_prompts, regret
from gpu_acceptance.finding import DEVICE, DRY, Finding
from rustvllm import LLM, SamplingParams, StructuredOutputsParams
from rustvllm.lora.request import LoRARequest

MAX_TOKENS = 6 if DRY else 24
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def features(found: Finding) -> None:
    """Check all features."""
    for name, run in (
        ("drafts", drafts), ("adapters", adapters), ("a grammar", grammar), ("a quantised checkpoint", quantised)
    ):  # fmt: skip
        found.attempt(name, run, name)


class Engine:
    """``LLM`` over a small checkpoint, with CUDA graphs if available; a context manager."""

    def __init__(self, folder: Path, **options: Any) -> None:
        given = GRAPHS | {"dtype": "float32", "device": DEVICE.type, "skip_tokenizer_init": True}
        self.llm = LLM(str(folder), **(given | options))
        self.replays = count_replays(self.llm.llm_engine.engine_core.core)  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.shutdown()

    def ids(self, asked: list[list[int]], adapters: Any = None, allowed: list[int] | None = None) -> list[list[int]]:
        """Greedy tokens of each prompt."""
        params = SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, allowed_token_ids=allowed
        )
        prompts = [{"prompt_token_ids": ids} for ids in asked]
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)  # type: ignore[arg-type]
        return [list(output.outputs[0].token_ids) for output in outputs]


def drafts(found: Finding, name: str) -> None:
    """Check that drafts change nothing; few tokens are allowed, so that outputs repeat themselves."""
    allowed = [3, 5, 8, 13, 21]
    rng = np.random.default_rng(5)
    asked = [rng.choice(allowed, length).tolist() for length in (9, 14, 20)]
    method = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint("llama", Path(folder))
        with Engine(Path(folder)) as engine:
            expected = engine.ids(asked, allowed=allowed)
        with Engine(Path(folder), speculative_config=method) as engine:
            ids = engine.ids(asked, allowed=allowed)
            num_drafts = engine.llm.llm_engine.engine_core.core.scheduler.stats()["num_draft_tokens"]  # type: ignore[attr-defined]
    alike = sum(a == b for a, b in zip(ids, expected, strict=True))
    found.check(name, alike >= len(asked) - 1 and num_drafts > 0, alike=alike, of=len(asked), drafts=num_drafts)


def adapters(found: Finding, name: str) -> None:
    """Check two adapters and the model itself in one batch against peft's merged models."""
    import peft_adapters

    asked = make_prompts()[:3]
    with tempfile.TemporaryDirectory() as folder:
        reference = checkpoint("llama", Path(folder)).cpu()
        folders = [Path(folder) / f"adapter{seed}" for seed in (1, 2)]
        for seed, own in enumerate(folders, 1):
            peft_adapters.make_adapter(reference, own, seed=seed, **peft_adapters.ALL_LINEAR)
        requests = [LoRARequest(f"a{i}", i, str(own)) for i, own in enumerate(folders, 1)]
        with Engine(Path(folder), enable_lora=True, max_loras=2) as engine:
            ids = engine.ids(asked, [*requests, None])
        models = [peft_adapters.merged(reference, [own]) for own in folders] + [reference]
        worst = 0.0
        for model, prompt, output in zip(models, asked, ids, strict=True):
            worst = max(worst, regret(model.to(DEVICE), [prompt], [output])[0])
        plain = regret(reference, asked[:2], ids[:2])[0]
    found.check(name, worst <= 2e-3 < plain, worst_regret=worst, regret_without=plain)


def grammar(found: Finding, name: str) -> None:
    """Check requests that follow a regular expression next to one that does not, with the embedded model."""
    pattern = "(yes|no|perhaps)"
    limited = SamplingParams(temperature=0, max_tokens=16, structured_outputs=StructuredOutputsParams(regex=pattern))
    free = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    options = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 60}
    llm = LLM(device=DEVICE.type, dtype="float32", **options)  # type: ignore[arg-type]
    try:
        replays = count_replays(llm.llm_engine.engine_core.core)  # type: ignore[attr-defined]
        alone = llm.generate(["Once upon a time"], [free], use_tqdm=False)[0].outputs[0]
        texts = ["Once upon a time", "The fox said", "The sea was"]
        outputs = [o.outputs[0] for o in llm.generate(texts, [free, limited, limited], use_tqdm=False)]
    finally:
        llm.shutdown()
    obeys = all(re.fullmatch(pattern, output.text) for output in outputs[1:])
    said = [output.text for output in outputs]
    right = obeys and outputs[0].token_ids == alone.token_ids and (DRY or replays[0] > 0)
    found.check(name, right, said=said, replays=replays[0])


def quantised(found: Finding, name: str) -> None:
    """Check an AWQ folder against transformers with the dequantized weights."""
    import quantized_files

    asked, rng = make_prompts()[:4], np.random.default_rng(3)

    def make_layer(layer: str, weight: Any) -> Any:
        parts = quantized_files.random_layer(rng, weight, 4, 32, symmetric=False)
        return quantized_files.awq(layer, *parts), quantized_files.meaning(*parts)

    with tempfile.TemporaryDirectory() as folder:
        reference = checkpoint("llama", Path(folder)).cpu()
        skip: Callable[[str], bool] = lambda layer: layer == "lm_head"  # noqa: E731 -- used once
        quantized_files.write_folder(Path(folder), reference, AWQ, make_layer, skip=skip)
        with Engine(Path(folder)) as engine:
            ids = engine.ids(asked)
            replays = engine.replays[0]
    worst, exact, total = regret(reference.to(DEVICE), asked, ids)
    right = worst <= 5e-2 and (DRY or replays > 0)  # 16-bit numbers are rounded once more
    found.check(name, right, worst_regret=worst, exact=f"{exact} of {total}", replays=replays)
