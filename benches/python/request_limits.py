"""Measures what a request at its limits does to others: ``/health`` and the streams of the same API process.

While 16 streams run over the simulated executor, the script sends one request after another that has one field as large
as a body may be, comes from a client that breaks the rules, or uses a chat template that takes too much. For each it
reports how long the answer took, and, before, during and after it, the answers of ``/health``, the gaps between the
events of a stream, and the memory (during: the peak). It also times the parse of such a body, which is not bounded.

    python benches/python/request_limits.py --server "OTHER/.venv/bin/python -m rustvllm.cli.main serve"
"""

import argparse
import contextlib
import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench_report import add_common_flags, add_server_flag, new_report, parse, publish
from hostile_clients import half_close_flood, send_before_reading
from measured_server import MeasuredServer, rustvllm_server
from neighbours import SETTLE_SECONDS, Neighbours

STREAMS = 16
GAP_SECONDS = 0.2
BODY_BYTES = (8 << 20) - 4096
USER = {"role": "user", "content": "x"}


def filled(item: Any) -> list[Any]:
    """A list with as many copies of the item as fit into a body."""
    return [item] * (BODY_BYTES // (len(json.dumps(item)) + 1))


def words(size: int = BODY_BYTES) -> list[str]:
    """Different words, as many as fit."""
    return [f"w{number}" for number in range(size // 11)]


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "nothing": ("/v1/completions", lambda: {"prompt": "a", "max_tokens": 1}),
    "bad_words": ("/v1/completions", lambda: {"prompt": "a", "bad_words": words()}),
    "bad_words, 2000": ("/v1/completions", lambda: {"prompt": "a", "max_tokens": 1, "bad_words": words(22_000)}),
    "stop": ("/v1/completions", lambda: {"prompt": "a", "stop": words()}),
    "stop_token_ids": ("/v1/completions", lambda: {"prompt": "a", "stop_token_ids": filled(9)}),
    "allowed_token_ids": ("/v1/completions", lambda: {"prompt": "a", "allowed_token_ids": filled(9)}),
    "logit_bias": ("/v1/completions", lambda: {"prompt": "a", "logit_bias": dict.fromkeys(words(), 1)}),
    "prompt, ids cut": ("/v1/completions", lambda: {"prompt": filled(200), "truncate_prompt_tokens": 9}),
    "prompt, texts": ("/v1/completions", lambda: {"prompt": filled("a" * 500), "max_tokens": 1}),
    "brackets": ("/v1/completions", lambda: {"prompt": "a", "metadata": filled([])}),
    "messages": ("/v1/chat/completions", lambda: {"messages": filled(USER)}),
    "message parts": ("/v1/chat/completions", lambda: {"messages": [{**USER, "content": filled({"text": "a"})}]}),
    "tools": ("/v1/chat/completions", lambda: {"messages": [USER], "tools": filled({"type": "function"})}),
    "tokenize": ("/tokenize", lambda: {"prompt": "a b " * (BODY_BYTES // 4), "return_token_strs": True}),
    "tokenize, 1 MB": ("/tokenize", lambda: {"prompt": "a b " * 250_000, "return_token_strs": True}),
    "detokenize": ("/detokenize", lambda: {"tokens": filled(97)}),
}
HOSTILE: dict[str, Callable[[str], dict[str, Any]]] = {
    "sends before it reads": send_before_reading,
    "half-closes": half_close_flood,
}
TEMPLATES = {
    "template, loops": "{% for a in range(4000) %}{% for b in range(4000) %}{% endfor %}{% endfor %}x",
    "template, constant": "{{ 'a' * 10 ** 9 }}",
}
"""Chat templates that take too long or too much memory: a server is started with each."""


def api_memory(server: MeasuredServer) -> int:
    """Memory of all processes of the server, in megabytes."""
    return round(sum(server.resident_bytes().values()) / 1e6)


@contextlib.contextmanager
def memory_watch(server: MeasuredServer) -> Iterator[list[int]]:
    """Track the peak memory of all the server's processes within the context, in megabytes: the list's only item."""
    most = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            with contextlib.suppress(AttributeError):  # no process yet
                most[0] = max(most[0], api_memory(server))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def send(url: str, path: str, body: bytes) -> dict[str, Any]:
    """Send one request of an ordinary client."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    begin = time.perf_counter()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = answer.read()
    took = time.perf_counter() - begin
    connection.close()
    return {
        "body_bytes": len(body),
        "status": answer.status,
        "says": said[:120].decode(errors="replace") if answer.status != 200 else "",
        "answer_ms": round(took * 1000, 1),
    }


def measure(server: MeasuredServer, neighbours: Neighbours, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one case; returns what the others saw for a second before it, during it, and for a second after it."""
    neighbours.take()
    time.sleep(SETTLE_SECONDS)
    phases = {"before": {**neighbours.take(), "memory_mb": api_memory(server)}}
    with memory_watch(server) as most:
        outcome = act()
        time.sleep(GAP_SECONDS)  # a gap is measured when it ends
    phases["during"] = {**neighbours.take(), "memory_mb": most[0]}
    time.sleep(SETTLE_SECONDS)
    phases["after"] = {**neighbours.take(), "memory_mb": api_memory(server)}
    return {**outcome, **phases}


def measure_template(server: MeasuredServer) -> dict[str, Any]:
    """Start a server with the template, then have it render it; returns the memory of the start, and ``measure``'s."""
    body = json.dumps({"messages": [USER], "max_tokens": 1}).encode()
    with contextlib.ExitStack() as stack:
        with memory_watch(server) as most:
            stack.enter_context(server)
        neighbours = stack.enter_context(Neighbours(server.url, STREAMS))
        row = measure(server, neighbours, partial(send, server.url, "/v1/chat/completions", body))
        return {"start_memory_mb": most[0], "ready_seconds": round(server.ready_after, 1), **row}


def body_of(name: str) -> bytes:
    """The request of a case."""
    return json.dumps(CASES[name][1](), separators=(",", ":")).encode()


def parse_milliseconds(path: str, body: bytes) -> float:
    """Processor time to parse a body, in this process."""
    from rustvllm.exceptions import RustVLLMError
    from rustvllm.server.errors import BadRequestError
    from rustvllm.server.schemas import protocol
    from rustvllm.server.schemas.request_body import parse_request

    model: Any = {
        "/v1/completions": protocol.CompletionRequest,
        "/v1/chat/completions": protocol.ChatCompletionRequest,
        "/tokenize": protocol.TokenizeRequest,
        "/detokenize": protocol.DetokenizeRequest,
    }[path]
    begin = time.process_time()
    with contextlib.suppress(BadRequestError, RustVLLMError, ValueError):
        parse_request(body, model)
    return (time.process_time() - begin) * 1000


def main() -> None:
    """Run every case once, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--step-time", type=float, default=20.0, help="milliseconds of a simulated step")
    names = [*CASES, *HOSTILE, *TEMPLATES]
    parser.add_argument("--cases", nargs="*", choices=names, default=names, metavar="CASE")
    add_common_flags(parser)
    add_server_flag(parser)
    args = parse(parser)
    flags = ["--executor", "sim", "--sim-step-time", f"{args.step_time:g}", *args.serve]
    rows = {}
    with (
        rustvllm_server(flags, args.mode, command=args.server) as server,
        Neighbours(server.url, STREAMS) as neighbours,
    ):
        for name in [name for name in args.cases if name not in TEMPLATES]:
            if name in HOSTILE:
                act = partial(HOSTILE[name], server.url)
            else:
                act = partial(send, server.url, CASES[name][0], body_of(name))
            rows[name] = measure(server, neighbours, act)
    for name in [name for name in CASES if name in rows]:  # last, when no neighbour uses this process any more
        rows[name]["parse_ms"] = round(parse_milliseconds(CASES[name][0], body_of(name)), 1)
    for name in [name for name in TEMPLATES if name in args.cases]:
        own = [*flags, "--chat-template", TEMPLATES[name]]
        rows[name] = measure_template(rustvllm_server(own, args.mode, command=args.server))
    publish({**new_report(), "streams": STREAMS, "step_time_ms": args.step_time, "cases": rows}, args.output_json)


if __name__ == "__main__":
    main()
