"""Only the owner can read files about requests, whatever the umask is."""

import os
import stat

import pytest

from rustvllm.batch.journal import BatchJournal
from rustvllm.batch.remote_file import download
from rustvllm.observe.steps.trace_file import StepTrace
from rustvllm.observe.trace.trace_file import begin_trace_file, end_trace_file


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def trace(path):
    begin_trace_file(path)
    end_trace_file(path)


def end_of_a_trace_that_was_removed(path):
    end_trace_file(path)


def step_trace(path):
    StepTrace(path).close()


def answers(path):
    with BatchJournal(path) as journal:
        places = [journal.add(b"{}\n")]
        assert mode(journal.path) == 0o600
        journal.finish(places)


def fetched_input(path):
    download("data:text/plain,x", path)


WRITERS = [trace, end_of_a_trace_that_was_removed, step_trace, answers, fetched_input]


@pytest.mark.parametrize("write", WRITERS)
def test_a_new_file_is_private(tmp_path, open_umask, write):
    path = tmp_path / "file"
    write(path)
    assert mode(path) == 0o600


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_that_is_there_keeps_its_mode(tmp_path, write):
    path = tmp_path / "file"
    path.write_text("before\n")
    path.chmod(0o640)
    write(path)
    assert mode(path) == 0o640


def test_what_a_killed_run_left_of_its_output_is_not_written_into(tmp_path, open_umask):
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    (tmp_path / "file.tmp").symlink_to(elsewhere)
    answers(path)
    assert elsewhere.read_text() == "precious"
    assert (path.read_bytes(), mode(path), path.is_symlink()) == (b"{}\n", 0o600, False)
