"""``rustvllm chat`` and ``rustvllm complete`` against a server, and against what is none."""

import http.server
import io
import json
import os
import subprocess
import sys
import threading

import pytest
from fake_engine import BOS, expected_text
from server_process import FAKE, ServerProcess

from rustvllm.cli.main import main


@pytest.fixture(scope="module")
def url():
    with ServerProcess([*FAKE, "--port", "0"]) as server:
        yield server.wait_until_ready() + "/v1"


@pytest.fixture
def silent():
    """Base URL of a server whose answer to everything is what the test puts there."""

    class Handler(http.server.BaseHTTPRequestHandler):
        status, body, kind, seen = 200, b"", "text/event-stream", []

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            Handler.seen.append((self.path, dict(self.headers), json.loads(self.rfile.read(length))))
            self.do_GET()

        def do_GET(self):
            self.send_response(self.status)
            self.send_header("Content-Type", self.kind)
            self.send_header("Content-Length", str(len(Handler.body)))
            self.end_headers()
            self.wfile.write(Handler.body)

        def log_message(self, *_args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        Handler.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield Handler
        server.shutdown()
        thread.join()


def complete(url, text, *argv):
    return main(["complete", "--url", url, "--max-tokens", "5", "-q", text, *argv])


def test_a_text_is_continued(capsys, url):
    assert complete(url, "ab") == 0
    assert capsys.readouterr().out == expected_text(len([BOS, *b"ab"]), 5) + "\n"


def test_one_thing_is_said(capsys, url):
    assert main(["chat", "--url", url, "--max-tokens", "4", "--temperature", "0", "-q", "Hi"]) == 0
    assert capsys.readouterr().out == expected_text(len([BOS, *b"Hi"]), 4) + "\n"


def test_calls_are_shown_and_the_next_line_answers_them(capsys, monkeypatch, silent, tmp_path):
    parts = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a": 1}'}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    deltas = [{"reasoning": "Hm"}, *({"tool_calls": [part]} for part in parts)]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    silent.body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
    tools = [{"type": "function", "function": {"name": "add"}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    monkeypatch.setattr(sys, "stdin", io.StringIO("One and one?\n2\n"))
    silent.seen.clear()
    arguments = ["--url", silent.url, "--model-name", "m", "--tools", str(tmp_path / "tools.json")]
    assert main(["chat", *arguments]) == 0
    assert capsys.readouterr().out == '(Hm)\n[add {"a": 1}]\n[now {}]\n' * 2
    first, second = [body for _, _, body in silent.seen]
    assert first["tools"] == second["tools"] == tools
    assert second["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    given = [{"role": "tool", "tool_call_id": name, "content": "2"} for name in ("call_1", "call_2")]
    assert second["messages"][2:] == given


@pytest.mark.parametrize(("text", "says"), [(None, "No such file"), ("{", "Expecting"), ("{}", "a JSON list of tools")])
def test_a_file_that_holds_no_tools_is_named(capsys, silent, tmp_path, text, says):
    path = tmp_path / "tools.json"
    if text is not None:
        path.write_text(text)
    assert main(["chat", "--url", silent.url, "--tools", str(path), "-q", "Hi"]) == 1
    message = capsys.readouterr().err
    assert str(path) in message
    assert says in message


def test_a_reader_that_has_heard_enough_ends_the_program_without_a_word(silent):
    chunk = {"choices": [{"index": 0, "text": "abc", "finish_reason": None}]}
    silent.body = f"data: {json.dumps(chunk)}\n\n".encode() * 3 + b"data: [DONE]\n\n"
    ours, theirs = os.pipe()
    os.close(ours)
    argv = [sys.executable, "-m", "rustvllm.cli.main", "complete", "--url", silent.url, "--model-name", "m", "-q", "a"]
    try:
        done = subprocess.run(argv, stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


def test_bytes_that_are_no_text_are_said_before_the_server_is_asked(capsys, silent):
    before = len(silent.seen)
    assert complete(silent.url, "a\udcff", "--model-name", "m") == 1
    assert "has bytes that are not UTF-8: 'a\\udcff'" in capsys.readouterr().err
    assert len(silent.seen) == before


def test_lines_of_the_input_are_a_conversation(capsys, monkeypatch, silent):
    silent.body = b'data: {"choices": [{"delta": {"content": "Oh"}}]}\n\n: alive\n\ndata: [DONE]\n\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\n\nTwo\n"))
    monkeypatch.setenv("RUSTVLLM_API_KEY", "secret")
    silent.seen.clear()
    assert main(["chat", "--url", silent.url, "--model-name", "m", "--system-prompt", "Be brief."]) == 0
    assert capsys.readouterr().out == "Oh\nOh\n"
    (_, headers, first), (_, _, second) = silent.seen
    assert headers["Authorization"] == "Bearer secret"
    assert first == {
        "model": "m",
        "stream": True,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}],
    }
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "One", "Oh", "Two"]


def test_thoughts_are_shown_and_not_sent_back(capsys, monkeypatch, silent):
    deltas = [{"reasoning": "H"}, {"reasoning": "m"}, {"content": "Oh"}, {"content": "!"}]
    silent.body = b"".join(b"data: %b\n\n" % json.dumps({"choices": [{"delta": it}]}).encode() for it in deltas)
    silent.body += b"data: [DONE]\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\nTwo\n"))
    silent.seen.clear()
    assert main(["chat", "--url", silent.url, "--model-name", "m"]) == 0
    assert capsys.readouterr().out == "(Hm)\nOh!\n" * 2
    assert [message["content"] for message in silent.seen[1][2]["messages"]] == ["One", "Oh!", "Two"]


class Terminal(io.StringIO):
    """Standard input that says it is a terminal."""

    def isatty(self):
        return True


def test_commands_of_a_chat_at_a_terminal(capsys, monkeypatch, silent):
    silent.body = b'data: {"choices": [{"delta": {"content": "Oh"}}]}\n\ndata: [DONE]\n\n'
    lines = ["/help", "One", "/clear", "Two", "/system Be brief.", "/system", " /usr", "/nothing", "/bye", "Never"]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(lines)))
    silent.seen.clear()
    assert main(["chat", "--url", silent.url, "--model-name", "m"]) == 0
    out = capsys.readouterr().out
    assert "/system TEXT   replace the system prompt" in out
    assert "Unknown command /nothing; /help lists the commands" in out
    assert "> Be brief.\n" in out
    asked = [[message["content"] for message in body["messages"]] for _, _, body in silent.seen]
    assert asked == [["One"], ["Two"], ["Be brief.", " /usr"]]


@pytest.mark.parametrize("text", ["/bye", "/help"])
def test_commands_are_plain_text_in_a_pipe(monkeypatch, silent, text):
    silent.body = b'data: {"choices": [{"delta": {"content": "Oh"}}]}\n\ndata: [DONE]\n\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    silent.seen.clear()
    assert main(["chat", "--url", silent.url, "--model-name", "m"]) == 0
    assert [body["messages"][-1]["content"] for _, _, body in silent.seen] == [text]


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_url_works_with_and_without_its_version(capsys, url, ending):
    assert complete(url.removesuffix("/v1") + ending, "ab") == 0
    assert capsys.readouterr().out == expected_text(len([BOS, *b"ab"]), 5) + "\n"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b'data: {"choices": [{"text": "half"}]}\n\n', "before [DONE]"),
        (200, b'data: {"choices": [{"te', "broke off"),
        (200, b'data: {"error": {"message": "the engine died", "code": 500}}\n\ndata: [DONE]\n\n', "the engine died"),
        (401, b'{"error": "Unauthorized"}', "401 Unauthorized"),
        (404, b'{"error": {"message": "The model `m` does not exist."}}', "The model `m` does not exist."),
        (503, b"<html>", "503 Service Unavailable"),
    ],
)
def test_an_answer_that_is_none(capsys, silent, status, body, says):
    silent.status, silent.body = status, body
    assert complete(silent.url, "ab", "--model-name", "m") == 1
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("rustvllm complete: error: ")


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"data": []}', b"no JSON"])
def test_a_server_that_names_no_model(capsys, silent, body):
    silent.body = body
    assert complete(silent.url, "ab") == 1
    assert "name one with --model-name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "says"),
    [("http://127.0.0.1:9/v1", "is the server running"), ("file:///etc/passwd", "must begin with http")],
)
def test_no_server(capsys, url, says):
    assert complete(url, "ab") == 1
    assert says in capsys.readouterr().err


def test_an_unknown_model_is_the_servers_word(capsys, url):
    assert complete(url, "ab", "--model-name", "nothing") == 1
    assert "404 The model `nothing` does not exist." in capsys.readouterr().err


@pytest.mark.parametrize("key", ["sk-plain", "schlüssel", "ключ-€"])
def test_a_key_travels_in_utf_8_as_servers_read_it(silent, key):
    silent.body, silent.seen[:] = b"data: [DONE]\n\n", []
    assert main(["complete", "--url", silent.url, "--model-name", "m", "--api-key", key, "-q", "a"]) == 0
    [(_, headers, _)] = silent.seen
    assert headers["Authorization"].encode("latin-1").decode() == f"Bearer {key}"


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize("key", ["sk-hush\n", "sk-hush\r", "sk hush", "sk-hush\x00", "sk-hush\udcff"])
def test_a_key_that_no_header_carries_is_refused_without_being_shown(capsys, monkeypatch, silent, command, key):
    silent.seen.clear()
    if "\0" in key:
        argv = ["--api-key", key]
    else:
        argv = []
        monkeypatch.setenv("RUSTVLLM_API_KEY", key)
    assert main([command, "--url", silent.url, "--model-name", "m", "-q", "a", *argv]) == 1
    said = capsys.readouterr()
    assert "the API key has a space or a control character at position " in said.err
    assert "hush" not in said.out + said.err
    assert silent.seen == []


@pytest.mark.parametrize("command", ["chat", "complete"])
@pytest.mark.parametrize(
    ("event", "says"),
    [
        ("null", "an event that is not a JSON object: b'null'"),
        ("[1]", "an event that is not a JSON object: b'[1]'"),
        ('{"choices": [1]}', "an event whose choices are not a list of objects: [1]"),
        ('{"choices": {"a": 1}}', "an event whose choices are not a list of objects: {'a': 1}"),
        ('{"choices": null, "usage": {}}', None),
        ('{"choices": [{}]}', None),
        ('{"choices": [{"delta": null, "text": null}], "error": null}', None),
    ],
)
def test_events_of_other_servers_break_nothing(capsys, silent, command, event, says):
    silent.body = f"data: {event}\n\ndata: [DONE]\n\n".encode()
    code = main([command, "--url", silent.url, "--model-name", "m", "-q", "a"])
    said = capsys.readouterr()
    if says is None:
        assert (code, said.out, said.err) == (0, "\n", "")
    else:
        assert (code, said.err.count("\n")) == (1, 1)
        assert says in said.err


def test_thoughts_are_read_by_their_older_name_too(capsys, silent):
    deltas = [{"reasoning_content": "Hm"}, {"content": "Yes"}]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    silent.body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
    assert main(["chat", "--url", silent.url, "--model-name", "m", "-q", "a"]) == 0
    assert capsys.readouterr().out == "(Hm)\nYes\n"
