"""``rustvllm bench serve``: what it sends, what it reports with which names, and mistakes."""

import json
import re
import sys
from pathlib import Path

import pytest

import rustvllm
from rustvllm import _core
from rustvllm.cli.bench.report.serve import KEYS, is_own_key
from rustvllm.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))
from stream_server import HEAD, WHOLE, StreamServer, event, text_event

VLLM_KEYS = {
    "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration",
    "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_concurrent_requests",
    *(
        f"{kind}_{metric}_ms"
        for kind in ("mean", "median", "std", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
}  # fmt: skip


@pytest.fixture
def serve():
    """Makes servers of ready answers."""
    made = []

    def make(*answers):
        made.append(StreamServer(*answers))
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


def run(capsys, server, *argv, exit_code=0):
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "4", "--json", *argv]) == exit_code
    return json.loads(capsys.readouterr().out)


def test_the_report_has_the_names_that_others_have(capsys, serve, tmp_path):
    server, path = serve(WHOLE), tmp_path / "report.json"
    report = run(
        capsys, server, "--output-json", str(path), "--max-concurrency", "2", "--goodput", "ttft:5000,e2el:9000"
    )
    assert set(report) >= VLLM_KEYS
    assert json.loads(path.read_text()) == report
    assert (report["completed"], report["failed"], report["model_id"]) == (4, 0, "ready-made")
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (20, 24)
    assert (report["content_events"], report["tokens_per_event"], report["output_tokens_from"]) == (8, 3.0, "usage")
    assert report["events_per_stream"] == {"mean": 2.0, "median": 2.0, "min": 2.0, "max": 2.0}
    assert report["output_throughput"] == pytest.approx(24 / report["duration"])
    assert report["request_goodput"] == pytest.approx(4 / report["duration"])
    assert (report["errors_by_kind"], report["goodput"]) == ({}, {"ttft": 5000.0, "e2el": 9000.0})
    assert report["machine"]["cores"] >= 1
    assert "rustvllm" in report["versions"]
    assert 0 <= report["mean_ttft_ms"] <= report["mean_e2el_ms"]


def test_a_saved_result(capsys, serve, tmp_path):
    server, folder = serve(WHOLE), tmp_path / "new" / "folder"
    argv = ["--result-dir", str(folder), "--metadata", "version=1.2", " tp = 2=two ", "--request-rate", "500"]
    report = run(capsys, server, "--save-result", "--max-concurrency", "2", *argv)
    [path] = folder.iterdir()
    assert path.name == f"openai-500.0qps-concurrency2-ready-made-{report['date']}.json"
    assert json.loads(path.read_text()) == report
    assert set(report) >= {*VLLM_KEYS, "endpoint_type", "label", "tokenizer_id"}
    assert (report["version"], report["tp"]) == ("1.2", "2=two")
    assert set(report).isdisjoint({"ttfts", "itls", "errors"})
    assert len(path.read_text().splitlines()) == 1
    run(capsys, server, "--save-result", "--label", "mine", "--model", "org/sub\n/a\tb", *argv[:2])
    [other] = set(folder.iterdir()) - {path}
    assert re.fullmatch(r"mine-infqps-a_b-\d{8}-\d{6}\.json", other.name)


def test_results_are_appended(capsys, serve, tmp_path):
    server, path = serve(WHOLE), tmp_path / "runs.json"
    argv = ["--result-dir", str(tmp_path), "--result-filename", "runs.json", "--append-result"]
    first = run(capsys, server, *argv)
    second = run(capsys, server, *argv, "--save-result", "--seed", "7")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [first, second]
    path.write_text('{"of": "vLLM"}')  # without the end of its line
    third = run(capsys, server, *argv)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"of": "vLLM"}, third]
    path.write_text("")
    fourth = run(capsys, server, *argv)
    assert path.read_text() == json.dumps(fourth) + "\n"


def test_details_of_each_request(capsys, serve, tmp_path):
    server = serve(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", WHOLE)
    argv = ["--max-concurrency", "1", "--vocab-size", "0", "--result-dir", str(tmp_path), "--result-filename", "r"]
    report = run(capsys, server, *argv, "--save-result", "--save-detailed")
    assert json.loads((tmp_path / "r").read_text()) == report
    assert (report["completed"], report["failed"]) == (3, 1)
    assert report["input_lens"] == [None, 5, 5, 5]  # words, which the server counts
    assert report["output_lens"] == [0, 6, 6, 6]
    assert [len(gaps) for gaps in report["itls"]] == [0, 1, 1, 1]
    assert report["errors"] == ["HTTP status 503: ", "", "", ""]
    assert report["ttfts"][0] == 0
    assert 1000 * sum(report["ttfts"][1:]) / 3 == pytest.approx(report["mean_ttft_ms"])
    starts, firsts = report["start_times"], report["ttfts"]
    assert all(start + first <= after for start, first, after in zip(starts, firsts, starts[1:], strict=False))
    assert 0 <= starts[0] <= starts[-1] <= report["duration"]


def test_the_names_of_a_report_are_known(capsys, serve):
    report = run(capsys, serve(WHOLE), "--save-detailed", "--goodput", "ttft:1")
    assert {key for key in report if not key.endswith("_ms")} == KEYS - {"generated_texts"}
    assert all(is_own_key(key) for key in report)
    assert not is_own_key("version")


@pytest.mark.parametrize(
    ("argv", "backend", "endpoint"),
    [
        ([], "openai", "/v1/completions"),
        (["--backend", "vllm"], "vllm", "/v1/completions"),
        (["--backend", "openai-chat"], "openai-chat", "/v1/chat/completions"),
        (["--endpoint", "/v1/chat/completions"], "openai-chat", "/v1/chat/completions"),
        (["--backend", "openai", "--endpoint", "/team-1/v1/completions"], "openai", "/team-1/v1/completions"),
        (["--backend", "openai-chat", "--endpoint", "/chat/completions"], "openai-chat", "/chat/completions"),
    ],
)
def test_backends_and_their_endpoints(capsys, serve, argv, backend, endpoint):
    server = serve(WHOLE)
    report = run(capsys, server, *argv)
    assert (report["backend"], report["endpoint_type"], report["endpoint"]) == (backend, backend, endpoint)
    assert report["completed"] == len(server.requests) == 4
    for head, body in server.requests:
        assert head.startswith(f"POST {endpoint} ")
        assert ("messages" in body, "prompt" in body) == (backend == "openai-chat", backend != "openai-chat")


def test_flags_without_effect_are_named(capsys, serve):
    argv = ["--base-url", serve(WHOLE).url, "--num-prompts", "1"]
    flags = ["--result-dir", "x", "--result-filename", "y", "--label", "z", "--metadata", "a=b", "--save-detailed"]
    assert main(["bench", "serve", *argv, *flags]) == 0
    notes = capsys.readouterr().err.splitlines()
    for flag in ("--result-dir", "--result-filename", "--label", "--metadata", "--save-detailed"):
        assert sum(f"{flag} has no effect without --save-result" in note for note in notes) == 1
    assert main(["bench", "serve", *argv, "--metadata", "--json"]) == 0
    assert "no effect" not in capsys.readouterr().err


def test_answers_of_one_token_have_no_time_between_tokens(capsys, serve):
    usage = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
    server = serve(HEAD + text_event("a") + usage + event("[DONE]"))
    report = run(capsys, server, "--metric-percentiles", "50,99.999999")
    assert (report["completed"], report["total_output_tokens"]) == (4, 4)
    for name in ("tpot", "itl"):
        assert [report[f"{kind}_{name}_ms"] for kind in ("mean", "median", "std", "p50", "p99.999999")] == [None] * 5
    assert report["p99.999999_ttft_ms"] > 0
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "2"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Mean TPOT (ms): -" in lines
    assert "P99 ITL (ms): -" in lines


def test_what_is_sent(capsys, serve, monkeypatch):
    monkeypatch.setenv("RUSTVLLM_API_KEY", "secret")
    server = serve(WHOLE)
    lengths = ["--random-input-len", "7", "--random-output-len", "9", "--vocab-size", "2K"]
    report = run(capsys, server, "--ignore-eos", "--temperature", "0.5", "--extra-body", '{"top_k": 3}', *lengths)
    assert "secret" not in json.dumps(report)
    assert len(server.requests) == 4
    for head, body in server.requests:
        assert head.startswith("POST /v1/completions ")
        assert "authorization: bearer secret" in head.lower()
        prompt = body.pop("prompt")
        assert len(prompt) == 7
        assert all(4 <= token < 2048 for token in prompt)
        assert body == {
            "model": "ready-made", "max_tokens": 9, "temperature": 0.5, "stream": True, "ignore_eos": True, "top_k": 3,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
    run(capsys, server, "--endpoint", "/v1/chat/completions", "--model", "other", "--dataset-name", "prefix", *lengths)
    head, body = server.requests[-1]
    assert head.startswith("POST /v1/chat/completions ")
    assert body["model"] == "other"
    [message] = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 256 + 7
    assert "ignore_eos" not in body


def test_texts_that_drafts_may_foresee(capsys, serve):
    server = serve(WHOLE)
    lengths = ["--random-input-len", "96", "--random-output-len", "9"]
    sent = {}
    for name in ("repeat", "edit"):
        for _ in range(2):
            run(capsys, server, "--dataset-name", name, "--seed", "3", *lengths)
        bodies = [body for _, body in server.requests[-8:]]
        assert {body["max_tokens"] for body in bodies} == {9}
        prompts = [body["prompt"] for body in bodies]
        assert sorted(prompts[:4]) == sorted(prompts[4:]), "a seed says which"
        assert len(set(prompts)) == 4
        sent[name] = prompts[0]
    words = sent["repeat"].split()
    assert len(words) == 48
    assert words[:12] * 4 == words
    asked, *rows = sent["edit"].splitlines()
    old = asked.rstrip(":").split()[-1]
    assert any(old in row.split() for row in rows)
    assert 40 <= len(sent["edit"].split()) <= 48


def test_sharegpt_and_traces(capsys, serve, tmp_path):
    conversations = tmp_path / "c.json"
    turns = [{"value": "Hello there"}, {"value": "Hi"}]
    conversations.write_text(json.dumps([{"conversations": turns}]))
    server = serve(WHOLE)
    run(
        capsys, server, "--dataset-name", "sharegpt", "--dataset-path", str(conversations), "--sharegpt-output-len", "3"
    )
    assert [(body["prompt"], body["max_tokens"]) for _, body in server.requests] == [("Hello there", 3)] * 4
    trace = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [3]}
    trace.write_text("".join(json.dumps(line | {"timestamp": at}) + "\n" for at in (0, 150)))
    report = run(capsys, server, "--dataset-name", "trace", "--dataset-path", str(trace))
    assert (report["completed"], report["num_prompts"]) == (2, 4)
    assert report["duration"] > 0.15
    assert server.requests[-1][1]["prompt"] == server.requests[-2][1]["prompt"]


def test_failures_are_counted_by_kind(capsys, serve):
    full = b'HTTP/1.1 503 Full\r\nContent-Length: 29\r\nConnection: close\r\n\r\n{"error":{"message":"full!"}}'
    cut = HEAD + text_event("a")
    gave_up = HEAD + text_event("a") + event({"error": {"message": "the engine died", "code": 500}})
    server = serve(full, cut, gave_up, WHOLE)
    report = run(capsys, server, "--max-concurrency", "1")
    assert (report["completed"], report["failed"]) == (1, 3)
    assert report["errors_by_kind"] == {"cut": 1, "error_event": 1, "http_503": 1}
    assert report["error_examples"]["http_503"] == "HTTP status 503: full!"
    assert report["error_examples"]["error_event"].endswith("the engine died")
    assert report["total_output_tokens"] == 6


@pytest.mark.parametrize("end", ["/v1", "/v1/", "/"])
def test_a_base_url_may_have_the_version(capsys, serve, end):
    server = serve(WHOLE)
    assert main(["bench", "serve", "--base-url", server.url + end, "--num-prompts", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 1
    assert [head.splitlines()[0] for head, _ in server.requests] == ["POST /v1/completions HTTP/1.1"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--dataset-name", "repeat"], "prompts of 96 words and answers of 128 tokens instead of 512 and 128"),
        (["--dataset-name", "edit"], "prompts of 96 words and answers of 128 tokens instead of 512 and 128"),
        (["--dataset-name", "prefix", "--vocab-size", "0"], "prefixes have 64 words instead of 256"),
    ],
)
def test_default_texts_fit_into_a_short_context(capsys, monkeypatch, serve, argv, says):
    monkeypatch.setattr("rustvllm.cli.bench.serve.ApiClient.context_len", lambda _: 512)
    server = serve(WHOLE)
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "4", "--json", *argv]) == 0
    assert says in capsys.readouterr().err
    tokenizer = _core.Tokenizer.from_file(str(Path(rustvllm.__file__).parent / "assets" / "tiny" / "tokenizer.json"))
    needed = [len(tokenizer.encode(body["prompt"])) + body["max_tokens"] for _, body in server.requests]
    assert len(needed) == 4
    assert max(needed) <= 512
    assert min(needed) > 200


def test_the_table_and_its_notes(capsys, serve):
    server = serve(HEAD + text_event("a") + text_event("é") + event("[DONE]"))
    argv = [
        "--base-url",
        server.url,
        "--num-prompts",
        "3",
        "--percentile-metrics",
        "ttft",
        "--metric-percentiles",
        "50,99.9",
    ]
    assert main(["bench", "serve", *argv, "--vocab-size", "0", "--request-rate", "500"]) == 0
    text = capsys.readouterr().out
    for part in ("Serving Benchmark Result", "Successful requests:", "P99.9 TTFT (ms):", "Request rate configured"):
        assert part in text
    assert "ITL" not in text
    assert "3 answers came without usage: each of their events counts as one token." in text
    assert "The number of tokens is unknown of 3 prompts." in text


def test_nothing_came_to_its_end(capsys, serve, tmp_path):
    server = serve(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "2"]) == 1
    captured = capsys.readouterr()
    assert "none of 2 requests finished; first http_500" in captured.err
    assert len(captured.err.splitlines()) == 1
    assert "Failed requests:" in captured.out
    assert not re.search(r"TTFT|TPOT|ITL|E2EL|throughput|0\.00$", captured.out)
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "2", "--warmup", "1"]) == 1
    assert "a warm-up request failed: HTTP status 500" in capsys.readouterr().err
    path = tmp_path / "result"
    report = run(capsys, server, "--save-result", "--result-filename", str(path), exit_code=1)
    assert (report["completed"], report["failed"], report["errors_by_kind"]) == (0, 4, {"http_500": 4})
    latencies = {key: value for key, value in report.items() if key.endswith("_ms")}
    assert len(latencies) == 16
    assert set(latencies.values()) == {None}
    assert not path.exists()
    argv = ["--base-url", server.url, "--num-prompts", "2", "--save-result", "--result-filename", str(path)]
    assert main(["bench", "serve", *argv]) == 1
    assert f"({path} was not written)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--save-result", "--result-filename", "there"], "there, exists already: give --append-result to add a line"),
        (["--save-result", "--result-filename", "."], "cannot write the file of the results, {}: Is a directory"),
        (["--append-result", "--result-filename", "."], "cannot write the file of the results, {}: Is a directory"),
        (
            ["--save-result", "--result-dir", "there/x"],
            "cannot make the folder there/x of the results: Not a directory",
        ),
        (["--save-result", "--result-dir", "/proc/x"], "cannot make the folder /proc/x of the results: No such file"),
        (["--save-result", "--result-filename", "n" * 300], "cannot write the file of the results, nnn"),
        (["--output-json", "no/such"], "cannot write --output-json no/such: No such file"),
        (["--metadata", "a=1", "a=2"], "--metadata a is given 2 times; each key may be given once"),
        (["--metadata", "ttfts=1"], "--metadata ttfts: the report has a ttfts of its own; choose another key"),
        (["--metadata", "p90_itl_ms=1"], "--metadata p90_itl_ms: the report has a p90_itl_ms of its own"),
        (["--backend", "openai", "--endpoint", "/v1/chat/completions"], "ends in /completions, and not in /chat"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], "ends in /chat/completions, for instance"),
    ],
)
def test_nothing_is_sent_before_all_flags_are_good(capsys, serve, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("mine")
    server = serve(WHOLE)
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "1", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message.format(".") in captured.err
    assert len(captured.err.splitlines()) == 1
    assert server.requests == []
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "mine"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--base-url", "https://localhost"], "https is not supported"),
        (["--base-url", "localhost:80"], "must be of the form http://HOST:PORT"),
        (["--port", "1"], "http://127.0.0.1:1: cannot connect: Connection refused"),
        (["--port", "1", "--model", "m"], "http://127.0.0.1:1: cannot connect: Connection refused"),
        (["--host", "::1", "--port", "1"], "http://[::1]:1: cannot connect"),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt needs --dataset-path FILE"),
        (["--dataset-name", "trace", "--dataset-path", "/no/such", "--model", "m"], "cannot read /no/such"),
        (
            ["--output-json", "/no/such/folder/x.json"],
            "cannot write --output-json /no/such/folder/x.json: No such file",
        ),
        (["--model", "m", "--vocab-size", "3"], "vocab_size must be between 6 and"),
    ],
)
def test_what_cannot_be_run(capsys, argv, message):
    assert main(["bench", "serve", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rustvllm bench serve: error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-prompts", "0"], "must be a whole number between 1 and"),
        (["--request-rate", "0"], "--request-rate: must be a number above 0 and at most 1000000, or inf, got '0'"),
        (["--request-rate", "fast"], "must be a number above 0 and at most 1000000, or inf, got 'fast'"),
        (["--burstiness", "-1"], "--burstiness: must be a number above 0 and at most 1000, got '-1'"),
        (["--burstiness", "nan"], "--burstiness: must be a number above 0 and at most 1000, got 'nan'"),
        (["--temperature", "-1"], "--temperature: must be a number of at least 0, got '-1'"),
        (["--dataset-name", "repeat", "--random-range-ratio", "1"], "must be a number of at least 0 and below 1"),
        (["--dataset-name", "repeat", "--random-input-len", "0"], "must be a whole number between 1 and"),
        (["--extra-body", '{"temperature": NaN}'], "--extra-body: must be a JSON object, got '{\"temperature\": NaN}'"),
        (["--extra-body", "[" * 100_000], "--extra-body: must be a JSON object, got '[[["),
        (["--goodput", "itl:3"], "must be like ttft:200,tpot:30,e2el:5000"),
        (["--goodput", "ttft"], "must be like ttft:200"),
        (["--percentile-metrics", "ttft,x"], "must be one or more of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "must be numbers from 0 to 100"),
        (["--metric-percentiles", "many"], "must be numbers from 0 to 100"),
        (["--extra-body", "[]"], "must be a JSON object, got '[]'"),
        (["--request-timeout", "0"], "must be a number of seconds above 0"),
        (["--endpoint", "/v1/embeddings"], "must be a path that ends in /completions or /chat/completions"),
        (["--endpoint", "v1/completions"], "must be a path that ends in /completions"),
        (["--endpoint", "/v1/completions?x=1"], "must be a path that ends in /completions"),
        (["--endpoint", "/v1/\r\nX: y/completions"], "must be a path that ends in /completions"),
        (["--backend", "openai-embeddings"], "--backend: must be vllm, openai, openai-chat (only streams of generated"),
        (["--backend", ""], "--backend: must be vllm, openai, openai-chat"),
        (["--metadata", "version"], "--metadata: must be KEY=VALUE, for instance version=1.2, got 'version'"),
        (["--metadata", "=1"], "--metadata: must be KEY=VALUE, for instance version=1.2, got '=1'"),
        (["--request-rate", "nan"], "must be a number above 0 and at most 1000000, or inf, got 'nan'"),
        (["--goodput", "ttft:nan"], "must be like ttft:200,tpot:30,e2el:5000"),
        (["--metric-percentiles", "nan"], "must be numbers from 0 to 100"),
        (["--max-concurency", "3"], "did you mean --max-concurrency?"),
    ],
)
def test_wrong_usage(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_progress_is_told_and_its_exception_ends_the_run(serve):
    server = serve(WHOLE)
    random = {"input_len": 4, "output_len": 4, "range_ratio": 0.0, "prefix_len": 0, "num_prefixes": 1}
    told = []

    def progress(*counts):
        told.append(counts)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.bench_serve(
            server.url, "/v1/completions", "{}", num_prompts=100, random=random, vocab_size=50, request_rate=20.0,
            progress=progress,
        )  # fmt: skip
    assert len(told) == 3
    assert all(failed == 0 and not is_warmup for _, failed, _, is_warmup in told)
    assert told[-1][0] <= 20
    with pytest.raises(ValueError, match="give exactly one of random, texts and trace"):
        _core.bench_serve(server.url, "/v1/completions", "{}", num_prompts=1)
    with pytest.raises(ValueError, match="must be one JSON object"):
        _core.bench_serve(server.url, "/v1/completions", "[", num_prompts=1, random=random, vocab_size=50)
    with pytest.raises(ValueError, match="timeout_s is -1"):
        _core.bench_serve(server.url, "/v1/completions", "{}", num_prompts=1, random=random, timeout_s=-1.0)
