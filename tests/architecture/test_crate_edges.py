"""The edges between our crates, and which foreign crates each layer may see."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

# Which of our crates each crate may name. A new crate is added here on purpose, with its place in the order.
ALLOWED = {
    "kvblocks": set(),
    "drafting": set(),
    "scheduler": {"kvblocks", "drafting"},
    "output": {"kvblocks", "scheduler"},
    "grammar": {"scheduler", "output"},
    "ipc": {"kvblocks", "scheduler", "output"},
    "loadgen": {"kvblocks", "scheduler"},
    "cpu-kernels": set(),
    "gguf": set(),
    "step-channel": {"scheduler"},
    "rustvllm-py": {
        "kvblocks",
        "scheduler",
        "output",
        "grammar",
        "ipc",
        "loadgen",
        "cpu-kernels",
        "gguf",
        "step-channel",
    },
    "rustvllm-benches": {"drafting", "kvblocks", "scheduler", "output", "ipc", "loadgen", "cpu-kernels"},
}
PRESENT = {
    "kvblocks", "scheduler", "output", "grammar", "ipc", "loadgen", "cpu-kernels", "gguf", "drafting", "step-channel",
    "rustvllm-py", "rustvllm-benches",
}  # fmt: skip

# Foreign crates with one owner: no other crate of ours may name them.
OWNED_BY = {
    "pyo3": {"rustvllm-py"},
    "numpy": {"rustvllm-py"},
    "tokenizers": {"output"},
    "tokio": {"ipc", "loadgen"},
    "llguidance": {"grammar"},
    "toktrie": {"grammar"},
}


@pytest.fixture(scope="module")
def ours(cargo_metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Our packages by name."""
    members = set(cargo_metadata["workspace_members"])
    return {package["name"]: package for package in cargo_metadata["packages"] if package["id"] in members}


def named(package: dict[str, Any], *, dev: bool = True) -> set[str]:
    """Names of the crates a manifest names; `dev` includes those of its tests."""
    return {edge["name"] for edge in package["dependencies"] if dev or edge["kind"] != "dev"}


def closure(cargo_metadata: dict[str, Any], root: str) -> set[str]:
    """Names of all crates that end up in a build of package `root`, tests aside."""
    names = {package["id"]: package["name"] for package in cargo_metadata["packages"]}
    nodes = {node["id"]: node for node in cargo_metadata["resolve"]["nodes"]}
    todo = [identity for identity, name in names.items() if name == root and identity in nodes]
    seen: set[str] = set()
    while todo:
        identity = todo.pop()
        if identity in seen:
            continue
        seen.add(identity)
        edges = nodes[identity]["deps"]
        todo.extend(edge["pkg"] for edge in edges if any(kind["kind"] is None for kind in edge["dep_kinds"]))
    return {names[identity] for identity in seen}


def test_the_workspace_holds_the_crates_we_think_it_holds(ours: dict[str, dict[str, Any]]) -> None:
    assert set(ours) >= PRESENT
    assert set(ours) <= set(ALLOWED), "a new crate needs its place in ALLOWED"


def test_a_crate_names_only_the_crates_below_it(ours: dict[str, dict[str, Any]]) -> None:
    upwards = {name: (named(package) & set(ALLOWED)) - ALLOWED[name] for name, package in ours.items()}
    assert {name: edges for name, edges in upwards.items() if edges} == {}


def test_the_page_lists_every_crate_with_what_it_uses(ours: dict[str, dict[str, Any]], repository: Path) -> None:
    """A crate's row in `docs/architecture.md` names what it uses, by itself or through another crate that it names."""
    section = (repository / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## The crates\n")[2]
    rows = re.findall(r"^\| `(?:crates/)?([a-z-]+)` \| .* \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    names = {"rustvllm-benches" if name == "benches" else name: uses for name, uses in rows}
    assert set(names) == set(ours)
    everything = {"all of them": set(ours), "all but the binding": set(ours) - {"rustvllm-py"}}
    for name, uses in names.items():
        listed = everything.get(uses, set(re.findall(r"`([a-z-]+)`", uses)))
        assert bool(listed) == (uses != "no other crate here"), f"{name}: {uses}"
        assert named(ours[name], dev=False) & set(ours) <= listed, f"{name}: {uses}"


def test_the_order_is_real(ours: dict[str, dict[str, Any]]) -> None:
    """The edges that make the architecture exist, so the test above does not pass by emptiness."""
    assert "kvblocks" in named(ours["scheduler"])
    assert "scheduler" in named(ours["rustvllm-py"])
    assert "output" in named(ours["rustvllm-py"])
    assert "scheduler" in named(ours["ipc"])
    assert "tokio" in named(ours["ipc"])
    assert {"llguidance", "output", "scheduler"} <= named(ours["grammar"])
    assert "ipc" in named(ours["rustvllm-py"])
    assert "loadgen" in named(ours["rustvllm-py"])
    assert "cpu-kernels" in named(ours["rustvllm-py"])
    assert "gguf" in named(ours["rustvllm-py"])


@pytest.mark.parametrize("foreign", sorted(OWNED_BY))
def test_a_foreign_crate_has_one_owner(ours: dict[str, dict[str, Any]], foreign: str) -> None:
    users = {name for name, package in ours.items() if foreign in named(package, dev=False)}
    assert users <= OWNED_BY[foreign]


@pytest.mark.parametrize("name", ["kvblocks", "scheduler"])
def test_the_scheduler_never_sees_python_text_or_sockets(cargo_metadata: dict[str, Any], name: str) -> None:
    reached = closure(cargo_metadata, name)
    assert name in reached
    assert reached & {"pyo3", "numpy", "tokenizers", "tokio", "serde_json", "parking_lot", "crossbeam"} == set()


def test_the_transport_never_sees_python_or_text(cargo_metadata: dict[str, Any]) -> None:
    reached = closure(cargo_metadata, "ipc")
    assert {"tokio", "scheduler"} <= reached
    assert reached & {"pyo3", "numpy", "tokenizers", "serde_json"} == set()


def test_the_closure_sees_through_crates(cargo_metadata: dict[str, Any]) -> None:
    assert {"pyo3", "kvblocks", "scheduler", "output", "thiserror"} <= closure(cargo_metadata, "rustvllm-py")


def test_kvblocks_forbids_unsafe(ours: dict[str, dict[str, Any]]) -> None:
    (target,) = (target for target in ours["kvblocks"]["targets"] if "lib" in target["kind"])
    assert "#![forbid(unsafe_code)]" in Path(target["src_path"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["kvblocks", "scheduler"])
def test_a_crate_without_locks_bans_them(ours: dict[str, dict[str, Any]], name: str) -> None:
    bans = tomllib.loads((Path(ours[name]["manifest_path"]).parent / "clippy.toml").read_text(encoding="utf-8"))
    banned = {entry["path"] for entry in bans["disallowed-types"]}
    assert {"std::sync::Mutex", "std::sync::RwLock", "std::sync::Condvar"} <= banned
    assert all(entry["reason"] for entry in bans["disallowed-types"])
