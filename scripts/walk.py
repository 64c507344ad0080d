"""A newcomer's walk: every command and every Python example of README.md and docs/ is run, or it is said why not.

    python scripts/walk.py                 all of it
    python scripts/walk.py --quick         what the tests run: `tests/e2e/test_walk.py`
    python scripts/walk.py --list          what there is, and what becomes of it
    python scripts/walk.py docs/api.md     one document

Examples run in one empty folder, against one server of the embedded model. `scripts/walk.toml` is the one place that
says what stands for names that are not here (a hub model, port 8000), and which examples are run by something else or
cannot be run; both lists are checked both ways.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parent.parent
PLAN = Path(__file__).with_suffix(".toml")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FATES, ADVICE = ("elsewhere", "cannot", "slow"), ("expect", "before", "keep")
SHELL, PROMPTED, PYTHON = ("bash", "sh"), ("console", "text"), ("python",)
SERVER = re.compile(r"(?:\w+=\S+ )*rustvllm serve\b")
READY_SECONDS = 120
SECONDS = 300
"""One example at most."""


@dataclass(frozen=True)
class Example:
    """One thing a document tells people to type."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text.splitlines()[0][:100]}"


@dataclass(frozen=True)
class Plan:
    """What `walk.toml` says.

    Attributes:
        names: What is written, and what stands for it.
        elsewhere: Beginnings of examples that something else runs: by what, and a word that is found there.
        cannot: Beginnings of examples that are not run, and why.
        slow: Beginnings of examples that are left out of the quick walk.
        expect: Beginnings of examples whose exit code is not 0, or that print something worth checking.
        before: Beginnings of examples that need something, and the code that comes before them.
        files: Fenced blocks of documents that an example reads as a file of that name.
        keep: Beginnings of servers that the rest of the document needs.
    """

    names: list[dict[str, str]]
    elsewhere: list[dict[str, str]]
    cannot: list[dict[str, str]]
    slow: list[dict[str, str]]
    expect: list[dict[str, Any]] = field(default_factory=list)
    before: list[dict[str, str]] = field(default_factory=list)
    keep: list[dict[str, str]] = field(default_factory=list)
    files: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls) -> Self:
        with PLAN.open("rb") as file:
            return cls(**tomllib.load(file))

    def entry(self, entries: Sequence[dict[str, Any]], example: Example) -> dict[str, Any] | None:
        """The entry for an example, if there is one: the one that says most of how it starts."""
        fitting = [entry for entry in entries if example.text.startswith(entry["starts"])]
        return max(fitting, key=lambda entry: len(entry["starts"]), default=None)

    def fate(self, example: Example) -> tuple[str, dict[str, Any]]:
        """What becomes of an example: `elsewhere`, `cannot`, `slow` or `run`, and the entry that says so."""
        entries = {name: self.entry(getattr(self, name), example) for name in FATES}
        chosen = {name: entry for name, entry in entries.items() if entry is not None}
        name = max(chosen, key=lambda name: len(chosen[name]["starts"]), default="run")
        return name, chosen.get(name, {})

    def stale(self, examples: Sequence[Example]) -> list[str]:
        """Entries that are about nothing any more."""
        wrong: list[str] = []
        used = [id(self.fate(example)[1]) for example in examples]
        used += [id(self.entry(getattr(self, name), example)) for example in examples for name in ADVICE]
        wrong += [
            f"{name}: {entry['starts']!r} decides nothing: no example starts so, or another entry says more"
            for name in FATES + ADVICE
            for entry in getattr(self, name)
            if id(entry) not in used
        ]
        for entry in self.elsewhere:
            place = REPOSITORY / entry["by"]
            if not place.exists() or entry["word"] not in place.read_text(encoding="utf-8"):
                wrong.append(f"elsewhere: {entry['word']!r} is not in {entry['by']}")
        bodies = [fence[2] for path in documents() for fence in FENCE.finditer(path.read_text(encoding="utf-8"))]
        wrong += [
            f"files: no block starts with {entry['starts']!r}"
            for entry in self.files
            if not any(body.startswith(entry["starts"]) for body in bodies)
        ]
        for entry in self.names:
            if not any(entry["written"] in text for text in [*(example.text for example in examples), *bodies]):
                wrong.append(f"names: no example contains {entry['written']!r}")
        return wrong


def documents() -> list[Path]:
    """README.md and everything under docs/."""
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def examples_of(path: Path) -> list[Example]:
    """What a document tells people to type, in its order."""
    text, found = path.read_text(encoding="utf-8"), []
    for fence in FENCE.finditer(text):
        language, body = fence[1], fence[2]
        line = text.count("\n", 0, fence.start()) + 2
        if language in SHELL + PROMPTED:
            for offset, command in commands_of(body, prompted=language in PROMPTED):
                found.append(Example(str(path.relative_to(REPOSITORY)), line + offset, "bash", command))
        elif language in PYTHON:
            found.append(Example(str(path.relative_to(REPOSITORY)), line, "python", body.rstrip()))
    return found


def commands_of(body: str, *, prompted: bool = False) -> Iterator[tuple[int, str]]:
    """The commands of a shell block, each with the line it begins in; continued and quoted lines belong together."""
    pending, begin, ends_at = "", 0, ""
    for number, line in enumerate(body.splitlines()):
        if prompted and not pending:
            if not line.startswith("$ "):
                continue  # what a command printed
            line = line[2:]  # noqa: PLW2901
        if not pending:
            begin = number
        pending += line + "\n"
        if ends_at:
            if line.strip() == ends_at:
                yield begin, pending.strip()
                pending, ends_at = "", ""
            continue
        if here := re.search(r"<<-?\s*'?(\w+)'?", line):
            ends_at = here[1]
            continue
        if line.rstrip().endswith("\\"):
            continue
        try:
            words = shlex.split(pending.replace("\\\n", " "), comments=True)
        except ValueError:  # a quotation goes on in the next line
            continue
        if words:
            yield begin, pending.strip()
        pending = ""


class Walk:
    """Runs examples in one folder, with one server that starts when one is needed.

    Attributes:
        folder: Where they run; what documents show as files is written into it when a document is entered.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.folder = Path(tempfile.mkdtemp(prefix="walk"))
        self._server: _Server | None = None
        self._document, self._kept = "", list[_Server]()
        scripts = Path(sys.executable).parent
        self._environment = {
            **os.environ,
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self.folder),
        }
        for name in ("benches", "docs"):
            (self.folder / name).symlink_to(REPOSITORY / name)
        model = REPOSITORY / "python" / "rustvllm" / "assets" / "tiny"
        (self.folder / "model-folder").symlink_to(model)
        (self.folder / "trace.jsonl").write_text(
            "".join(
                json.dumps({"timestamp": 50 * i, "input_length": 100, "output_length": 10, "hash_ids": [i % 4]}) + "\n"
                for i in range(20)
            )
        )
        turns = [
            {"from": "human", "value": "Tell me a story."},
            {"from": "gpt", "value": "Once upon a time there was."},
        ]
        (self.folder / "sharegpt.json").write_text(json.dumps([{"conversations": turns}] * 20))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.enter("")
        code = 0 if self._server is None else self._server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        if code:
            raise WalkError(f"the server for all ended with exit code {code}")

    def enter(self, document: str) -> None:
        """Go on with a document; what another one had running ends."""
        if document != self._document:
            for server in self._kept:
                server.stop()
            self._document, self._kept = document, []
            if document:
                self._write_files(REPOSITORY / document)

    def _write_files(self, document: Path) -> None:
        for fence in FENCE.finditer(document.read_text(encoding="utf-8")):
            for entry in self._plan.files:
                if fence[2].startswith(entry["starts"]):
                    (self.folder / entry["name"]).write_text(self._rewritten(fence[2]))

    @property
    def server(self) -> "_Server":
        """The server for all examples that need one."""
        if self._server is None:
            self._server = _Server(["rustvllm", "serve"], self.folder, self._environment)
            self._server.wait_until_ready()
        return self._server

    def run(self, example: Example) -> None:
        """Run one.

        Raises:
            WalkError: It did not do what a reader expects.
        """
        text = self._rewritten(example.text)
        before = self._plan.entry(self._plan.before, example)
        if before is not None and example.language == "bash":
            self._run(["bash", "-euo", "pipefail", "-c", before["code"]], example)
        if text == "rustvllm serve":
            _ = self.server  # the one for all
        elif example.language == "bash" and SERVER.match(text) and "--help" not in text:
            self._serve(text, example)
        elif example.language == "bash":
            self._run(["bash", "-euo", "pipefail", "-c", text], example)
        else:
            self._run([sys.executable, "-c", f"{before['code']}\n{text}" if before else text], example)

    def _rewritten(self, text: str) -> str:
        for entry in self._plan.names:
            if entry["written"] in text:
                value = entry["here"].replace("{folder}", str(self.folder))
                if "{port}" in value or "{url}" in value:
                    value = value.replace("{port}", str(self.server.port)).replace("{url}", self.server.url)
                text = text.replace(entry["written"], value)
        # An answer that is an error is none that a reader expects; curl by itself ends with 0 all the same.
        text = re.sub(r"^curl ", "curl --silent --show-error --fail-with-body ", text)
        for command in ("rustvllm chat", "rustvllm complete"):
            if text.startswith(command) and "--url" not in text:
                text = text.replace(command, f"{command} --url {self.server.url}/v1", 1)
        if text.startswith("rustvllm bench serve") and "--port" not in text:
            text = text.replace("rustvllm bench serve", f"rustvllm bench serve --port {self.server.port}", 1)
        return text

    def _run(self, command: list[str], example: Example) -> None:
        expected = self._plan.entry(self._plan.expect, example) or {}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise WalkError(f"{example}: not at its end after {SECONDS} s") from None
        printed = done.stdout + done.stderr
        if done.returncode != expected.get("code", 0):
            raise WalkError(f"{example}: exit code {done.returncode}\n{printed[-3000:]}")
        if expected.get("prints", "") not in printed:
            raise WalkError(f"{example}: {expected['prints']!r} was not printed\n{printed[-3000:]}")

    def _serve(self, text: str, example: Example) -> None:
        """A server of its own: it becomes ready and ends in order."""
        words = shlex.split(text.replace("\\\n", " "), comments=True)
        words = [word for word in words if word != "&"]
        headless = "--headless" in words
        server = _Server(words, self.folder, self._environment)
        try:
            server.wait_until_ready("engine 0 ready" if headless else "ready, serving")
        except WalkError as error:
            server.stop()
            raise WalkError(f"{example}: {error}") from None
        if self._plan.entry(self._plan.keep, example):
            self._kept.append(server)
        elif (code := server.stop()) != 0:
            raise WalkError(f"{example}: exit code {code}\n{server.output[-3000:]}")


class WalkError(Exception):
    """An example does not do what a reader expects."""


class _Server:
    """``rustvllm serve`` on a port that is free."""

    def __init__(self, words: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = ""
        settings = {}
        words = list(words)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            settings[name] = value
        if "--port" in words:
            words[words.index("--port") + 1] = str(self.port)
        elif "--uds" not in words:
            words += ["--port", str(self.port)]
        if "--num-gpu-blocks-override" not in words and "--engine-address" not in words:
            words += ["--num-gpu-blocks-override", "2048"]  # an example needs no gigabytes
        self._process = subprocess.Popen(
            words, cwd=folder, env={**environment, **settings}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.output += line
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_until_ready(self, words: str = "ready, serving") -> None:
        with self._news:
            self._news.wait_for(lambda: words in self.output or not self._reader.is_alive(), READY_SECONDS)
            if words not in self.output:
                raise WalkError(f"the server was not ready\n{self.output[-3000:]}")

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        self._reader.join(10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Walk; 1 when something did not do what it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", help="these alone")
    parser.add_argument("--quick", action="store_true", help="without what takes long")
    parser.add_argument("--list", action="store_true", help="run nothing, say what would be")
    args = parser.parse_args()
    plan = Plan.read()
    everything = [example for path in documents() for example in examples_of(path)]
    wrong = plan.stale(everything)
    failed = list(wrong)
    for line in wrong:
        print(f"STALE {line}")
    with Walk(plan) as walk:
        for example in everything:
            if args.documents and example.document not in args.documents:
                continue
            fate, entry = plan.fate(example)
            if fate in ("elsewhere", "cannot"):
                print(f"  --  {example}   ({entry.get('why') or 'run by ' + entry['by']})")
                continue
            if args.list or (args.quick and fate == "slow"):
                print(f"{fate:>4}  {example}")
                continue
            walk.enter(example.document)
            begin = time.monotonic()
            try:
                walk.run(example)
            except WalkError as error:
                failed.append(str(error))
                print(f"FAIL  {error}", flush=True)
            else:
                print(f"  ok  {example}   ({time.monotonic() - begin:.1f} s)", flush=True)
    print(f"{len(failed)} failed" if failed else "all is as the documents say")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
