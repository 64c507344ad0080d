"""Bad input and bad clients against `rustvllm serve` with a real model: each gets its answer and harms no other."""

import json
import signal
import socket
import threading
import time

import httpx
import pytest
from server_process import REAL, STOP_SECONDS, ServerProcess

MAX_MODEL_LEN = 512
VOCAB_SIZE = 512
HEAD = "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Once upon a time"}]
GOOD = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(shared_dir_of_module):
    model = shared_dir_of_module / "data" / "stories260K" / "hf"
    command = [*REAL, str(model), "--served-model-name", "stories", "tales", "--port", "0", "--max-num-seqs", "16"]
    with ServerProcess(command) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def shared_dir_of_module(request):
    return request.getfixturevalue("shared_dir")


@pytest.fixture(scope="module")
def good_text(server):
    return httpx.post(server.url + COMPLETIONS, json=GOOD, timeout=60).json()["choices"][0]["text"]


@pytest.fixture
def post(server, good_text):
    """Posts a bad request; afterwards a good one must be answered as ever."""

    def post_bad(path, **options):
        return httpx.post(server.url + path, timeout=60, **options)

    yield post_bad
    assert httpx.post(server.url + COMPLETIONS, json=GOOD, timeout=60).json()["choices"][0]["text"] == good_text


def assert_idle(server, seconds=5.0):
    """All blocks are free again, soon."""
    deadline = time.monotonic() + seconds
    while True:
        load = httpx.get(server.url + "/load").json()
        idle = load["num_running"] == load["num_waiting"] == 0 and load["num_free_blocks"] == load["num_usable_blocks"]
        if idle and load["server_load"] == 0:
            return
        assert time.monotonic() < deadline, load
        time.sleep(0.01)


def check(response, status, *, param=None, says=()):
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert error["code"] == status
    assert error["param"] == param
    for words in says:
        assert words in error["message"], error


def test_unknown_model(post):
    check(post(COMPLETIONS, json={**GOOD, "model": "gpt-9"}), 404, param="model", says=("gpt-9",))
    check(post(CHAT, json={"messages": USER, "model": "gpt-9"}), 404, param="model", says=("gpt-9",))
    assert post(COMPLETIONS, json={**GOOD, "model": "tales"}).json()["model"] == "tales"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 100_000])
def test_prompt_too_long_names_both_numbers(post, num_tokens, stream):
    response = post(COMPLETIONS, json={"prompt": [5] * num_tokens, "stream": stream})
    check(response, 400, param="input_tokens", says=(f"{MAX_MODEL_LEN} tokens", f"{num_tokens} input tokens"))


def test_text_too_long_names_both_numbers(post):
    text = "Once upon a time there was a dragon. " * 200
    for path, body in ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        check(post(path, json=body), 400, param="input_tokens", says=(f"{MAX_MODEL_LEN} tokens", "input tokens"))


def test_the_longest_prompt_that_fits_is_served(post):
    body = post(COMPLETIONS, json={"prompt": [5] * (MAX_MODEL_LEN - 1), "max_tokens": 100, "ignore_eos": True}).json()
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31, 2**63, 10**40])
def test_token_ids_outside_the_vocabulary(post, token_id):
    check(post(COMPLETIONS, json={"prompt": [1, token_id]}), 400, param="prompt", says=(str(VOCAB_SIZE - 1),))


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_empty_prompt(post, prompt):
    check(post(COMPLETIONS, json={"prompt": prompt}), 400, param="prompt", says=("empty",))


def test_max_tokens_0_is_for_echo_only(post):
    check(post(COMPLETIONS, json={**GOOD, "max_tokens": 0}), 400, param="max_tokens", says=("echo",))
    check(post(CHAT, json={"messages": USER, "max_tokens": 0}), 400, param="max_tokens", says=("at least 1",))
    for stream in (False, True):
        response = post(COMPLETIONS, json={**GOOD, "max_tokens": 0, "echo": True, "stream": stream})
        assert response.status_code == 200
        assert GOOD["prompt"] in response.text
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("max_tokens", [-1, -(2**40), MAX_MODEL_LEN + 1, 2**31, 2**63, 10**30])
def test_max_tokens_negative_or_huge(post, max_tokens):
    for path, body in ((COMPLETIONS, GOOD), (CHAT, {"messages": USER})):
        check(post(path, json={**body, "max_tokens": max_tokens}), 400, param="max_tokens", says=(str(max_tokens),))


@pytest.mark.parametrize("temperature", ["NaN", "Infinity", "-0.5", "2.5", "1e400"])
def test_temperature_out_of_range(post, temperature):
    content = f'{{"prompt": "a", "temperature": {temperature}}}'
    response = post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "temperature" in response.json()["error"]["message"]


def test_a_role_of_any_name(post):
    answer = post(CHAT, json={"messages": [{"role": "wizard", "content": "a"}], "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    check(post(CHAT, json={"messages": [{"role": 7, "content": "a"}]}), 400, param="messages", says=("role",))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1]", b"null", b'{"prompt":', b"[" * 200_000])
def test_body_that_is_no_json_object(post, content):
    for path in (COMPLETIONS, CHAT):
        check(post(path, content=content, headers={"Content-Type": "application/json"}), 400, says=("body",))


def test_ten_megabytes(post):
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    for content in (body, iter([body[i : i + 65536] for i in range(0, len(body), 65536)])):
        response = post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
        check(response, 413, says=("--max-body-bytes",))


def test_megabytes_within_the_limit_are_refused_quickly_and_delay_no_other_request(server, post):
    """A stream's longest pause stays short while others send the largest prompts the server takes."""
    pauses = []

    def read():
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        for _ in range(3):
            last = time.monotonic()
            with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
                for _ in response.iter_lines():
                    pauses.append(time.monotonic() - last)
                    last = time.monotonic()

    reader = threading.Thread(target=read)
    reader.start()
    largest = [
        {"prompt": "a" * 8_000_000},
        {"prompt": [5] * 2_000_000},
        {"prompt": [[5]] * 1_000_000},
        {"prompt": ["a b c"] * 16_000, "n": 2},
    ]
    for body in largest:
        response = post(COMPLETIONS, json=body)
        assert response.status_code == 400
    reader.join(60)
    assert len(pauses) > 300
    assert max(pauses) < 20, "a hang, not a delay"


@pytest.mark.parametrize("count", [1, 8])
def test_a_client_that_goes_away_mid_stream_frees_its_blocks(server, post, count):
    url = httpx.URL(server.url)
    # Far more than the server can have answered when the client leaves: 64 answers of 500 tokens, 16 of them at a time.
    body = json.dumps({"prompt": [[5]] * 16, "n": 4, "max_tokens": 500, "ignore_eos": True, "stream": True})
    head = HEAD % (COMPLETIONS, len(body))
    num_aborted = finished(server, "abort")
    clients = []
    for _ in range(count):
        client = socket.create_connection((url.host, url.port))
        client.sendall((head + body).encode())
        clients.append(client)
    assert clients[0].recv(1024).startswith(b"HTTP/1.1 200")  # the others may wait behind it
    for client in clients:
        client.close()
    assert_idle(server, 60)
    assert finished(server, "abort") > num_aborted, "every answer went on to its end"


def finished(server, reason):
    """Requests that have ended so far for one reason."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    found = [line for line in lines if "request_success_total{" in line and f'finished_reason="{reason}"' in line]
    assert found, "the counter has another name"
    return sum(float(line.split()[-1]) for line in found)


def test_the_blocks_of_a_client_that_left_are_free_within_one_step(server, post):
    """Another client's stream keeps the engine stepping, so that steps can be counted."""

    def load():
        return httpx.get(server.url + "/load").json()

    def stream(max_tokens):
        body = {"prompt": [5] * 20, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60)

    for _ in range(4):  # on a busy machine the staying stream may end before it was looked at
        with stream(490) as staying:
            staying_lines = staying.iter_lines()
            next(staying_lines)
            with stream(490) as leaving:
                leaving_lines = leaving.iter_lines()
                next(leaving_lines)
                both = load()
                if both["server_load"] < 2:
                    continue  # the staying stream has ended meanwhile
                assert (both["num_running"], both["server_load"]) == (2, 2)
            while (seen := load())["server_load"] == 2:  # until the server has noticed
                pass
            freed = seen
            while freed["num_running"] == 2:
                # The step under way, and the next, which takes the abort in: after these it must not run any more.
                assert freed["last_updated_step"] - seen["last_updated_step"] <= 2
                freed = load()
            if freed["num_running"] == 1:
                # The other stream goes on taking blocks meanwhile: what is held is no more than it alone may hold.
                assert freed["num_usable_blocks"] - freed["num_free_blocks"] <= -(-(20 + 490) // 16)
                assert sum(1 for line in staying_lines if line.startswith("data: {")) > 300
                break
    else:
        pytest.fail("the staying stream must outlast this test")
    assert_idle(server, 2)


def test_a_client_that_goes_away_before_the_answer_frees_its_blocks(server, post):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + COMPLETIONS,
            json={"prompt": ["Once"] * 8, "n": 2, "max_tokens": 500, "ignore_eos": True},
            timeout=httpx.Timeout(30, read=0.05),
        )
    assert_idle(server, 2)


def test_garbage_instead_of_http_is_dropped(server, post):
    url = httpx.URL(server.url)
    for garbage in (b"\x16\x03\x01\x02\x00\x01" * 10, b"GET\r\n\r\n", b"POST /v1/completions HTTP/9.9\r\n\r\n"):
        with socket.create_connection((url.host, url.port), timeout=10) as client:
            client.sendall(garbage)
            assert b"200 OK" not in client.recv(4096)
    assert_idle(server)


def test_a_body_that_never_comes_whole_holds_nothing_but_its_connection(server, post):
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall((HEAD % (COMPLETIONS, 100) + "{").encode())
        assert httpx.post(server.url + COMPLETIONS, json=GOOD, timeout=60).status_code == 200
    assert_idle(server)


@pytest.mark.parametrize("delay", [0.5, 1.5, 3])
def test_a_signal_while_a_real_model_loads_ends_the_process(delay):
    with ServerProcess([*REAL, "--port", "0"]) as process:
        process.wait_for("listening on")
        time.sleep(delay)
        code, seconds = process.end(signal.SIGINT)
        process.assert_nothing_left()
    assert code == 0, process.output
    assert seconds < STOP_SECONDS
    assert "Traceback" not in process.output


def test_the_process_printed_no_traceback(server):
    assert "Traceback" not in server.output
