"""The files of docs/deploy say what the server understands: flags, paths, ports, times, the fields of their kinds."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from rustvllm.cli.serve import parse_args

PORT = 8000
KEY_VARIABLE = "RUSTVLLM_API_KEY"
KEYLESS = {"/health", "/ping", "/version"}
PUBLIC_NAME = "llm.example.org"


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    return repository / "docs" / "deploy"


@pytest.fixture(scope="module")
def endpoints() -> set[str]:
    from rustvllm.server.app import build_app
    from rustvllm.server.state import ServerState

    app = build_app(ServerState())
    paths = {getattr(route, "path", "") for route in app.routes} | set(app.openapi()["paths"])
    assert {"/health", "/v1/completions"} <= paths
    return paths


def checked(words: list[str], patience: float) -> None:
    """The server's parser takes the flags, and its supervisor waits longer than a shutdown needs."""
    assert words, "nothing was found to check"
    args = parse_args(words)
    assert args.port == PORT
    assert args.shutdown_timeout + 2 <= patience, "the supervisor kills before the server has ended"
    assert not args.api_key, "every user of the machine can read a key in a command line"


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_every_file_is_named_in_the_readme(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    names = {path.name for path in folder.iterdir() if path.is_file()} - {"README.md", "Dockerfile.dockerignore"}
    assert len(names) >= 6
    assert {name for name in names if f"({name})" not in text} == set()


# -- systemd ----------------------------------------------------------------------------------------------------------


def test_the_unit_runs_the_server_unprivileged(folder: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((folder / "rustvllm.service").read_text())
    service = unit["Service"]
    program, command, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("rustvllm", "serve")
    checked(words, seconds(service["TimeoutStopSec"]))
    assert service["KillMode"] == "mixed"
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert service["ProtectSystem"] == "strict"
    assert KEY_VARIABLE not in service["Environment"]
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_systemd_takes_the_unit(folder: Path, tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze here")
    text = (folder / "rustvllm.service").read_text().replace("/opt/rustvllm/bin/rustvllm", shutil.which("true") or "")
    unit = tmp_path / "rustvllm.service"
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if "rustvllm" in line]
    assert complaints == []
    wrong = tmp_path / "wrong.service"
    wrong.write_text(text.replace("KillMode=mixed", "KillMode=nothing"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", wrong],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "nothing" in done.stderr, "the check can find something"


# -- Dockerfile -------------------------------------------------------------------------------------------------------

INSTRUCTIONS = {
    "ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "ENTRYPOINT", "CMD",
}  # fmt: skip


def instructions_of(text: str) -> list[tuple[str, str]]:
    """Instruction and arguments of each line, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def test_the_image(folder: Path, repository: Path, endpoints: set[str]) -> None:
    found = instructions_of((folder / "Dockerfile").read_text())
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] in ("ARG", "FROM")
    stages: dict[str, list[tuple[str, str]]] = {}
    defaults: dict[str, str] = {}
    for name, rest in found:
        if name == "ARG" and not stages:
            key, _, value = rest.partition("=")
            defaults[key] = value
        elif name == "FROM":
            image, word, stage = rest.split()
            assert word == "AS"
            for key, value in defaults.items():
                image = image.replace(f"${{{key}}}", value)
            assert "$" not in image, f"{image}: an argument that was not declared before the first FROM"
            assert image in stages or ":" in image, f"{image} is neither a stage nor an image with a tag"
            stages[stage] = []
        else:
            stages[stage].append((name, rest))
    assert {f"base-{device}" for device in ("cpu", "cuda")} <= set(stages)
    for name, rest in stages["wheel"]:
        if name == "COPY":
            *sources, _ = rest.split()
            assert [source for source in sources if not (repository / source).exists()] == []
    last = dict(stages["server"])
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", last["USER"]), "not root, and a number, so that Kubernetes can see it"
    assert last["EXPOSE"] == str(PORT)
    assert last["STOPSIGNAL"] == "SIGTERM"
    entry, command = json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])
    assert entry == ["rustvllm", "serve"]
    checked(command, 60)
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", last["HEALTHCHECK"])
    assert asked
    assert asked[1] == str(PORT)
    assert asked[2] in endpoints & KEYLESS
    assert not any(KEY_VARIABLE in rest for _, rest in found), "everyone with the image can read its key"
    runs = [rest for name, rest in found if name == "RUN" and "apt-get install" in rest]
    assert runs
    for run in runs:
        assert "rm -rf /var/lib/apt/lists" in run
        assert "--no-install-recommends" in run


def test_the_build_context_has_what_the_build_copies(folder: Path) -> None:
    copied = [rest for name, rest in instructions_of((folder / "Dockerfile").read_text()) if name == "COPY"]
    sources = {source for rest in copied for source in rest.split()[:-1]}
    kept = {line[1:] for line in (folder / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == kept


# -- compose and Kubernetes -------------------------------------------------------------------------------------------


def test_compose(folder: Path, repository: Path) -> None:
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    assert set(compose) == {"services", "volumes"}
    (service,) = compose["services"].values()
    build = service["build"]
    assert (folder / build["context"]).resolve() == repository.resolve()
    assert (repository / build["dockerfile"]).exists()
    assert f"FROM base-${{{'DEVICE'}}}" in (repository / build["dockerfile"]).read_text()
    assert build["args"]["DEVICE"] in ("cpu", "cuda")
    checked(service["command"], seconds(service["stop_grace_period"]))
    assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert service["environment"][KEY_VARIABLE].startswith("${"), "no key in the file"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    for volume in service["volumes"]:
        assert volume.split(":")[0] in compose["volumes"]


@pytest.fixture(scope="module")
def kinds(folder: Path) -> dict[str, Any]:
    documents = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))
    versions = {document["kind"]: document["apiVersion"] for document in documents}
    assert versions == {"Deployment": "apps/v1", "Service": "v1", "PodDisruptionBudget": "policy/v1"}
    for document in documents:
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
    return {document["kind"]: document["spec"] for document in documents}


def test_the_objects_find_each_other(kinds: dict[str, Any]) -> None:
    labels = kinds["Deployment"]["template"]["metadata"]["labels"]
    assert kinds["Deployment"]["selector"]["matchLabels"].items() <= labels.items()
    assert kinds["Service"]["selector"].items() <= labels.items()
    assert kinds["PodDisruptionBudget"]["selector"]["matchLabels"].items() <= labels.items()
    assert kinds["PodDisruptionBudget"]["minAvailable"] < kinds["Deployment"]["replicas"], "else no node can be drained"
    (container,) = kinds["Deployment"]["template"]["spec"]["containers"]
    names = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in kinds["Service"]["ports"]} <= set(names)
    volumes = {volume["name"] for volume in kinds["Deployment"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_pod(kinds: dict[str, Any], endpoints: set[str]) -> None:
    pod = kinds["Deployment"]["template"]["spec"]
    (container,) = pod["containers"]
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    checked(container["args"], pod["terminationGracePeriodSeconds"] - pause)
    assert "command" not in container, "the image's entry point is the server"
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]["httpGet"]
        assert probe["path"] in endpoints & KEYLESS
        assert probe["port"] == "http"
    assert container["livenessProbe"]["httpGet"]["path"] != "/health", "a server that loads or restarts is not dead"
    (secret,) = [variable for variable in container["env"] if variable["name"] == KEY_VARIABLE]
    assert set(secret["valueFrom"]["secretKeyRef"]) == {"name", "key"}
    assert pod["securityContext"]["runAsNonRoot"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert set(container["resources"]) == {"requests", "limits"}
    assert {"/tmp", "/cache"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    scrape = kinds["Deployment"]["template"]["metadata"]["annotations"]
    assert scrape["prometheus.io/path"] in endpoints
    assert scrape["prometheus.io/port"] == str(PORT)


# -- proxies ----------------------------------------------------------------------------------------------------------


def test_the_proxies_hold_no_stream_back(folder: Path) -> None:
    nginx = re.sub(r"#.*", "", (folder / "nginx.conf").read_text())
    assert nginx.count("{") == nginx.count("}") >= 4
    for statement in re.split(r"[;{}]", nginx):
        assert "\n" not in statement.strip(), f"a semicolon is missing: {statement.strip()}"
    for words in ("proxy_buffering off", "proxy_http_version 1.1", f"server 127.0.0.1:{PORT}", "proxy_cache off"):
        assert words in nginx
    limit = re.search(r"client_max_body_size (\d+)m;", nginx)
    assert limit
    assert int(limit[1]) << 20 == parse_args([]).max_body_bytes
    caddy = re.sub(r"(?<!\S)#.*", "", (folder / "Caddyfile").read_text())
    assert caddy.count("{") == caddy.count("}") >= 4
    for words in ("flush_interval -1", f"reverse_proxy 127.0.0.1:{PORT}", f"max_size {limit[1]}MiB"):
        assert words in caddy


async def status_under(words: list[str], host: str, path: str = "/v1/models", *, key: str | None = None) -> int:
    """What a server with these flags answers to a request for that host."""
    from rustvllm.server.app import build_app
    from rustvllm.server.flags.settings import ServerSettings
    from rustvllm.server.launch.listen import Listener
    from rustvllm.server.launch.serve import _with_known_hosts
    from rustvllm.server.state import ServerState

    args = parse_args([*words, *(["--api-key", key] if key else [])])
    bound = SimpleNamespace(getsockname=lambda: (args.host, args.port))
    settings = _with_known_hosts(ServerSettings.from_args(args), Listener(bound, "http://x"), args.host)
    transport = httpx.ASGITransport(build_app(ServerState(settings)))
    headers = {"Host": host, "Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return (await client.get(path, headers=headers)).status_code


async def test_the_server_knows_the_name_that_the_proxies_pass_on(folder: Path) -> None:
    nginx = re.sub(r"#.*", "", (folder / "nginx.conf").read_text())
    assert re.findall(r"server_name ([^;]+);", nginx) == [PUBLIC_NAME]
    assert re.findall(r"proxy_set_header Host ([^;]+);", nginx) == ["$host"]
    caddy = re.sub(r"(?<!\S)#.*", "", (folder / "Caddyfile").read_text())
    assert caddy.split()[:2] == [PUBLIC_NAME, "{"]
    assert "header_up" not in caddy, "Caddy passes Host on as it came by default"
    unit = (folder / "rustvllm.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+ serve (.*)$", unit, re.MULTILINE)
    words = shlex.split(command)
    # 503: past the check of the host, without a model yet. Without a key, as the unit starts without its file.
    for host, status in ((PUBLIC_NAME, 503), (f"{PUBLIC_NAME}:443", 503), ("evil.example", 403), ("localhost", 503)):
        assert await status_under(words, host) == status
    assert (
        await status_under([word for word in words if word not in ("--allowed-hosts", PUBLIC_NAME)], PUBLIC_NAME) == 403
    )


async def test_the_containers_answer_probes_and_scrapes_by_address(folder: Path, kinds: dict[str, Any]) -> None:
    (container,) = kinds["Deployment"]["template"]["spec"]["containers"]
    (service,) = yaml.safe_load((folder / "compose.yaml").read_text())["services"].values()
    for words in (container["args"], service["command"]):
        assert await status_under(words, f"10.1.2.3:{PORT}", "/health", key="k") == 503
        assert await status_under(words, f"10.1.2.3:{PORT}", "/metrics", key="k") == 503
