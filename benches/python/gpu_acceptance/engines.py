"""Checks engines over small checkpoints: transformers' logits judge their tokens, in every mode of running steps."""

import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_acceptance.finding import DEVICE, DRY, Finding
from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.core import EngineCore

VOCAB = 1000
KINDS = ("gpt2", "llama", "qwen3")
BASE = {"max_model_len": 256, "max_num_seqs": 16, "block_size": 16, "num_gpu_blocks_override": 400}
GRAPHS = BASE | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
OVERLAP = GRAPHS | {"async_scheduling": True}
TIGHT = OVERLAP | {"num_gpu_blocks_override": 8 if DRY else 40, "max_model_len": 96 if DRY else 256}
TIGHT |= {"max_num_batched_tokens": 64}
IN_ORDER = {"async_scheduling": False, "enable_prefix_caching": False}
MODES = {
    "eager": BASE | IN_ORDER | {"enforce_eager": True},
    "graphs": GRAPHS | IN_ORDER,
    "overlap, pieces, prefix cache": OVERLAP | {"max_num_batched_tokens": 32},
    "overlap, recomputed": TIGHT,
    "overlap, swapped": TIGHT | {"preemption_mode": "swap", "swap_space": 0.25},
    "captured late": OVERLAP | {"cudagraph_capture_mode": "lazy"},
}
SAMPLED = [
    {"temperature": 0.8, "seed": 1}, {"temperature": 1.0, "top_k": 20, "seed": 2},
    {"temperature": 0.9, "top_p": 0.8, "seed": 3}, {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "seed": 4},
    {"temperature": 1.2, "min_p": 0.05, "seed": 5}, {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.6, "presence_penalty": 0.8, "frequency_penalty": 0.5, "seed": 6},
    {"temperature": 0.0, "num_logprobs": 3},
    {"temperature": 0.9, "seed": 7, "min_tokens": 5, "stop_token_ids": list(range(200))},
    {"temperature": 0.0, "num_prompt_logprobs": 2}, {"temperature": 1.0, "top_n_sigma": 1.5, "seed": 8},
]  # fmt: skip


def checkpoint(kind: str, folder: Path) -> torch.nn.Module:
    """Save a small random model of transformers; returns the model, on the device."""
    import checkpoints

    hidden, layers = (64, 2) if DRY else (256, 4)
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": 512}
    if kind == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": hidden, "n_layer": layers, "n_positions": 512}
    else:
        sizes |= {"intermediate_size": 2 * hidden + 32, "head_dim": hidden // 4}
    model = checkpoints.make(kind, sizes)
    model.save_pretrained(folder)
    return model.to(DEVICE)


def make_core(folder: Path, **options: Any) -> EngineCore:
    """An engine for a folder, without a tokenizer."""
    given = {"model": str(folder), "device": DEVICE.type, "skip_tokenizer_init": True, "disable_log_stats": False}
    return EngineCore(EngineArgs(**(given | options)).create_engine_config("llm_class"))


def end(core: EngineCore) -> None:
    """Free an engine's memory."""
    core.shutdown()
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


def make_prompts() -> list[list[int]]:
    """Prompts of many lengths; the last ones have a common beginning."""
    rng = np.random.default_rng(1)
    lengths = [3, 14, 13, 15, 12] if DRY else [1, 2, 17, 40, 90, 150, 64, 33, 5, 120, 31, 48]
    common = rng.integers(0, VOCAB, 16 if DRY else 48).tolist()
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths] + [
        common + rng.integers(0, VOCAB, length).tolist() for length in ((5,) if DRY else (5, 21, 64))
    ]


def regret(reference: Any, asked: list[list[int]], outputs: list[list[int]]) -> tuple[float, int, int]:
    """The largest regret: by how many standard deviations of its logits a model would have preferred another token.

    Also returns how many tokens are the model's own choice, and how many there are.
    """
    worst, exact, total = 0.0, 0, 0
    with torch.no_grad():
        for prompt, output in zip(asked, outputs, strict=True):
            ids = torch.tensor([prompt + output], device=next(reference.parameters()).device)
            logits = reference(ids[:, :-1]).logits[0, len(prompt) - 1 :].double()
            chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            behind = (logits.amax(1) - chosen) / logits.std(1)
            worst, total = max(worst, float(behind.max())), total + len(output)
            exact += int((behind == 0).sum())
    return worst, exact, total


def answers(
    core: EngineCore, asked: list[list[int]], max_tokens: int, params: list[dict[str, Any]] | None = None
) -> tuple[list[list[int]], list[str], int]:
    """Token ids of each prompt, errors, and how many prompt tokens came from the prefix cache."""
    place: dict[int, int] = {}
    for index, prompt in enumerate(asked):
        key = core.handle.new_key()
        place[key] = index
        own = {"temperature": 0.0} if params is None else params[index]
        core.handle.add_request(key, f"r{key}", prompt, max_tokens=max_tokens, **own)
    ids, errors, cached = [[] for _ in asked], [], 0
    is_busy = True
    while is_busy:
        is_busy = core.has_unfinished_requests()
        if is_busy:
            core.step()
        for record in core.scheduler.take_outputs():
            if record["new_token_id"] is not None:
                ids[place[record["key"]]].append(record["new_token_id"])
            if record["error"]:
                errors.append(record["error"])
            if record["finish_reason"]:
                cached += record["num_cached_tokens"] or 0
    return ids, errors, cached


def greedy(found: Finding) -> None:
    """Check each kind of model in each mode, twice, the second time with the prefix cache."""
    modes = {name: (options, "float32") for name, options in MODES.items()}
    if DRY:
        modes = {name: modes[name] for name in ("eager", "overlap, recomputed")}
    dry = {"gpt2": ("eager",), "llama": tuple(modes), "qwen3": ("overlap, recomputed",)}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            reference = checkpoint(kind, Path(folder))
            own = {name: modes[name] for name in dry[kind]} if DRY else dict(modes)
            if kind != "gpt2" and not DRY:
                own["overlap, bfloat16"] = (MODES["overlap, pieces, prefix cache"], "bfloat16")
            for name, (options, dtype) in own.items():
                found.attempt(
                    f"{kind}: {name}", greedy_mode, f"{kind}: {name}", Path(folder), reference, options, dtype
                )
            del reference


def greedy_mode(found: Finding, name: str, folder: Path, reference: Any, options: dict[str, Any], dtype: str) -> None:
    asked, max_tokens, began = make_prompts(), 5 if DRY else 40, time.monotonic()
    core = make_core(folder, dtype=dtype, **options)
    try:
        replays = count_replays(core)
        first, errors, _ = answers(core, asked, max_tokens)
        second, more, cached = answers(core, asked, max_tokens)
        num_preemptions = core.scheduler.stats().get("num_preemptions", 0)
    finally:
        end(core)
    worst, exact, total = regret(reference, asked * 2, first + second)
    ok = worst <= (2e-3 if dtype == "float32" else 0.15) and not errors and not more
    ok = ok and all(len(output) == max_tokens for output in first + second)
    if not DRY:
        ok = ok and (replays[0] > 0) == ("cudagraph_capture_sizes" in options)
    ok = ok and (num_preemptions > 0 or options["num_gpu_blocks_override"] > 100)
    found.check(
        name, ok, worst_regret=worst, exact=f"{exact} of {total}", replays=replays[0], preemptions=num_preemptions,
        cached_tokens=cached, rounds_alike=first == second, errors=(errors + more)[:2],
        seconds=time.monotonic() - began,
    )  # fmt: skip


def count_replays(core: EngineCore) -> list[int]:
    """A list with one number, which counts the steps that run in graphs."""
    graphs, count = core.executor._runner.graphs, [0]  # noqa: SLF001 -- to count their replays
    if graphs is not None:
        stage = graphs.stage

        def counted(*args: Any) -> Any:
            replay = stage(*args)
            count[0] += replay is not None
            return replay

        graphs.stage = counted
    return count


def sampling(found: Finding) -> None:
    """Check that every kind of parameter gives the same answers twice, and with overlap and graphs as without."""
    asked, max_tokens = make_prompts(), 5 if DRY else 48
    params = [SAMPLED[index % len(SAMPLED)] for index in range(len(asked))]
    names = ("eager", "overlap, recomputed") if DRY else ("eager", *list(MODES)[2:])
    results: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint("llama", Path(folder))

        def run(_: Finding, name: str) -> None:
            core = make_core(Path(folder), dtype="float32", **MODES[name])
            try:
                first, errors, _ = answers(core, asked, max_tokens, params)
                core.scheduler.reset_prefix_cache()
                second, more, _ = answers(core, asked, max_tokens, params)
            finally:
                end(core)
            results[name] = first
            alike = sum(a == b for a, b in zip(first, second, strict=True))
            # With overlap, a request's neighbours, and so its last bits, depend on the speed of the device.
            enough = len(asked) - (name != "eager")
            problems = (errors + more)[:2]
            found.check(f"twice: {name}", alike >= enough and not problems, alike=alike, of=len(asked), errors=problems)

        for name in names:
            found.attempt(f"twice: {name}", run, name)
    for name in set(results) - {"eager"}:
        alike = sum(a == b for a, b in zip(results.get("eager", []), results[name], strict=False))
        found.check(f"as in order: {name}", alike >= len(asked) - 1, alike=alike, of=len(asked))


def capture(found: Finding, options: dict, *, waits_always: bool = True) -> None:
    """Check that a model that waits for the device runs correctly without graphs, or that its start fails helpfully."""
    if DRY:
        found.check("there is nothing to capture on a CPU", True)
        return
    from rustvllm.exceptions import ModelLoadError
    from rustvllm.models.decoder.rotary_lm import RotaryLM

    plain, asked = RotaryLM.forward, make_prompts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint("llama", folder)
        core = make_core(folder, dtype="float32", **MODES["eager"])
        expected, _, _ = answers(core, asked, 24)
        end(core)

        def waiting(self: Any, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
            if waits_always or torch.cuda.is_current_stream_capturing():
                int(input_ids.sum())
            return plain(self, input_ids, *args)

        RotaryLM.forward = waiting  # like modelling code with experts
        if not waits_always:
            try:
                make_core(folder, dtype="float32", max_model_len=256, max_num_seqs=16, **options)
                found.check("the start ends with the remedy", False, said="it started")
            except ModelLoadError as error:
                found.check("the start ends with the remedy", "enforce_eager" in str(error), said=str(error)[:200])
            return
        core = make_core(folder, dtype="float32", max_model_len=256, max_num_seqs=16, **options)
        found.check("it starts", True)
        got, errors, _ = answers(core, asked, 24)
        right = sum(a == b for a, b in zip(got, expected, strict=True))
        found.check("it runs right", right >= len(asked) - 1 and not errors, right=right, errors=errors[:2])
        stays = torch.cuda.current_stream() == torch.cuda.default_stream()
        found.check("the stream is as it was", stays)
        torch.cuda.empty_cache()
        end(core)
        found.check("memory can be given back", True)


def toolchain(found: Finding) -> None:
    """Check that without a C compiler an engine uses torch's operations, and says what to install."""
    from rustvllm.kernels import tuning

    if DRY:
        found.check("the interpreter needs no compiler", tuning.why_no_toolchain() is None)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PATH": folder, "CC": "", "TRITON_CACHE_DIR": folder}  # only in this process
        reason = tuning.why_no_toolchain()
        checkpoint("llama", Path(folder))
        core = make_core(Path(folder), dtype="float32", **MODES["eager"])
        name = core.executor._runner.backend.name  # noqa: SLF001 -- the chosen backend
        _, errors, _ = answers(core, make_prompts()[:3], 5)
        end(core)
    found.check("it runs without a compiler", name == "torch" and not errors, reason=reason, attention=name)
