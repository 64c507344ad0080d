"""Measures whether a server suffers if its log is not read: ``/health``, a stream and memory, before, during, after.

A server with an access log writes into a pipe. At first the pipe is read. Then it is not read while requests make
thousands of lines (``unread``: it fills up; ``gone``: its reader has closed it). Then, if possible, it is read again.

    python benches/python/output_fault.py --seconds 5 --output-json report.json
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any, Self

import psutil
from bench_report import add_common_flags, add_server_flag, new_report, parse, publish
from measured_server import SERVE

POLL_SECONDS = 0.02
TIMEOUT = 3.0
BATCH = 20
"""How many requests are sent at once."""
FAULTS = ("unread", "gone")


class PipedServer:
    """A server whose output is a pipe that can be left unread."""

    def __init__(self, command: Sequence[str], flags: Sequence[str]) -> None:
        self._command = [*command, "--executor", "sim", "--port", "0", "--enable-access-log", *flags]
        self._is_read = threading.Event()
        self._is_ready = threading.Event()
        self._is_over = False
        self._is_gone = False
        self.tail = b""
        self.url = ""

    def __enter__(self) -> Self:
        self._reader, writer = os.pipe()
        self.process = subprocess.Popen(self._command, stdout=writer, stderr=writer, start_new_session=True)
        os.close(writer)
        self._is_read.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        if not self._is_ready.wait(120):
            raise SystemExit(f"the server was not ready in time: {self.tail.decode(errors='replace')}")
        launcher = psutil.Process(self.process.pid)
        is_api = ".api_process"  # the end of the module's name
        self.api = next((each for each in launcher.children() if is_api in " ".join(each.cmdline())), launcher)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over = True
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._thread.join()

    def _read(self) -> None:
        """Read the pipe while it should be read."""
        while not self._is_over:
            if self._is_gone:
                os.close(self._reader)
                return
            if not self._is_read.wait(0.1) or not select.select([self._reader], [], [], 0.1)[0]:
                continue
            piece = os.read(self._reader, 1 << 16)
            if not piece:
                break
            self.tail = (self.tail + piece)[-4096:]
            if found := re.search(rb"listening on (http://\S+),", self.tail):
                self.url = found.group(1).decode()
            if b"ready, serving" in self.tail:
                self._is_ready.set()
        os.close(self._reader)

    def fault(self, kind: str) -> None:
        """Stop reading the pipe, or close it."""
        if kind == "gone":
            self._is_gone = True
        else:
            self._is_read.clear()

    def mend(self) -> None:
        """Read the pipe again, if that is still possible."""
        self._is_read.set()

    def stop(self) -> dict[str, Any]:
        """End the server as a supervisor does; returns its exit code, and the seconds it took."""
        begin = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        try:
            code: int | None = self.process.wait(15)
        except subprocess.TimeoutExpired:
            code = None
        return {"exit_code": code, "seconds": round(time.perf_counter() - begin, 3)}


def watch_phase(server: PipedServer, seconds: float) -> dict[str, Any]:
    """Run one phase: requests that make log lines, a stream, and queries to ``/health`` over new connections."""
    over = threading.Event()
    gaps: list[float] = []
    lines = [0]
    background = [
        threading.Thread(target=_make_lines, args=(server.url, over, lines)),
        threading.Thread(target=_read_stream, args=(server.url, over, gaps)),
    ]
    for thread in background:
        thread.start()
    asked, failures = [], 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        try:
            _get(server.url, "/health")
            asked.append(time.perf_counter() - begin)
        except OSError:
            failures += 1
        time.sleep(POLL_SECONDS)
    over.set()
    for thread in background:
        thread.join()
    memory = server.api.memory_info().rss if server.process.poll() is None else None
    return {
        "health_ms": _summary(asked),
        "health_failures": failures,
        "inter_token_ms": _summary(gaps),
        "lines_made": lines[0],
        "api_rss_mib": None if memory is None else round(memory / 2**20, 1),
    }


def _get(url: str, path: str) -> None:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        connection.getresponse().read()
    finally:
        connection.close()


def _make_lines(url: str, over: threading.Event, lines: list[int]) -> None:
    """Send requests over one connection, at most 1,000 a second; each makes a line of about 330 bytes."""
    parts = urllib.parse.urlsplit(url)
    request = f"GET /v1/{'x' * 230} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname, parts.port), TIMEOUT) as connection:
        while not over.wait(BATCH / 1000):
            connection.sendall(BATCH * request)
            answers = b""
            while answers.count(b"HTTP/1.1 404") < BATCH or not answers.endswith(b"}"):
                piece = connection.recv(1 << 16)
                if not piece:
                    return
                answers += piece
            lines[0] += BATCH


def _read_stream(url: str, over: threading.Event, gaps: list[float]) -> None:
    parts = urllib.parse.urlsplit(url)
    body = json.dumps({"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True})
    while not over.is_set():
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            last = None
            while not over.is_set() and (line := answer.readline()):
                now = time.perf_counter()
                if line.startswith(b"data: {"):
                    gaps += [] if last is None else [now - last]
                    last = now
        except OSError:
            over.wait(0.1)
        finally:
            connection.close()


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {"count": 0}
    at = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 99)}
    in_ms = {name: round(value * 1e3, 2) for name, value in {**at, "max": ordered[-1]}.items()}
    return {"count": len(ordered), **in_ms}


def main() -> None:
    """Measure each fault with its own server, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each phase")
    parser.add_argument("--step-time", type=float, default=10.0, help="milliseconds of a simulated step")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="which; twice for both (default: both)")
    add_common_flags(parser)
    add_server_flag(parser)
    args = parse(parser)
    runs: dict[str, Any] = {}
    mode = ["--disable-frontend-multiprocessing"] if args.mode == "thread" else []
    for kind in args.fault or FAULTS:
        with PipedServer(
            args.server or SERVE, ["--sim-step-time", f"{args.step_time:g}", *mode, *args.serve]
        ) as server:
            watch_phase(server, 1.0)  # warms up connections and code
            run = {"before": watch_phase(server, args.seconds)}
            server.fault(kind)
            time.sleep(0.3)
            run["during"] = watch_phase(server, args.seconds)
            if kind != "gone":
                server.mend()
                run["after"] = watch_phase(server, args.seconds)
                server.fault(kind)
                watch_phase(server, min(args.seconds, 2.0))  # fills the pipe again
            run["stop"] = server.stop()
            runs[kind] = run
    publish({**new_report(), "step_time_ms": args.step_time, "mode": args.mode, "runs": runs}, args.output_json)


if __name__ == "__main__":
    main()
