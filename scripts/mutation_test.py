"""Puts known bugs back into the control plane and proves that its tests fail.

A mutant is an entry of `tests/mutation/*.toml`: a text that occurs once in a source file, what to put in its place, and
the test binary that must fail then. The crates are copied into a build folder that stays between runs, so a mutant
costs one incremental compile of three small crates and as much of a test as it needs to fail. A mutant per processor is
judged at a time, each in a copy of its own. The working tree is only read. Called by `make test-mutation`.

    scripts/mutation_test.py                 the mutants that are not marked `slow`
    scripts/mutation_test.py --all           every mutant: what CI runs
    scripts/mutation_test.py --required      the five bugs that must be found whatever else is left out
    scripts/mutation_test.py --only NAME     one of them; may be repeated
    scripts/mutation_test.py --list          their names and bugs
    scripts/mutation_test.py --check         whether each text still occurs exactly once; nothing is built
    scripts/mutation_test.py --jobs 1        so many mutants at a time

The last line is a JSON object with the numbers and the names of what was not killed; `--json` adds a verdict for each
mutant. Exit status: 0 when every mutant was killed, 1 when one survived, 2 when the tester could not do its work (a
text that is not there, a mutant that does not compile, a test that fails on the sources as they are).
"""

import argparse
import fcntl
import json
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

REPOSITORY = Path(__file__).resolve().parent.parent
MUTANTS = REPOSITORY / "tests" / "mutation"
CRATES = ("kvblocks", "drafting", "scheduler")
BUILD = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")).absolute() / "mutation"

# Most mutants fail within the first seeds, so compiling costs more than running. loom is compiled once and runs long.
PROFILE = """
[profile.dev]
opt-level = 0
debug = 0

[profile.dev.package.loom]
opt-level = 2
"""
# How far a test goes before its mutant counts as a survivor. What the environment says goes first.
LIMITS = {
    "kvblocks:random_operations": {"RUSTVLLM_TEST_SEEDS": "30", "RUSTVLLM_TEST_OPERATIONS": "1000"},
    "scheduler:random_operations": {"RUSTVLLM_TEST_SEEDS": "96", "RUSTVLLM_TEST_OPERATIONS": "1200"},
    "scheduler:beams": {"RUSTVLLM_TEST_SEEDS": "1000"},
    "scheduler:equal_to_naive": {"RUSTVLLM_TEST_SEEDS": "200", "RUSTVLLM_TEST_OPERATIONS": "400"},
}
# A mutant may loop for ever, or until there is no memory. A survivor must not be taken for one of these because the
# machine became busy after the baseline: the slow Python tests run at the same time, with more priority.
SECONDS_AT_LEAST = 20.0
TIMES_THE_BASELINE = 8.0
MAX_MEMORY_BYTES = 4 << 30


# Outcomes that are failures.
LEFT_ALIVE = ("survived", "error")


class TesterError(Exception):
    """The tester cannot say anything about a mutant."""


@dataclass(frozen=True)
class Mutant:
    """One bug that is put back."""

    name: str
    bug: str
    file: str
    old: str
    new: str
    test: str  # "crate:test file", or "crate:loom_tests" for the models among its unit tests
    required: bool = False
    slow: bool = False

    def mutated(self, text: str) -> str:
        """The file's text with the bug in it."""
        count = text.count(self.old)
        if count != 1:
            raise TesterError(f"{self.name}: its text occurs {count} times in {self.file}, not once:\n{self.old}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    name: str
    bug: str
    test: str
    status: str  # "killed", "killed by its time limit", "survived" or "error"
    build_s: float
    run_s: float
    message: str


@dataclass(frozen=True)
class Run:
    """One run of a test binary."""

    passed: bool
    timed_out: bool
    seconds: float
    message: str


def say(text: str) -> None:
    """For people; standard output is for the summary."""
    print(text, file=sys.stderr, flush=True)


def read_mutants() -> list[Mutant]:
    """All mutants, file by file: the required ones first, then the slow ones, so that none comes last."""
    mutants = []
    for path in sorted(MUTANTS.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            try:
                mutants.append(Mutant(**entry))
            except TypeError as error:
                raise TesterError(f"{path}: {entry.get('name')}: {error}") from None
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not mutants or twice:
        raise TesterError(f"{MUTANTS}: {len(mutants)} mutants, names used twice: {twice}")
    return sorted(mutants, key=lambda mutant: (not mutant.required, not mutant.slow))


def check_texts(mutants: Sequence[Mutant]) -> None:
    """Each text occurs once and is changed; all that do not are named together."""
    wrong = []
    for mutant in mutants:
        crate, _, test = mutant.test.partition(":")
        if test != "loom_tests" and not (REPOSITORY / "crates" / crate / "tests" / f"{test}.rs").is_file():
            wrong.append(f"{mutant.name}: there is no test {mutant.test}")
        if not mutant.file.startswith(tuple(f"crates/{crate}/src/" for crate in CRATES)):
            wrong.append(f"{mutant.name}: {mutant.file} is not a source of {', '.join(CRATES)}")
            continue
        try:
            text = (REPOSITORY / mutant.file).read_text(encoding="utf-8")
            if mutant.mutated(text) == text:
                wrong.append(f"{mutant.name}: it changes nothing")
        except (OSError, TesterError) as error:
            wrong.append(str(error))
    if wrong:
        raise TesterError("\n".join(wrong))


class Tree:
    """One copy of the crates, with cargo's build folders next to it."""

    def __init__(self, number: int) -> None:
        self.root = BUILD / str(number)
        self.folder = self.root / "tree"

    def refresh(self) -> None:
        """Makes the copy equal to the working tree. What is equal is not touched: cargo looks at dates."""
        wanted: dict[Path, bytes] = {}
        for crate in CRATES:
            root = REPOSITORY / "crates" / crate
            wanted |= {path.relative_to(REPOSITORY): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        wanted |= {Path(name): (REPOSITORY / name).read_bytes() for name in ("Cargo.lock", "clippy.toml")}
        manifest = (REPOSITORY / "Cargo.toml").read_text(encoding="utf-8")
        members = json.dumps([f"crates/{crate}" for crate in CRATES])
        manifest, found = re.subn(r"(?m)^members = \[.*\]$", f"members = {members}", manifest)
        manifest, profiles = re.subn(r"(?m)^\[profile\.dev\]\n(?:[^\[\n].*\n)*", "", manifest)
        if (found, profiles) != (1, 1):
            raise TesterError("Cargo.toml: expected one line `members = […]` and one [profile.dev]")
        manifest = re.sub(r"(?m)^default-members = .*\n", "", manifest) + PROFILE
        wanted[Path("Cargo.toml")] = manifest.encode()
        for path in self.folder.rglob("*"):
            # cargo shortens the lock file to what these crates need; it stays as long as it is younger than ours.
            if path.is_file() and path.relative_to(self.folder) not in wanted:
                path.unlink()
        lock = self.folder / "Cargo.lock"
        if lock.is_file() and lock.stat().st_mtime > (REPOSITORY / "Cargo.lock").stat().st_mtime:
            del wanted[Path("Cargo.lock")]
        for name, content in wanted.items():
            self.write(name, content)

    def write(self, name: Path | str, content: bytes) -> None:
        """Writes a file of the copy, unless it is like that already."""
        path = self.folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    @contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[None]:
        """The copy has the bug for a while."""
        original = (self.folder / mutant.file).read_text(encoding="utf-8")
        self.write(mutant.file, mutant.mutated(original).encode())
        try:
            yield
        finally:
            self.write(mutant.file, original.encode())

    def build(self, test: str) -> Path:
        """Compiles one test binary and returns its path."""
        crate, _, name = test.partition(":")
        command = ["cargo", "test", "--quiet", "--no-run", "--message-format=json-render-diagnostics"]
        command += ["--package", crate, *(["--lib"] if name == "loom_tests" else ["--test", name])]
        environment = dict(os.environ)
        if name.startswith("loom"):
            # In a build folder of its own, because it makes every crate another crate.
            environment["RUSTFLAGS"] = "--cfg loom"
            command += ["--target-dir", str(self.root / "loom")]
        else:
            command += ["--target-dir", str(self.root / "build")]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise TesterError(f"{test} does not compile:\n{done.stderr}")
        for line in done.stdout.splitlines():
            message = json.loads(line)
            # Nothing else that is built is a test.
            if message.get("profile", {}).get("test") and message.get("executable"):
                return Path(message["executable"])
        raise TesterError(f"cargo built no test binary for {test}")

    def run(self, test: str, binary: Path, limit_s: float) -> Run:
        """Runs a test binary; it ends at its first failure, or at the limit."""
        environment = LIMITS.get(test, {}) | {"LOOM_MAX_PREEMPTIONS": "2"} | os.environ | {"RUST_BACKTRACE": "0"}
        begin = time.monotonic()
        process = subprocess.Popen(
            [binary, *(["loom"] if test.endswith(":loom_tests") else [])],
            cwd=self.folder / "crates" / test.partition(":")[0],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        timed_out = False
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
        seconds = time.monotonic() - begin
        if b"running 0 tests" in printed:
            raise TesterError(f"{test}: there is no test in it")
        if timed_out:
            message = f"no end within {limit_s:.0f} s"
        elif process.returncode < 0:
            message = f"ended by {signal.Signals(-process.returncode).name}"
        else:
            message = first_panic(printed.decode(errors="replace"))
        return Run(process.returncode == 0, timed_out, seconds, message)


def first_panic(printed: str) -> str:
    """Where and why a test panicked first, in one line."""
    found = re.search(r"panicked at (\S+?):\d+:\d+:\n(.*(?:\n +\S.*)*)", printed)
    if found is None:
        return ""
    return f"{Path(found[1]).name}: " + re.sub(r"\s+", " ", found[2])[:200]


def baseline(tree: Tree, test: str) -> float:
    """Seconds that a test may take with a bug. Without one it passes."""
    begin = time.monotonic()
    binary = tree.build(test)
    built = time.monotonic() - begin
    run = tree.run(test, binary, limit_s=300)
    if not run.passed:
        raise TesterError(f"{test} does not pass on the sources as they are: {run.message}")
    say(f"  passes without a bug  {built:5.1f} s + {run.seconds:4.1f} s  {test}")
    return max(SECONDS_AT_LEAST, TIMES_THE_BASELINE * run.seconds)


def judge(tree: Tree, mutant: Mutant, limit_s: float) -> Verdict:
    """Builds and runs one mutant."""
    begin = time.monotonic()
    status, message, run_s = "error", "", 0.0
    try:
        with tree.with_bug(mutant):
            binary = tree.build(mutant.test)
            build_s = time.monotonic() - begin
            run = tree.run(mutant.test, binary, limit_s)
        run_s, message = run.seconds, run.message
        status = "survived" if run.passed else "killed by its time limit" if run.timed_out else "killed"
    except TesterError as error:
        build_s, message = time.monotonic() - begin, str(error)
    say(
        f"  {status:<20}  {build_s:5.1f} s + {run_s:4.1f} s  {mutant.name}: {mutant.bug}\n"
        f"      {mutant.test}: {message or 'it passes'}"
    )
    return Verdict(mutant.name, mutant.bug, mutant.test, status, round(build_s, 2), round(run_s, 2), message)


def choose(mutants: list[Mutant], arguments: argparse.Namespace) -> list[Mutant]:
    """The mutants that the command line asks for."""
    if arguments.only:
        unknown = sorted(set(arguments.only) - {mutant.name for mutant in mutants})
        if unknown:
            raise TesterError(f"there are no mutants {unknown}; --list shows all")
        return [mutant for mutant in mutants if mutant.name in arguments.only]
    if arguments.required:
        return [mutant for mutant in mutants if mutant.required]
    return [mutant for mutant in mutants if arguments.all or not mutant.slow]


Item = TypeVar("Item")
Result = TypeVar("Result")


class Trees:
    """So many copies of the crates, each used by one task at a time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(count):
            tree = Tree(number)
            tree.refresh()
            self.free.put(tree)

    def map(self, task: Callable[[Tree, Item], Result], items: Sequence[Item]) -> list[Result]:
        """Results of ``task`` for every item, in their order; an error or Ctrl-C leaves out what has not begun."""

        def with_a_tree(item: Item) -> Result:
            tree = self.free.get()
            try:
                return task(tree, item)
            finally:
                self.free.put(tree)

        pool = ThreadPoolExecutor(self.count)
        try:
            return list(pool.map(with_a_tree, items))
        finally:
            pool.shutdown(cancel_futures=True)


def test_all(mutants: Sequence[Mutant], *, jobs: int, with_verdicts: bool) -> int:
    """Judges the mutants and prints the summary."""
    started = time.monotonic()
    trees = Trees(jobs)
    tests = sorted({mutant.test for mutant in mutants})
    limits = dict(zip(tests, trees.map(baseline, tests), strict=True))
    verdicts = trees.map(lambda tree, mutant: judge(tree, mutant, limits[mutant.test]), mutants)
    named = {status: [verdict.name for verdict in verdicts if verdict.status == status] for status in LEFT_ALIVE}
    num_killed = len(verdicts) - sum(len(names) for names in named.values())
    summary = {"killed": num_killed, **named, "wall_s": round(time.monotonic() - started, 1)}
    if with_verdicts:
        summary["mutants"] = [asdict(verdict) for verdict in verdicts]
    print(json.dumps(summary))
    return 2 if named["error"] else int(bool(named["survived"]))


def main() -> int:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description="Put known bugs back and prove that the tests fail.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--all", action="store_true", help="the slow ones too")
    group.add_argument("--required", action="store_true", help="only the five that must be found")
    group.add_argument("--only", metavar="NAME", action="append", help="only this one; may be repeated")
    group.add_argument("--list", action="store_true", help="show the mutants")
    group.add_argument("--check", action="store_true", help="look only whether each still applies")
    parser.add_argument(
        "--jobs", type=int, metavar="N", default=len(os.sched_getaffinity(0)), help="mutants at a time (default: CPUs)"
    )
    parser.add_argument("--json", action="store_true", help="print a verdict for each mutant in the last line")
    arguments = parser.parse_args()
    try:
        mutants = read_mutants()
        if arguments.list:
            for mutant in mutants:
                marks = " (required)" * mutant.required + " (slow)" * mutant.slow
                print(f"{mutant.name:<36} {mutant.bug}{marks}")
            return 0
        if arguments.jobs < 1:
            raise TesterError(f"--jobs {arguments.jobs}: at least 1")
        chosen = choose(mutants, arguments)
        check_texts(mutants)
        if arguments.check:
            print(f"{len(mutants)} mutants apply")
            return 0
        BUILD.mkdir(parents=True, exist_ok=True)
        with (BUILD / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Another run works in the same folder.
            return test_all(chosen, jobs=arguments.jobs, with_verdicts=arguments.json)
    except TesterError as error:
        say(f"mutation test: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
