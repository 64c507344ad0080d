"""Compares rustvllm with other engines offline on the CPU: the same checkpoint, prompts and cores, alternating.

The model has the shape of GPT-2 small, of a Llama of 160 million parameters, of a Qwen3 or of a gpt-oss, and seeded
random weights.
Each engine is its own process with the interpreter of its own environment (``engines/``); while one is measured, the
others are stopped (SIGSTOP). There are two measurements: 32 prompts of 128 tokens with 128 greedy tokens each, and
prompts of 128 alone: three with 1 token, of which the median counts, and one with 128; the difference gives the time
per token. docs/benchmarks/engines.md says how to install the other engines and convert the model.

The report also has the limits of the machine ("ceilings"), measured before and after while all engines are stopped: how
fast the same number of threads reads packed weights with a prefetching loop, and how many operations per second they
reach from registers; and what the model could reach in rustvllm's format if only its weights were read and multiplied
(no attention, no norms).

With ``--adapters N``, neighbouring rows of the batch use different adapters out of N of rank 16, and the single stream
uses the first. The batch is also measured with one token each; the difference is decoding.

    python benches/python/compare_offline.py --engine vllm=vllm/bin/python \
        --engine openvino=ov/bin/python:gpt2-ov --engine ctranslate2=ct2/bin/python:gpt2-ct2 --output-json report.json
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from bench_report import new_report, publish
from cpu_ceilings import machine_rates, model_ceilings
from lora_folders import write_adapters
from tiny_checkpoint import (
    write_gpt2_small,
    write_gpt_oss_0_6b,
    write_llama_160m,
    write_qwen3_0_6b,
    write_qwen3_1_7b,
    write_qwen3_moe_0_5b,
)
from tokenizer_folder import tokenizer_folder

ENGINES = Path(__file__).parent / "engines"
SHAPES = {
    "gpt2-small": (write_gpt2_small, "gpt2-tokenizer"),
    "llama-160m": (write_llama_160m, "slm4096-gpt2/hf"),
    "qwen3-0.6b": (write_qwen3_0_6b, "slm4096-gpt2/hf"),
    "qwen3-1.7b": (write_qwen3_1_7b, "slm4096-gpt2/hf"),
    "qwen3-moe-0.5b": (write_qwen3_moe_0_5b, "slm4096-gpt2/hf"),
    "gpt-oss-0.6b": (write_gpt_oss_0_6b, "slm4096-gpt2/hf"),
}
INPUT_LEN = OUTPUT_LEN = 128
PROMPTS_ALONE = 3
"""Prompts of a turn that run alone; the first finds its engine's memory cold after the other engines' turns."""
MAX_MODEL_LEN = 512
"""Tokens that engines make room for in each sequence, or as many as a prompt and its answer have."""
ADAPTER_RANK = 16


class Engine:
    """One engine's process.

    Args:
        name: Name of the file in ``engines/``; a part after ``-`` distinguishes two settings of one engine.
        python: Interpreter that has the engine.
        settings: The first line that the process reads.
        environment: Variables in addition to those of this process.
        log: File for its output.
    """

    def __init__(
        self, name: str, python: str, settings: Mapping[str, Any], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name, self._log = name, log
        self._process = subprocess.Popen(
            [python, str(ENGINES / f"{name.partition('-')[0]}_engine.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, **environment},
            process_group=0,
        )
        try:
            self.load_seconds: float = self._ask(settings)["load_seconds"]
        except BaseException:
            self._end()
            raise
        self.pause()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").splitlines()[-1:]
            raise SystemExit(f"{self.name} ended: {''.join(last) or 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Generate tokens, while the other engines are stopped."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            answer = self._ask({"prompts": prompts, "max_tokens": max_tokens})
        finally:
            self.pause()
        lens = {len(ids) for ids in answer["token_ids"]}
        if lens != {max_tokens}:
            raise SystemExit(f"{self.name} drew {sorted(lens)} tokens, and not {max_tokens}")
        return answer

    def pause(self) -> None:
        """Stop it and all its processes."""
        os.killpg(self._process.pid, signal.SIGSTOP)


def end_on_signals() -> None:
    """Make SIGTERM and SIGHUP end this process with an exception, so that no stopped engine is left behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def prompts_of(seed: int, count: int, vocab_size: int, input_len: int = INPUT_LEN) -> list[list[int]]:
    """Random prompts; no two measurements have the same ones."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(input_len)] for _ in range(count)]


def measure(
    engine: Engine, turn: int, vocab_size: int, args: argparse.Namespace
) -> tuple[dict[str, float], list[list[int]]]:
    """One turn of one engine: its figures, and the tokens of its batch."""
    output_len = args.output_len
    singles = prompts_of(1000 + turn, PROMPTS_ALONE, vocab_size, args.input_len)
    first = statistics.median(engine.generate([prompt], 1)["seconds"] for prompt in singles)
    whole = engine.generate(singles[-1:], output_len)["seconds"]
    figures = {"prefill_ms": 1e3 * first, "ms_per_token": 1e3 * (whole - first) / (output_len - 1)}
    token_ids: list[list[int]] = []
    if args.num_prompts:
        batch = engine.generate(prompts_of(turn, args.num_prompts, vocab_size, args.input_len), output_len)
        figures["tokens_per_second"] = args.num_prompts * output_len / batch["seconds"]
        token_ids = batch["token_ids"]
        if args.adapters:
            others = prompts_of(500 + turn, args.num_prompts, vocab_size, args.input_len)
            prompts = engine.generate(others, 1)["seconds"]
            figures["batch_prompts_ms"] = 1e3 * prompts
            figures["decoded_tokens_per_second"] = args.num_prompts * (output_len - 1) / (batch["seconds"] - prompts)
    return figures, token_ids


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens before the first that differs: random weights cause many near ties."""
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        pairs = enumerate(zip(one, other, strict=True))
        same += next((place for place, (a, b) in pairs if a != b), len(one))
    return same / sum(map(len, ours))


def compare(engines: Mapping[str, Engine], args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Run turns of all engines: all runs, medians, and ratios of rustvllm to the others and to the ceilings."""
    vocab_size = vocab_size_of(model)
    rates = [machine_rates(args.num_threads)]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    agreed: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, args.turns):  # the first warms up
        ours: list[list[int]] = []
        for name, engine in engines.items():
            figures, token_ids = measure(engine, turn, vocab_size, args)
            ours = ours or token_ids
            print(f"{turn:>2} {name:<16} {row(figures)}", file=sys.stderr, flush=True)
            if turn >= 0:
                runs[name].append(figures)
                agreed[name] += [agreement(ours, token_ids)] if token_ids else []
    medians = {
        name: {key: statistics.median(run[key] for run in of_one) for key in of_one[0]} for name, of_one in runs.items()
    }
    first = next(iter(engines))
    rates.append(machine_rates(args.num_threads))
    best_rates = {name: max(found[name] for found in rates) for name in rates[0]}
    ceilings: dict[str, float] = {}
    if model.is_dir():  # the arguments do not say the format of a file's weights
        ceilings = model_ceilings(
            json.loads((model / "config.json").read_text()),
            kind_of_weights(args, model),
            best_rates,
            (args.num_prompts, args.input_len, args.output_len),
        )
    shares = {
        key: ceiling / medians[first][key] if key.endswith(("ms", "per_token")) else medians[first][key] / ceiling
        for key, ceiling in ceilings.items()
        if key in medians[first]
    }
    ratios = {
        name: {
            key: statistics.median(ours[key] / theirs[key] for ours, theirs in zip(runs[first], of_one, strict=True))
            for key in of_one[0]
        }
        for name, of_one in runs.items()
        if name != first
    }
    return {
        "machine_rates": rates,
        "ceilings": ceilings,
        f"shares_of_the_ceilings_that_{first}_reaches": shares,
        "runs": runs,
        "medians": medians,
        f"ratios_of_{first}": ratios,
        "tokens_before_the_first_that_differs": {
            name: statistics.mean(of_one) for name, of_one in agreed.items() if of_one
        },
    }


def kind_of_weights(args: argparse.Namespace, model: Path) -> str:
    """The format of rustvllm's weights: f32, bf16, or the value of ``--quantization``.

    What a quantised folder has in 16 bits, next to experts in MXFP4, stays in them.
    """
    is_quantised = "quantization_config" in json.loads((model / "config.json").read_text())
    return args.quantization or ("bf16" if is_quantised else {"float32": "f32", "bfloat16": "bf16"}[args.dtype])


def vocab_size_of(model: Path) -> int:
    """The vocabulary size of a folder's model; for a GGUF file, of the folder that contains it."""
    folder = model.parent if model.is_file() else model
    size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    return size


def row(figures: Mapping[str, float]) -> str:
    """The figures as text."""
    return "  ".join(f"{key} {value:.2f}" for key, value in figures.items())


def environment_of(name: str, python: str, num_threads: int) -> dict[str, str]:
    """The variables that an engine's documentation recommends."""
    if name == "rustvllm":
        return {}
    environment = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)}
    if name.startswith("vllm"):
        del environment["OMP_NUM_THREADS"]
        library = Path(python).absolute().parent.parent / "lib/libiomp5.so"
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:num_threads]))
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"LD_PRELOAD": str(library)} if library.exists() else {}
    return environment


def main() -> None:
    """Start all engines, measure in alternating turns, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=PYTHON[:CONVERTED]",
        help="one to compare with, its interpreter, and the converted model where it needs one",
    )
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, made if it is not there")
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-small", help="of the checkpoint that is made")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", help="of rustvllm")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of rustvllm")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--num-prompts", type=int, default=32, help="of the batch; 0: single streams only")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--input-len", type=int, default=INPUT_LEN, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=OUTPUT_LEN, help="tokens to draw after each prompt")
    parser.add_argument("--adapters", type=int, default=0, help="adapters of rank 16 that the prompts have in turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json")
    parser.add_argument("--log-folder", type=Path, help="what the engines print goes there")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    end_on_signals()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = args.model or Path(folder) / args.shape
        write, tokenizer = SHAPES[args.shape]
        if not model.is_file() and not (model / "config.json").exists():
            write(model, args.tokenizer or tokenizer_folder(tokenizer))
        vocab_size = vocab_size_of(model)
        logs = args.log_folder or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        common = {
            "model": str(model),
            "dtype": args.dtype,
            "max_model_len": max(MAX_MODEL_LEN, args.input_len + args.output_len),
            "vocab_size": vocab_size,
            "max_num_seqs": args.max_num_seqs,
            "num_threads": args.num_threads,
        }
        if args.adapters:
            folders = write_adapters(model, Path(folder), args.adapters, ADAPTER_RANK)
            common |= {"adapters": list(map(str, folders)), "adapter_rank": ADAPTER_RANK}
        engines: dict[str, Engine] = {}
        for text in [f"rustvllm={sys.executable}", *args.engine]:
            name, _, where = text.partition("=")
            python, _, converted = where.partition(":")
            settings = common | {"name": name, "converted": converted}
            if name == "rustvllm" and args.quantization:
                settings["quantization"] = args.quantization
            if name == "rustvllm":
                settings["kv_cache_dtype"] = args.kv_cache_dtype
            environment = environment_of(name, python, args.num_threads)
            engine = Engine(name, python, settings, environment, logs / f"{name}.log")
            engines[name] = stack.enter_context(engine)
            print(f"{name} loaded in {engine.load_seconds:.1f} s", file=sys.stderr, flush=True)
        report = {
            **new_report(),
            "model": {
                "shape": args.shape,
                "path": args.model and args.model.name,
                "dtype": args.dtype,
                "quantization": args.quantization,
                "kv_cache_dtype": args.kv_cache_dtype,
            },
            "input_len": args.input_len,
            "output_len": args.output_len,
            "adapters": args.adapters,
            "num_prompts": args.num_prompts,
            "num_threads": args.num_threads,
            "max_num_seqs": args.max_num_seqs,
            "load_seconds": {name: engine.load_seconds for name, engine in engines.items()},
            **compare(engines, args, model),
        }
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
