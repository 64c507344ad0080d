"""The progress bar of a load: on a terminal, and nowhere else."""

import io
import sys

import pytest

from rustvllm.cli.bench.report.progress import LoadProgress


class Terminal(io.StringIO):
    """Text that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO, True), (Terminal, False)])
def test_nothing_is_shown_without_a_terminal(monkeypatch, stream, enabled):
    monkeypatch.setattr(sys, "stderr", stream())
    with LoadProgress(10, enabled=enabled) as progress:
        progress(1, 0, 5, False)
        progress.finish({"completed": 10, "failed": 0})
    assert sys.stderr.getvalue() == ""


def test_the_bar_counts_requests_events_and_failures(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with LoadProgress(10, enabled=True) as progress:
        progress(3, 0, 0, True)
        progress(4, 2, 50, False)
        progress.finish({"completed": 8, "failed": 2})
    text = sys.stderr.getvalue()
    assert "warm-up" in text
    assert "events/s, 2 failed" in text
    assert "10/10" in text
