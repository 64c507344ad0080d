"""Draws which package imports which, from the code, into docs/architecture.md.

    scripts/import_drawing.py          write the drawing between its two marks
    scripts/import_drawing.py --check  exit with 1 if it is not what the code says

An arrow that follows from two others is left out, so the drawing shows the order of the rooms and no more.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "architecture.md"
BEGIN, END = "<!-- imports: begin -->", "<!-- imports: end -->"
GROUND = "ground"
"""One node for the modules directly under the package, but for ``TOP``."""
TOP = frozenset({"llm", "offline", "beam_search"})
"""``LLM`` and what it takes and gives, which stand at the top: one node, too."""


def package_edges() -> dict[str, set[str]]:
    """Each package and the packages that its modules import, types included."""
    sys.path.insert(0, str(REPOSITORY / "python"))
    graph = grimp.build_graph("rustvllm", cache_dir=None)
    edges: dict[str, set[str]] = defaultdict(set)
    for importer in graph.modules:
        source = _package(importer, graph)
        for imported in graph.find_modules_directly_imported_by(importer):
            target = _package(imported, graph)
            if source and target and source != target:
                edges[source].add(target)
                edges.setdefault(target, set())
    return dict(edges)


def _package(module: str, graph: grimp.ImportGraph) -> str | None:
    parts = module.split(".")
    if len(parts) == 1:
        return None  # the package itself, whose names are imported when they are used
    top = ".".join(parts[:2])
    if parts[1] in TOP:
        return "llm"
    return parts[1] if graph.find_children(top) or len(parts) > 2 else GROUND


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The edges without those that follow from others; there is no circle."""
    reach: dict[str, set[str]] = {}

    def reachable(node: str) -> set[str]:
        if node not in reach:
            reach[node] = set().union(*({each} | reachable(each) for each in edges[node]))
        return reach[node]

    return {
        node: {each for each in targets if not any(each in reachable(other) for other in targets - {each})}
        for node, targets in edges.items()
    }


def drawing() -> str:
    """The drawing as a Mermaid flow chart."""
    edges = reduced(package_edges())
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {source} --> {target}" for source in sorted(edges) for target in sorted(edges[source])]
    return "\n".join([*lines, "```"])


def main() -> int:
    """The command line.

    Returns:
        0, or 1 when ``--check`` finds another drawing.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n{drawing()}\n{END}{after}"
    if args.check:
        if page != wanted:
            print("the drawing of imports is old: run scripts/import_drawing.py", file=sys.stderr)
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
