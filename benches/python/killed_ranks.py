"""Measures what a killed rank costs: each of many servers with several ranks loses one at a random moment.

    python benches/python/killed_ranks.py [--rounds 100] [--seed 0] [--size 2] [--stages 1]
        [--moments start steps restart]

A round starts ``rustvllm serve`` with several ranks and the embedded model, kills a rank (SIGKILL; rank 0 is the engine
process) while it starts or while four streams run, and measures how long it takes until every stream has ended with an
error that names the rank, and until every process is gone. The round fails if these take more than 2 and 10 seconds, or
if a process, a listening port, or a file in TMPDIR or /dev/shm is left. In a "restart" round the server has
``--restart-engine``, and the time until new ranks answer a request counts instead. Prints JSON; the exit code is 1 if a
round failed.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

KNOWN_SECONDS, GONE_SECONDS, START_SECONDS, BACK_SECONDS = 2.0, 10.0, 120.0, 90.0
NUM_STREAMS = 4
SHARED = Path("/dev") / "shm"
ENGINE, WORKER = "rustvllm.engine.process", "rustvllm.worker.process"
LONGEST_START = 4.0
"""A rank is killed at most this many seconds after it was first seen, because later the server is ready."""


class Server:
    """One server in its own session, with its own directory."""

    def __init__(self, size: int, stages: int, *flags: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
        self.lines: list[str] = []
        self._news = threading.Condition()
        command = [sys.executable, "-m", "rustvllm.cli.main", "serve", "--port", "0", "--device", "cpu"]
        command += ["--tensor-parallel-size", str(size // stages), "--pipeline-parallel-size", str(stages)]
        command += ["--hf-overrides", json.dumps({"n_head": 2 * size})]
        command += ["--num-gpu-blocks-override", "200", "--max-num-seqs", "8", *flags]
        switches = {"RUSTVLLM_CHECK_INVARIANTS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **switches, "TMPDIR": str(self.directory)},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()

    def wait_for(self, words: str) -> str:
        """Wait for the first line that contains these words, and return it."""
        with self._news:
            found = self._news.wait_for(lambda: [line for line in self.lines if words in line], START_SECONDS)
        if not found:
            raise TimeoutError(f"the server did not print {words!r}: {''.join(self.lines)[-1000:]}")
        return str(found[0])

    def processes(self) -> list[psutil.Process]:
        """The living processes of its session."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                of_session = os.getsid(process.pid) == self.process.pid
                if of_session and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
        return living

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, rank 0 first."""
        found: dict[str, list[psutil.Process]] = {ENGINE: [], WORKER: []}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                for module, ranks in found.items():
                    if module in process.cmdline():
                        ranks.append(process)
        return found[ENGINE] + sorted(found[WORKER], key=lambda process: process.pid)

    def close(self) -> None:
        """End the remaining processes."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class Stream:
    """One streamed completion, which a thread reads to its end."""

    def __init__(self, url: str) -> None:
        self.text = ""
        self.ended: float | None = None
        self.has_begun = threading.Event()
        self._url = urlsplit(url)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "stream": True, "temperature": 0}
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(str(self._url.hostname), int(self._url.port or 0), timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            while line := answer.readline():
                self.text += line.decode()
                self.has_begun.set()
                if '"error"' in self.text and self.ended is None:
                    self.ended = time.monotonic()
        self.has_begun.set()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(60)


def run_round(number: int, moment: str, chance: random.Random, size: int, stages: int) -> dict[str, Any]:
    """Run one server and kill one rank."""
    before = {each.name for each in SHARED.iterdir()}
    server = Server(size, stages, *(["--restart-engine"] if moment == "restart" else []))
    result: dict[str, Any] = {"round": number, "moment": moment, "failures": []}
    try:
        streams: list[Stream] = []
        url = ""
        if moment != "start":
            found = re.search(r"https?://[^\s,]+", server.wait_for("listening on"))
            url = "" if found is None else found[0]
            server.wait_for("ready, serving")
            streams = [Stream(url) for _ in range(NUM_STREAMS)]
            for stream in streams:
                stream.has_begun.wait(60)
            result["failures"] += metrics_failures(url, size)
            time.sleep(chance.uniform(0.0, 0.3))
        else:
            deadline = time.monotonic() + START_SECONDS
            while len(server.ranks()) < size and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(chance.uniform(0.0, LONGEST_START))
        ranks = server.ranks()
        rank = chance.randrange(len(ranks))
        result["rank"], pid = rank, ranks[rank].pid
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            stream.join()
        if streams:
            ends = [stream.ended for stream in streams]
            known = [end - began for end in ends if end is not None]
            result["known_s"] = round(max(known, default=float("inf")), 3)
            if len(known) < NUM_STREAMS or max(known) > KNOWN_SECONDS:
                result["failures"].append(f"{len(known)} of {NUM_STREAMS} streams heard of it in {known}")
            name = (
                f"worker rank {rank} (node 0, pid {pid}) was killed by SIGKILL" if rank else f"its process {pid} ended"
            )
            if nameless := [stream.text[-200:] for stream in streams if name not in stream.text]:
                result["failures"].append(f"an error that does not name the rank: {nameless[0]!r}")
        if moment == "restart":
            result["back_s"] = round(wait_until_back(url, server, {each.pid for each in ranks}, size) - began, 3)
            began = time.monotonic()
            server.process.terminate()
        while (left := server.processes()) and time.monotonic() < began + GONE_SECONDS:
            time.sleep(0.01)
        result["gone_s"] = round(time.monotonic() - began, 3)
        if left:
            result["failures"].append(f"left after {GONE_SECONDS:g} s: {[each.cmdline()[:4] for each in left]}")
        name = f"{'worker ' if rank else ''}rank {rank} (node 0, pid {pid})"
        if url and not any(name in line for line in server.lines):
            result["failures"].append(f"the log does not name the rank: {''.join(server.lines)[-300:]!r}")
        if url and not is_refused(url):
            result["failures"].append(f"a process still listens on {url}")
        if files := [str(path) for path in server.directory.rglob("*")]:
            result["failures"].append(f"files left: {files}")
        if shared := {each.name for each in SHARED.iterdir()} - before:
            result["failures"].append(f"shared memory left: {sorted(shared)}")
    except (TimeoutError, IndexError, psutil.Error) as error:
        result["failures"].append(f"{type(error).__name__}: {error}")
    finally:
        server.close()
    return result


def metrics_failures(url: str, size: int) -> list[str]:
    """What is wrong in /metrics about running ranks."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), int(parts.port or 0), timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    running = re.findall(r'^vllm:rank_running\{.*rank="(\d+)",node="0",.*\} 1\.0$', text, re.MULTILINE)
    collectives = re.findall(r"^vllm:rank_collectives_total\{.*\} ([1-9]\d*)\.0$", text, re.MULTILINE)
    if running != [str(rank) for rank in range(size)] or len(collectives) != size:
        return [f"/metrics has {running} as running ranks, and {len(collectives)} with collectives"]
    return []


def wait_until_back(url: str, server: Server, before: set[int], size: int) -> float:
    """The time when a request was answered again, by as many ranks as before, all of them new."""
    deadline = time.monotonic() + BACK_SECONDS
    parts = urlsplit(url)
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True})
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(str(parts.hostname), int(parts.port or 0), timeout=BACK_SECONDS)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == http.HTTPStatus.OK and json.loads(answer.read())["usage"]["completion_tokens"] == 4:
                now, pids = time.monotonic(), {each.pid for each in server.ranks()}
                if len(pids) != size or pids & before:
                    raise TimeoutError(f"the ranks {sorted(pids)} answered, but those before were {sorted(before)}")
                return now
        time.sleep(0.1)
    raise TimeoutError(f"no request was answered within {BACK_SECONDS:g} s: {''.join(server.lines)[-1000:]}")


def is_refused(url: str) -> bool:
    """Whether no process listens at the URL."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), int(parts.port or 0), timeout=2)
    try:
        connection.connect()
    except OSError:
        return True
    connection.close()
    return False


def main() -> int:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--stages", type=int, default=1, help="groups of layers, which divides the ranks")
    parser.add_argument("--moments", nargs="+", choices=["start", "steps", "restart"], default=["start", "steps"])
    args = parser.parse_args()
    chance = random.Random(args.seed)
    rounds = []
    for number in range(args.rounds):
        moment = args.moments[number % len(args.moments)]
        rounds.append(run_round(number, moment, chance, args.size, args.stages))
        if rounds[-1]["failures"]:
            sys.stderr.write(f"{json.dumps(rounds[-1])}\n")
    known = sorted(each["known_s"] for each in rounds if "known_s" in each)
    gone = sorted(each["gone_s"] for each in rounds if "gone_s" in each)
    back = sorted(each["back_s"] for each in rounds if "back_s" in each)
    failed = [each for each in rounds if each["failures"]]
    report = {
        "rounds": len(rounds),
        "seed": args.seed,
        "size": args.size,
        "stages": args.stages,
        "failed": failed,
        "known_s": {"median": known[len(known) // 2], "max": known[-1]} if known else None,
        "gone_s": {"median": gone[len(gone) // 2], "max": gone[-1]} if gone else None,
        "back_s": {"median": back[len(back) // 2], "max": back[-1]} if back else None,
    }
    print(json.dumps(report, indent=2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
