"""Measures how fast a step is compared with reading what it must read, with a 0.6B model of random weights; then
sampler and attention alone.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F

from gpu_acceptance.engines import end, make_core
from gpu_acceptance.finding import DEVICE, DRY, Finding, device_seconds, replayed, rulers, synchronize
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.attention.static_batch import StaticDecodeBatch
from rustvllm.attention.triton_backend import TritonAttentionBackend
from rustvllm.model_loader import loader
from rustvllm.sample.metadata import SamplingMetadata
from rustvllm.sample.sampler import Sampler

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
if DRY:
    SHAPE |= {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    }  # fmt: skip
DECODES = [(1, 20), (3, 20)] if DRY else [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 256), (256, 256)]
PHASES = {"warm": 3, "overlap": 8, "no_overlap": 5, "no_graphs": 5} if DRY else {
    "warm": 10, "overlap": 60, "no_overlap": 20, "no_graphs": 10}  # fmt: skip
DRAWN = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
_seeds = itertools.count(1 << 20)


class Times:
    """The host time of each step, and on the compute stream when its inputs and its samples were there."""

    def __init__(self, core: Any) -> None:
        self.core, self.runner = core, core.executor._runner  # noqa: SLF001 -- to time its launches
        self.steps: list[dict[str, Any]] = []
        self.phase = ""

    def __enter__(self) -> Self:
        runner, batch = self.runner, self.runner.input_batch
        execute, sample, begin = runner.execute_model, runner.sample_tokens, batch.write_block_table

        def timed_execute(output: Any) -> None:
            self.steps.append({
                "phase": self.phase, "num_reqs": output.num_reqs, "longest": output.max_num_scheduled_tokens,
                "began": time.perf_counter(), "inputs": _event(), "samples": _event(),
            })  # fmt: skip
            execute(output)

        def timed_begin() -> None:
            _record(self.steps[-1]["inputs"])
            begin()

        def timed_sample(grammar: Any = None) -> Any:
            sampled = sample(grammar)
            _record(self.steps[-1]["samples"])
            self.steps[-1]["ended"] = time.perf_counter()
            return sampled

        runner.execute_model, runner.sample_tokens, batch.write_block_table = timed_execute, timed_sample, timed_begin
        return self

    def __exit__(self, *_: object) -> None:
        synchronize()
        del self.runner.execute_model, self.runner.sample_tokens, self.runner.input_batch.write_block_table

    def figures(self, phase: str, chosen: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, float]:
        """Medians over the steps of a phase, except its first two."""
        done = [step for step in self.steps if "ended" in step]
        pairs = [(a, b) for a, b in itertools.pairwise(done) if a["phase"] == b["phase"] == phase and chosen(a)]
        pairs = [pair for pair in pairs if chosen(pair[1])][2:]
        if not pairs:
            return {}
        steps = sorted(_between(a["samples"], b["samples"]) for a, b in pairs)
        gap = statistics.median(max(0.0, _between(a["samples"], b["inputs"])) for a, b in pairs)
        median = statistics.median(steps)
        return {
            "step_ms": 1e3 * median, "p90_ms": 1e3 * steps[int(0.9 * (len(steps) - 1))],
            "gap_percent": 100 * gap / median if median else 0.0,
            "host_ms": 1e3 * statistics.median(b["ended"] - b["began"] for _, b in pairs),
        }  # fmt: skip


def _event() -> Any:
    return [0.0] if DRY else torch.cuda.Event(enable_timing=True)


def _record(event: Any) -> None:
    if DRY:
        event[0] = time.perf_counter()
    else:
        event.record()


def _between(begin: Any, end_: Any) -> float:
    return float(end_[0] - begin[0]) if DRY else float(begin.elapsed_time(end_)) / 1e3


def perf(found: Finding) -> None:
    """Measure a start, decodes, random decodes, prompts, prompts next to decodes, and the kernels of a step."""
    ruler = rulers()
    found.put(rulers=ruler)
    if not DRY:
        torch.cuda.empty_cache()
        loader.fill_dummy_weights = _fill_on_device
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 8192}
        if DRY:
            options |= {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 200, "max_num_seqs": 8}
        core = make_core(Path(folder), async_scheduling=True, **options)
    try:
        runner = core.executor._runner  # noqa: SLF001 -- to read what was chosen
        start = {"phases_s": core.startup_phases, "num_blocks": core.num_blocks, "attention": runner.backend.name}
        if not DRY:
            free, total = torch.cuda.mem_get_info()
            start["used_share"] = 1 - free / total
        found.put(start=start)
        for batch, context in DECODES:
            found.attempt(f"decode {batch} x {context}", decode, core, batch, context, ruler)
        for batch in (2,) if DRY else (1, 64, 256):
            found.attempt(f"drawn decode {batch}", drawn_decode, core, batch)
        for count, length in [(2, 30)] if DRY else [(1, 128), (1, 2048), (8, 2048), (64, 256), (2, 8000)]:
            found.attempt(f"prompts {count} x {length}", prompts, core, count, length, ruler)
        for batch, length in [(2, 9)] if DRY else [(64, 128), (64, 512), (8, 32)]:
            found.attempt(f"decodes {batch} and prompts of {length}", mixed, core, batch, length)
        if not DRY:
            for batch in (1, 64):
                found.attempt(f"kernels of a step of {batch}", profiled, core, batch)
        found.check("measured", len(found.facts.get("decode", [])) == len(DECODES))
    finally:
        end(core)


def _fill_on_device(model: torch.nn.Module, _seed: int, filled: Callable[[Any], Any] = lambda _: None) -> None:
    """Make random weights directly on the device."""
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() < 2
        parameter.normal_(std=0.05 if is_norm or "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
        if is_norm:
            parameter.add_(1.0)
        filled(parameter)


def _step(core: Any) -> None:
    core.step()
    core.scheduler.take_outputs()


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], length).tolist()


class Batch:
    """Requests that decode together, and end with the context."""

    def __init__(self, core: Any, times: Times, batch: int, context: int, max_tokens: int, **params: Any) -> None:
        self._core, self._ids = core, []
        for index in range(batch):
            key = core.handle.new_key()
            self._ids.append(f"d{key}")
            own = {"temperature": 0.0} | params | ({"seed": index} if params else {})
            core.handle.add_request(key, f"d{key}", _prompt(index, context), max_tokens=max_tokens, **own)
        for _ in range(5000):
            _step(core)
            if (times.steps[-1]["num_reqs"], times.steps[-1]["longest"]) == (batch, 1):
                return
        raise RuntimeError(f"{batch} requests never decoded as a whole")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._core.handle.abort_requests(self._ids)
        while self._core.has_unfinished_requests():
            _step(self._core)


def decode(found: Finding, core: Any, batch: int, context: int, ruler: dict[str, float]) -> None:
    runner = core.executor._runner  # noqa: SLF001 -- to switch its graphs off for a while
    graphs = runner.graphs
    with Times(core) as times, Batch(core, times, batch, context, sum(PHASES.values()) + 40):
        try:
            for phase, count in PHASES.items():
                core.max_concurrent_batches = 1 if phase == "no_overlap" else 2
                runner.graphs = None if phase == "no_graphs" else graphs
                times.phase = phase
                for _ in range(count):
                    _step(core)
        finally:
            core.max_concurrent_batches, runner.graphs = 2, graphs
    row = {phase: times.figures(phase, lambda s: (s["num_reqs"], s["longest"]) == (batch, 1)) for phase in PHASES}
    del row["warm"]
    model = runner.model
    read = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    if model.lm_head is not None:
        read -= model.embed_tokens.weight.nbytes
    per_token = model.kv_cache_spec.bytes_per_block(1, runner.kv_caches[0].dtype)
    read += batch * (context + PHASES["warm"] + PHASES["overlap"] // 2) * per_token
    seconds = row["overlap"]["step_ms"] / 1e3
    found.add("decode", {
        "batch": batch, "context": context, **row, "read_gigabytes": read / 1e9, "tokens_per_s": batch / seconds,
        "times_reading": seconds * ruler["read_gigabytes_per_s"] * 1e9 / read,
        "times_copying": seconds * ruler["copy_gigabytes_per_s"] * 1e9 / read,
    })  # fmt: skip


def drawn_decode(found: Finding, core: Any, batch: int) -> None:
    context = DECODES[0][1]
    with Times(core) as times, Batch(core, times, batch, context, 80, **DRAWN):
        for phase, count in (("warm", 5), ("overlap", 8 if DRY else 30)):
            times.phase = phase
            for _ in range(count):
                _step(core)
    found.add("drawn", {"batch": batch, "context": context, **DRAWN, **times.figures("overlap")})


def prompts(found: Finding, core: Any, count: int, length: int, ruler: dict[str, float]) -> None:
    """Measure new prompts, each read to its end; the first round warms up."""
    for _ in range(2):
        with Times(core) as times:
            began = time.perf_counter()
            for _ in range(count):
                key = core.handle.new_key()
                core.handle.add_request(key, f"p{key}", _prompt(next(_seeds), length), max_tokens=1, temperature=0.0)
            while core.has_unfinished_requests():
                _step(core)
            synchronize()
            wall = time.perf_counter() - began
    busy = sum(_between(step["inputs"], step["samples"]) for step in times.steps if "ended" in step)
    heads, kv_heads, dim = (SHAPE[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    features = 2 * (heads + kv_heads) * dim + 3 * SHAPE["intermediate_size"]
    layers = SHAPE["num_hidden_layers"]
    flops = layers * count * length * (2 * SHAPE["hidden_size"] * features + 2 * length * heads * dim)
    host = statistics.median(step["ended"] - step["began"] for step in times.steps if "ended" in step)
    found.add("prompts", {
        "prompts": count, "length": length, "steps": len(times.steps), "tokens_per_s": count * length / wall,
        "device_ms": 1e3 * busy, "host_ms_per_step": 1e3 * host, "teraflops": flops / busy / 1e12,
        "share_of_product": flops / busy / 1e12 / ruler["product_teraflops"],
    })  # fmt: skip


def mixed(found: Finding, core: Any, batch: int, length: int) -> None:
    """Measure decodes while every step also reads a new prompt, like most steps of a busy server."""
    with Times(core) as times, Batch(core, times, batch, 20 if DRY else 256, 80):
        times.phase = "decode"
        for _ in range(10):
            _step(core)
        times.phase = "mixed"
        for _ in range(6 if DRY else 24):
            key = core.handle.new_key()
            core.handle.add_request(key, f"m{key}", _prompt(next(_seeds), length), max_tokens=1, temperature=0.0)
            _step(core)
    found.add("mixed", {
        "decodes": batch, "prompt": length, "decode": times.figures("decode", lambda s: s["longest"] == 1),
        "mixed": times.figures("mixed", lambda s: s["longest"] > 1),
    })  # fmt: skip


def profiled(found: Finding, core: Any, batch: int) -> None:
    """List the kernels of a decode step with torch's profiler, which slows down everything after it."""
    with Times(core) as times, Batch(core, times, batch, DECODES[0][1], 60):
        synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(4):
                _step(core)
            synchronize()
    rows = [(e.self_device_time_total / 4, e.count / 4, e.key) for e in profiler.key_averages()]
    rows = sorted((row for row in rows if row[0] and not row[2].startswith("Mem")), reverse=True)
    found.add("kernels_of_a_step", {
        "batch": batch, "kernels": sum(row[1] for row in rows), "kernel_ms": sum(row[0] for row in rows) / 1e3,
        "longest": [{"us": us, "times": times_, "name": name[:60]} for us, times_, name in rows[:14]],
    })  # fmt: skip


def micro(found: Finding) -> None:
    """Measure the largest parts of a step alone, as replays of graphs."""
    ruler = rulers()
    found.put(rulers=ruler)
    found.attempt("sampler", _sampler)
    found.attempt("decode attention", _decode_attention, ruler)
    found.attempt("prompt attention", _prompt_attention)


def _sampler(found: Finding) -> None:
    for rows in (2,) if DRY else (1, 64, 256):
        logits = (4 * torch.randn(rows, 300 if DRY else 151936, device=DEVICE)).to(torch.bfloat16)
        numbers, ones = torch.arange(rows, device=DEVICE), torch.ones(rows, device=DEVICE)
        drawn = {"random_rows": numbers, "temperature": 0.7 * ones, "seeds": numbers, "positions": numbers}
        top_k, top_p = {"top_k": torch.full_like(numbers, 20)}, {"top_p": 0.95 * ones}
        kinds = {
            "greedy": {}, "temperature": drawn, "top_k": drawn | {"filters": top_k},
            "top_p": drawn | {"filters": top_p}, "top_k and top_p": drawn | {"filters": top_k | top_p},
        }  # fmt: skip
        row: dict[str, Any] = {"rows": rows}
        for kind, values in kinds.items():
            metadata, kept = SamplingMetadata(**values), []  # type: ignore[arg-type]
            run = replayed(lambda m=metadata, k=kept, x=logits: k.append(Sampler().sample(x.float(), m)))
            row[kind] = 1e6 * device_seconds(run)
        found.add("sampler_us", row)
    found.check("sampler", True)


def _decode_attention(found: Finding, ruler: dict[str, float]) -> None:
    """Measure over the caches of so many layers that the processor's own cache has none of them."""
    cases: list[tuple[list[int], int, int, int]] = [([40], 4, 2, 16)]
    if not DRY:
        alike = [[1024], [16384], [1024] * 8, [1024] * 40, [1024] * 64, [1024] * 256, [256] * 63 + [16384]]
        cases = [(lengths, 16, 8, 128) for lengths in alike] + [([1024] * 64, 32, 8, 128), ([1024] * 64, 14, 2, 64)]
    dtype = torch.float32 if DRY else torch.bfloat16
    for lengths, heads, kv_heads, dim in cases:
        columns = [-(-length // 16) for length in lengths]
        layer = 2 * sum(lengths) * kv_heads * dim * dtype.itemsize
        num_layers = 1 if DRY else max(2, min(48, (1 << 30) // layer))
        shape = (2, sum(columns) + 1, 16, kv_heads, dim)
        caches = [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(num_layers)]
        table = torch.zeros((len(lengths), max(columns)), dtype=torch.int32, device=DEVICE)
        blocks = (torch.randperm(sum(columns), device=DEVICE) + 1).int().split(columns)
        for row, own in enumerate(blocks):
            table[row, : own.numel()] = own
        slots = torch.stack([own[-1] * 16 + (length - 1) % 16 for own, length in zip(blocks, lengths, strict=True)])
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        query = torch.randn(len(lengths), heads, dim, device=DEVICE).to(dtype)
        key, value = torch.randn(2, len(lengths), kv_heads, dim, device=DEVICE).to(dtype)
        backend = TritonAttentionBackend(KVCacheSpec(1, kv_heads, dim), dtype, DEVICE)
        rows = backend.counting(len(lengths))
        plan = backend.plan_static(StaticDecodeBatch(16, table, rows, slots.int(), seq_lens, max(lengths)))
        run = replayed(lambda p=plan, c=caches, q=query, k=key, v=value: [p.forward(q, k, v, x, 0.1) for x in c])
        seconds = device_seconds(run, 10) / num_layers
        row = {"requests": len(lengths), "longest": max(lengths), "heads": heads, "head_dim": dim, "us": 1e6 * seconds}
        row |= {"share_of_read": layer / seconds / 1e9 / ruler["read_gigabytes_per_s"]}
        found.add("decode_attention", row | _varlen(query, caches, table, seq_lens, num_layers))
        del caches
    found.check("decode attention", True)


def _varlen(query: Any, caches: list[Any], table: Any, seq_lens: Any, num_layers: int) -> dict[str, Any]:
    """Measure torch's own attention over the same cache, if it takes block tables."""
    if DRY:
        return {}
    try:
        from torch.nn.attention.varlen import varlen_attn

        starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=DEVICE)
        longest = int(seq_lens.max())

        def run() -> None:
            for cache in caches:
                varlen_attn(
                    query, cache[0], cache[1], starts, None, 1, longest, window_size=(-1, 0), enable_gqa=True,
                    seqused_k=seq_lens, block_table=table,
                )  # fmt: skip

        return {"varlen_us": 1e6 * device_seconds(replayed(run), 10) / num_layers}
    except Exception as error:  # noqa: BLE001 -- other versions of torch have other rules
        return {"varlen": f"{type(error).__name__}: {error}"[:120]}


def _prompt_attention(found: Finding) -> None:
    from ragged import make_step

    dtype = torch.float32 if DRY else torch.bfloat16
    for heads, kv_heads, dim, length in [(4, 2, 16, 20)] if DRY else [(16, 8, 128, 2048), (32, 8, 128, 8192)]:
        step = make_step([(0, length)], heads, kv_heads, dim, block_size=16, dtype=dtype, device=DEVICE, seed=1)
        plan = TritonAttentionBackend(KVCacheSpec(1, kv_heads, dim), dtype, DEVICE).plan(step.metadata)
        run = replayed(lambda p=plan, s=step: p.forward(s.query, s.key, s.value, s.cache, 0.1))
        flops, seconds = 2 * length * length * heads * dim, device_seconds(run, 10)
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (step.query, step.key, step.value))
        dense = replayed(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        found.add("prompt_attention", {
            "heads": heads, "head_dim": dim, "length": length, "us": 1e6 * seconds, "teraflops": flops / seconds / 1e12,
            "sdpa_us": 1e6 * device_seconds(dense, 10),
        })  # fmt: skip
    found.check("prompt attention", True)
