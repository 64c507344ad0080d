"""A follower node that is stopped while it waits for its head."""

import socket
import threading
from types import SimpleNamespace

import pytest

from rustvllm.distributed import nodes
from rustvllm.executor.follower_node import FollowerNode


@pytest.fixture
def silent_head():
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_stop_ends_the_handshake_with_a_silent_head(silent_head, monkeypatch):
    monkeypatch.setattr(nodes, "HANDSHAKE_SECONDS", 3600.0)
    parallel = SimpleNamespace(node_rank=1, master_addr="127.0.0.1", master_port=silent_head.getsockname()[1])
    stopped = threading.Event()
    node = FollowerNode(
        SimpleNamespace(parallel=parallel),
        {},
        b"a secret of 16 bytes",
        lambda _: None,
        lambda: "SIGTERM" if stopped.is_set() else None,
    )
    run = threading.Thread(target=node.run, args=(3600.0,), daemon=True)
    run.start()
    connection, _ = silent_head.accept()
    with connection:
        stopped.set()
        run.join(60)
        assert not run.is_alive()
        while connection.recv(4096):  # what it said before
            pass
    # The stop may come before the thread that connects has noted its connection: it then ends by itself.
    for thread in threading.enumerate():
        if thread.name == "rustvllm-connect":
            thread.join(60)
            assert not thread.is_alive()
