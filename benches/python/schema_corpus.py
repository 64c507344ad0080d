"""Reads schemas with texts from published files: MaskBench and the JSON Schema Test Suite. Needs only Python.

Also has ``quantiles``, so that all engines' times are summarized in the same way.
"""

import gzip
import json
import tarfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@dataclass(frozen=True)
class Entry:
    """A schema and texts.

    Attributes:
        name: The schema's name.
        schema: An object or a boolean.
        tests: Objects with ``data``, and with ``valid``: whether the data obeys.
    """

    name: str
    schema: Any
    tests: list[dict[str, Any]]


def read_schemas(path: Path, limit: int | None = None) -> list[Entry]:
    """The schemas of MaskBench; with a limit, only that many, evenly spread."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    step = 1 if not limit else max(1, len(found) // limit)
    return [Entry(entry["name"], entry["schema"], entry["tests"]) for entry in found[::step]]


def read_suite(path: Path) -> dict[str, list[Entry]]:
    """The groups of the suite by draft, without optional ones; each schema names its draft."""
    groups: defaultdict[str, list[Entry]] = defaultdict(list)
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            folder, _, file = member.name.removeprefix("./").rpartition("/")
            parent, _, draft = folder.rpartition("/")
            if not parent.endswith("tests") or draft not in DRAFTS or not file.endswith(".json"):
                continue
            stored = archive.extractfile(member)
            assert stored is not None
            for group in json.load(stored):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": DRAFTS[draft], **schema}
                groups[draft].append(Entry(f"{draft}/{file}: {group['description']}", schema, group["tests"]))
    return dict(sorted(groups.items()))


def quantiles(values: list[float]) -> dict[str, float]:
    """Count, mean, some quantiles and the maximum."""
    values = sorted(values)
    found = {name: round(values[int(share * (len(values) - 1))], 1) for name, share in SHARES.items()}
    return {"count": len(values), "mean": round(sum(values) / len(values), 1), **found, "max": round(values[-1], 1)}
