"""An engine that hangs, with ``--stall-action end``: its clients get an error, and it is killed."""

import signal
import time

import httpx
import psutil
import pytest
from server_process import REAL, ServerProcess
from test_faults import SIM, SLOW, STREAM, OpenStreams, complete, wait_for_health

from rustvllm.cli.serve import make_parser
from rustvllm.exceptions import ConfigError
from rustvllm.server.launch.process_layout import ProcessLayout

END = ["--stall-timeout", "1", "--stall-action", "end"]


def assert_all_ended_with_an_error(streams: OpenStreams) -> None:
    streams.join()
    for text in streams.texts:
        assert '"error"' in text, text[-300:]
        assert text.endswith("data: [DONE]\n\n"), text[-300:]


@pytest.mark.parametrize("args", [["--disable-frontend-multiprocessing"], ["--stall-timeout", "0"]])
def test_what_cannot_be_ended_is_refused_by_name(args):
    parsed = make_parser().parse_args(["serve", "--stall-action", "end", *args])
    with pytest.raises(ConfigError, match=r"--stall-action end.*needs|--stall-action end needs") as refusal:
        ProcessLayout.from_args(parsed)
    assert args[0] in str(refusal.value)


def test_an_engine_that_hangs_is_ended_and_the_server_with_it(empty_tmpdir):
    with ServerProcess([*SLOW, *END, "-asc", "2"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        streams = OpenStreams(url, 8)
        server.engines()[0].suspend()
        whole = complete_slowly(url)
        assert_all_ended_with_an_error(streams)
        assert whole is None or whole.status_code == 500
        assert server.process.wait(20) == 1
        server.assert_nothing_left(2)
    assert "engine 0 has shown no sign of life for 2." in server.output
    assert "(--stall-timeout 1, --stall-action end), and counts as dead; its process" in server.output
    assert "is killed; stopping the server" in server.output
    assert list(empty_tmpdir.iterdir()) == []


def complete_slowly(url: str) -> httpx.Response | None:
    """A whole answer of an engine that hangs; None: the server ended before it was asked."""
    try:
        return complete(url)
    except httpx.TransportError:
        return None


def test_the_one_that_hangs_of_two_engines_is_started_again_and_the_other_goes_on(empty_tmpdir):
    command = [*SLOW, *END, "-dp", "2", "-asc", "2", "--restart-engine"]
    with ServerProcess(command, TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        streams = OpenStreams(url, 16)
        first, second = server.engines()
        first.suspend()
        streams.join()
        broken = [text for text in streams.texts if '"error"' in text]
        assert 0 < len(broken) < 16
        assert all(text.endswith("data: [DONE]\n\n") for text in streams.texts)
        assert not first.is_running()
        assert second.is_running()
        deadline = time.monotonic() + 60
        while server.output.count("engine 0 is back") < 2:  # each API process has it back
            assert time.monotonic() < deadline, server.output
            time.sleep(0.05)
        wait_for_health(url, "ok")
        # A step that takes long, but less than twice the timeout, is not a hang: it is reported, and that is all.
        third = next(engine for engine in server.engines() if engine != second)
        third.suspend()
        time.sleep(1.2)
        third.resume()
        wait_for_health(url, "ok")
        assert third.is_running()
        assert complete(url).status_code == 200
        assert server.end(signal.SIGTERM)[0] == 0
        server.assert_nothing_left(1)
    assert server.output.count("counts as dead") == 1
    assert list(empty_tmpdir.iterdir()) == []


def test_a_launcher_that_was_stopped_itself_kills_no_engine(empty_tmpdir):
    with ServerProcess([*SIM, *END], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        launcher = psutil.Process(server.process.pid)
        processes = [launcher, *server.engines()]
        for process in processes:
            process.suspend()
        time.sleep(4)
        for process in reversed(processes):
            process.resume()
        time.sleep(2)
        assert complete(url).status_code == 200
        assert server.end(signal.SIGTERM)[0] == 0
        server.assert_nothing_left(1)
    assert "counts as dead" not in server.output


def test_a_front_end_leaves_an_engine_elsewhere_that_hangs_and_its_launcher_ends_it(empty_tmpdir):
    address = f"unix:{empty_tmpdir}/engine"
    headless = [*SLOW[:-2], "--sim-step-time", "20", "--headless", "--engine-address", address]
    environment = {"TMPDIR": str(empty_tmpdir)}
    with ServerProcess(headless, **environment) as engines:
        engines.wait_for("ready, front ends connect")
        front = [*REAL, "--port", "0", "--engine-address", address, *END]
        with ServerProcess(front, **environment) as server:
            url = server.wait_until_ready()
            streams = OpenStreams(url, 4, STREAM)
            (engine,) = engines.engines()
            engine.suspend()
            assert_all_ended_with_an_error(streams)
            assert all("has shown no sign of life for 2." in text for text in streams.texts)
            assert server.process.wait(10) == 1
            server.assert_nothing_left(2)
        assert "its requests end, and its own launcher may end it" in server.output
        assert engine.is_running(), "the headless server was not told to end it"
        engine.resume()
        with ServerProcess([*front, "--restart-engine"], **environment) as server:
            url = server.wait_until_ready()
            engine.suspend()
            wait_for_health(url, "restarting")
            engine.resume()
            wait_for_health(url, "ok")
            assert complete(url).status_code == 200
            assert server.end(signal.SIGTERM)[0] == 0
        assert engines.end(signal.SIGTERM)[0] == 0
    with ServerProcess([*headless, *END, "--restart-engine"], **environment) as engines:
        engines.wait_for("ready, front ends connect")
        (engine,) = engines.engines()
        engine.suspend()
        deadline = time.monotonic() + 60
        while engines.output.count("engine 0 listens on") < 2:
            assert time.monotonic() < deadline, engines.output
            time.sleep(0.05)
        assert not engine.is_running()
        # It may have hung before the launcher had heard from it at all.
        assert (
            "counts as dead; its process" in engines.output or "has not answered since it was ready" in engines.output
        )
        assert engines.end(signal.SIGTERM)[0] == 0
        engines.assert_nothing_left(1)
