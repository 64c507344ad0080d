"""Measures where the time of a step goes on the CPU: products, attention, the rest, and reading the weights once.

    python benches/python/decode_cost.py [--shape gpt2-small|llama-160m|qwen3-0.6b|pythia-160m|gemma3-270m]
        [--variants float32 bfloat16 int8 int4-g32]
        [--rows 1 8 32] [--prompt-len 32] [--prefill 128 2048] [--num-steps 40] [--output-json FILE]

The model has random weights. Variants with weights of 8 and 4 bits round activations, except those whose name ends in
-float; -bf16-cache and -int8-cache keep the KV cache in fewer bits; names that end in -modules run module by module.
All variants run in this process and alternate, a step each. Between their steps, the same threads read the packed
weights from first to last, which is the shortest time that a step of one row can take. Figures are medians in
milliseconds. "rest" is everything except products and attention, including the scheduler. "host" is the processor time
of the stepping thread outside of the core's calls for products, attention and blocks. "quick" is the lower quartile of
the steps, which other work on the machine disturbs less; the tokens per second are those of quick steps.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_report import new_report, publish

import rustvllm.executor  # noqa: F401 -- before anything loads torch, because it sets how torch's threads wait
from rustvllm.attention.cpu_backend import CPUAttentionPlan
from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.core import EngineCore
from rustvllm.layers.cpu.linear import CoreLinear, OneDnnLinear, TorchLinear
from rustvllm.worker.cpu_decoder import CoreDecoder

GPT2_SMALL = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 4096, "vocab_size": 50257, "torch_dtype": "float32",
}  # fmt: skip
LLAMA_160M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 4096,
    "vocab_size": 32000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "max_position_embeddings": 4096, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
PYTHIA_160M = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 4096, "vocab_size": 50304,
    "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
GEMMA3_270M = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048,
    "max_position_embeddings": 4096, "vocab_size": 262144, "sliding_window": 512, "torch_dtype": "float32",
}  # fmt: skip
SHAPES = {
    "gpt2-small": GPT2_SMALL, "llama-160m": LLAMA_160M, "qwen3-0.6b": QWEN3_06B, "pythia-160m": PYTHIA_160M,
    "gemma3-270m": GEMMA3_270M,
}  # fmt: skip
FLOAT_ACTIVATIONS = "-float"
VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8-g64": {"dtype": "float32", "quantization": "int8-g64"},
    "int4-g32": {"dtype": "float32", "quantization": "int4-g32"},
    "int4-g128": {"dtype": "float32", "quantization": "int4-g128"},
    "int4-g128-bfloat16": {"dtype": "bfloat16", "quantization": "int4-g128"},
    "int8-bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
}
VARIANTS |= {
    f"{name}-{short}-cache": args | {"kv_cache_dtype": cache}
    for name, args in VARIANTS.items()
    for short, cache in (("bf16", "bfloat16"), ("int8", "int8_per_token_head"))
}
BY_MODULES = "-modules"
VARIANTS |= {f"{name}{FLOAT_ACTIVATIONS}": args for name, args in VARIANTS.items() if "quantization" in args}
VARIANTS |= {f"{name}{BY_MODULES}": args for name, args in VARIANTS.items()}
NUM_WARMUPS = 4
NUM_PROMPTS = 5


class Clock:
    """Seconds in products and in attention since the last ``take``, and the thread's processor time in these calls."""

    def __init__(self) -> None:
        self.products = self.attention = self.called = 0.0
        for kind in (CoreLinear, OneDnnLinear, TorchLinear):
            self._watch(kind, "products")
        self._watch(CPUAttentionPlan, "attention")
        self._watch_decoder()

    def _watch(self, kind: type, name: str) -> None:
        forward: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, of_thread = time.perf_counter(), time.thread_time()
            out = forward(*args, **kwargs)
            setattr(self, name, getattr(self, name) + time.perf_counter() - begin)
            self.called += time.thread_time() - of_thread
            return out

        kind.forward = timed  # type: ignore[attr-defined]

    def _watch_decoder(self) -> None:
        for name in ("forward", "forward_logits"):
            forward: Callable[..., Any] = getattr(CoreDecoder, name)
            setattr(CoreDecoder, name, self._timed(forward))

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(decoder: CoreDecoder, *args: Any, **kwargs: Any) -> Any:
            of_thread = time.thread_time()
            out = forward(decoder, *args, **kwargs)
            self.called += time.thread_time() - of_thread
            _, products, attention = decoder.times
            self.products += products / 1e9
            self.attention += attention / 1e9
            return out

        return timed

    def take(self) -> tuple[float, float, float]:
        """Return all three, and set them to zero."""
        taken = self.products, self.attention, self.called
        self.products = self.attention = self.called = 0.0
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2-small")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["float32", "bfloat16", "int8"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens before each row's first step")
    parser.add_argument("--prefill", nargs="*", type=int, default=[128])
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    report = new_report()
    clock = Clock()
    cores = {name: make_core(name, args) for name in args.variants}
    report["decode"] = {rows: decode(cores, clock, rows, args.num_steps, args.prompt_len) for rows in args.rows}
    report["prefill"] = {tokens: prefill(cores, clock, tokens) for tokens in args.prefill}
    for core in cores.values():
        core.shutdown()
    publish(report, args.output_json)


def make_core(variant: str, args: argparse.Namespace) -> EngineCore:
    """An engine for the shape, with random weights."""
    os.environ["RUSTVLLM_DECODER"] = "modules" if variant.endswith(BY_MODULES) else "core"
    rounds = not variant.removesuffix(BY_MODULES).endswith(FLOAT_ACTIVATIONS)
    os.environ["RUSTVLLM_ACTIVATIONS"] = "int8" if rounds else "float"
    longest = max([args.prompt_len + args.num_steps + NUM_WARMUPS + 32, *(tokens + 1 for tokens in args.prefill)])
    most_rows = max([1, *args.rows])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]), encoding="utf-8")
        engine_args = EngineArgs(
            model=folder, load_format="dummy", device="cpu", skip_tokenizer_init=True, max_num_seqs=most_rows,
            max_num_batched_tokens=max([args.prompt_len * most_rows, *args.prefill]), max_model_len=longest,
            num_gpu_blocks_override=1 + most_rows * -(-longest // 16), enable_prefix_caching=False,
            **VARIANTS[variant],
        )  # fmt: skip
        return EngineCore(engine_args.create_engine_config("llm_class"))


def packed_layers(core: EngineCore) -> list[CoreLinear]:
    """The core's copies of the weights, in the model's order."""
    executor: Any = core.executor
    model = executor._runner.model  # noqa: SLF001 -- a measurement needs internals
    kernels = [module.kernel for module in model.modules() if hasattr(module, "kernel")]
    return [kernel for kernel in [*kernels, model.head_kernel] if isinstance(kernel, CoreLinear)]


def decode(
    cores: dict[str, EngineCore], clock: Clock, rows: int, num_steps: int, prompt_len: int
) -> dict[str, dict[str, float]]:
    """Alternate steps that decode ``rows`` rows."""
    for core in cores.values():
        add_requests(core, rows, prompt_len, num_steps + NUM_WARMUPS + 1)
        core.step()  # computes all prompts
        core.scheduler.take_outputs()
    found: dict[str, dict[str, list[float]]] = {name: new_times() for name in cores}
    for index in range(num_steps + NUM_WARMUPS):
        for name, core in cores.items():
            with recorded(clock, found[name] if index >= NUM_WARMUPS else new_times()):
                core.step()
            core.scheduler.take_outputs()
            layers = packed_layers(core)
            begin = time.perf_counter()
            for layer in layers:
                layer.read()
            if index >= NUM_WARMUPS:
                found[name]["reading"].append(time.perf_counter() - begin)
    for core in cores.values():
        while core.has_unfinished_requests():
            core.step()
            core.scheduler.take_outputs()
    return {name: summary(times, rows) for name, times in found.items()}


def prefill(cores: dict[str, EngineCore], clock: Clock, num_tokens: int) -> dict[str, dict[str, float]]:
    """Alternate steps that compute one prompt and its first token."""
    found = {name: new_times() for name in cores}
    for index in range(1 + NUM_PROMPTS):
        for name, core in cores.items():
            add_requests(core, 1, num_tokens, 1)
            with recorded(clock, found[name] if index else new_times()):
                core.step()
            core.scheduler.take_outputs()
    return {name: summary(times, num_tokens) for name, times in found.items()}


def add_requests(core: EngineCore, rows: int, prompt_len: int, max_tokens: int) -> None:
    """Add greedy requests with different prompts."""
    handle = core.handle
    for index in range(rows):
        prompt = [(7 * index + 3 * position) % 4000 + 5 for position in range(prompt_len)]
        key = handle.new_key()
        handle.add_request(key, f"r{key}", prompt, max_tokens=max_tokens, temperature=0.0)


def new_times() -> dict[str, list[float]]:
    """Empty lists for the seconds of each part."""
    return {"step": [], "products": [], "attention": [], "host": [], "reading": []}


@contextmanager
def recorded(clock: Clock, times: dict[str, list[float]]) -> Iterator[None]:
    """Add the times of the body."""
    clock.take()
    begin, of_thread = time.perf_counter(), time.thread_time()
    yield
    times["step"].append(time.perf_counter() - begin)
    products, attention, called = clock.take()
    times["host"].append(time.thread_time() - of_thread - called)
    times["products"].append(products)
    times["attention"].append(attention)


def summary(times: dict[str, list[float]], num_tokens: int) -> dict[str, float]:
    """Medians in milliseconds, and the tokens per second of quick steps with ``num_tokens`` tokens."""
    found = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items() if seconds}
    found["rest"] = found["step"] - found["products"] - found["attention"]
    quick = statistics.quantiles(times["step"], n=4, method="inclusive")[0]
    found |= {"quick": quick * 1e3, "tokens_per_second": num_tokens / quick}
    if "reading" in found:
        found["step_per_reading"] = found["step"] / found["reading"]
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
