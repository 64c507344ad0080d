"""Models name layers: collectives are named in `layers` and `distributed` alone."""

import ast

ROOMS = ("layers", "distributed")
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "all_to_all", "isend", "irecv",
}  # fmt: skip


def named(tree):
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & COLLECTIVES


def test_only_layers_and_what_is_distributed_name_collectives(repository):
    package = repository / "python" / "rustvllm"
    found = {
        path.relative_to(package).parts[0]: path for path in package.rglob("*.py") if named(ast.parse(path.read_text()))
    }
    assert set(ROOMS) <= set(found), "nothing names collectives any more"
    strangers = {room: str(path) for room, path in found.items() if room not in ROOMS}
    assert not strangers, f"collectives belong to {' and '.join(ROOMS)}: {strangers}"
