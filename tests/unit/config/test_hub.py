"""Names of models: folders, the embedded model, and a hub played by a small HTTP server with every kind of answer."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hub_server import use_hub_here
from rustvllm.config import hub
from rustvllm.config.hub import download
from rustvllm.exceptions import ModelLoadError, ModelNotFoundError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["GPT2LMHeadModel"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "README.md": b"text",
    "onnx/config.json": b"{}",
    "consolidated.safetensors": b"again",
}
GGUF_FILES = {
    "m-Q4_K_M.gguf": b"four",
    "m-Q8_0-00001-of-00002.gguf": b"eight",
    "m-Q8_0-00002-of-00002.gguf": b"more",
    "mmproj-F16.gguf": b"pictures",
    "BF16/m-BF16.gguf": b"sixteen",
}
# What the hub says, by repository: status and error code.
FILES_OF = {
    "acme/pickled": ["config.json", "pytorch_model.bin"],
    "acme/adapter": ["adapter_config.json", "adapter_model.safetensors", "README.md"],
    "acme/tokenizer": ["tokenizer.json"],
    "acme/templates": [*FILES, "additional_chat_templates/tool_use.jinja"],
}
OTHER_FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"weights",
    "additional_chat_templates/tool_use.jinja": b"tools",
}
ANSWERS = {
    "acme/gated": (403, "GatedRepo"),
    "acme/missing": (404, "RepoNotFound"),
    "acme/private": (401, "RepoNotFound"),
    "acme/branchless": (404, "RevisionNotFound"),
    "acme/broken": (500, None),
    "acme/forbidden": (403, None),
}
SCRIPT = """
import json, sys
from pathlib import Path
from rustvllm.config import hub
name, revision, download_dir, weights, config = json.loads(sys.argv[1])
try:
    place = download_dir and Path(download_dir)
    found = hub.resolve_model(name, revision, place, with_weights=weights, with_config=config)
    folder = found.path if found.path.is_dir() else found.path.parent
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    print(json.dumps({"files": files, "name": found.name, "aliases": found.aliases, "path": str(found.path)}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
assert "torch" not in sys.modules
"""


class Hub(BaseHTTPRequestHandler):
    """Enough of the hub's HTTP API for a snapshot."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        path = self.path.split("?")[0]
        parts = path.strip("/").split("/")
        repo = "/".join(parts[2:4]) if path.startswith("/api/models/") else "/".join(parts[:2])
        if repo in ANSWERS:
            status, code = ANSWERS[repo]
            return self.answer(status, b'{"error": "no"}', {"X-Error-Code": code} if code else {})
        files = FILES | GGUF_FILES if repo == "acme/gguf" else FILES
        files = files | OTHER_FILES
        names = FILES_OF.get(repo) or [name for name in files if name not in OTHER_FILES]
        if repo == "acme/portal":
            return self.answer(200, b"<html>Please log in</html>", {"Content-Type": "text/html"})
        if repo == "acme/gguf":
            names = [name for name in names if name not in FILES or name == "README.md"]
        if path.startswith("/api/models/"):
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in path:
                info = [{"type": "file", "path": name, "size": len(files[name]), "oid": COMMIT} for name in names]
            return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        content = files.get("/".join(parts[4:]))
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if repo == "acme/cut" and path.endswith(".safetensors") and self.command == "GET":
            content = content[:-1]
        if repo == "acme/slow" and path.endswith(".safetensors") and self.command == "GET":
            self.server.is_waiting.set()
            self.server.may_go_on.wait(60)
        return self.answer(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hash(content) & 0xFFFFFFFF:x}"'})

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests = []
    server.is_waiting, server.may_go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.may_go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def environ(server, tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "RUSTVLLM"))}
    env |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    return env | {"PYTHONPATH": str(Path(hub.__file__).parents[3])}


@pytest.fixture
def resolve_apart(environ):
    """What a name leads to in a process of its own, with these variables in its environment."""

    def run(name, *, revision=None, download_dir=None, weights=True, config=True, **environment):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps([name, revision, download_dir, weights, config])],
            env=environ | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def resolve(server, monkeypatch, tmp_path, capfd):
    """The same in this process, which costs no imports."""

    def run(name, *, revision=None, download_dir=None, weights=True, config=True, **environment):
        url = environment.pop("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        is_offline = environment.pop("HF_HUB_OFFLINE", "0") == "1"
        with monkeypatch.context() as patch:
            use_hub_here(patch, url, tmp_path / "home", is_offline=is_offline)
            for key, value in environment.items():
                patch.setenv(key, value)
            place = download_dir and Path(download_dir)
            try:
                found = hub.resolve_model(name, revision, place, with_weights=weights, with_config=config)
            except ModelLoadError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            else:
                folder = found.path if found.path.is_dir() else found.path.parent
                files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
                answer = {"files": files, "name": found.name, "aliases": list(found.aliases), "path": str(found.path)}
        assert "Traceback" not in capfd.readouterr().err
        return answer

    return run


def test_only_safetensors_and_text_are_fetched(resolve, resolve_apart, tmp_path):
    found = resolve_apart("acme/model")
    assert found["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert found["path"].startswith(str(tmp_path / "home"))
    offline = resolve_apart("acme/model", HF_HUB_OFFLINE="1")
    assert offline == found
    assert resolve("acme/model") == resolve("acme/model", HF_HUB_OFFLINE="1") == found


def test_a_cached_model_outlives_its_hub(resolve):
    found = resolve("acme/model")
    assert resolve("acme/model", HF_ENDPOINT="http://127.0.0.1:9") == found


@pytest.mark.parametrize(
    ("name", "files", "path"),
    [
        ("acme/gguf:q4_k_m", ["m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        ("acme/gguf/BF16/m-BF16.gguf", ["m-BF16.gguf"], "BF16/m-BF16.gguf"),
        (
            "acme/gguf:Q8_0",
            ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"],
            "m-Q8_0-00001-of-00002.gguf",
        ),
    ],
)
def test_one_gguf_model_is_fetched_with_its_parts(resolve, name, files, path):
    found = resolve(name)
    assert found["files"] == files
    assert found["path"].endswith(path)
    assert found["name"] == name
    assert resolve(name, HF_HUB_OFFLINE="1") == found


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("acme/gguf:Q5_0", "ModelNotFoundError", ["no GGUF file with quantisation 'Q5_0'", "BF16, Q4_K_M, Q8_0"]),
        ("acme/gguf/none.gguf", "ModelNotFoundError", ["acme/gguf has no file none.gguf"]),
        ("acme/model:Q8_0", "ModelNotFoundError", ["acme/model has no GGUF file that holds a model"]),
        (
            "acme/gguf",
            "ModelLoadError",
            ["has no config.json", "it has GGUF files (BF16, Q4_K_M, Q8_0): name one, such as acme/gguf:BF16"],
        ),
        ("acme/missing:Q8_0", "ModelNotFoundError", ["no model acme/missing"]),
        ("acme/gated/m.gguf", "ModelAccessError", ["acme/gated (asked for as acme/gated/m.gguf) is gated"]),
    ],
)
def test_gguf_names_that_lead_nowhere_say_what_there_is(resolve, name, error, words):
    answer = resolve(name)
    assert answer["error"] == error, answer
    for word in words:
        assert word in answer["message"]


def test_gguf_files_in_folders(tmp_path):
    def found(name):
        return hub.resolve_model(str(name)).path

    (tmp_path / "one").mkdir()
    (tmp_path / "one/m-Q8_0.gguf").write_bytes(b"")
    (tmp_path / "one/mmproj-m.gguf").write_bytes(b"")
    assert found(tmp_path / "one") == found(tmp_path / "one/m-Q8_0.gguf") == tmp_path / "one/m-Q8_0.gguf"
    (tmp_path / "one/config.json").write_bytes(b"{}")
    assert found(tmp_path / "one") == tmp_path / "one/m-Q8_0.gguf", "a configuration alone is not a model"
    (tmp_path / "one/model.safetensors").write_bytes(b"")
    assert found(tmp_path / "one") == tmp_path / "one"
    assert found(f"{tmp_path / 'one'}:Q8_0") == tmp_path / "one/m-Q8_0.gguf"
    with pytest.raises(ModelNotFoundError, match=r"no GGUF file with quantisation 'Q4_0'; it has Q8_0"):
        found(f"{tmp_path / 'one'}:Q4_0")
    (tmp_path / "two").mkdir()
    for name in ("a-Q4_0.gguf", "a-Q4_K_M.gguf"):
        (tmp_path / "two" / name).write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files \(Q4_0, Q4_K_M\); name one, such as .*two:Q4_0"):
        found(tmp_path / "two")
    assert found(f"{tmp_path / 'two'}:q4_k_m") == tmp_path / "two/a-Q4_K_M.gguf"
    with pytest.raises(ModelNotFoundError, match=r"there is no folder and no GGUF file .*"):
        found(tmp_path / "none.gguf")


@pytest.mark.parametrize("name", ["gpt2", "gpt-2", "GPT2"])
def test_short_names(resolve, server, name):
    server.requests.clear()
    found = resolve(name)
    assert found["name"] == name
    assert "openai-community/gpt2" in found["aliases"]
    assert name not in found["aliases"]
    assert any("openai-community/gpt2" in path for path, _ in server.requests)


def test_dummy_weights_need_no_download_of_weights(resolve):
    assert resolve("acme/model", weights=False)["files"] == ["config.json", "tokenizer.json"]


def test_download_dir_and_token(resolve_apart, server, tmp_path):
    server.requests.clear()
    found = resolve_apart("acme/model", download_dir=str(tmp_path / "there"), HF_TOKEN="hf_secretsecretsecret")
    assert found["path"].startswith(str(tmp_path / "there"))
    assert ("Bearer hf_secretsecretsecret") in {token for _, token in server.requests}


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("acme/gated", "ModelAccessError", ["acme/gated is gated", "accept its licence", "HF_TOKEN"]),
        ("acme/missing", "ModelNotFoundError", ["no model acme/missing", "check the spelling"]),
        ("acme/private", "ModelNotFoundError", ["no model acme/private", "set HF_TOKEN"]),
        ("acme/forbidden", "ModelAccessError", ["HTTP 403", "HF_TOKEN"]),
        ("acme/broken", "ModelLoadError", ["HTTP 500", "try again"]),
        ("acme/pickled", "ModelLoadError", ["no *.safetensors", "they can run code"]),
        ("acme/adapter", "ModelLoadError", ["no config.json", "it is an adapter: serve its base model"]),
        ("acme/portal", "ModelLoadError", ["something other than the hub's JSON", "proxy"]),
        ("acme/cut", "HubUnreachableError", ["the download of acme/cut from", "was not finished", "Start again"]),
    ],
)
def test_refusals_are_told_apart(resolve, server, name, error, words):
    server.requests.clear()
    answer = resolve(name)
    if name != "acme/cut":
        assert downloads(server) == [], "nothing is fetched of what is refused"
    assert answer["error"] == error, answer
    for word in words:
        assert word in answer["message"]


def test_unknown_revision(resolve):
    answer = resolve("acme/branchless", revision="v9")
    assert answer["error"] == "ModelNotFoundError"
    assert "no revision 'v9'" in answer["message"]


def test_templates_in_their_folder_are_fetched(resolve):
    assert "additional_chat_templates/tool_use.jinja" in resolve("acme/templates")["files"]


def test_a_tokenizer_alone_needs_no_configuration(resolve):
    found = resolve("acme/tokenizer", weights=False, config=False)
    assert found["files"] == ["tokenizer.json"]
    assert resolve("acme/tokenizer", weights=False, config=False, HF_HUB_OFFLINE="1") == found


def test_an_interrupted_download_ends_at_once(environ, server):
    code = "from rustvllm.cli.main import main; import sys; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "inspect", "acme/slow"], env=environ, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert server.is_waiting.wait(60)
            process.send_signal(signal.SIGINT)
            printed = process.communicate(timeout=20)[1]
        finally:
            process.kill()
    assert process.returncode == 130, printed
    assert not server.may_go_on.is_set()
    assert "Traceback" not in printed


def test_requests_without_a_time_limit_get_one(monkeypatch):
    from huggingface_hub import get_session

    monkeypatch.setenv("RUSTVLLM_HUB_TIMEOUT", "7")
    session, before = get_session(), get_session().timeout
    with download.time_limit():
        assert session.timeout.read == session.timeout.connect == 7
    assert session.timeout == before
    monkeypatch.setattr(session, "timeout", 3)
    with download.time_limit():
        assert session.timeout.read == 3, "a program's own limit stays"
    monkeypatch.setattr(session, "timeout", before)


def test_a_time_limit_stays_until_the_last_download_of_several_threads():
    from huggingface_hub import get_session

    session, before = get_session(), get_session().timeout
    first, second = download.time_limit(), download.time_limit()
    first.__enter__()
    second.__enter__()
    limited = session.timeout
    first.__exit__(None, None, None)
    assert session.timeout == limited != before
    second.__exit__(None, None, None)
    assert session.timeout == before


def test_what_cannot_be_in_a_token_is_said(resolve):
    answer = resolve("acme/model", HF_TOKEN="hf_secretsecret\u2019")
    assert answer["error"] == "ModelAccessError", answer
    assert "your HF_TOKEN holds a character that no token has" in answer["message"]
    assert "hf_secret" not in answer["message"]


@pytest.mark.parametrize("name", ["acme/missing", "gpt2"])
def test_a_password_in_the_endpoint_is_masked(resolve_apart, server, name):
    port = 9 if name == "gpt2" else server.server_port
    answer = resolve_apart(name, HF_ENDPOINT=f"http://me:hunter2@127.0.0.1:{port}")
    assert f"http://***@127.0.0.1:{port}" in answer["message"]
    assert "hunter2" not in answer["message"]


def test_a_token_is_never_in_a_message(resolve):
    for name in ANSWERS:
        assert "hf_secret" not in json.dumps(resolve(name, HF_TOKEN="hf_secretsecretsecret"))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "offline mode is on (HF_HUB_OFFLINE)"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_without_a_network_the_message_says_what_where_and_what_to_do(resolve, tmp_path, environment, reason):
    started = time.monotonic()
    answer = resolve("gpt2", **environment)
    assert answer["error"] == "HubUnreachableError", answer
    for word in ("openai-community/gpt2", "asked for as gpt2", str(tmp_path / "home"), reason, "local folder"):
        assert word in answer["message"]
    assert "\n" not in answer["message"]
    assert time.monotonic() - started < 20


def put_in_cache(folder, repo_id, files):
    """A snapshot as a tool that keeps no list of a repository's files leaves it."""
    storage = folder / ("models--" + repo_id.replace("/", "--"))
    snapshot = storage / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    for name in files:
        (snapshot / name).write_bytes(FILES[name])
    return snapshot


NO_NETWORK = [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
WHOLE = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("environment", NO_NETWORK)
@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "gpt-2"])
@pytest.mark.parametrize("own_dir", [False, True])
def test_a_cache_under_the_short_name_is_found(resolve, tmp_path, name, environment, own_dir):
    folder = tmp_path / "there" if own_dir else tmp_path / "home" / "hub"
    snapshot = put_in_cache(folder, "gpt2", WHOLE)
    # A copy under the full name that is of no use does not hide it.
    put_in_cache(folder, "openai-community/gpt2", ["tokenizer.json"])
    found = resolve(name, download_dir=str(folder) if own_dir else None, **environment)
    assert found["path"] == str(snapshot), found
    assert found["files"] == WHOLE


def downloads(server):
    return [path for path, _ in server.requests if "/resolve/" in path]


def test_the_same_commit_under_the_short_name_is_not_downloaded_again(resolve, server, tmp_path):
    snapshot = put_in_cache(tmp_path / "home" / "hub", "gpt2", WHOLE)
    server.requests.clear()
    assert resolve("gpt2")["path"] == str(snapshot)
    assert server.requests, "the hub was asked which commit is the present one"
    assert downloads(server) == []


@pytest.mark.parametrize("left_out", WHOLE)
def test_a_part_under_the_short_name_is_downloaded_whole(resolve, server, tmp_path, left_out):
    put_in_cache(tmp_path / "home" / "hub", "gpt2", [name for name in WHOLE if name != left_out])
    server.requests.clear()
    found = resolve("gpt2")
    assert "models--openai-community--gpt2" in found["path"]
    assert found["files"] == WHOLE
    assert len({path.partition("/resolve/")[2] for path in downloads(server)}) == len(WHOLE)


@pytest.mark.parametrize("environment", NO_NETWORK)
@pytest.mark.parametrize(
    ("files", "weights", "missing"),
    [
        (["config.json", "tokenizer.json"], True, "has no *.safetensors"),
        (["model.safetensors"], True, "has no config.json"),
        (["tokenizer.json"], True, "has no config.json and no *.safetensors"),
        (["tokenizer.json"], False, "has no config.json"),
    ],
)
def test_a_part_of_a_model_without_a_network(resolve, tmp_path, environment, files, weights, missing):
    cache = tmp_path / "home" / "hub"
    snapshot = put_in_cache(cache, "acme/model", files)
    answer = resolve("acme/model", weights=weights, **environment)
    assert answer["error"] == "HubUnreachableError", answer
    for word in (f"the cache in {cache} is incomplete", f"{snapshot} {missing})", "Connect to the network", "copy"):
        assert word in answer["message"]
    assert "language model" not in answer["message"]
    assert "other formats" not in answer["message"]


def test_a_download_without_weights_is_a_part_for_one_who_wants_them(resolve, tmp_path):
    resolve("acme/model", weights=False)  # leaves the list of files, by which the hub's client itself sees the gap
    answer = resolve("acme/model", HF_HUB_OFFLINE="1")
    assert answer["error"] == "HubUnreachableError", answer
    assert "is incomplete (" in answer["message"]
    assert resolve("acme/model", weights=False, HF_HUB_OFFLINE="1")["files"] == ["config.json", "tokenizer.json"]


def test_every_name_that_was_looked_for_is_listed(resolve):
    message = resolve("gpt2", HF_HUB_OFFLINE="1")["message"]
    assert "(looked for openai-community/gpt2, gpt2, gpt-2)" in message


def test_a_hub_that_never_answers_is_given_up(resolve_apart):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and says nothing
        started = time.monotonic()
        answer = resolve_apart(
            "gpt2", HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}", RUSTVLLM_HUB_TIMEOUT="1"
        )
        assert answer["error"] == "HubUnreachableError", answer
        assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "name",
    ["a/b/c", "has space", "../up", "/nowhere/at/all", "~user/x", "é", "a" * 300, "", "x--y/z", "x\x00y", "a\nb"],
)
def test_names_that_cannot_be(name):
    with pytest.raises(ModelNotFoundError):
        hub.resolve_model(name)


def test_folders(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        hub.resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="it is an adapter: serve its base model with --enable-lora"):
        hub.resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve_model(str(tmp_path)).path == tmp_path
    with pytest.raises(ModelNotFoundError, match="is not a GGUF file"):
        hub.resolve_model(str(tmp_path / "config.json"))


def test_embedded_model(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "embedded_model_path", lambda: tmp_path)
    with pytest.raises(ModelNotFoundError, match="no embedded model"):
        hub.resolve_model(None)
    (tmp_path / "config.json").write_text("{}")
    for name in (None, "rustvllm-tiny"):
        found = hub.resolve_model(name)
        assert (found.name, found.path) == ("rustvllm-tiny", tmp_path)


def test_timeout_is_checked(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_HUB_TIMEOUT", "soon")
    with pytest.raises((ModelLoadError, ValueError), match="RUSTVLLM_HUB_TIMEOUT must be a number"):
        hub.resolve_model("acme/model")
