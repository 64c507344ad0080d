r"""Judges real schemas with texts that do and do not obey them: right, refused and wrong ones, and the cost.

    python benches/python/structured_output.py --schemas open.jsonl.gz --suite JSON-Schema-Test-Suite.tar.gz \
        --tokenizer FOLDER --peer-python OTHER/bin/python --peer-limit 200

Each line of ``--schemas`` has ``schema`` and ``tests`` with ``valid`` and ``data`` (MaskBench); ``--suite`` is the
archive of the JSON Schema Test Suite, judged draft by draft. A schema is *right* if all its texts are accepted or
refused correctly, *refused* if it cannot be enforced, *wrong* if a text that does not obey is accepted, and *narrow* if
one that obeys is not. In lenient mode, a schema that is not fully enforced has a warning: *told* are the wrong ones
with a warning. Compile and mask times are those of the engine, with the vocabulary of ``--tokenizer``, for the texts
that obey. ``--peer-python`` is an interpreter with ``xgrammar``, which judges the same schemas and needs a second for
each. ``--library-python`` is an interpreter with ``llguidance``, the library that computes our masks: its masks and
ours, in alternating turns, show how much of the time is ours, and how fast the machine is at the moment.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_report import new_report, parse, publish
from schema_corpus import Entry, quantiles, read_schemas, read_suite

from rustvllm import _core
from rustvllm.text.tokenizer import Tokenizer

ENGINES = Path(__file__).parent / "engines"
TURNS = 3


def judge(spec: _core.GrammarSpec, entry: Entry) -> str:
    """The verdict on a schema that can be enforced."""
    verdict = "right"
    for test in entry.tests:
        taken = spec.accepts(json.dumps(test["data"], ensure_ascii=False))
        if taken and not test["valid"]:
            return "wrong"
        if test["valid"] and not taken:
            verdict = "narrow"
    return verdict


def verdicts(entries: list[Entry], names: bool) -> dict[str, Any]:
    """Counts of verdicts, strict and lenient."""
    strict: Counter[str] = Counter()
    lenient: Counter[str] = Counter()
    wrong = []
    for entry in entries:
        spec = _core.GrammarSpec("json", json.dumps(entry.schema))
        try:
            spec.check("schema")
        except ValueError:
            verdict = "refused"
        else:
            verdict = judge(spec, entry)
        strict[verdict] += 1
        if verdict == "wrong":
            wrong.append(entry.name)
        if verdict == "refused":
            verdict = judge_leniently(spec, entry)
        lenient[verdict] += 1
    report: dict[str, Any] = {"schemas": len(entries), "strict": shares(strict), "lenient": shares(lenient)}
    return {**report, "wrong": wrong} if names else report


def judge_leniently(spec: _core.GrammarSpec, entry: Entry) -> str:
    """The verdict on a schema whose keywords may be left out."""
    try:
        relaxed, _, count = spec.relaxed("schema")
    except ValueError:
        return "refused"
    verdict = judge(relaxed, entry)
    return "told" if verdict == "wrong" and count else verdict


def shares(counts: Counter[str]) -> dict[str, Any]:
    """Each count, and its share in percent."""
    total = sum(counts.values())
    return {name: {"count": count, "percent": round(100 * count / total, 2)} for name, count in counts.most_common()}


def times(entries: list[Entry], folder: Path) -> dict[str, Any]:
    """Compile and mask times for the texts that obey, in microseconds of the thread's processor time."""
    tokenizer = Tokenizer.from_folder(folder)
    eos = tokenizer.eos_token_id
    timer = _core.MaskTimer(tokenizer.core, [] if eos is None else [eos], tokenizer.vocab_size)
    compiles: list[float] = []
    masks: list[float] = []
    masks_again: list[float] = []
    counts = [0, 0, 0]
    for spec, texts in obeying(entries):
        for text in texts:
            try:
                ids = tokenizer.encode(text, add_special_tokens=False)
                compile_us, mask_us, again_us, is_taken = timer.time(spec, ids)
            except ValueError:
                break  # refused
            compiles.append(compile_us)
            if is_taken:
                masks += mask_us
                masks_again += again_us
                *found, is_followed = timer.forced(spec, text)
                if is_followed:
                    counts = [total + count for total, count in zip(counts, found, strict=True)]
    num_tokens, num_forced, num_runs = counts
    return {
        "compile_us": quantiles(compiles),
        "mask_us": quantiles(masks),
        "mask_us_of_second_request": quantiles(masks_again),
        "forced_percent": round(100 * num_forced / num_tokens, 2),
        "steps_saved_percent": {
            "one step at a time": round(100 * num_forced / num_tokens, 2),
            "overlapping steps": round(100 * (num_forced - num_runs) / num_tokens, 2),
        },
    }


def obeying(entries: list[Entry]) -> Iterator[tuple[_core.GrammarSpec, list[str]]]:
    """The grammars of schemas, each with the texts that obey it."""
    for entry in entries:
        texts = [json.dumps(test["data"], ensure_ascii=False) for test in entry.tests if test["valid"]]
        yield _core.GrammarSpec("json", json.dumps(entry.schema)), texts


def of_peer(python: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The verdicts and times of xgrammar, in an interpreter that has it."""
    suite = [] if args.suite is None else ["--suite", args.suite]
    return answer_of(python, "xgrammar_schemas.py", args, *suite)


def next_to_library(python: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The mask times of the library under our masks, in its own package, and ours, in alternating turns."""
    entries = read_schemas(args.schemas, args.peer_limit)
    turns = []
    for _ in range(TURNS):
        library = answer_of(python, "llguidance_masks.py", args)
        ours = times(entries, args.tokenizer)
        ratio = round(ours["mask_us"]["mean"] / library["mask_us"]["mean"], 2)
        turns.append({"llguidance": library, "rustvllm": ours, "ratio_of_mean_masks": ratio})
    return turns


def answer_of(python: Path, engine: str, args: argparse.Namespace, *more: object) -> dict[str, Any]:
    """The line of JSON that a program prints in another interpreter."""
    asked = ["--schemas", args.schemas, "--tokenizer", args.tokenizer, "--limit", args.peer_limit or 0, *more]
    command = [str(part) for part in [python, ENGINES / engine, *asked]]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def main() -> None:
    """Judge the schemas of a file, and those of the suite, and publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, required=True, help="lines of JSON, compressed")
    parser.add_argument("--suite", type=Path, help="archive of the JSON Schema Test Suite")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the vocabulary for the times")
    parser.add_argument("--limit", type=int, help="as many schemas, evenly spread over the file")
    parser.add_argument("--peer-python", type=Path, help="interpreter that has xgrammar")
    parser.add_argument("--library-python", type=Path, help="interpreter that has llguidance")
    parser.add_argument("--peer-limit", type=int, help="schemas of the file for these two, evenly spread")
    parser.add_argument("--output-json", type=Path, help="write the report there as well")
    args = parse(parser)
    report = new_report()
    entries = read_schemas(args.schemas, args.limit)
    report["maskbench"] = {**verdicts(entries, names=True), **times(entries, args.tokenizer)}
    if args.peer_limit is not None:
        report["maskbench_of_peer"] = verdicts(read_schemas(args.schemas, args.peer_limit), names=False)
    if args.suite is not None:
        report["suite"] = {draft: verdicts(groups, names=True) for draft, groups in read_suite(args.suite).items()}
    if args.peer_python is not None:
        report["xgrammar"] = of_peer(args.peer_python, args)
    if args.library_python is not None:
        report["llguidance"] = next_to_library(args.library_python, args)
    publish(report, args.output_json)


if __name__ == "__main__":
    sys.exit(main())
