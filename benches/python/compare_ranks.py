"""Compares two ranks of one thread with one process of two threads, offline, in rustvllm and vLLM on the same cores.

    python benches/python/compare_ranks.py --vllm-python vllm/bin/python [--rows 1 8] [--tokens 48] [--turns 2]
        [--engines rustvllm vllm] [--output-json FILE]

The model has random weights in the shape of a Llama of 160 million (float32), and prompts have 16 tokens. Each engine
and size is its own process, one after the other. The report has the tokens per second of the best of several runs, and
for rustvllm the share of each rank's time in collectives.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from tensor_parallel import LLAMA_160M

SCRIPT = """
import json, sys, time
def main():
    # Not at the top: processes that vLLM spawns run this file's top again, with another standard input.
    order = json.loads(sys.stdin.readline())
    if order["engine"] == "vllm":
        from vllm import LLM, SamplingParams
    else:
        from rustvllm import LLM, SamplingParams
    llm = LLM(**order["llm"])
    found = {}
    for rows in order["rows"]:
        params = SamplingParams(temperature=0, max_tokens=order["tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": [3 + (7 * i + 11 * j) % 30000 for j in range(16)]} for i in range(rows)]
        best = 0.0
        for turn in range(order["turns"] + 1):
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            speed = rows * order["tokens"] / (time.perf_counter() - began)
            best = max(best, speed if turn else 0.0)
        found[rows] = round(best, 2)
    core = getattr(llm.llm_engine.engine_core, "core", None)
    states = core.executor.rank_states() if hasattr(core, "executor") else []
    print("found", json.dumps({"tokens_per_s": found, "collective_s": [s["collective_seconds"] for s in states]}))
if __name__ == "__main__":
    main()
"""


def run(engine: str, size: int, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one engine with ``size`` ranks."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    llm: dict[str, Any] = {
        "model": folder, "tensor_parallel_size": size, "dtype": "float32", "skip_tokenizer_init": True,
        "load_format": "dummy", "max_model_len": 256, "max_num_seqs": 32, "enable_prefix_caching": False,
    }  # fmt: skip
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if engine == "vllm":
        binds = "|".join(map(str, cores)) if size == 2 else ",".join(map(str, cores))
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": binds, "PYTHONPATH": ""}
        library = args.vllm_python.absolute().parent.parent / "lib/libiomp5.so"
        environment |= {"LD_PRELOAD": str(library)} if library.exists() else {}
        environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if size > 1 else "0"}
        llm["enforce_eager"] = True
    else:
        llm |= {"device": "cpu", "kv_cache_memory_bytes": 256 << 20}
        if size == 2:
            environment["OMP_NUM_THREADS"] = "1"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(SCRIPT)
        script.flush()
        python = args.vllm_python if engine == "vllm" else sys.executable
        order = {"engine": engine, "llm": llm, "rows": args.rows, "tokens": args.tokens, "turns": args.turns}
        done = subprocess.run(
            [str(python), script.name],
            input=json.dumps(order) + "\n", capture_output=True, text=True, env=environment, check=False, timeout=280,
        )  # fmt: skip
    lines = [line.partition("found ")[2] for line in done.stdout.splitlines() if "found {" in line]
    return json.loads(lines[0]) if lines else {"error": (done.stdout + done.stderr)[-1500:]}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, default=Path("vllm/bin/python"))
    parser.add_argument("--engines", nargs="+", choices=["rustvllm", "vllm"], default=["rustvllm", "vllm"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output-json", type=Path, help="write the report there as well")
    args = parser.parse_args()
    report = new_report()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_160M))
        for engine in args.engines:
            found = {size: run(engine, size, folder, args) for size in (1, 2)}
            report[engine] = {"one process, two threads": found[1], "two ranks, one thread each": found[2]}
            if all("tokens_per_s" in each for each in found.values()):
                one, two = (found[size]["tokens_per_s"] for size in (1, 2))
                report[engine]["ratio"] = {rows: round(two[rows] / one[rows], 3) for rows in one}
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
