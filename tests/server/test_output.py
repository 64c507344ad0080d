"""A server whose output goes nowhere, or is not read, serves and stops as any other."""

import re
import signal
import threading

import pytest
from fault_server import FaultServer, ManyStreams, wait_until


@pytest.fixture
def directory(empty_tmpdir):
    """Holds a server's socket and its ``TMPDIR``."""
    yield empty_tmpdir
    for name in ("t", "log"):
        path = empty_tmpdir / name
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def serve_through_an_engines_end(server: FaultServer) -> None:
    """Streams, a killed engine and another in its place: everything that a server has to tell."""
    server.wait_for_health("ok")
    streams = ManyStreams(server.socket, 8, 20)
    assert set(streams.ends()) == {"whole"}
    server.find("engine").kill()
    wait_until(lambda: server.health() == "restarting", "the engine's end is noticed")
    server.wait_for_health("ok")
    streams = ManyStreams(server.socket, 8, 300)
    streams.wait_until_all_run()
    assert server.end(signal.SIGTERM) == 0, server.log
    assert set(streams.ends()) == {"aborted"}
    assert server.left() == []


@pytest.mark.parametrize("output", ["no input", "no output", "no errors", "disk full", "no reader"])
def test_a_server_without_its_streams_serves_restarts_and_stops(directory, output):
    with FaultServer(directory, output, ["--restart-engine"]) as server:
        serve_through_an_engines_end(server)
    expected = {"no input": ["ready, serving", "stopping", "POST"], "no output": ["POST"], "no errors": ["stopping"]}
    for words in expected.get(output, []):
        assert words in server.log
    assert "Traceback" not in server.log


def test_a_log_that_nothing_reads_is_bounded_and_told_of(directory):
    """Thousands of lines into a pipe that is full; when it is read again, a line says how many are missing."""
    num_requests = 5000  # with a line of some 330 bytes each, 1.6 MB
    with FaultServer(directory, "full", []) as server:
        server.wait_for_health("ok")
        assert server.ask_often("/v1/" + "x" * 230, num_requests) == {404: num_requests}
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(server.read_pipe()))
        reader.start()
        assert server.health() == "ok"
        assert server.end(signal.SIGTERM) == 0
        assert server.left() == []
        reader.join(10)
        assert not reader.is_alive()
    (text,) = found
    assert text.startswith("." * 4095)  # what was in the pipe
    assert "ready, serving" in text
    assert "rustvllm: stopping" in text
    (dropped,) = re.findall(
        r"WARNING .*\[rustvllm.process.output.serving_output\] (\d+) log lines were dropped: they were not", text
    )
    written = text.count('"GET /v1/xxx')
    assert 1000 <= written <= (1 << 20) / 330 + 10
    others = text.count('"GET /health') + 10  # lines that may be among the dropped ones
    assert num_requests <= written + int(dropped) <= num_requests + others
