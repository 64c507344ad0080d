"""``rustvllm run-batch`` with the embedded model: files and URLs in and out, killed and resumed, and its exit codes."""

import http.server
import json
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from rustvllm.batch.remote_file import RemoteFileError, download, shown, upload
from rustvllm.cli.main import main

BATCH = [sys.executable, "-m", "rustvllm.cli.main", "run-batch", "--num-gpu-blocks-override", "512"]


def line_of(custom_id, body, url="/v1/completions"):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


class Store(http.server.BaseHTTPRequestHandler):
    """Keeps what is PUT, gives it back, and fails as often as told to."""

    files: dict[str, bytes] = {}  # noqa: RUF012 -- one store per test
    failures: list[int] = []  # noqa: RUF012

    def do_GET(self):
        content = self.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) + (10 if "short" in self.path else 0)))
        self.end_headers()
        self.wfile.write(content)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.failures:
            self.send_error(self.failures.pop())
            return
        self.files[self.path] = content
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def store():
    Store.files, Store.failures = {}, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_from_a_url_to_a_url(store, tmp_path, capsys):
    greedy = {"max_tokens": 8, "temperature": 0}
    Store.files["/in?sig=secret"] = "\n".join(
        [
            line_of("text", {"prompt": "Once upon a time", **greedy}),
            line_of("wrong", {"prompt": "x", "top_p": 2}),
            line_of("chat", {"messages": [{"role": "user", "content": "Hi"}], **greedy}, "/v1/chat/completions"),
            line_of("again", {"prompt": "Once upon a time", "logprobs": 1, **greedy}),
        ]
    ).encode()
    Store.failures.append(500)
    flags = ["--num-gpu-blocks-override", "512", "--output-tmp-dir", str(tmp_path)]
    assert main(["run-batch", "-i", f"{store}/in?sig=secret", "-o", f"{store}/out?sig=secret", *flags]) == 3
    answers = [json.loads(line) for line in Store.files["/out?sig=secret"].splitlines()]
    assert [(answer["custom_id"], answer["response"]["status_code"]) for answer in answers] == [
        ("text", 200), ("wrong", 400), ("chat", 200), ("again", 200),
    ]  # fmt: skip
    first, _, _, again = (answer["response"]["body"] for answer in answers)
    assert first["choices"][0]["text"] == again["choices"][0]["text"] != ""
    assert len(again["choices"][0]["logprobs"]["token_logprobs"]) == 8
    printed = capsys.readouterr().err
    assert "4 lines: 3 answered, 1 failed; " in printed
    assert re.search(r"; [1-9]\d* tokens read and [1-9]\d* generated in ", printed)
    assert f"the answers are in {store}/out\n" in printed
    assert "secret" not in printed
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_ended_goes_on(tmp_path, capsys):
    source, output, partial = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.jsonl.partial"))
    lines = [
        line_of(f"c{i}", {"prompt": "The fox", "max_tokens": 100, "seed": i, "ignore_eos": True}) for i in range(20)
    ]
    source.write_text("\n".join(lines))
    files = ["-i", str(source), "-o", str(output)]
    with subprocess.Popen([*BATCH, *files, "--max-num-seqs", "1"], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 90
        while not (partial.exists() and partial.stat().st_size):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGTERM
    kept = partial.read_bytes().splitlines()
    assert f"ended by SIGTERM; {len(kept)} answers are in {partial}: --resume" in printed
    assert 1 <= len(kept) < 20
    assert not output.exists()
    assert main(["run-batch", *files]) == 1
    assert "continue it with --resume" in capsys.readouterr().err
    assert main(["run-batch", *files, "--resume", "--num-gpu-blocks-override", "512"]) == 0
    answers = output.read_bytes().splitlines()
    assert [json.loads(answer)["custom_id"] for answer in answers] == [f"c{i}" for i in range(20)]
    assert set(kept) <= set(answers)
    assert f"{20 - len(kept)} answered, 0 failed, {len(kept)} answered before" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_what_cannot_be_is_said_before_a_model_is_loaded(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text("")
    workings = [tmp_path / "kept.partial", tmp_path / "kept.writing"]
    for working in workings:
        working.write_text("an input")
    for arguments, code, says in (
        (["-i", tmp_path / "none", "-o", tmp_path / "out"], 1, "none is not there"),
        (["-i", "-", "-o", tmp_path / "out"], 1, "-i - is not supported: run-batch does not use standard input"),
        (["-i", tmp_path / "none", "-o", "-"], 1, "-o - is not supported: run-batch does not use standard output"),
        (["-i", tmp_path, "-o", tmp_path / "out"], 1, "not a regular file"),
        (["-i", source, "-o", tmp_path / "none" / "out"], 1, "folder"),
        (["-i", source, "-o", source], 1, "same file"),
        *(
            (["-i", working, "-o", tmp_path / "kept", "--resume"], 1, "or choose another output")
            for working in workings
        ),
        (["-i", source, "-o", "http://host/out", "--output-tmp-dir", tmp_path / "none"], 1, "is not a folder"),
        (["-i", "http://127.0.0.1:1/in?sig=secret", "-o", tmp_path / "out"], 1, "cannot fetch http://127.0.0.1:1/in:"),
        (["-i", source, "-o", tmp_path / "out"], 0, "no lines"),
    ):
        assert main(["run-batch", *map(str, arguments)]) == code
        printed = capsys.readouterr().err
        assert says in printed
        assert "secret" not in printed
    assert (tmp_path / "out").read_bytes() == b""
    assert [working.read_text() for working in workings] == ["an input"] * 2
    for arguments, says in (
        ([], "-i/--input-file, -o/--output-file"),
        (["-i", "a", "-o", "b", "--inptu", "c"], "--inptu"),
        (["-i", "a", "-o", "b", "--max-body-bytes", "0"], "at least 1"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["run-batch", *arguments])
        assert caught.value.code == 2
        assert says in capsys.readouterr().err


def test_a_link_is_followed_to_the_output(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(line_of("wrong", {"prompt": "x", "top_p": 2}))
    (tmp_path / "there").mkdir()
    for name in ("out", "new"):
        (tmp_path / name).symlink_to(tmp_path / "there" / name)
    (tmp_path / "there/out").write_text("old")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "source").symlink_to(tmp_path / "in.jsonl")
    flags = ["--num-gpu-blocks-override", "64"]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o"]
    for name in ("loop", "source"):
        assert main(["run-batch", *files, str(tmp_path / name), *flags]) == 1
    printed = capsys.readouterr().err
    assert f"the output {tmp_path / 'loop'} is a link that leads nowhere" in printed
    assert "input and output are the same file" in printed
    for name in ("out", "new"):
        assert main(["run-batch", *files, str(tmp_path / name), *flags]) == 3
        assert (tmp_path / name).is_symlink()
        assert json.loads((tmp_path / "there" / name).read_bytes())["custom_id"] == "wrong"
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["new", "out"]


def test_files_behind_urls(store, tmp_path):
    file = tmp_path / "file"
    Store.files.update({"/x": b"12345", "/short": b"12345"})
    download(f"{store}/x", file, 5)
    assert file.read_bytes() == b"12345"
    with pytest.raises(RemoteFileError, match="more than 4 bytes"):
        download(f"{store}/x", file, 4)
    with pytest.raises(RemoteFileError, match="404"):
        download(f"{store}/nothing?key=secret", file)
    with pytest.raises(RemoteFileError, match=r"the connection ended|IncompleteRead"):
        download(f"{store}/short", file)
    Store.failures[:] = [403, 500, 500, 500]
    with pytest.raises(RemoteFileError, match="500"):
        upload(file, f"{store}/y", (0.0, 0.0))
    with pytest.raises(RemoteFileError, match="403"):
        upload(file, f"{store}/y", (0.0, 0.0))
    upload(file, f"{store}/y")
    assert Store.files["/y"] == file.read_bytes()
    assert shown("https://user:word@host:8443/a/b?sig=secret#x") == "https://host:8443/a/b"


def test_answers_that_cannot_be_stored_stay_here(store, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text("\n")
    Store.failures[:] = [403]
    (tmp_path / "tmp").mkdir()
    flags = ["-i", str(source), "-o", f"{store}/out", "--output-tmp-dir", str(tmp_path / "tmp")]
    assert main(["run-batch", *flags]) == 1
    kept = tmp_path / "tmp" / "batch-output.jsonl"
    assert f"cannot store the answers at {store}/out: 403 Forbidden; they are in {kept}" in capsys.readouterr().err
    assert kept.exists()
