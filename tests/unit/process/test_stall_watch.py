"""Which silent engines count as dead."""

from rustvllm.process.health import EngineHealth
from rustvllm.process.stall_watch import StallWatch

LOOK = 0.25


def looks(watch: StallWatch, seconds: float, start: float = 0.0, rank: int = 0) -> tuple[float, dict[int, str]]:
    """Look at an engine that falls silent at ``start``, until it counts as dead or the time is over."""
    now, dead = start, {}
    while now - start < seconds and not dead:
        now += LOOK
        dead = watch.look([EngineHealth(rank, None, now - start, 0.0)], now)
    return now - start, dead


def test_an_engine_counts_as_dead_after_twice_the_stall_timeout():
    watch = StallWatch(3.0)
    watch.look([EngineHealth(1, None, 0.0, 0.0)], 0.0)
    silent, dead = looks(watch, 20, rank=1)
    assert 6.0 < silent <= 6.0 + LOOK
    assert dead[1].startswith("engine 1 has shown no sign of life for 6.")
    assert "(--stall-timeout 3, --stall-action end)" in dead[1]


def test_a_step_that_stands_still_counts_like_a_heartbeat_that_does_not_come():
    watch = StallWatch(1.0)
    for number in range(8):
        assert not watch.look([EngineHealth(0, None, 0.1, number * LOOK)], number * LOOK)
    assert list(watch.look([EngineHealth(0, None, 0.1, 2.2)], 2.2)) == [0]


def test_a_sign_of_life_begins_the_count_anew():
    watch = StallWatch(1.0)
    watch.look([EngineHealth(0, None, 0.0, 0.0)], 0.0)
    _, dead = looks(watch, 1.75)
    assert not dead
    watch.look([EngineHealth(0, None, 0.1, 0.0)], 2.0)
    silent, dead = looks(watch, 20, start=2.0)
    assert silent > 1.75
    assert dead


def test_a_process_that_was_stopped_itself_blames_no_engine():
    watch = StallWatch(2.0)
    watch.look([EngineHealth(0, None, 0.1, 0.0)], 0.0)
    # Three minutes asleep: the heartbeats before that are old now, and the next have not been read.
    assert not watch.look([EngineHealth(0, None, 180.1, 0.0)], 180.0)
    assert not watch.look([EngineHealth(0, None, 0.1, 180.2)], 180.2)
    assert not watch.look([EngineHealth(0, None, 0.1, 0.0)], 180.5)
    silent, dead = looks(watch, 20, start=181.0)
    assert silent > 4.0
    assert dead


def test_only_the_silent_one_of_several_counts_as_dead_and_dead_ones_are_passed_over():
    watch, dead = StallWatch(1.0), {}
    for number in range(12):
        now = number * LOOK
        engines = [EngineHealth(0, None, now, 0.0), EngineHealth(1, None, 0.1, 0.0), EngineHealth(2, "died", now, 0.0)]
        dead = watch.look(engines, now)
    assert list(dead) == [0]
    assert not watch.look([EngineHealth(0, "it was left", 9.0, 0.0)], 3.0)
    # The one in its place has as long as any other, though its step stood still before.
    assert not watch.look([EngineHealth(0, None, 0.1, 9.0)], 3.25)
