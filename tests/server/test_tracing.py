"""A traced server: what its processes tell, in the log, in one trace file, and to a collector of spans."""

import gzip
import http.server
import json
import signal
import sys
import threading

import httpx
import pytest
from server_process import ServerProcess

from rustvllm.observe.trace.tracer import COMPONENTS, STARTUP_LAYERS
from trace_schema import check_trace

SECRET_PROMPT = "the treasure is under the old oak"
KEY = "sk-very-secret-key"
JOURNEY = [
    "APIServer", "InputProcessor", "Scheduler", "Sampler", "Scheduler", "OutputProcessor", "AsyncLLM", "APIServer",
]  # fmt: skip
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def serve(*flags, **environment):
    command = [sys.executable, "-m", "rustvllm.cli.main", "serve", "--port", "0", "--executor", "sim"]
    return ServerProcess([*command, "--sim-step-time", "1", *flags], **environment)


def lines_by_request(output):
    """Component and event of each traced request, in the order of time."""
    requests = {}
    for line in output.splitlines():
        _, found, told = line.partition("[rustvllm.trace] ")
        if found:
            time, component, *words = told.split()
            if words[0] == "step":
                words = words[2:]
            requests.setdefault(words[0] if words[0].startswith(("cmpl", "chatcmpl")) else "", []).append(
                (float(time), component, words[1] if len(words) > 1 else words[0])
            )
    return {name: [(component, event) for _, component, event in sorted(told)] for name, told in requests.items()}


def assert_in_order(expected, names):
    rest = iter(names)
    missing = [name for name in expected if name not in rest]
    assert not missing, f"{missing} are missing or come too early in {list(names)}"


@pytest.mark.parametrize("layout", ["processes", "one process"])
def test_log_and_file_of_a_server(tmp_path, empty_tmpdir, layout):
    path = tmp_path / "trace.json"
    flags = ["--trace-file", str(path), "--api-key", KEY]
    environment = {"TMPDIR": str(empty_tmpdir)}
    if layout == "processes":
        flags += ["--trace", "--api-server-count", "2", "--data-parallel-size", "2"]
    else:
        flags += ["--disable-frontend-multiprocessing"]
        environment["RUSTVLLM_TRACE"] = "1"
    with serve(*flags, **environment) as server:
        url = server.wait_until_ready()
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            body = {"prompt": SECRET_PROMPT, "max_tokens": 3}
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            streamed = client.post("/v1/completions", json=body | {"stream": True, "n": 2, "temperature": 1.0})
            refused = client.post("/v1/completions", json=body | {"max_tokens": -1})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert refused.status_code == 400
        server.end(signal.SIGTERM)
        output = server.output
    told = lines_by_request(output)
    components = {component for component, _ in told[""]}
    assert {COMPONENTS[layer] for layer in STARTUP_LAYERS} <= components
    assert ("APIServer", "sent") in told[""] or "http_status=400" in output
    [mine] = [told[name] for name in told if name.startswith(answer["id"])]
    # Steps belong to no request in particular: their execution and update are among the lines without one.
    assert_in_order(JOURNEY, [component for component, _ in mine])
    assert "ModelRunner" in components
    assert mine[-1] == ("APIServer", "sent")
    text = path.read_text()
    for secret in (SECRET_PROMPT, "treasure", KEY, answer["choices"][0]["text"].strip()):
        assert secret not in output.replace("Try it", "")
        assert secret not in text
    events = check_trace(text)
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    several = {"launcher", "API process 0", "API process 1", "engine 0", "engine 1"}
    assert processes == (several if layout == "processes" else {"server"})
    assert sum(event.get("cat") == "step" for event in events) >= 6
    ids = {event["id"] for event in events if event.get("cat") == "front end"}
    assert len(ids) == 2


def test_the_level_of_the_log_shows_journeys_without_a_flag(empty_tmpdir):
    with serve("--api-key", KEY, TMPDIR=str(empty_tmpdir), RUSTVLLM_LOGGING_LEVEL="DEBUG") as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"prompt": SECRET_PROMPT, "max_tokens": 3}
        url = f"{server.wait_until_ready()}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=30).json()
        server.end(signal.SIGTERM)
        output = server.output
    lines = [line for line in output.splitlines() if "[rustvllm.trace] " in line]
    assert lines
    assert all(line.startswith("DEBUG ") for line in lines)
    told = lines_by_request(output)
    [mine] = [told[name] for name in told if name.startswith(answer["id"])]
    assert_in_order(JOURNEY, [component for component, _ in mine])
    assert not any(secret in line for line in lines for secret in (SECRET_PROMPT, KEY))


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans over HTTP."""

    def __init__(self):
        self.spans = []
        self.came = threading.Event()
        super().__init__(("127.0.0.1", 0), _Collect)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Collect(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        sent = ExportTraceServiceRequest.FromString(body)
        assert self.path == "/v1/traces"
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
        self.server.came.set()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs rustvllm[otel]")
    with Collector() as collector:
        yield collector
        collector.shutdown()


def test_a_span_of_a_request_is_part_of_its_clients_trace(collector, empty_tmpdir):
    environment = {"TMPDIR": str(empty_tmpdir), "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with serve("--otlp-traces-endpoint", collector.url, **environment) as server:
        url = server.wait_until_ready()
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        body = {"prompt": SECRET_PROMPT, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "stream": True}
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30).raise_for_status()
        assert collector.came.wait(30)
        server.end(signal.SIGTERM)
        assert "[rustvllm.trace]" not in server.output
    [span] = collector.spans
    assert span.name == "llm_request"
    assert span.trace_id.hex() == TRACE_ID
    assert span.parent_span_id.hex() == PARENT_ID
    values = {each.key: each.value for each in span.attributes}
    assert values["gen_ai.request.temperature"].double_value == 0.5
    assert values["gen_ai.request.top_p"].double_value == 0.9
    assert values["gen_ai.request.max_tokens"].int_value == 3
    assert values["gen_ai.request.n"].int_value == 1
    assert values["gen_ai.usage.completion_tokens"].int_value == 3
    assert values["gen_ai.usage.prompt_tokens"].int_value > 3
    assert values["gen_ai.response.model"].string_value == "rustvllm-tiny"
    assert values["gen_ai.request.id"].string_value.startswith("cmpl-")
    times = {name: values[f"gen_ai.latency.{name}"].double_value for name in (
        "time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode",
        "time_in_model_inference",
    )}  # fmt: skip
    assert 0 < times["time_in_queue"] <= times["time_to_first_token"] <= times["e2e"]
    parts = times["time_in_model_prefill"] + times["time_in_model_decode"]
    assert parts == pytest.approx(times["time_in_model_inference"])
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(times["e2e"], abs=1e-3)
    assert "treasure" not in json.dumps([str(each) for each in span.attributes])


def test_an_endpoint_without_the_sdk_is_refused_with_what_to_install(tmp_path):
    hidden = tmp_path / "opentelemetry"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ImportError('hidden')\n")
    with serve("--otlp-traces-endpoint", "http://127.0.0.1:1", PYTHONPATH=_before_the_path(tmp_path)) as server:
        code, _ = server.end(signal.SIGCONT)
        assert code == 1
        assert "pip install 'rustvllm[otel]'" in server.output


def _before_the_path(folder):
    import os

    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
