"""The directory of a server's sockets: private, with a short path, or an error that says where it was tried."""

import stat
import tempfile

import pytest

from rustvllm.engine import run_directory
from rustvllm.engine.run_directory import make_run_directory
from rustvllm.exceptions import ConfigError


def test_it_is_private_and_in_tmpdir(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's own are too long for sockets
        monkeypatch.setenv("TMPDIR", place)
        directory = make_run_directory()
        assert str(directory.parent) == place
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_places_that_will_not_do_are_named(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(run_directory, "_USUAL_PLACES", ("/nowhere/at/all", "/dev/null"))
    with pytest.raises(ConfigError, match="set TMPDIR") as caught:
        make_run_directory()
    for words in ("and may have 107", "/nowhere/at/all: No such file or directory", "/dev/null: Not a directory"):
        assert words in str(caught.value)
    assert list(long.iterdir()) == []
