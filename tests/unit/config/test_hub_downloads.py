"""Downloads that go wrong: bytes that change on the way, starts that are interrupted, caches that cannot be written."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hub_server import COMMIT, NEWER, HubServer
from logged import logged
from rustvllm.config import hub
from rustvllm.config.hub import checksums, download, storage
from rustvllm.exceptions import HubUnreachableError, ModelLoadError, ModelNotFoundError

WEIGHTS = bytes(range(256)) * 64
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
}
FIRST, SECOND = sorted(name for name in FILES if name.endswith(".safetensors"))
SCRIPT = """
import os, sys
from rustvllm.config import hub
try:
    print(hub.resolve_model(sys.argv[1]).path)
except Exception as error:
    print(type(error).__name__, error)
except KeyboardInterrupt:
    os._exit(130)  # as the command line does, without waiting for threads of the hub's client
"""


@pytest.fixture
def server(monkeypatch, tmp_path):
    with HubServer() as server:
        server.use_here(monkeypatch, tmp_path)
        server.put("acme/model", FILES)
        yield server


@pytest.fixture
def lines():
    with logged("rustvllm.config.hub") as messages:
        yield messages


def path_of(name="acme/model", **options):
    return hub.resolve_model(name, **options).path


def contents(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def go_offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_what_comes_is_hashed_once(server, lines, monkeypatch):
    hashed = []
    original = checksums._sha256_of
    monkeypatch.setattr(
        checksums, "_sha256_of", lambda path, progress: (hashed.append(path.name), original(path, progress))[1]
    )
    assert contents(path_of()) == FILES
    assert hashed == [FIRST, SECOND]
    assert any("acme/model: the SHA-256 of 2 files" in line for line in lines)
    for _ in range(2):
        assert contents(path_of()) == FILES
    go_offline(monkeypatch)
    assert contents(path_of()) == FILES
    assert hashed == [FIRST, SECOND]


def test_wrong_bytes_are_refused_and_fetched_anew_by_the_next_start(server, tmp_path):
    server.spoiled.add(("acme/model", SECOND))
    with pytest.raises(ModelLoadError) as error:
        path_of()
    message = str(error.value)
    assert f"{SECOND} has the SHA-256 " in message
    assert f"but the hub says {server.hash_of('acme/model', SECOND)}" in message
    assert f"rustvllm has removed it from {tmp_path / 'hub' / 'models--acme--model'}. Start again" in message
    assert FIRST not in message
    server.spoiled.clear()
    server.requests.clear()
    assert contents(path_of()) == FILES
    assert server.fetched() == [SECOND]


def test_without_a_network_wrong_bytes_leave_an_incomplete_copy(server, monkeypatch):
    server.spoiled |= {("acme/model", FIRST), ("acme/model", SECOND)}
    with pytest.raises(ModelLoadError, match=f"2 files changed .*{FIRST} has .*; {SECOND} has .*removed them"):
        path_of()
    go_offline(monkeypatch)
    with pytest.raises(HubUnreachableError, match="is incomplete"):
        path_of()


def test_gguf_files_are_hashed(server):
    server.put("acme/gguf", {"m-Q8_0.gguf": WEIGHTS})
    server.spoiled.add(("acme/gguf", "m-Q8_0.gguf"))
    with pytest.raises(ModelLoadError, match=r"m-Q8_0\.gguf has the SHA-256"):
        path_of("acme/gguf:Q8_0")
    server.spoiled.clear()
    assert path_of("acme/gguf:Q8_0").read_bytes() == WEIGHTS


def test_a_hub_that_gives_no_hash_is_named(server, lines):
    server.hashless.add("acme/model")
    server.spoiled.add(("acme/model", FIRST))
    path_of()
    assert f"acme/model: the hub gives no SHA-256 for {FIRST}, {SECOND}, so their bytes were not checked" in lines


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_check_that_was_interrupted_is_done_by_the_next_start(server, monkeypatch, is_offline):
    server.spoiled.add(("acme/model", FIRST))
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(checksums, "_sha256_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            path_of()
    server.requests.clear()
    if is_offline:
        go_offline(monkeypatch)
    with pytest.raises(ModelLoadError, match=f"{FIRST} has the SHA-256"):
        path_of()
    assert server.fetched() == []


def test_a_file_that_another_commit_had_is_not_hashed_again(server, monkeypatch):
    path_of()
    server.put("acme/model", FILES | {"config.json": b'{"new": 1}'}, NEWER)
    server.revisions["acme/model"]["main"] = NEWER
    monkeypatch.setattr(checksums, "_sha256_of", None)
    found = path_of()
    assert (found.name, contents(found)["config.json"]) == (NEWER, b'{"new": 1}')
    go_offline(monkeypatch)
    assert path_of() == found


def test_a_cache_without_links(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)
    server.spoiled.add(("acme/model", FIRST))
    with pytest.raises(ModelLoadError, match=f"{FIRST} has the SHA-256"):
        path_of()
    server.spoiled.clear()
    server.requests.clear()
    assert contents(path_of()) == FILES
    assert server.fetched() == [FIRST]
    monkeypatch.setattr(checksums, "_sha256_of", None)
    found = path_of()
    assert not (found / FIRST).is_symlink()


def test_a_cached_file_of_another_size_is_fetched_again(server):
    """As a copy that was broken off leaves it."""
    found = path_of()
    os.truncate(found / FIRST, 100)
    (found / "config.json").write_bytes(b'{"edited": 1}')
    server.requests.clear()
    assert contents(path_of()) == FILES | {"config.json": b'{"edited": 1}'}
    assert server.fetched() == [FIRST]


def test_a_file_elsewhere_that_was_linked_into_the_cache_stays(server, lines, tmp_path):
    """Of another size, or with other bytes: it leaves the cache, but it is not the cache's to delete."""
    for content in (b"mine", bytes(len(WEIGHTS))):
        (tmp_path / "mine").write_bytes(content)
        found = path_of()
        (found / FIRST).unlink()
        (found / FIRST).symlink_to(tmp_path / "mine")
        if len(content) == len(WEIGHTS):
            storage.RepoStorage(tmp_path / "hub", "acme/model").mark_unchecked([server.hash_of("acme/model", FIRST)])
            with pytest.raises(ModelLoadError, match=f"{FIRST} has the SHA-256"):
                path_of()
        assert contents(path_of()) == FILES
        assert (tmp_path / "mine").read_bytes() == content
    assert f"{found / FIRST} has 4 bytes, but the hub says {len(WEIGHTS)}" in "\n".join(lines)


def test_blobs_on_another_disk(server, tmp_path):
    blobs = path_of().parents[1] / "blobs"
    blobs.rename(tmp_path / "disk")
    blobs.symlink_to(tmp_path / "disk")
    blob = tmp_path / "disk" / server.hash_of("acme/model", FIRST)
    os.truncate(blob, 100)
    assert contents(path_of()) == FILES
    assert blob.read_bytes() == FILES[FIRST]


@pytest.mark.parametrize("name", ["../../../m-Q8_0.gguf", "/m-Q8_0.gguf", "a/../../../../m-Q8_0.gguf", "./m-Q8_0.gguf"])
def test_a_hub_whose_files_lead_out_of_their_folder_is_refused(server, tmp_path, name):
    (path_of() / "a").mkdir()
    (tmp_path / "hub" / "m-Q8_0.gguf").write_bytes(b"mine")
    server.put("acme/model", FILES | {name: WEIGHTS})
    with pytest.raises(ModelLoadError, match=r"has '.*m-Q8_0.gguf', which is not inside the repository: check"):
        path_of("acme/model:Q8_0")
    assert (tmp_path / "hub" / "m-Q8_0.gguf").read_bytes() == b"mine"


def test_a_hash_that_leads_out_of_its_folder_is_none(server, lines, tmp_path):
    (path_of() / FIRST).unlink()
    (tmp_path / "hub" / "mine").write_bytes(b"mine")
    server.hashes["acme/model", FIRST] = "../../mine"
    assert contents(path_of()) == FILES
    assert (tmp_path / "hub" / "mine").read_bytes() == b"mine"


def test_a_link_whose_file_is_gone_is_fetched_again(server):
    (path_of() / FIRST).resolve().unlink()
    assert contents(path_of()) == FILES


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1", NEWER])
def test_tags_branches_and_commits(server, monkeypatch, revision):
    server.put("acme/model", FILES | {"config.json": b'{"new": 1}'}, NEWER)
    server.revisions["acme/model"] |= {"v1": NEWER, "refs/pr/1": NEWER}
    if revision == "refs/pr/1":  # which the hub's client quotes
        server.revisions["acme/model"]["refs"] = NEWER
    found = path_of(revision=revision)
    assert contents(found)["config.json"] == b'{"new": 1}'
    assert path_of().name == COMMIT
    go_offline(monkeypatch)
    assert path_of(revision=revision) == found
    assert path_of().name == COMMIT
    with pytest.raises(HubUnreachableError, match="acme/model at revision v9: it is not cached in"):
        path_of(revision="v9")


def test_the_copy_before_an_interrupted_download_still_serves(server, monkeypatch):
    files = FILES | {"additional_chat_templates/tool_use.jinja": b"tools"}
    server.put("acme/model", files)
    before = path_of()
    assert contents(before) == files
    server.put("acme/model", files | {FIRST: WEIGHTS[5:]}, NEWER)
    server.revisions["acme/model"]["main"] = NEWER
    server.spoiled.add(("acme/model", FIRST))
    with pytest.raises(ModelLoadError, match=f"{FIRST} has the SHA-256"):
        path_of()
    go_offline(monkeypatch)
    assert path_of() == before


def test_a_branch_that_moves_meanwhile_does_not_mix_commits(server, monkeypatch):
    server.put("acme/model", {"config.json": b"{}", "README.md": b"no weights"}, NEWER)
    original = storage.RepoStorage.mark_unchecked

    def move(self, hashes):
        server.revisions["acme/model"]["main"] = NEWER
        original(self, hashes)

    monkeypatch.setattr(storage.RepoStorage, "mark_unchecked", move)
    found = path_of()
    assert (found.name, contents(found)) == (COMMIT, FILES)


def test_a_model_that_is_too_large_is_refused_before_anything_is_fetched(server, tmp_path):
    server.sizes["acme/model", SECOND] = 1 << 60
    with pytest.raises(ModelLoadError, match=r"no room for acme/model: .* to be downloaded, .* free.*--download-dir"):
        path_of()
    assert server.fetched() == []
    assert not (tmp_path / "hub").exists()


def test_what_a_killed_download_left_is_taken_away(server, tmp_path):
    blobs = tmp_path / "hub" / "models--acme--model" / "blobs"
    locks = tmp_path / "hub" / ".locks" / "models--acme--model"
    for folder in (blobs, locks):
        folder.mkdir(parents=True)
    old, new, other = (blobs / f"{letter * 64}.0123abcd.incomplete" for letter in "abc")
    for path in (old, new, other):
        path.write_bytes(b"half")
        (locks / f"{path.name[:64]}.lock").touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    import fcntl

    with (locks / f"{'c' * 64}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path_of()
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_download_dirs_links_and_homes(server, monkeypatch, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    found = path_of(download_dir=tmp_path / "link")
    assert contents(found) == FILES
    assert found.is_relative_to(tmp_path / "disk")
    server.requests.clear()
    assert path_of(download_dir=tmp_path / "disk") == path_of(download_dir=tmp_path / "link") == found
    assert server.fetched() == []
    go_offline(monkeypatch)
    assert path_of(download_dir=tmp_path / "link") == found


def test_a_cache_that_cannot_be_written_to(server, tmp_path):
    found = path_of()
    folders = [tmp_path / "hub", *(path for path in (tmp_path / "hub").rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        if os.access(tmp_path / "hub", os.W_OK):
            pytest.skip("this user may write everywhere")
        assert path_of() == found
        server.put("acme/model", FILES | {FIRST: WEIGHTS[5:]}, NEWER)
        server.revisions["acme/model"]["main"] = NEWER
        with pytest.raises(ModelLoadError, match=r"cannot store acme/model in .*hub: .*Permission.*--download-dir"):
            path_of()
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_cache_that_is_a_file(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=r"cannot store acme/model in .*/file: .*\. Name a folder with"):
        path_of(download_dir=tmp_path / "file")


def start(server, home, name="acme/model", **options):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, name],
        # At the limit Python would keep compiled modules cut off, and import those ever after.
        env=server.environ(home) | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_file_larger_than_the_limit(server, tmp_path):
    limit = (1000, 1000)
    process = start(server, tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    printed, logged = process.communicate(timeout=60)
    assert "ModelLoadError cannot store acme/model in" in printed, logged
    assert "File too large. Raise the limit on the size of a file (ulimit -f)" in printed
    server.requests.clear()
    assert contents(path_of()) == FILES, "the next start gets it"


def test_two_starts_at_once_share_a_download(server, tmp_path):
    server.held.add(("acme/model", FIRST))
    processes = [start(server, tmp_path) for _ in range(2)]
    assert server.is_held.wait(60)
    time.sleep(1)
    server.may_go_on.set()
    answers = [process.communicate(timeout=60) for process in processes]
    assert {printed.strip() for printed, _ in answers} == {str(tmp_path / "hub/models--acme--model/snapshots" / COMMIT)}
    assert contents(Path(answers[0][0].strip())) == FILES
    assert sorted(server.fetched(".safetensors")) == [FIRST, SECOND]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_start_after_one_that_was_ended_in_the_middle_of_a_file(server, tmp_path, number):
    server.held.add(("acme/model", FIRST))
    with start(server, tmp_path) as process:
        assert server.is_held.wait(60)
        process.send_signal(number)
        process.communicate(timeout=30)
    server.may_go_on.set()
    assert contents(path_of()) == FILES


def test_a_file_that_another_start_takes_out_meanwhile(server, monkeypatch):
    original = checksums._hash_of_blob

    def taken_out(path):
        (path.parent / FIRST).unlink(missing_ok=True)
        return original(path)

    server.hashless.add("acme/model")
    monkeypatch.setattr(checksums, "_hash_of_blob", lambda path: taken_out(path) or "0" * 64)
    with pytest.raises(ModelLoadError, match=f"cannot read .*{FIRST}: .*Start again to download it anew"):
        path_of()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_who_stops_waiting_for_a_thread_does_not_break_it():
    may_end, ended = threading.Event(), threading.Event()

    def work():
        may_end.wait(60)
        ended.set()

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.01)

    future = download.in_thread(work, "test")
    asyncio.run(give_up())
    may_end.set()
    assert ended.wait(60)
    assert future.result(60) is None


def test_home_with_a_tilde(server, tmp_path):
    environment = server.environ("~/models") | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "acme/model"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path / "models" / "hub"))


def test_the_embedded_model_is_suggested(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "rustvllm_tiny", "rustvllm/rustvllm-tiny", "rustvllm-tini"):
        with pytest.raises(ModelNotFoundError, match=r"\. Did you mean rustvllm-tiny, the model inside the package\?$"):
            path_of(name)
    go_offline(monkeypatch)
    with pytest.raises(HubUnreachableError, match="Did you mean rustvllm-tiny"):
        path_of("tiny")
    for name in ("acme/tiny", "mistral", "gpt2", "acme/other"):
        with pytest.raises(ModelLoadError) as error:
            path_of(name)
        assert "Did you mean" not in str(error.value)


def test_a_folder_of_a_similar_name_is_suggested(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("Tiny-Fox", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "Tiny-Fox" / "config.json").write_text(json.dumps({}))
    (tmp_path / "m-Q8_0.gguf").touch()
    for given, meant in (
        ("tinyfox", "the folder ./Tiny-Fox"),
        ("acme/tiny-fox", "the folder ./Tiny-Fox"),
        ("./tiny-fix", "the folder ./Tiny-Fox"),
        (f"{tmp_path}/tiny_fox", f"the folder {tmp_path}/Tiny-Fox"),
        ("./m-Q8_O.gguf", "the file ./m-Q8_0.gguf"),
    ):
        with pytest.raises(ModelNotFoundError) as error:
            path_of(given)
        assert str(error.value).endswith(f"Did you mean {meant}?"), given
    with pytest.raises(ModelNotFoundError) as error:
        path_of("./note")
    assert "Did you mean" not in str(error.value), "a folder without a model"


def test_only_folders_of_similar_names_are_looked_into(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("fox-tiny-1", "fox-tiny-2", "fox-tiny-3", "photos", "mail"):
        (tmp_path / name).mkdir()
    (tmp_path / "fox-tiny-2" / "config.json").write_text("{}")
    looked, glob = [], Path.glob

    def recorded(self, pattern):
        looked.append(self.name)
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", recorded)
    with pytest.raises(ModelNotFoundError, match=r"Did you mean the folder \./fox-tiny-2\?$"):
        path_of("./fox-tiny-4")
    assert {"photos", "mail"}.isdisjoint(looked)
