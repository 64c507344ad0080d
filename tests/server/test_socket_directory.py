"""The directory of the engines' sockets is removed while a server serves, as by a cleaner of temporary files."""

import shutil
import signal
import time

from server_process import ServerProcess
from test_faults import SIM, OpenStreams, complete


def wait_for_count(server: ServerProcess, words: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while server.output.count(words) < count:
        assert time.monotonic() < deadline, server.output
        time.sleep(0.05)


def test_a_removed_directory_is_made_again_and_a_new_api_process_finds_its_engines(empty_tmpdir):
    with ServerProcess([*SIM, "-dp", "2"], TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        streams = OpenStreams(url, 4)
        (directory,) = empty_tmpdir.iterdir()
        assert len(list(directory.iterdir())) == 2
        shutil.rmtree(directory)
        wait_for_count(server, "listens there again", 2)
        assert directory.stat().st_mode & 0o777 == 0o700
        streams.join()
        assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in streams.texts)
        (api,) = server.apis()
        api.kill()
        wait_for_count(server, "API process 0 ready", 2)
        assert complete(url).status_code == 200
        # Once more, with no time in between: the API process is there before the sockets are.
        shutil.rmtree(directory)
        (api,) = server.apis()
        api.kill()
        wait_for_count(server, "API process 0 ready", 3)
        assert complete(url).status_code == 200
        assert f"the socket {directory}/engine-0.sock was removed" in server.output
        assert server.end(signal.SIGTERM)[0] == 0
        server.assert_nothing_left(1)
    assert list(empty_tmpdir.iterdir()) == []


def test_an_api_process_without_a_way_to_its_engine_says_so(empty_tmpdir):
    with ServerProcess(SIM, TMPDIR=str(empty_tmpdir)) as server:
        url = server.wait_until_ready()
        (directory,) = empty_tmpdir.iterdir()
        (engine,) = server.engines()
        engine.suspend()
        shutil.rmtree(directory)
        (api,) = server.apis()
        api.kill()
        server.wait_for(f"no connection to engine 0 on unix:{directory}/engine-0.sock yet", 30)
        assert "its socket is not there" in server.output
        engine.resume()
        wait_for_count(server, "API process 0 ready", 2)
        assert complete(url).status_code == 200
        # The same with a socket that is there, of an engine that does not answer.
        engine.suspend()
        (api,) = server.apis()
        api.kill()
        server.wait_for("a process listens there and does not answer", 30)
        engine.resume()
        wait_for_count(server, "API process 0 ready", 3)
        assert complete(url).status_code == 200
        assert server.end(signal.SIGTERM)[0] == 0
        server.assert_nothing_left(1)
    assert list(empty_tmpdir.iterdir()) == []
