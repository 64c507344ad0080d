"""``HubServer``: a hub of models on this machine, whose files a test can spoil, hold back or make look large."""

import hashlib
import json
import os
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import rustvllm

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEWER = "fedcba9876543210fedcba9876543210fedcba98"
LARGE = (".safetensors", ".gguf", ".bin")
"""Ends of the names of files for which the hub gives a SHA-256."""


class HubServer:
    """Enough of the hub's HTTP API for snapshots; a context manager.

    Attributes:
        repos: Files of each repository at each commit.
        revisions: Commits of each repository's branches and tags; ``main`` is ``COMMIT`` where nothing else is said.
        answers: Status and error code, for repositories of which nothing else is said.
        spoiled: (repository, file) that are sent with another last byte.
        sizes: (repository, file) whose size is listed wrongly.
        hashes: Likewise, with a wrong SHA-256.
        ids: What the hub calls repositories that it also knows by another spelling.
        hashless: Repositories for which no SHA-256 is given.
        held: (repository, file) of which the second half is sent once ``may_go_on`` is set.
        is_held: Set when the first half of one has been sent.
        requests: Paths that were asked for.
    """

    def __init__(self):
        self.repos, self.answers, self.sizes = defaultdict(dict), {}, {}
        self.hashes, self.ids = {}, {}
        self.revisions = defaultdict(lambda: {"main": COMMIT})
        self.spoiled, self.hashless, self.held, self.requests = set(), set(), set(), []
        self.is_held, self.may_go_on = threading.Event(), threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Answer no more; calling it again does nothing."""
        self.may_go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, repo, files, commit=COMMIT):
        """Publish a repository: bytes by name."""
        self.repos[repo][commit] = files

    def fetched(self, suffix=""):
        """Names of the files that were sent."""
        paths = [path.partition("/resolve/")[2] for method, path in self.requests if method == "GET"]
        return [path.partition("/")[2] for path in paths if path.endswith(suffix) and path]

    def environ(self, home):
        """Variables for a process that asks this hub and keeps what it fetches below a folder."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "RUSTVLLM"))}
        return kept | {
            "HF_HOME": str(home),
            "HF_ENDPOINT": self.url,
            "PYTHONPATH": str(Path(rustvllm.__file__).parents[1]),
        }

    def use_here(self, monkeypatch, home):
        """Have this process ask this hub, and keep what it fetches below a folder."""
        use_hub_here(monkeypatch, self.url, home)

    def hash_of(self, repo, name, commit=COMMIT):
        """The SHA-256 that the hub gives."""
        return hashlib.sha256(self.repos[repo][commit][name]).hexdigest()


def use_hub_here(monkeypatch, url, home, *, is_offline=False):
    """Tell this process's huggingface_hub what it reads from the environment only when it is imported."""
    from huggingface_hub import constants

    for key in list(os.environ):
        if key.startswith(("HF_", "HUGGING")):
            monkeypatch.delenv(key)
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": is_offline,
    }.items():
        monkeypatch.setattr(constants, name, value)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that has gone is none."""


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server.hub, unquote(self.path.split("?")[0])
        hub.requests.append((self.command, path))
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo in hub.answers or repo not in hub.repos:
            status, code = hub.answers.get(repo, (404, "RepoNotFound"))
            return self._answer(status, b'{"error": "no"}', {"X-Error-Code": code} if code else {})
        revision = rest[1] if len(rest) > 1 else "main"
        commit = hub.revisions[repo].get(revision, revision)
        files = hub.repos[repo].get(commit)
        if files is None:
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if is_api:
            return self._list(repo, commit, files, is_tree="tree" in rest[:1])
        name = "/".join(rest[2:])
        if name not in files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = files[name]
        etag = _sha256(content) if self._is_hashed(repo, name) else hashlib.sha1(content).hexdigest()
        if (repo, name) in hub.spoiled:
            content = content[:-1] + bytes([content[-1] ^ 1])
        is_held = (repo, name) in hub.held and self.command == "GET"
        return self._answer(200, content, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, is_held=is_held)

    def _is_hashed(self, repo, name):
        return name.endswith(LARGE) and repo not in self.server.hub.hashless

    def _list(self, repo, commit, files, *, is_tree):
        entries = []
        for name, content in files.items():
            size = self.server.hub.sizes.get((repo, name), len(content))
            sha256 = self.server.hub.hashes.get((repo, name), _sha256(content))
            lfs = {"sha256": sha256, "oid": sha256, "size": size, "pointerSize": 134}
            more = {"lfs": lfs} if self._is_hashed(repo, name) else {}
            place = {"type": "file", "path": name, "oid": "0" * 40} if is_tree else {"rfilename": name}
            entries.append(place | {"size": size} | more)
        answer = entries if is_tree else {"id": self.server.hub.ids.get(repo, repo), "sha": commit, "siblings": entries}
        self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _answer(self, status, body, headers, *, is_held=False):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "GET":
            return
        half = len(body) // 2 if is_held else 0
        self.wfile.write(body[:half])
        if is_held:
            self.wfile.flush()
            self.server.hub.is_held.set()
            self.server.hub.may_go_on.wait(60)
        self.wfile.write(body[half:])


def _sha256(content):
    return hashlib.sha256(content).hexdigest()
