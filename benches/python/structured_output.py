"""Real schemas with texts that obey them and texts that do not: how many are right, refused, and wrong.

``python benches/python/structured_output.py open.jsonl.gz --limit 500``; each line of the file has ``schema`` and
``tests`` of ``valid`` and ``data`` (MaskBench). A schema is *right* when all its texts are taken or refused as they
should be, *refused* when it cannot be enforced, *wrong* when a text that does not obey is taken, and *narrow* when one
that obeys is not.
"""

import argparse
import gzip
import json
import time
from collections import Counter
from pathlib import Path

from rustvllm import _core


def judge(entry: dict) -> tuple[str, float]:
    """What becomes of one schema, and the seconds that its check took."""
    spec = _core.GrammarSpec("json", json.dumps(entry["schema"]))
    began = time.perf_counter()
    try:
        spec.check("schema")
    except ValueError:
        return "refused", time.perf_counter() - began
    seconds = time.perf_counter() - began
    verdict = "right"
    for test in entry["tests"]:
        taken = spec.accepts(json.dumps(test["data"], ensure_ascii=False))
        if taken and not test["valid"]:
            return "wrong", seconds
        if test["valid"] and not taken:
            verdict = "narrow"
    return verdict, seconds


def main() -> None:
    """Judge the schemas of a file and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=int, default=None, help="as many schemas, evenly spread over the file")
    arguments = parser.parse_args()
    with gzip.open(arguments.file, "rt", encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines]
    step = 1 if arguments.limit is None else max(1, len(entries) // arguments.limit)
    chosen = entries[::step]
    counts: Counter[str] = Counter()
    times = []
    for entry in chosen:
        verdict, seconds = judge(entry)
        counts[verdict] += 1
        times.append(seconds * 1e3)
        if verdict == "wrong":
            print("wrong:", entry.get("name"))
    times.sort()
    print({name: f"{count} ({count / len(chosen):.1%})" for name, count in counts.most_common()})
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"check: p50 {p50:.2f} ms, p99 {p99:.2f} ms, most {times[-1]:.1f} ms")


if __name__ == "__main__":
    main()
