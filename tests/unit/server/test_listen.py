"""The listening socket: which addresses, who can reach it, and what a Unix socket's file is like."""

import socket
import stat

import pytest

from rustvllm.exceptions import ConfigError
from rustvllm.server.launch.listen import listen_tcp, listen_unix


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="needs the loopback address of IPv6")


@pytest.mark.parametrize(
    ("host", "url", "is_open"),
    [
        ("127.0.0.1", "http://127.0.0.1:", False),
        ("localhost", "http://localhost:", False),
        ("0.0.0.0", "http://127.0.0.1:", True),
        pytest.param("::1", "http://[::1]:", False, marks=needs_ipv6),
        pytest.param("::", "http://[::1]:", True, marks=needs_ipv6),
    ],
)
def test_addresses(host, url, is_open):
    listener = listen_tcp(host, 0)
    try:
        assert listener.url.startswith(url)
        assert listener.is_open_to_others is is_open
        assert listener.with_tls().url == listener.url.replace("http:", "https:")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        assert host == "localhost" or listener.socket.family == family
    finally:
        listener.close()


def test_a_unix_socket_is_for_this_user_alone(tmp_path):
    path = tmp_path / "s"
    listener = listen_unix(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not listener.is_open_to_others
    assert listener.with_tls().curl_target() == f"--unix-socket {path} https://localhost"
    with pytest.raises(ConfigError, match="in use by another server"):
        listen_unix(str(path))
    listener.socket.close()  # as after a crash: the file is left
    again = listen_unix(str(path))
    again.close()
    assert not path.exists()


def test_a_path_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot listen on --uds .* path too long"):
        listen_unix(str(tmp_path / ("x" * 120)))
