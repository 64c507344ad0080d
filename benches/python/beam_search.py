"""Runs a beam search in rustvllm and in vLLM, and prints seconds and output tokens per second as JSON.

    .venv/bin/python benches/python/beam_search.py [--model FOLDER] [--vllm-python PYTHON] [--repeats 3]

Each engine loads the model once, searches once to warm up, and then ``--repeats`` times; the median counts. Output
tokens are those of all beams.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tiny_checkpoint import write_gpt2_small
from tokenizer_folder import tokenizer_folder

TOKENIZER = tokenizer_folder("gpt2-tokenizer")
PROMPT = "The quick brown fox jumps over the lazy dog and runs into the forest, where it meets an old friend who"


def search(engine: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Search with one engine in this process."""
    options: dict[str, Any] = {
        "model": str(arguments.model),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 64,
    }
    if engine == "vllm":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        import vllm as installed
        from vllm import LLM
        from vllm.sampling_params import BeamSearchParams
    else:
        import rustvllm as installed
        from rustvllm import LLM, BeamSearchParams

        options["device"] = "cpu"
    llm = LLM(**options)
    prompts = [{"prompt": f"{index}. {PROMPT}"} for index in range(arguments.prompts)]
    params = BeamSearchParams(beam_width=arguments.width, max_tokens=arguments.max_tokens, ignore_eos=True)
    seconds = []
    for repeat in range(arguments.repeats + 1):
        began = time.perf_counter()
        found = llm.beam_search(prompts, params)
        if repeat:
            seconds.append(time.perf_counter() - began)
    assert all(len(one.sequences) == arguments.width for one in found)
    median = statistics.median(seconds)
    num_tokens = arguments.prompts * arguments.width * arguments.max_tokens
    best = found[0].sequences[0]
    return {
        "engine": engine,
        "version": installed.__version__,
        "torch": version("torch"),
        "seconds": [round(second, 3) for second in seconds],
        "tokens_per_second": round(num_tokens / median, 1),
        "best_tokens": list(best.tokens),
        "best_cum_logprob": round(best.cum_logprob, 4),
    }


def processor() -> str:
    """The name of the processor."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor()


def main() -> None:
    """Measure, and print one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("gpt2-small"), help="made if it is not there")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--vllm-python", help="an interpreter with vLLM")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", choices=["rustvllm", "vllm"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        print(json.dumps(search(arguments.engine, arguments)))
        return
    if not (arguments.model / "config.json").exists():
        write_gpt2_small(arguments.model, arguments.tokenizer)
    interpreters = {"rustvllm": sys.executable}
    if arguments.vllm_python:
        interpreters["vllm"] = arguments.vllm_python
    results = []
    for engine, python in interpreters.items():
        command = [python, __file__, "--engine", engine, *sys.argv[1:]]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results.append(json.loads(done.stdout.strip().splitlines()[-1]))
    shape = {name: getattr(arguments, name) for name in ("width", "prompts", "max_tokens", "repeats")}
    print(
        json.dumps(
            {
                "model": arguments.model.name,
                "processor": processor(),
                "python": platform.python_version(),
                **shape,
                "results": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
