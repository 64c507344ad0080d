"""``/metrics`` of a server with two API processes and two engines, held against what its clients were sent."""

import concurrent.futures
import re
import ssl
import time
from collections import defaultdict

import httpx
import pytest
from asgi_client import serving
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server_process import REAL, ServerProcess

from rustvllm.server.flags.http_settings import HttpSettings
from rustvllm.server.flags.settings import ServerSettings

NUM_ENGINES = 2
MODEL = "named"
MAX_NUM_SEQS, MAX_NUM_QUEUED = 4, 6
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Reading the system's certificates for every request would take most of the time."""

# As vLLM 0.32 has them: name, type, labels besides model_name and engine.
VLLM_METRICS = [
    ("num_requests_running", "gauge", ()),
    ("num_requests_waiting", "gauge", ()),
    ("num_requests_waiting_by_reason", "gauge", ("reason",)),
    ("kv_cache_usage_perc", "gauge", ()),
    ("engine_sleep_state", "gauge", ("sleep_state",)),
    ("prefix_cache_queries", "counter", ()),
    ("prefix_cache_hits", "counter", ()),
    ("num_preemptions", "counter", ()),
    ("prompt_tokens", "counter", ()),
    ("prompt_tokens_cached", "counter", ()),
    ("generation_tokens", "counter", ()),
    ("request_success", "counter", ("finished_reason",)),
    ("admission_rejections", "counter", ("reason",)),
    ("time_to_first_token_seconds", "histogram", ()),
    ("inter_token_latency_seconds", "histogram", ()),
    ("request_time_per_output_token_seconds", "histogram", ()),
    ("e2e_request_latency_seconds", "histogram", ()),
    ("request_queue_time_seconds", "histogram", ()),
    ("request_inference_time_seconds", "histogram", ()),
    ("request_prefill_time_seconds", "histogram", ()),
    ("request_decode_time_seconds", "histogram", ()),
    ("request_prompt_tokens", "histogram", ()),
    ("request_generation_tokens", "histogram", ()),
    ("request_max_num_generation_tokens", "histogram", ()),
    ("request_prefill_kv_computed_tokens", "histogram", ()),
    ("request_params_n", "histogram", ()),
    ("request_params_max_tokens", "histogram", ()),
    ("request_num_preemptions", "histogram", ()),
    ("iteration_tokens_total", "histogram", ()),
]
SPECULATION = [
    ("spec_decode_num_drafts", "counter", ()),
    ("spec_decode_num_draft_tokens", "counter", ()),
    ("spec_decode_num_accepted_tokens", "counter", ()),
    ("spec_decode_num_accepted_tokens_per_pos", "counter", ("position",)),
]
OURS = [
    ("step_time_seconds", "histogram", ()),
    ("step_phase_time_seconds", "histogram", ("phase",)),
    ("spec_decode_num_withheld_draft_tokens", "counter", ()),
    ("spec_decode_num_pauses", "counter", ()),
    ("spec_decode_paused", "gauge", ()),
    ("grammar_forced_tokens", "counter", ()),
    *SPECULATION,
]

REASONS = ("stop", "length", "abort", "error", "repetition")
FINISH_REASON = re.compile(r'"finish_reason":\s*"(\w+)"')

# Every bucket that vLLM 0.32 has must be there.
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640]
FIRST += [2560]
BETWEEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500]  # up to max_model_len
VLLM_BUCKETS = {
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_params_n": [1, 2, 5, 10, 20],
}


@pytest.fixture(scope="module")
def server():
    command = [
        *REAL, "--executor", "sim", "--port", "0", "--sim-step-time", "4", "--served-model-name", MODEL,
        "--api-server-count", "2", "--data-parallel-size", str(NUM_ENGINES), "--restart-engine",
        "--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-queued-reqs", str(MAX_NUM_QUEUED),
    ]  # fmt: skip
    with ServerProcess(command, RUSTVLLM_LOG_STATS_INTERVAL="0.2") as process:
        process.wait_until_ready()
        yield process


class Scrape:
    """Samples of one scrape: sums over the engines, and each engine's."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in parse_text(text)}
        self.by_engine: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        self.sums: dict[tuple[str, str], float] = defaultdict(float)
        for family in self.families.values():
            for sample in family.samples:
                own = ",".join(v for k, v in sample.labels.items() if k not in {"model_name", "engine"})
                self.by_engine[sample.labels["engine"]][sample.name, own] = sample.value
                self.sums[sample.name, own] += sample.value

    def __getitem__(self, name: str) -> float:
        """The sum over the engines of ``name``, or of ``name/label``."""
        name, _, label = name.partition("/")
        return self.sums["vllm:" + name, label]


def get(server, **headers: str) -> httpx.Response:
    """By a connection of its own, so that any of the API processes answers."""
    return httpx.get(f"{server.url}/metrics", headers=headers, timeout=30, verify=NO_TLS)


def scrape(server) -> Scrape:
    answer = get(server)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(answer.text)


def settled(server) -> Scrape:
    """A scrape when nothing runs or waits any more."""
    deadline = time.monotonic() + 30
    while (now := scrape(server))["num_requests_running"] or now["num_requests_waiting"]:
        assert time.monotonic() < deadline, "requests without a client go on"
        time.sleep(0.05)
    return now


def ended(server, before: Scrape, number: int) -> Scrape:
    """A scrape when so many requests more have ended; an engine hears of some ends a little later than the clients."""
    deadline = time.monotonic() + 30
    while True:
        now = settled(server)
        if (
            sum(
                now[f"request_success_total/{reason}"] - before[f"request_success_total/{reason}"] for reason in REASONS
            )
            >= number
        ):
            return now
        assert time.monotonic() < deadline, "requests have ended and are not counted"
        time.sleep(0.02)


class Difference:
    """What was counted between two scrapes."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before, self._after = before, after

    def __getitem__(self, name: str) -> float:
        return self._after[name] - self._before[name]


def post(server, body: dict, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60, verify=NO_TLS)


def all_of(server, bodies: list[dict]) -> list[httpx.Response]:
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: post(server, body), bodies))


def test_names_types_labels_and_buckets_are_vllms(server):
    families = scrape(server).families
    for name, kind, labels in [*VLLM_METRICS, *OURS]:
        family = families.pop(f"vllm:{name}")
        assert family.type == kind, name
        assert family.documentation, name
        engines = set()
        for sample in family.samples:
            engines.add(sample.labels["engine"])
            assert sample.labels["model_name"] == MODEL
            others = set(sample.labels) - {"model_name", "engine", "le"}
            assert others == set(labels), name
        assert engines == {"0", "1"}, name
        if kind == "counter":
            assert {sample.name for sample in family.samples} == {f"vllm:{name}_total"}
        if name in VLLM_BUCKETS:
            bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
            assert bounds >= {float(bound) for bound in VLLM_BUCKETS[name]} | {float("inf")}, name
    info = families.pop("vllm:cache_config_info")
    assert families == {}
    for sample in info.samples:
        assert sample.value == 1
        assert sample.labels["block_size"] == "16"
        blocks = int(sample.labels["num_gpu_blocks"])
        assert int(sample.labels["kv_cache_size_tokens"]) == (blocks - 1) * 16
    reasons = {label for name, label in scrape(server).sums if name == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}


@pytest.mark.parametrize("stream", [False, True])
def test_requests_give_exact_counts(server, stream):
    num_requests, num_prompt, num_output = 8, 12, 7
    before = settled(server)
    seed = 1000 * stream
    bodies = [
        {"prompt": list(range(seed + 50 * i, seed + 50 * i + num_prompt)), "max_tokens": num_output, "stream": stream}
        for i in range(num_requests)
    ]
    assert [answer.status_code for answer in all_of(server, bodies)] == [200] * num_requests
    got = Difference(before, settled(server))
    assert got["time_to_first_token_seconds_count"] == num_requests
    assert got["inter_token_latency_seconds_count"] == num_requests * (num_output - 1)
    assert got["iteration_tokens_total_sum"] == num_requests * (num_prompt + num_output)
    assert got["prompt_tokens_total"] == num_requests * num_prompt
    assert got["prompt_tokens_cached_total"] == 0
    assert got["generation_tokens_total"] == num_requests * num_output
    assert got["request_success_total/length"] == num_requests
    for reason in ("stop", "abort", "error", "repetition"):
        assert got[f"request_success_total/{reason}"] == 0
    for name in ("prompt_tokens", "generation_tokens", "params_max_tokens", "params_n", "num_preemptions"):
        assert got[f"request_{name}_count"] == num_requests, name
    assert got["request_params_max_tokens_sum"] == num_requests * num_output
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert got[f"{name}_seconds_count"] == num_requests, name
    # From arrival to the end there is the queue, the prompt, the output, and what is before the queue.
    parts = sum(got[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert parts <= got["e2e_request_latency_seconds_sum"] + 1e-6
    assert got["inter_token_latency_seconds_sum"] == pytest.approx(got["request_decode_time_seconds_sum"])
    assert got["step_time_seconds_count"] == got["step_phase_time_seconds_count/forward"] > 0


def test_samples_share_their_prompt(server):
    before = settled(server)
    body = {"prompt": list(range(40)), "max_tokens": 5, "n": 3, "seed": 1}
    usage = post(server, body).json()["usage"]
    got = Difference(before, settled(server))
    assert usage["completion_tokens"] == got["generation_tokens_total"] == 15
    assert got["time_to_first_token_seconds_count"] == got["request_success_total/length"] == 3
    assert (got["request_params_n_count"], got["request_params_n_sum"]) == (1, 3)
    assert (got["request_max_num_generation_tokens_count"], got["request_max_num_generation_tokens_sum"]) == (1, 5)
    assert got["prompt_tokens_total"] == 3 * 40
    assert got["prompt_tokens_total"] - got["prompt_tokens_cached_total"] <= 40 + 2


def test_a_stop_string_counts_as_stop(server):
    body = {"prompt": [7, 8, 9], "max_tokens": 80, "temperature": 0}
    words = post(server, body).json()["choices"][0]["text"].split()
    before = settled(server)
    choice = post(server, {**body, "stop": words[5]}).json()["choices"][0]
    got = Difference(before, settled(server))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", words[5])
    assert (got["request_success_total/stop"], got["request_success_total/abort"]) == (1, 0)
    assert got["request_generation_tokens_count"] == 1
    assert got["generation_tokens_total"] < 80


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_the_last_text_counts_as_stop(server, stream):
    """The engine has come to ``max_tokens`` by itself: only the API process knows that the text ended before."""
    body = {"prompt": [7, 8, 9], "max_tokens": 6, "temperature": 0}
    words = post(server, body).json()["choices"][0]["text"].split()
    before = settled(server)
    num_requests = 8  # over both API processes and both engines
    bodies = [{**body, "stop": words[-1], "stream": stream} for _ in range(num_requests)]
    bodies += [{**body, "stop": "no such word", "stream": stream}]
    answers = all_of(server, bodies)
    said = [reason for answer in answers for reason in FINISH_REASON.findall(answer.text)]
    assert sorted(said) == ["length"] + ["stop"] * num_requests
    got = Difference(before, ended(server, before, num_requests + 1))
    assert got["request_success_total/stop"] == num_requests
    assert got["request_success_total/length"] == 1
    assert got["generation_tokens_total"] == 6 * (num_requests + 1), "the engine made all tokens"


def test_what_a_client_leaves_is_an_abort_and_the_gauges_go_back(server):
    body = {"prompt": [1, 2, 3], "max_tokens": 490, "stream": True, "n": 2}
    for _ in range(5):  # on a busy machine it may be over before it is looked at
        before = settled(server)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # kept: when it goes, the connection is closed
            next(lines)
            was_running = scrape(server)["num_requests_running"]
        after = settled(server)
        if was_running:
            break
    assert was_running == 2
    got = Difference(before, after)
    assert got["request_success_total/abort"] == 2
    assert got["e2e_request_latency_seconds_count"] == got["request_params_n_count"] == 0
    assert after["kv_cache_usage_perc"] == 0
    assert after["num_requests_waiting_by_reason/capacity"] == 0


def test_refused_requests_are_counted_by_the_limit(server):
    before = settled(server)
    many = 2 * NUM_ENGINES * (MAX_NUM_SEQS + MAX_NUM_QUEUED)
    num_sent = refused = 0
    while not refused:
        assert num_sent < 5 * many, "nothing was ever refused"
        answers = all_of(server, [{"prompt": [i, 1], "max_tokens": 100} for i in range(many)])
        refused = [answer.status_code for answer in answers].count(503)
        num_sent += many
    invalid = post(server, {"prompt": "x", "temperature": 9})
    assert invalid.status_code == 400
    got = Difference(before, settled(server))
    assert got["admission_rejections_total/max_num_queued_reqs"] == refused > 0
    assert got["admission_rejections_total/max_num_queued_tokens"] == 0
    assert got["request_success_total/length"] == num_sent - refused
    assert got["request_success_total/error"] == 0


def test_every_process_says_the_same(server):
    settled(server)
    texts = {get(server).text for _ in range(12)}
    assert len(texts) == 1


def test_openmetrics_on_request(server):
    accept = "application/openmetrics-text; version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = get(server, Accept=accept)
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.text.endswith("# EOF\n")
    families = {family.name: family for family in parse_openmetrics(answer.text)}
    plain = scrape(server)
    for name, kind, _ in [*VLLM_METRICS, *OURS]:
        assert families[f"vllm:{name}"].type == kind
        samples = {sample.name for sample in families[f"vllm:{name}"].samples}
        assert samples == {sample.name for sample in plain.families[f"vllm:{name}"].samples}


def test_the_line_of_statistics_comes_with_traffic_alone(server):
    settled(server)
    time.sleep(0.6)  # intervals that still have some
    before = len(server.lines)
    assert post(server, {"prompt": [1] * 30, "max_tokens": 60}).status_code == 200
    deadline = time.monotonic() + 20
    while not (new := [line for line in server.lines[before:] if "Avg generation throughput" in line]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Engine 00" in new[0]
    assert "KV cache usage: " in new[0]
    settled(server)
    time.sleep(0.6)
    num_lines = len(server.lines)
    time.sleep(0.6)
    assert len(server.lines) == num_lines, "an idle engine says nothing"


def test_an_engine_that_was_restarted_counts_from_the_start_and_the_other_goes_on(server):
    all_of(server, [{"prompt": [i, 2], "max_tokens": 3} for i in range(6)])
    before = settled(server)
    assert all(before.by_engine[rank]["vllm:generation_tokens_total", ""] > 0 for rank in "01")
    server.engines()[0].kill()
    server.wait_for("starting it again")
    deadline = time.monotonic() + 60
    while True:
        now = scrape(server)
        if set(now.by_engine) == {"0", "1"} and now.by_engine["0"]["vllm:generation_tokens_total", ""] == 0:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert now.by_engine["1"] == before.by_engine["1"]


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_key_is_asked_for_unless_told_otherwise(is_open):
    http = HttpSettings(keyless_paths=("/metrics",) if is_open else ())
    settings = ServerSettings(api_keys=("secret",), http=http)
    async with serving(settings=settings) as (client, _):
        assert (await client.get("/metrics")).status_code == (200 if is_open else 401)
        answer = await client.get("/metrics", headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
