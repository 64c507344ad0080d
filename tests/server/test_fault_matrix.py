"""Each signal for each process, in each phase, whatever becomes of the output: how streams end, and the exit code.

The product has 144 cases. A few that differ most run always, the others are ``slow``.
"""

import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from fault_server import FaultServer, ManyStreams, wait_until

NUM_STREAMS = 200
LONG, SHORT = 480, 100
"""Tokens of streams that the fault ends, and of those that go on to their end; ten a second before the fault."""

# A child of a program that ignores hangups (nohup) would ignore them as well.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@dataclass(frozen=True)
class Case:
    """One fault."""

    number: signal.Signals
    role: str
    phase: str
    output: str

    def __str__(self) -> str:
        return f"{self.number.name}-{self.role}-{self.phase}-{self.output}"


@dataclass(frozen=True)
class Outcome:
    """What became of a server.

    Attributes:
        streams: How the open streams ended.
        serves_on: Whether it answered a request after the fault; it was then told to end.
        exit_code: Of the launcher.
        left: Processes and files that should be gone.
    """

    streams: str
    serves_on: bool
    exit_code: int
    left: tuple[str, ...] = ()


ON = Outcome("none", serves_on=True, exit_code=0)
"""No client was served, and the server serves on."""
WHOLE = Outcome("whole", serves_on=True, exit_code=0)
DRAINED = Outcome("whole", serves_on=False, exit_code=0)


def ended(exit_code: int, streams: str = "none") -> Outcome:
    """The server ended by the fault."""
    return Outcome(streams, serves_on=False, exit_code=exit_code)


KILL, TERM, HUP, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP
EXPECTED: dict[tuple[str, str], dict[signal.Signals, Outcome]] = {
    # The launcher takes everything along, except that TERM means: in order. A second TERM means at once.
    ("launcher", "loading"): {KILL: ended(-KILL), TERM: ended(0), HUP: ended(-HUP), STOP: ON},
    ("launcher", "idle"): {KILL: ended(-KILL), TERM: ended(0), HUP: ended(-HUP), STOP: ON},
    ("launcher", "streams"): {
        KILL: ended(-KILL, "broken"),
        TERM: ended(0, "aborted"),
        HUP: ended(-HUP, "broken"),
        STOP: WHOLE,
    },
    ("launcher", "draining"): {
        KILL: ended(-KILL, "broken"),
        TERM: ended(-TERM, "broken"),
        HUP: ended(-HUP, "broken"),
        STOP: DRAINED,
    },
    # An API process is started again, with its streams lost; one that never was ready is a failed start.
    ("API", "loading"): {KILL: ended(1), TERM: ended(1), HUP: ended(1), STOP: ON},
    ("API", "idle"): {KILL: ON, TERM: ON, HUP: ON, STOP: ON},
    ("API", "streams"): {
        KILL: Outcome("broken", serves_on=True, exit_code=0),
        TERM: Outcome("aborted", serves_on=True, exit_code=0),
        HUP: Outcome("broken", serves_on=True, exit_code=0),
        STOP: WHOLE,
    },
    ("API", "draining"): {KILL: ended(0, "broken"), TERM: ended(0, "broken"), HUP: ended(0, "broken"), STOP: DRAINED},
    # Without --restart-engine the last engine's end is the server's. Its streams get an error.
    ("engine", "loading"): {KILL: ended(1), TERM: ended(1), HUP: ended(1), STOP: ON},
    ("engine", "idle"): {KILL: ended(1), TERM: ended(1), HUP: ended(1), STOP: ON},
    ("engine", "streams"): {KILL: ended(1, "error"), TERM: ended(1, "error"), HUP: ended(1, "error"), STOP: WHOLE},
    ("engine", "draining"): {KILL: ended(0, "error"), TERM: ended(0, "error"), HUP: ended(0, "error"), STOP: DRAINED},
}
CASES = [
    Case(number, role, phase, output)
    for (role, phase), by_signal in EXPECTED.items()
    for number, output in product(by_signal, ("open", "closed", "full"))
]
ALWAYS = {
    "SIGTERM-launcher-loading-full",
    "SIGSTOP-launcher-idle-closed",
    "SIGTERM-launcher-streams-full",
    "SIGHUP-launcher-streams-closed",
    "SIGTERM-launcher-draining-full",
    "SIGKILL-API-streams-full",
    "SIGSTOP-API-idle-open",
    "SIGKILL-engine-loading-closed",
    "SIGSTOP-engine-streams-full",
    "SIGTERM-engine-idle-full",
    "SIGKILL-engine-draining-closed",
}


def play(case: Case) -> Outcome:
    """Start a server, bring it into the phase, send the signal, see how everything ends."""
    expected = EXPECTED[case.role, case.phase][case.number]
    is_loading, is_draining = case.phase == "loading", case.phase == "draining"
    has_streams = case.phase in ("streams", "draining")
    flags = ["--shutdown-timeout", "30"] if is_draining else []
    with (
        tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as directory,
        FaultServer(Path(directory), case.output, flags, hold=is_loading, slow=has_streams) as server,
    ):
        server.wait_for_health("loading" if is_loading else "ok")
        wait_until(lambda: len(server.children()) == 2, "an API and an engine process")
        streams = None
        if has_streams:
            streams = ManyStreams(server.socket, NUM_STREAMS, SHORT if expected.streams == "whole" else LONG)
            streams.wait_until_all_run()
        if is_draining:
            server.process.send_signal(TERM)
            server.wait_for_health("stopping")
            time.sleep(0.5)  # a second signal that comes sooner is the echo of the first
        process = server.find(case.role)
        process.send_signal(case.number)
        if case.number is STOP:
            see_it_stopped(server, case)
            process.resume()
        server.release()
        how = {"none"} if streams is None else set(streams.ends())
        assert len(how) == 1, Counter() if streams is None else streams.ends()
        if expected.serves_on:
            serves_on = serves(server)
            exit_code = server.end(TERM)
        else:
            exit_code = server.process.wait(30)
            serves_on = False
        return Outcome(how.pop(), serves_on, exit_code, tuple(server.left()))


def see_it_stopped(server: FaultServer, case: Case) -> None:
    """While a process is stopped: who answers what."""
    if case.phase == "draining":
        time.sleep(0.3)
    elif case.role == "API":
        assert server.health(timeout=0.5) == ""
    elif case.role == "engine" and case.phase != "loading":
        server.wait_for_health("stalled")
    else:
        assert server.health() == ("loading" if case.phase == "loading" else "ok")


def serves(server: FaultServer) -> bool:
    """Wait until it answers a request, its API process perhaps a new one."""

    def answers() -> bool:
        assert server.process.poll() is None, server.log
        return server.ask("POST", "/v1/completions", '{"prompt": "Once", "max_tokens": 2}')[0] == 200

    wait_until(answers, "a request is answered")
    server.wait_for_health("ok")
    return True


def _parameters() -> Iterator[object]:
    for case in CASES:
        yield pytest.param(case, marks=[] if str(case) in ALWAYS else [pytest.mark.slow], id=str(case))


@pytest.mark.parametrize("case", list(_parameters()))
def test_a_fault_ends_every_stream_and_the_server_as_told(case):
    assert len(CASES) == 4 * 3 * 4 * 3
    assert {str(each) for each in CASES} >= ALWAYS
    assert play(case) == EXPECTED[case.role, case.phase][case.number]
