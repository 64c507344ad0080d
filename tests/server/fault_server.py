"""A server whose output is as a test wants it and whose load is held until told; hundreds of streams at once."""

import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self

import psutil
from server_process import REAL, TEMPLATES, command_of, is_alive

COMMAND = [*REAL, "--executor", "sim", "--sim-step-time", "20", "--max-num-seqs", "256", "--stall-timeout", "0.6"]
COMMAND += ["--num-gpu-blocks-override", "8192", "--enable-access-log"]
REDIRECTIONS = {
    "open": ">>$LOG 2>&1",
    "closed": "<&- >&- 2>&-",
    "no input": "<&- >>$LOG 2>&1",
    "no output": ">&- 2>>$LOG",
    "no errors": ">>$LOG 2>&-",
    "disk full": ">/dev/full 2>&1",
    "full": "",  # a pipe that takes nothing more until it is read
    "no reader": "",  # a pipe that nothing reads any more
}
"""What becomes of a server's standard streams."""
IN_ENGINES = '''
"""In an engine process: the executor is made when the file $HOLD is gone; while $SLOW is there, steps take 0.1 s."""
import os, sys, time
if "rustvllm.engine.process" in sys.orig_argv and "HOLD" in os.environ:
    from rustvllm.executor.sim import SimExecutor
    make, execute = SimExecutor.__init__, SimExecutor.execute_model
    def hold(self, *arguments, **options):
        while os.path.exists(os.environ["HOLD"]):
            time.sleep(0.02)
        make(self, *arguments, **options)
    def execute_slowly(self, output):
        if os.path.exists(os.environ["SLOW"]):
            self._end = max(self._end, time.perf_counter()) + 0.08
        execute(self, output)
    SimExecutor.__init__, SimExecutor.execute_model = hold, execute_slowly
'''


def wait_until(condition, what: str, seconds: float = 60) -> None:
    """Look at ``condition`` until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s: {what}"
        time.sleep(0.02)


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe that takes nothing more until it is read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while os.write(writer, b"." * 4095 + b"\n"):
            pass
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer


class FaultServer:
    """A server on a Unix socket.

    Args:
        directory: Its ``TMPDIR``, socket and log; with a short path.
        output: One of :data:`REDIRECTIONS`.
        flags: Further flags.
        hold: Keep the engine loading until :meth:`release`.
        slow: Let a step take five times as long until :meth:`release`: hundreds of streams have time to begin.
    """

    def __init__(
        self, directory: Path, output: str, flags: list[str], *, hold: bool = False, slow: bool = False
    ) -> None:
        self.tmp = directory / "t"
        self.socket = str(directory / "s")
        self.seen: set[psutil.Process] = set()
        self._output = output
        self._log = directory / "log"
        self._held_by = {"HOLD": directory / "hold", "SLOW": directory / "slow"}
        self._command = [*COMMAND, "--uds", self.socket, *flags]
        self.tmp.mkdir()
        self._environment = {**os.environ, "TMPDIR": str(self.tmp), "LOG": str(self._log)}
        if hold or slow:
            (directory / "sitecustomize.py").write_text(IN_ENGINES)
            path = f"{directory}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
            self._environment |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
            self._environment |= {name: str(file) for name, file in self._held_by.items()}
        for file, is_made in zip(self._held_by.values(), (hold, slow), strict=True):
            if is_made:
                file.touch()

    def __enter__(self) -> Self:
        self._pipe = full_pipe() if self._output == "full" else os.pipe()
        if self._output == "no reader":
            os.close(self._pipe[0])
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" {REDIRECTIONS[self._output]}', *self._command],
            stdout=self._pipe[1],
            stderr=self._pipe[1],
            env=self._environment,
            start_new_session=True,
        )
        os.close(self._pipe[1])
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.children()
        for process in (self.process, *filter(is_alive, self.seen)):
            process.kill()
        self.process.wait()
        if self._output != "no reader":
            os.close(self._pipe[0])

    def read_pipe(self) -> str:
        """What comes out of the pipe up to its end, which is the server's."""
        with open(self._pipe[0], "rb", closefd=False) as pipe:
            return pipe.read().decode()

    @property
    def log(self) -> str:
        """What it has written, where that can be read."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def children(self, module: str = "") -> list[psutil.Process]:
        """Its child processes that run a module of that name; without one all but those for templates."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self.seen.update(found)
        commands = {child: command_of(child) for child in found}
        return [child for child in found if (module in commands[child] if module else TEMPLATES not in commands[child])]

    def find(self, role: str) -> psutil.Process:
        """The launcher, the API or the engine process."""
        if role == "launcher":
            return psutil.Process(self.process.pid)
        (process,) = self.children({"API": "api_process", "engine": "engine.process"}[role])
        return process

    def release(self) -> None:
        """Let a held engine load, and a slow one go as fast as others."""
        for file in self._held_by.values():
            file.unlink(missing_ok=True)

    def ask(self, method: str, path: str, body: str | None = None, timeout: float = 30) -> tuple[int, dict[str, Any]]:
        """One request: status and answer; 0 when there is none."""
        with closing(_Connection(self.socket, timeout)) as connection:
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            except (OSError, HTTPException):
                return 0, {}

    def ask_often(self, path: str, count: int) -> Counter[int]:
        """So many GETs over one connection; how many had which status."""
        statuses: Counter[int] = Counter()
        with closing(_Connection(self.socket, 30)) as connection:
            for _ in range(count):
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
                statuses[answer.status] += 1
        return statuses

    def health(self, timeout: float = 30) -> str:
        """The status that ``/health`` tells; empty while nothing answers."""
        return str(self.ask("GET", "/health", timeout=timeout)[1].get("status", ""))

    def wait_for_health(self, status: str) -> None:
        """Wait until ``/health`` tells this."""

        def is_so() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.log}"
            return self.health() == status

        wait_until(is_so, status)

    def end(self, number: signal.Signals) -> int:
        """Send the launcher a signal; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)

    def left(self) -> list[str]:
        """Processes and files that are still there when they had time to go."""
        deadline = time.monotonic() + 10
        while any(map(is_alive, self.seen)) or any(self.tmp.iterdir()):
            if time.monotonic() > deadline:
                return [*map(command_of, filter(is_alive, self.seen)), *map(str, self.tmp.iterdir())]
            time.sleep(0.02)
        return []


class _Connection(HTTPConnection):
    """HTTP over a Unix socket, which is closed also when nothing listens."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class ManyStreams:
    """Streaming requests that one thread reads.

    Args:
        path: The server's Unix socket.
        count: How many.
        max_tokens: Of each.
    """

    def __init__(self, path: str, count: int, max_tokens: int) -> None:
        body = f'{{"prompt": "Once", "max_tokens": {max_tokens}, "ignore_eos": true, "stream": true}}'
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        request = (head + body).encode()
        self.texts = [bytearray() for _ in range(count)]
        self._selector = selectors.DefaultSelector()
        for text in self.texts:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(30)
            connection.connect(path)
            connection.sendall(request)
            self._selector.register(connection, selectors.EVENT_READ, text)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                try:
                    piece = key.fileobj.recv(1 << 16)
                except ConnectionError:
                    piece = b""
                key.data.extend(piece)
                if not piece:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()

    def wait_until_all_run(self) -> None:
        """Each has sent its first event and none its last."""
        wait_until(lambda: all(b'"text"' in text for text in self.texts), "every stream has begun")
        assert not any(b"[DONE]" in text for text in self.texts), "a stream was at its end before the last one began"

    def ends(self) -> Counter[str]:
        """How many ended how, once all have: ``whole``, ``error`` (an event says so), ``aborted``, ``broken``."""
        self._thread.join(60)
        assert not self._thread.is_alive(), f"streams without an end: {len(self._selector.get_map())}"
        return Counter(map(_end_of, self.texts))


def _end_of(text: bytes) -> str:
    if not text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        return "broken"
    if b'"error"' in text:
        return "error"
    for reason, name in ((b'"finish_reason":"length"', "whole"), (b'"finish_reason":"abort"', "aborted")):
        if reason in text:
            return name
    return f"unknown: {text[-300:]!r}"
