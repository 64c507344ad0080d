"""``rustvllm.observe.metrics.drain_rate``: when to try again, from counters and a clock that a test moves."""

from rustvllm.observe.metrics.drain_rate import MAX_RETRY_AFTER, WINDOW, DrainRate


class Engine:
    """Counters and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_looks = 0
        self.counters = dict.fromkeys(
            ("num_admitted_requests", "num_admitted_tokens", "num_queued", "num_queued_tokens"), 0.0
        )
        self.rate = DrainRate(self.stats, lambda: self.now)

    def stats(self) -> dict[str, float]:
        self.num_looks += 1
        return dict(self.counters)

    def run(self, seconds: float, requests: float, tokens: float = 0.0) -> None:
        """Let time pass, in which so many requests and tokens per second leave the queue."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.counters["num_admitted_requests"] += requests / 10
            self.counters["num_admitted_tokens"] += tokens / 10
            self.rate.observe()


def test_waiting_requests_over_their_rate() -> None:
    engine = Engine()
    engine.rate.observe()
    engine.run(5, requests=10)
    engine.counters["num_queued"] = 75
    assert engine.rate.retry_after() == 8


def test_waiting_tokens_over_their_rate_when_that_takes_longer() -> None:
    engine = Engine()
    engine.rate.observe()
    engine.run(5, requests=10, tokens=1000)
    engine.counters |= {"num_queued": 10, "num_queued_tokens": 20_000}
    assert engine.rate.retry_after() == 20
    engine.counters |= {"num_queued": 300}
    assert engine.rate.retry_after() == 30


def test_the_last_seconds_count_alone() -> None:
    engine = Engine()
    engine.rate.observe()
    engine.run(100, requests=100)
    engine.run(2 * WINDOW, requests=1)
    engine.counters["num_queued"] = 20
    assert engine.rate.retry_after() in (20, 21)


def test_at_least_one_second_and_no_more_than_the_most() -> None:
    engine = Engine()
    assert engine.rate.retry_after() == 1, "nothing is known yet"
    engine.counters["num_queued"] = 1000
    engine.run(0.1, requests=0)
    assert engine.rate.retry_after() <= MAX_RETRY_AFTER
    engine.run(5, requests=0)
    assert engine.rate.retry_after() == MAX_RETRY_AFTER, "nothing moves"
    engine.counters["num_queued"] = 1
    engine.run(5, requests=1000)
    assert engine.rate.retry_after() == 1


def test_a_restarted_engine_begins_anew() -> None:
    engine = Engine()
    engine.rate.observe()
    engine.run(5, requests=1000)
    engine.counters |= {"num_admitted_requests": 0, "num_queued": 10}
    assert engine.rate.retry_after() == 1
    engine.run(2, requests=2)
    assert engine.rate.retry_after() in (5, 6)


def test_many_requests_look_seldom() -> None:
    engine = Engine()
    for _ in range(10_000):
        engine.now += 0.0001
        engine.rate.observe()
    assert engine.num_looks <= 6
