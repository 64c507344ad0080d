"""Measures the share of a tool call's tokens that its grammar forces, so that no model has to be asked for them.

    python benches/python/forced_calls.py --functions BFCL/simple_python.jsonl --tokenizer FOLDER

Each line of ``--functions`` has ``function``, a list of functions. The script calls the first one as hermes writes
calls, with random arguments from its schema; no model runs. ``left_out`` counts functions whose schema cannot be
enforced or whose call does not obey it.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from bench_report import new_report, parse, publish

from rustvllm import _core
from rustvllm.text.tokenizer import Tokenizer

TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
WORDS = ("Paris", "large", "two blue cars", "2024-05-01")


def as_schema(value: Any) -> Any:
    """Convert a schema of the data, which has Python's type names, to JSON Schema."""
    if isinstance(value, list):
        return [as_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: as_schema(item) for key, item in value.items() if key not in ("default", "format", "optional")}
    if isinstance(found.get("type"), str):
        found["type"] = TYPES.get(found["type"], found["type"])
    return found


def example(schema: dict[str, Any], choice: random.Random) -> Any:
    """A value of a schema: required members, and some of the others."""
    if "enum" in schema:
        return choice.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            members = schema.get("properties", {}).items()
            chosen = (name for name, _ in members if name in schema.get("required", ()) or choice.random() < 0.5)
            return {name: example(schema["properties"][name], choice) for name in chosen}
        case "array":
            return [example(schema.get("items", {}), choice) for _ in range(2)]
        case "integer":
            return choice.randrange(1000)
        case "number":
            return choice.randrange(1000) / 10
        case "boolean":
            return choice.random() < 0.5
    return choice.choice(WORDS)


def written(name: str, arguments: Any) -> str:
    """A call in the format of hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def main() -> None:
    """Count, and publish the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=Path, required=True, help="lines of JSON")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the vocabulary")
    parser.add_argument("--seed", type=int, default=1, help="of the arguments")
    parser.add_argument("--output-json", type=Path, help="write the report there as well")
    args = parse(parser)
    report = new_report()
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    timer = _core.MaskTimer(tokenizer.core, [], tokenizer.vocab_size)
    choice = random.Random(args.seed)
    counts, num_calls, num_left_out = [0, 0, 0], 0, 0
    for line in args.functions.read_text().splitlines():
        function = json.loads(line)["function"][0]
        schema = as_schema(function["parameters"])
        text = written(function["name"], example(schema, choice))
        lark = _core.Tools([(function["name"], json.dumps(schema), False)]).grammar("hermes", parallel=False)
        assert lark is not None
        try:
            *found, is_taken = timer.forced(_core.GrammarSpec("grammar", lark), text)
        except ValueError:
            is_taken = False
        if not is_taken:
            num_left_out += 1
            continue
        num_calls += 1
        counts = [total + count for total, count in zip(counts, found, strict=True)]
    num_tokens, num_forced, num_runs = counts
    report |= {"calls": num_calls, "left_out": num_left_out, "tokens_per_call": round(num_tokens / num_calls, 1)}
    report["steps_saved_percent"] = {
        "one step at a time": round(100 * num_forced / num_tokens, 1),
        "overlapping steps": round(100 * (num_forced - num_runs) / num_tokens, 1),
    }
    publish(report, args.output_json)


if __name__ == "__main__":
    sys.exit(main())
