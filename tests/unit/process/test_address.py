"""Addresses of engines and the secret for TCP: which are accepted, and what errors say about the others."""

from pathlib import Path

import pytest

from rustvllm.exceptions import ConfigError
from rustvllm.process.address import EngineAddress, read_secret


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:/a/b", EngineAddress(path=Path("/a/b"))),
        ("unix:/" + "x" * 106, EngineAddress(path=Path("/" + "x" * 106))),
        ("tcp:127.0.0.1:0", EngineAddress(host="127.0.0.1", port=0)),
        ("tcp:host.example:65535", EngineAddress(host="host.example", port=65535)),
        ("tcp:[::1]:9000", EngineAddress(host="::1", port=9000)),
    ],
)
def test_an_address_is_read_and_written(text, expected):
    assert EngineAddress.parse(text) == expected
    assert str(expected) == text
    assert expected.is_tcp == text.startswith("tcp")


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "unix:relative", "tcp:", "tcp:host", "tcp::1", "tcp:h:65536", "tcp:h:-1", "tcp:h:٣", "http:x:1"],
)
def test_what_is_no_address_is_shown_what_one_is(text):
    with pytest.raises(ConfigError, match="unix:/path or tcp:HOST:PORT") as caught:
        EngineAddress.parse(text)
    assert repr(text) in str(caught.value)


def test_a_long_path_names_both_lengths():
    with pytest.raises(ConfigError, match="108 bytes, but the path of a Unix socket has at most 107"):
        EngineAddress.parse("unix:/" + "é" * 53 + "x")


def test_a_host_is_resolved():
    assert EngineAddress(host="127.0.0.1", port=9).resolve() == "127.0.0.1:9"
    assert EngineAddress(host="::1", port=9).resolve() == "[::1]:9"
    with pytest.raises(ConfigError, match=r"no\.such\.host"):
        EngineAddress(host="no.such.host.invalid", port=9).resolve()


def test_a_secret_comes_from_the_file_or_else_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("RUSTVLLM_ENGINE_SECRET", raising=False)
    assert read_secret(None) is None
    monkeypatch.setenv("RUSTVLLM_ENGINE_SECRET", "from the environment")
    assert read_secret(None) == b"from the environment"
    (tmp_path / "s").write_bytes(b"\xff0123456789abcdef\n")
    assert read_secret(str(tmp_path / "s")) == b"\xff0123456789abcdef"


def test_a_secret_that_will_not_do_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("RUSTVLLM_ENGINE_SECRET", "short-secret")
    with pytest.raises(ConfigError, match="has 12 bytes, but a secret must have 16 to 4096") as caught:
        read_secret(None)
    assert "short-secret" not in str(caught.value)
    (tmp_path / "s").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="16 to 4096"):
        read_secret(str(tmp_path / "s"))
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="directory"):
        read_secret(str(tmp_path))
