"""Compares the streams of chat, Anthropic's Messages API and OpenAI's Responses API: processor time per token.

The steps are simulated, so the script measures the way from a token to its event. A client that only counts bytes reads
the streams, so that it takes little of the machine. Scenes alternate, each in three forms:

    plain     text alone
    calls     ``tools`` that may be called, without constraints
    thoughts  the whole answer is reasoning

    python benches/python/api_streams.py --streams 48 --step-ms 10 --turns 5
    python benches/python/api_streams.py --server 'python -m rustvllm.cli.main serve'    # of another commit
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from bench_report import add_common_flags, add_server_flag, new_report, parse, publish
from measured_server import MeasuredServer, rustvllm_server

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
MESSAGES = [{"role": "user", "content": "Say something."}]
BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", "max_tokens", {"messages": MESSAGES, "stream_options": {"include_usage": True}}),
    "messages": ("/v1/messages", "max_tokens", {"messages": MESSAGES}),
    "responses": ("/v1/responses", "max_output_tokens", {"input": MESSAGES}),
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}],
    "messages": [{"name": "get_weather", "input_schema": CITY}],
    "responses": [{"type": "function", "name": "get_weather", "parameters": CITY}],
}
PLAIN = ("--tool-call-parser=hermes", "--tool-call-constraint=off", "--enable-auto-tool-choice")
THOUGHTS = ("--reasoning-parser=deepseek_r1",)
SCENES = [f"{api} {form}" for form in ("plain", "calls", "thoughts") for api in BODIES]
LAST_BYTES = 4096
"""Of a stream's end, where the number of its tokens stands. The Responses API has it within the response."""


def flags_of(scene: str) -> tuple[str, ...]:
    """The flags of a scene's server; scenes with the same flags share one."""
    return THOUGHTS if scene.endswith("thoughts") else PLAIN


def request_of(scene: str, model: str, output_len: int) -> bytes:
    """The whole HTTP request."""
    api, form = scene.split()
    path, limit, fields = BODIES[api]
    body = {"model": model, "stream": True, limit: output_len, **fields}
    if api != "messages":
        body["ignore_eos"] = True
    if form == "calls":
        body["tools"] = TOOLS[api]
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


async def num_tokens_of_stream(url: str, request: bytes) -> int:
    """Read one stream; how many tokens it had."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request)
    end = b""
    while data := await reader.read(1 << 20):
        end = (end + data)[-LAST_BYTES:]
    writer.close()
    found = re.findall(rb'"(?:completion|output)_tokens":(\d+)', end)
    if not found:
        raise SystemExit(f"a stream ended without the number of its tokens: {end[-400:]!r}")
    return int(found[-1])


async def load(url: str, request: bytes, args: argparse.Namespace) -> int:
    """Read streams, so many at a time; how many tokens they had."""
    num_left = args.requests

    async def some() -> int:
        nonlocal num_left
        num_tokens = 0
        while num_left > 0:
            num_left -= 1
            num_tokens += await num_tokens_of_stream(url, request)
        return num_tokens

    return sum(await asyncio.gather(*(some() for _ in range(args.streams))))


def measure(server: MeasuredServer, scene: str, model: str, args: argparse.Namespace) -> float:
    """One run: microseconds of processor time per token, of the server and the engine together."""
    before = server.processor_seconds()
    num_tokens = asyncio.run(load(server.url, request_of(scene, model, args.output_len), args))
    used = server.processor_seconds()
    used.subtract(before)
    return 1e6 * sum(used.values()) / num_tokens


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Alternate runs of all scenes; compares each one with chat of the same form and turn."""
    runs: dict[str, list[float]] = {scene: [] for scene in args.scenes}
    with ExitStack() as stack:
        base = ["--executor", "sim", "--max-num-seqs", "256", "--sim-step-time", f"{args.step_ms:g}", *args.serve]
        servers = {
            flags: stack.enter_context(rustvllm_server([*base, *flags], args.mode, command=args.server))
            for flags in dict.fromkeys(map(flags_of, args.scenes))
        }
        models = {flags: server.get("/v1/models")["data"][0]["id"] for flags, server in servers.items()}
        for turn in range(args.turns + 1):
            for scene in args.scenes:
                flags = flags_of(scene)
                cost = measure(servers[flags], scene, models[flags], args)
                if turn:  # the first one warms up
                    runs[scene].append(cost)
                    print(f"{scene}: {cost:.1f} µs", file=sys.stderr, flush=True)
    report: dict[str, Any] = {}
    for scene, costs in runs.items():
        chat = runs.get(f"chat {scene.split()[1]}", costs)
        ratios = [cost / other for cost, other in zip(costs, chat, strict=True)]
        report[scene] = {
            "server_cpu_us_per_token": {
                "median": round(statistics.median(costs), 1),
                "all": [round(c, 1) for c in costs],
            },
            "share_of_chat": {"median": round(statistics.median(ratios), 3), "all": [round(r, 3) for r in ratios]},
        }
    return report


def main() -> None:
    """Measure and publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=48, help="at a time")
    parser.add_argument("--requests", type=int, default=96, help="of a run")
    parser.add_argument("--output-len", type=int, default=300, help="tokens of an answer")
    parser.add_argument("--step-ms", type=float, default=10.0, help="milliseconds of a step")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--scenes", type=lambda text: text.split(","), default=SCENES, help="(default: all)")
    add_server_flag(parser)
    add_common_flags(parser)
    args = parse(parser)
    if not set(args.scenes) <= set(SCENES):
        parser.error(f"scenes are {', '.join(SCENES)}")
    settings = {"streams": args.streams, "step_ms": args.step_ms, "output_len": args.output_len}
    publish({**new_report(), **settings, "scenes": compare(args)}, args.output_json)


if __name__ == "__main__":
    main()
