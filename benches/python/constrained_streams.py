"""Measures requests per second with and without schemas, 64 at a time, also in vLLM, and counts invalid answers.

Both servers use the same model, a Llama of random weights, because such a model is the hardest to hold to a schema.
Each request without a schema generates as many tokens as the one with a schema in its place did just before, so both
kinds of run end with equally long answers. The script validates every answer that ended by itself, but only after a
run, because the client shares the machine.

    python benches/python/constrained_streams.py --vllm-python vllm/bin/python --output-json report.json
"""

import argparse
import asyncio
import json
import ssl
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from bench_report import add_common_flags, new_report, parse, publish
from compare_vllm import awake, our_server, vllm_server
from measured_server import MeasuredServer
from tiny_checkpoint import write_tiny_llama
from tokenizer_folder import tokenizer_folder

TOKENIZER = tokenizer_folder("gpt2-tokenizer")
MAX_TOKENS = 96
SHORT = {"type": "string", "minLength": 1, "maxLength": 12}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": SHORT,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "is_member": {"type": "boolean"},
        },
        "required": ["name", "age", "is_member"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Berlin", "Lagos", "Lima", "Osaka", "Quito"]},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -999, "maximum": 999}, "minItems": 3, "maxItems": 9},
    {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"id": {"type": "integer"}, "label": SHORT},
                    "required": ["id", "label"],
                    "additionalProperties": False,
                },
                "minItems": 1,
                "maxItems": 3,
            }
        },
        "required": ["items"],
        "additionalProperties": False,
    },
]


class Client:
    """Sends requests to one server, a fixed number at a time.

    Args:
        server: The server.
        concurrency: How many requests are open at a time.

    Attributes:
        num_invalid: Answers that ended by themselves but do not obey their schema.
        num_cut: Answers that reached the limit.
    """

    def __init__(self, server: MeasuredServer, concurrency: int) -> None:
        self._url, self._concurrency = server.url, concurrency
        self.num_invalid = self.num_cut = 0
        self._answers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._num_tokens: dict[int, int] = {}

    def run(self, num_requests: int, is_constrained: bool, seed: int) -> dict[str, float]:
        """Send all requests and measure their rate; a run with schemas comes before one without."""
        began = time.perf_counter()
        counts = asyncio.run(self._run(num_requests, is_constrained, seed))
        seconds = time.perf_counter() - began
        for choice, schema in self._answers:
            self._judge(choice, schema)
        self._answers.clear()
        return {
            "requests_per_second": num_requests / seconds,
            "tokens_per_second": sum(counts) / seconds,
            "tokens_per_request": statistics.mean(counts),
        }

    async def _run(self, num_requests: int, is_constrained: bool, seed: int) -> list[int]:
        # Each worker has its own client: in a common pool, requests waited for seconds while connections were idle.
        numbers, context = iter(range(num_requests)), ssl.create_default_context()

        async def worker() -> list[int]:
            async with httpx.AsyncClient(base_url=self._url, verify=context, timeout=300) as client:
                return [await self._ask(client, number, is_constrained, seed) for number in numbers]

        of_workers = await asyncio.gather(*(worker() for _ in range(self._concurrency)))
        return [count for counts in of_workers for count in counts]

    async def _ask(self, client: httpx.AsyncClient, number: int, is_constrained: bool, seed: int) -> int:
        body: dict[str, Any] = {"prompt": f"Number {number}.", "temperature": 1, "seed": seed * 100_000 + number}
        schema = SCHEMAS[number % len(SCHEMAS)]
        if is_constrained:
            wanted = {"name": "answer", "schema": schema, "strict": True}
            body |= {"max_tokens": MAX_TOKENS, "response_format": {"type": "json_schema", "json_schema": wanted}}
        else:
            body |= {"max_tokens": self._num_tokens[number], "ignore_eos": True}
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        [choice] = answer["choices"]
        num_tokens = int(answer["usage"]["completion_tokens"])
        if is_constrained:
            self._num_tokens[number] = num_tokens
            self._answers.append((choice, schema))
        return num_tokens

    def _judge(self, choice: dict[str, Any], schema: dict[str, Any]) -> None:
        if choice["finish_reason"] != "stop":
            self.num_cut += 1
            return
        try:
            jsonschema.validate(json.loads(choice["text"]), schema)
        except (ValueError, jsonschema.ValidationError):
            self.num_invalid += 1


def name_end(model: Path) -> None:
    """Make the tokenizer's last id the checkpoint's end of text: vLLM ends no answer of a model without one."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"eos_token_id": config["vocab_size"] - 1}))


def compare(servers: dict[str, MeasuredServer], args: argparse.Namespace) -> dict[str, Any]:
    """Alternate runs of all servers with and without schemas; the first one warms up."""
    clients = {name: Client(server, args.streams) for name, server in servers.items()}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {"free": [], "constrained": []} for name in servers}
    for turn in range(args.turns + 1):
        for name, client in clients.items():
            with awake(servers, name):
                constrained = client.run(args.requests, True, turn)
                free = client.run(args.requests, False, turn)
            if turn:
                runs[name]["constrained"].append(constrained)
                runs[name]["free"].append(free)
                print(name, json.dumps({"constrained": constrained, "free": free}), file=sys.stderr, flush=True)
    report: dict[str, Any] = {}
    for name, of_server in runs.items():
        medians = {
            kind: {key: round(statistics.median(run[key] for run in of_kind), 1) for key in of_kind[0]}
            for kind, of_kind in of_server.items()
        }
        shares = [
            constrained["tokens_per_second"] / free["tokens_per_second"]
            for constrained, free in zip(of_server["constrained"], of_server["free"], strict=True)
        ]
        client = clients[name]
        report[name] = medians | {
            "constrained_over_free": {
                "median": round(statistics.median(shares), 3),
                "all": [round(s, 3) for s in shares],
            },
            "answers": args.requests * (args.turns + 1),
            "cut_by_max_tokens": client.num_cut,
            "wrongly_accepted": client.num_invalid,
        }
    return report


def main() -> None:
    """Start the servers, measure in alternating turns, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vllm-python", type=Path, help="interpreter of the environment vLLM is in; none: rustvllm alone"
    )
    parser.add_argument("--vllm-cores", default="", help="VLLM_CPU_OMP_THREADS_BIND (default: all cores)")
    parser.add_argument("--vllm-arguments", default="", help="more of vLLM's flags")
    parser.add_argument("--arguments", default="", help="more of rustvllm's flags")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a folder with a tokenizer.json")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--hidden-size", type=int, default=256, help="of the model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512, help="of a run")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--log-folder", type=Path)
    add_common_flags(parser)
    args = parse(parser)
    args.prefix_caching = False
    report = new_report()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_tiny_llama(
            Path(folder) / "model", args.tokenizer, num_layers=args.layers, hidden_size=args.hidden_size
        )
        name_end(model)
        servers = {"rustvllm": stack.enter_context(our_server(model, args))}
        if args.vllm_python:
            servers["vllm"] = stack.enter_context(vllm_server(args.vllm_python.absolute(), model, args))
        report |= {"streams": args.streams, "requests": args.requests, "servers": compare(servers, args)}
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
