"""``benches/python/step_times.py``: what steps explain of a stream's gaps, against the rule said plainly."""

import importlib.util
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

MOST_NS = 60


@pytest.fixture(scope="module")
def step_times(repository):
    spec = importlib.util.spec_from_file_location("step_times", repository / "benches/python/step_times.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def step(launch, done):
    return {"step": 1, "schedule_ns": 0, "launch_ns": launch, "done_ns": done, "update_ns": done, "num_tokens": 1}


def explained(done, duration, begin, end, num_steps):
    """The longest run of so many steps among those that were over in the gap, by trying all."""
    within = [index for index, at in enumerate(done) if begin <= at <= end]
    length = min(num_steps, len(within))
    runs = [within[start : start + length] for start in range(len(within) - length + 1)]
    return max((sum(duration[index] for index in run) for run in runs), default=0)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=12),
    gaps=st.lists(
        st.tuples(st.integers(0, MOST_NS), st.integers(0, MOST_NS), st.integers(1, 5)), min_size=1, max_size=8
    ),
)
def test_gaps_are_explained_by_the_longest_run_of_steps(step_times, lengths, gaps):
    steps, now = [], 0
    for pause, duration in lengths:
        steps.append(step(now + pause, now + pause + duration))
        now += pause + duration
    times = step_times.StepTimes.of(steps)
    assert times.duration.tolist() == [duration for _, duration in lengths]
    rows = [(min(first, second), max(first, second), count) for first, second, count in gaps]
    begin, end, count = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    expected = [explained(times.done.tolist(), times.duration.tolist(), *row) for row in rows]
    assert times.longest_within(begin, end, count).tolist() == expected


def test_a_step_launched_while_another_computes_counts_from_the_end_of_that(step_times):
    times = step_times.StepTimes.of([step(0, 10), step(4, 15), step(20, 23)])
    assert times.duration.tolist() == [10, 5, 3]
    assert times.between(11, 24).duration.tolist() == [5, 3]


def test_a_file_that_is_still_written(step_times, tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(step(1, 3)) + "\n" + json.dumps(step(4, 9)) + "\n" + '{"step":3,"sch')
    assert step_times.StepTimes.read(path).done.tolist() == [3, 9]
    path.write_text("")
    assert step_times.StepTimes.read(path).longest_within(*np.zeros((3, 2), np.int64)).tolist() == [0, 0]
