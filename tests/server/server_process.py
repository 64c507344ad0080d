"""A server as a process of its own, started, watched and ended by a test."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx
import psutil

FAKE = [sys.executable, "-W", "error", str(Path(__file__).parent / "serve_fake.py")]
CHILDREN_END_SECONDS = 10
STOP_SECONDS = 4.0
"""How long the end of a server may take: it gives itself two seconds, and the rest is for a busy machine."""
TEMPLATES = "template_worker"
"""Renders chat templates; API processes have one each, and a second for long conversations."""
REAL = [sys.executable, "-m", "rustvllm.cli.main", "serve"]


class ServerProcess:
    """Runs ``command``; on leaving the context whatever is left of its process group is killed.

    Children have a moment first: they end by themselves when their parent is gone, and remove its directory.

    Attributes:
        url: Base URL, from the line the server prints when it listens; empty before.
        lines: What it printed so far, both streams.
    """

    def __init__(self, command: list[str], **environment: str) -> None:
        self.command = command
        self.environment = environment
        self.lines: list[str] = []
        self.url = ""
        self._news = threading.Condition()
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a process group of its own, to see that nothing of it is left
            env={**os.environ, **self.environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.children()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + CHILDREN_END_SECONDS
        while any(is_alive(child) for child in self._seen) and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in self._seen:
            if is_alive(child):
                child.kill()
        self._reader.join(10)
        self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                if found := re.search(r"listening on (https?://\S+),", line):
                    self.url = found.group(1)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "".join(self.lines)

    def wait_for(self, words: str, timeout: float = 60) -> str:
        """The base URL, once ``words`` were printed."""
        with self._news:
            ok = self._news.wait_for(
                lambda: any(words in line for line in self.lines) or not self._reader.is_alive(), timeout
            )
        assert ok, f"not printed within {timeout} s: {words!r}\n{self.output}"
        assert any(words in line for line in self.lines), f"ended without printing {words!r}\n{self.output}"
        return self.url

    def wait_until(self, is_so: Callable[[], bool], timeout: float = 60) -> None:
        """Wait for lines that make something true."""
        with self._news:
            assert self._news.wait_for(is_so, timeout), f"not so within {timeout} s\n{self.output}"

    def wait_until_ready(self, timeout: float = 90) -> str:
        """The base URL of a server that serves."""
        return self.wait_for("ready, serving", timeout)

    def children(self, module: str = "") -> list[psutil.Process]:
        """Its child processes that run a module of that name, oldest first; without one all but those for templates."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._seen.update(found)
        commands = {child: command_of(child) for child in found}
        return [child for child in found if (module in commands[child] if module else TEMPLATES not in commands[child])]

    def engines(self) -> list[psutil.Process]:
        """Its engine processes, by rank."""
        return self.children("rustvllm.engine.process")

    def apis(self) -> list[psutil.Process]:
        """Its API processes."""
        return self.children("api_process")

    def end(self, number: signal.Signals) -> tuple[int, float]:
        """Send a signal and wait.

        Returns:
            Exit code, and the seconds from the signal to the end of the process.
        """
        self.children()
        start = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(15)
        return code, time.monotonic() - start

    def assert_nothing_left(self, seconds: float = 0.0) -> None:
        """No process of the group is alive, nor any child that was ever seen; no process listens.

        Args:
            seconds: How long they may take to be gone.
        """
        deadline = time.monotonic() + seconds
        while left := self._left():
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        if self.url:
            try:
                httpx.get(self.url + "/health", timeout=2)
            except httpx.TransportError:
                return
            raise AssertionError("a process still listens")

    def _left(self) -> list[psutil.Process]:
        left = []
        for process in psutil.process_iter():
            try:
                is_ours = os.getpgid(process.pid) == self.process.pid or process in self._seen
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return left


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; one whose exit code was not asked for has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """Its command line; empty for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
