"""``rustvllm.observe.metrics.history``: percentiles and rates from readings of counters, an hour of them at most."""

import bisect
import json
import math
import random

import pytest

from rustvllm.observe.metrics.counters import EngineMetrics, HistogramValues
from rustvllm.observe.metrics.history import COLUMNS, INTERVAL_SECONDS, MAX_POINTS, MetricsHistory, quantile_of

BOUNDS = [0.001, 0.002, 0.005, 0.01, 0.1, 1.0]
ZERO = {
    "num_running": 0,
    "num_waiting": 0,
    "num_queued": 0,
    "num_usable_blocks": 100,
    "num_free_blocks": 100,
}


def reading(rank=0, *, latencies=(), **counters):
    counts = [0] * (len(BOUNDS) + 1)
    for value in latencies:
        counts[bisect.bisect_left(BOUNDS, value)] += 1
    histogram = HistogramValues(BOUNDS, counts, sum(latencies))
    return EngineMetrics(
        rank, {**ZERO, **counters}, {"time_to_first_token": histogram, "inter_token_latency": histogram}
    )


def row(values):
    return dict(zip(COLUMNS, values, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_quantile_lies_in_the_bucket_of_the_value_it_stands_for(seed):
    chosen = random.Random(seed)
    values = sorted(chosen.choice([0.0004, 0.0015, 0.004, 0.03, 0.4, 3.0]) for _ in range(chosen.randint(1, 200)))
    counts = reading(latencies=values).histograms["time_to_first_token"].counts
    for share in (0.5, 0.9, 0.99, 1.0):
        exact = values[max(math.ceil(len(values) * share) - 1, 0)]
        found = quantile_of(BOUNDS, counts, share)
        bucket = bisect.bisect_left(BOUNDS, exact)
        low = BOUNDS[bucket - 1] if bucket else 0.0
        high = BOUNDS[bucket] if bucket < len(BOUNDS) else BOUNDS[-1]
        assert min(low, high) <= found <= high, (seed, share, exact)


def test_nothing_measured_has_no_quantile():
    assert quantile_of(BOUNDS, [0] * 7, 0.5) is None
    assert quantile_of((), (), 0.5) is None


def test_a_point_has_rates_counts_and_percentiles_of_its_interval_alone():
    history = MetricsHistory()
    history.add(0.0, 1000.0, [reading(latencies=[0.5] * 100, num_generation_tokens=900, num_preemptions=4)])
    assert json.loads(history.as_json(0))["points"] == [], "a first reading has nothing to compare with"
    now = reading(
        latencies=[0.5] * 100 + [0.0015] * 99 + [0.05],
        num_generation_tokens=1200,
        num_preemptions=5,
        num_finished_error=2,
        num_running=3,
        num_free_blocks=75,
    )
    history.add(10.0, 1010.0, [now])
    (point,) = json.loads(history.as_json(0))["points"]
    assert (point["number"], point["time"]) == (1, 1010.0)
    assert point["all"] == point["engines"]["0"]
    got = row(point["all"])
    assert (got["running"], got["kv_cache_usage"], got["generation"]) == (3, 0.25, 30.0)
    assert (got["errors"], got["preemptions"], got["finished"]) == (2, 1, 0)
    assert 0.001 < got["ttft_p50"] < 0.002, "what was slow before the interval is not in it"
    assert got["itl_p99"] <= 0.1
    assert json.loads(history.as_json(1))["points"] == []


def test_engines_add_up_and_one_that_begins_again_counts_from_zero():
    history = MetricsHistory()
    history.add(0.0, 0.0, [reading(0, num_generation_tokens=100), reading(1, num_generation_tokens=500)])
    engines = [
        reading(0, num_generation_tokens=200, num_running=1),
        reading(1, num_generation_tokens=50, num_running=2),
    ]
    recent = history.recent(10.0, engines)
    assert row(recent["engines"]["0"])["generation"] == 10.0
    assert row(recent["engines"]["1"])["generation"] == 5.0, "it is another engine: all that it has counted is new"
    assert (row(recent["all"])["generation"], row(recent["all"])["running"]) == (15.0, 3)
    assert recent["seconds"] == 10.0
    assert set(recent["totals"]) == {"all", "0", "1"}
    assert json.loads(history.as_json(0))["points"] == [], "a look makes no point"
    history.add(20.0, 20.0, [reading(0)])
    (point,) = json.loads(history.as_json(0))["points"]
    assert set(point["engines"]) == {"0"}, "an engine that does not answer is left out"


def test_no_engine_and_no_histograms_are_no_error():
    history = MetricsHistory()
    assert history.recent(0.0, [])["all"] is None
    bare = EngineMetrics(0, ZERO)
    history.add(0.0, 0.0, [])
    history.add(15.0, 15.0, [bare])
    history.add(30.0, 30.0, [bare])
    points = json.loads(history.as_json(0))["points"]
    assert [row(point["all"])["ttft_p50"] for point in points] == [None, None]


def test_it_keeps_an_hour():
    history = MetricsHistory()
    for at in range(2 * MAX_POINTS):
        history.add(at * INTERVAL_SECONDS, at * INTERVAL_SECONDS, [reading(num_generation_tokens=at)])
    points = json.loads(history.as_json(0))["points"]
    assert len(points) == MAX_POINTS == 3600 / INTERVAL_SECONDS
    assert points[-1]["number"] == 2 * MAX_POINTS - 1
    assert history.recent(2 * MAX_POINTS * INTERVAL_SECONDS, [])["seconds"] <= 5 * INTERVAL_SECONDS, "a minute or so"
    assert len(history.as_json(0)) < 100_000
