"""Metrics in one process: rendering, what an engine without a server counts, loggers, and the dashboard's queries."""

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from rustvllm import LLM, SamplingParams
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.engine.async_llm import AsyncLLM
from rustvllm.observe.metrics.counters import Counter, EngineMetrics, Gauge, Histogram
from rustvllm.observe.metrics.families import FAMILIES, STEP_PHASES
from rustvllm.observe.metrics.prometheus import PrometheusText
from rustvllm.observe.metrics.stat_logger import IterationStats, LoggingStatLogger, SchedulerStats, StatLogger

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(executor="sim", async_scheduling=False, sim_step_time=1.0) as llm:
        yield llm


def by_name(metrics):
    """Metrics by name and further labels."""
    return {
        (metric.name, *(value for key, value in metric.labels.items() if key not in {"model_name", "engine"})): metric
        for metric in metrics
    }


def test_offline_everything_is_counted_and_the_parts_of_a_step_are_the_step(llm):
    before = by_name(llm.get_metrics())
    outputs = llm.generate(["Once upon a time", "Hello"], GREEDY, use_tqdm=False)
    after = by_name(llm.get_metrics())
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)

    def grown(*key, what="value"):
        return getattr(after[key], what) - getattr(before[key], what)

    assert grown("vllm:prompt_tokens") == num_prompt
    assert grown("vllm:generation_tokens") == 12
    assert grown("vllm:request_success", "length") == 2
    assert grown("vllm:time_to_first_token_seconds", what="count") == 2
    assert grown("vllm:inter_token_latency_seconds", what="count") == 10
    assert grown("vllm:iteration_tokens_total", what="sum") == num_prompt + 12
    whole = grown("vllm:step_time_seconds", what="sum")
    parts = sum(grown("vllm:step_phase_time_seconds", phase, what="sum") for phase in STEP_PHASES)
    assert parts == pytest.approx(whole, rel=0.05)
    assert grown("vllm:step_phase_time_seconds", "forward", what="count") == grown(
        "vllm:step_time_seconds", what="count"
    )
    assert isinstance(after["vllm:num_requests_running",], Gauge)
    assert isinstance(after["vllm:generation_tokens",], Counter)
    histogram = after["vllm:e2e_request_latency_seconds",]
    assert isinstance(histogram, Histogram)
    assert list(histogram.buckets.values()) == sorted(histogram.buckets.values())
    assert histogram.buckets["+Inf"] == histogram.count


def test_a_requests_own_times_are_in_order_and_what_the_histograms_have(llm):
    before = by_name(llm.get_metrics())
    (output,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    after = by_name(llm.get_metrics())
    times = output.metrics
    order = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time]
    assert [*order, times.finished_time] == sorted([*order, times.finished_time])
    assert times.time_in_queue == times.first_scheduled_time - times.arrival_time

    def grown(name):
        return after[f"vllm:{name}_seconds",].sum - before[f"vllm:{name}_seconds",].sum

    assert grown("time_to_first_token") == pytest.approx(times.first_token_time - times.arrival_time, abs=1e-3)
    assert grown("request_prefill_time") == pytest.approx(times.first_token_time - times.first_scheduled_time, abs=1e-6)
    assert grown("request_decode_time") == pytest.approx(times.last_token_time - times.first_token_time, abs=1e-6)


def test_without_statistics_there_are_no_histograms():
    with LLM(executor="sim", disable_log_stats=True) as llm:
        llm.generate("Hello", GREEDY, use_tqdm=False)
        metrics = llm.get_metrics()
    assert not any(isinstance(metric, Histogram) for metric in metrics)
    assert by_name(metrics)["vllm:generation_tokens",].value == 6
    text = PrometheusText(llm.llm_engine.config, "m").render([EngineMetrics(0, dict.fromkeys(_counters(), 1))])
    assert "_bucket" not in text


def _counters():
    names = [source for family in FAMILIES if family.kind != "histogram" for source in family.sources.values()]
    return {*filter(lambda name: isinstance(name, str), names)} | {
        "num_waiting", "num_queued", "num_usable_blocks", "num_free_blocks", "num_waiting_for_grammar"
    }  # fmt: skip


def test_names_with_quotes_and_another_prefix_survive_the_text(llm):
    config, counted = llm.llm_engine.config, EngineMetrics(3, dict.fromkeys(_counters(), 7))
    name = 'a "quoted"\\ name\nof two lines'
    families = {family.name: family for family in parse_text(PrometheusText(config, name, "mine_").render([counted]))}
    (sample,) = families["mine_num_requests_running"].samples
    assert sample.labels == {"model_name": name, "engine": "3"}
    assert sample.value == 7
    assert PrometheusText(config, name).render([]) == ""


def test_each_of_several_ranks_has_its_series(llm):
    states = [
        {"rank": rank, "node_rank": rank, "stage": 0, "state": state, "step_age": age, "collective_seconds": 2.5,
         "collectives": 40}
        for rank, state, age in ((0, "running", 0.0), (1, "sleeping", 0.0), (2, "stopped", 61.5))
    ]  # fmt: skip
    text = PrometheusText(llm.llm_engine.config, "m").render([], ranks={0: states})
    families = {family.name: family for family in parse_text(text)}
    running = {sample.labels["rank"]: sample.value for sample in families["vllm:rank_running"].samples}
    assert running == {"0": 1, "1": 1, "2": 0}
    [*_, late] = families["vllm:rank_step_age_seconds"].samples
    assert (late.labels, late.value) == (
        {"model_name": "m", "engine": "0", "rank": "2", "node": "2", "stage": "0"},
        61.5,
    )
    assert {sample.value for sample in families["vllm:rank_collective_seconds"].samples} == {2.5}
    assert {sample.value for sample in families["vllm:rank_collectives"].samples} == {40}


class Recorder(StatLogger):
    """Keeps what it gets."""

    made: "list[Recorder]"

    def __init__(self, config, engine_index=0):
        super().__init__(config, engine_index)
        self.records = []
        self.num_logs = self.num_starts = 0
        self.news = threading.Event()
        Recorder.made.append(self)

    def record(self, scheduler_stats, iteration_stats, engine_idx=0):
        self.records.append((scheduler_stats, iteration_stats, engine_idx))
        self.news.set()

    def log(self):
        self.num_logs += 1

    def log_engine_initialized(self):
        self.num_starts += 1


class Failing(StatLogger):
    """Fails."""

    def record(self, scheduler_stats, iteration_stats, engine_idx=0):
        raise RuntimeError("no disk")


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_LOG_STATS_INTERVAL", "0.1")
    Recorder.made = []


def check_records(recorder, num_tokens):
    assert recorder.num_starts == 1
    assert recorder.num_logs == len(recorder.records)
    assert sum(iteration.num_generation_tokens for _, iteration, _ in recorder.records) == num_tokens
    assert sum(iteration.num_finished_reqs["length"] for _, iteration, _ in recorder.records) == num_tokens // 6
    scheduler, last, rank = recorder.records[-1]
    assert (scheduler.num_running_reqs, scheduler.num_waiting_reqs, scheduler.kv_cache_usage, rank) == (0, 0, 0.0, 0)
    assert last.metrics.counters["num_generation_tokens"] == num_tokens
    assert last.seconds > 0


def test_an_offline_engine_tells_its_loggers(often):
    with LLM(executor="sim", stat_loggers=[Failing, Recorder]) as llm:
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    (recorder,) = Recorder.made
    check_records(recorder, 12)


async def test_an_asynchronous_engine_tells_its_loggers_and_writes_its_line(often, caplog):
    args = AsyncEngineArgs(executor="sim", sim_step_time=1.0)
    engine = AsyncLLM.from_engine_args(args, stat_loggers=[Recorder])
    try:
        async for _ in engine.generate("Hello", GREEDY, "one"):
            pass
        (metrics,) = await engine.metrics()
        assert metrics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0, "repetition": 0}
        (recorder,) = Recorder.made
        assert await asyncio.to_thread(recorder.news.wait, 30)
    finally:
        engine.shutdown()
    check_records(recorder, 6)
    lines = [record.getMessage() for record in caplog.records if "Avg generation throughput" in record.getMessage()]
    assert len(lines) >= 1
    assert "Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 0.0%" in lines[-1]


def test_the_line_is_for_intervals_with_traffic_alone():
    logger = LoggingStatLogger(None, 1)

    def line(num_running=0, num_steps=0, num_tokens=0, hits=0):
        counted = EngineMetrics(1, {})
        scheduler = SchedulerStats(num_running, 0, 0.5, 100, hits)
        finished = dict.fromkeys(["stop"], 0)
        logger.record(scheduler, IterationStats(2.0, num_steps, 30, 0, num_tokens, 0, finished, counted), 1)
        return logger._line

    assert line() == ""
    assert line(num_steps=3, num_tokens=7, hits=50) == (
        "Engine 001: Avg prompt throughput: 15.0 tokens/s, Avg generation throughput: 3.5 tokens/s, "
        "Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 25.0%"
    )
    assert line(num_running=1) != ""
    assert line() == ""


def test_every_query_of_the_dashboard_and_of_the_page_names_a_metric_that_there_is():
    docs = Path(__file__).parents[3] / "docs"
    board = json.loads((docs / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    page = (docs / "metrics.md").read_text(encoding="utf-8")
    queries += re.findall(r"^\| [^|`]+ \| `(.*vllm:.*)` \|$", page, re.MULTILINE)
    assert len(queries) > 40
    scraped = {"vllm:cache_config_info"}
    for family in FAMILIES:
        endings = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}[family.kind]
        scraped |= {f"vllm:{family.name}{ending}" for ending in endings}
    asked = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    assert asked <= scraped
    documented = set(re.findall(r"vllm:(\w+)", page))
    assert documented >= {family.name for family in FAMILIES}, "every metric is explained"
    labels = {family.label for family in FAMILIES if family.label} | {"le", "engine", "model_name"}
    for query in queries:
        assert set(re.findall(r"by \((\w+)\)", query)) <= labels, query
