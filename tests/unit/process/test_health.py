"""The health of an engine in a thread: its step's age grows while it has requests and finishes no step."""

from rustvllm.process import health as engine_health
from rustvllm.process.health import EngineHealth, StepWatch


def test_the_age_of_a_step_counts_only_while_nothing_is_done(monkeypatch):
    now = 100.0
    monkeypatch.setattr(engine_health.time, "monotonic", lambda: now)
    watch = StepWatch()

    def age(step, running=0, waiting=0, queued=0, planned=None, is_paused=0):
        stats = {"num_running": running, "num_waiting": waiting, "num_queued": queued, "last_updated_step": step}
        stats |= {"num_steps": step if planned is None else planned, "is_paused": is_paused}
        return watch.step_age(stats)

    assert age(0) == 0
    now += 50
    assert age(0) == 0  # idle
    now += 1
    assert age(0, queued=1) == 1  # as exact as it is asked
    now += 5
    assert age(0, waiting=1) == 6
    now += 5
    assert age(1, running=1) == 0
    now += 2
    assert age(1, running=1) == 2
    assert age(1) == 0
    now += 2
    assert age(1, running=1) == 2
    assert age(1, running=1, waiting=1, is_paused=1) == 0
    now += 2
    assert age(1, running=1, planned=2, is_paused=1) == 2  # its step has not ended


def test_the_worse_of_both_ages_is_the_stall():
    assert EngineHealth(0, None, 1.0, 2.0).stalled_for == 2.0
    assert EngineHealth(0, None, 3.0, 2.0).stalled_for == 3.0
