"""The directory of a server's sockets: a new one with a short path, or an error that names the places tried."""

import tempfile

import pytest

from rustvllm.exceptions import ConfigError
from rustvllm.process import run_directory
from rustvllm.process.run_directory import choose_run_directory


def test_it_is_in_tmpdir_and_new_each_time(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's own are too long for sockets
        monkeypatch.setenv("TMPDIR", place)
        chosen = {choose_run_directory() for _ in range(100)}
        assert len(chosen) == 100
        assert {str(directory.parent) for directory in chosen} == {place}
        assert not any(directory.exists() for directory in chosen)


def test_places_that_will_not_do_are_named(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(run_directory, "_USUAL_PLACES", ("/nowhere/at/all", "/dev/null"))
    with pytest.raises(ConfigError, match="set TMPDIR") as caught:
        choose_run_directory()
    for words in ("at most 107 work", "/nowhere/at/all: not a directory", "/dev/null: not a directory"):
        assert words in str(caught.value)
    assert list(long.iterdir()) == []
