"""``MeasuredServer``: a server as its own process tree, whose processor time and memory are read from /proc.

The scripts of this folder start it, load it with ``rustvllm bench serve``, and compute differences.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

RUSTVLLM = [sys.executable, "-m", "rustvllm.cli.main"]
SERVE = [*RUSTVLLM, "serve"]
TICKS = os.sysconf("SC_CLK_TCK")
STOP_SECONDS = 30
LAST_LINES = 40


class MeasuredServer:
    """A server that starts when the context begins, and ends with all its processes when the context ends.

    Args:
        command: Its command line.
        url: Where it will listen; None: it prints ``listening on URL,`` and ``ready, serving``, as rustvllm does.
        environment: Variables in addition to those of this process.
        ready_seconds: The longest time that a start may take.
        log: A file for its output; None: the last lines are kept for the error message of a failed start.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str | None = None,
        environment: Mapping[str, str] | None = None,
        ready_seconds: float = 120,
        log: Path | None = None,
    ) -> None:
        self.command = list(command)
        self.url = url or ""
        self.ready_after = 0.0
        self._says_when_ready = url is None
        self._environment = {**os.environ, **(environment or {})}
        self._ready_seconds = ready_seconds
        self._log = log
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        begin = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            while not self._is_ready():
                if self.process.poll() is not None or time.monotonic() - begin > self._ready_seconds:
                    why = "ended" if self.process.poll() is not None else "took too long"
                    text = "".join(self._last_lines)
                    raise SystemExit(f"the server {why} before it was ready: {' '.join(self.command)}\n{text}")
                self._ready.wait(0.1)
        except BaseException:
            self.__exit__()
            raise
        self.ready_after = time.monotonic() - begin
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.resume()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        # Its children are in its session: if any remained, they would disturb the next measurement.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        with open(self._log or os.devnull, "w", encoding="utf-8") as log:  # noqa: PTH123 -- devnull too
            for line in self.process.stdout or ():
                log.write(line)
                log.flush()
                self._last_lines.append(line)
                if self._says_when_ready and "listening on http" in line:
                    self.url = line.split("listening on ")[1].split(",")[0].strip()
                if self._says_when_ready and "ready, serving" in line:
                    self._ready.set()

    def _is_ready(self) -> bool:
        if self._says_when_ready:
            return self._ready.is_set()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:  # noqa: S310 -- our own address
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def get(self, path: str) -> Any:
        """Get a page, and parse it as JSON."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:  # noqa: S310 -- our own address
            return json.load(answer)

    def pids(self) -> list[int]:
        """The ids of the process and all its descendants."""
        found = [self.process.pid]
        for pid in found:
            try:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
            except OSError:
                continue  # ended meanwhile
        return found

    def processor_seconds(self) -> Counter[str]:
        """Processor time of every living process, by process and thread; pools of threads count as one."""
        used: Counter[str] = Counter()
        for pid in self.pids():
            try:
                name = process_name(pid)
                for task in Path(f"/proc/{pid}/task").iterdir():
                    used[f"{name}:{thread_name(pid, task)}"] += task_seconds(task)
            except OSError:
                continue
        return used

    def resident_bytes(self) -> dict[str, int]:
        """Memory of every living process, by name and id."""
        resident = {}
        for pid in self.pids():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                resident[f"{process_name(pid)}[{pid}]"] = pages * os.sysconf("SC_PAGE_SIZE")
            except OSError:
                continue
        return resident

    def pause(self) -> None:
        """Stop all processes, so that they cost nothing while another server is measured."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)


def process_name(pid: int) -> str:
    """A process's name: the last part of the module that it runs, or the name in /proc."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "-m" in arguments[:-1]:
        module = arguments[arguments.index("-m") + 1].split(".")
        return {"main": "server", "process": "engine"}.get(module[-1], module[-1])
    return Path(f"/proc/{pid}/comm").read_text().strip()


def thread_name(pid: int, task: Path) -> str:
    """The main thread's name, or a thread's name without its number."""
    if task.name == str(pid):
        return "main"
    # Python before 3.14 does not name its threads: they have the name of the process.
    return (task / "comm").read_text().strip().rstrip("0123456789_-") or "thread"


def task_seconds(task: Path) -> float:
    """Processor time of a thread: in nanoseconds if the kernel counts them, else in ticks."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS  # user, system


def mode_flags(mode: str) -> list[str]:
    """Flags that put rustvllm's engine into its own ``process``, the default, or into a ``thread`` of the server."""
    return ["--disable-frontend-multiprocessing"] if mode == "thread" else []


def rustvllm_server(
    arguments: Sequence[str], mode: str = "process", log: Path | None = None, command: Sequence[str] | None = None
) -> MeasuredServer:
    """``rustvllm serve`` on a free port.

    Args:
        arguments: Its flags.
        mode: See :func:`mode_flags`.
        log: See :class:`MeasuredServer`.
        command: Another server's command, which takes the same flags.
    """
    return MeasuredServer([*(command or SERVE), *arguments, *mode_flags(mode), "--port", "0"], log=log)


def bench_serve(url: str, concurrency: int, num_prompts: int, *more: str) -> dict[str, Any]:
    """Run ``rustvllm bench serve`` once; returns its report, with ``failed`` and ``errors_by_kind``."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [*RUSTVLLM, "bench", "serve", "--base-url", url, "--max-concurrency", str(concurrency)]
        command += ["--num-prompts", str(num_prompts), "--ignore-eos", "--metric-percentiles", "50,99"]
        command += ["--output-json", file.name, "--disable-tqdm", *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.load(file)
    return report
