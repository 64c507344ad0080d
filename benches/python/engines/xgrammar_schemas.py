"""Judges schemas with xgrammar, as ``structured_output.py`` does with ours, and times it; prints one line of JSON.

Properties that a schema does not name are allowed unless it says otherwise (``strict_mode=False``), as in JSON Schema.
"""

import argparse
import importlib.metadata
import json
import sys
import time
from collections import Counter
from pathlib import Path

import xgrammar
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from schema_corpus import Entry, quantiles, read_schemas, read_suite


class Judge:
    """A vocabulary, and the measured times."""

    def __init__(self, folder: Path) -> None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        self.tokenizer = tokenizer
        self.eos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[self.eos])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        self.compiles: list[float] = []
        self.masks: list[float] = []

    def judge(self, entry: Entry, times: bool) -> str:
        """The verdict on a schema."""
        began = time.perf_counter()
        try:
            grammar = self.compiler.compile_json_schema(json.dumps(entry.schema), strict_mode=False)
        except Exception:  # noqa: BLE001 -- each of its errors means a refusal
            return "refused"
        self.compiles.append(1e6 * (time.perf_counter() - began))
        verdict = "right"
        for test in entry.tests:
            text = json.dumps(test["data"], ensure_ascii=False)
            matcher = xgrammar.GrammarMatcher(grammar)
            taken = matcher.accept_string(text) and matcher.accept_token(self.eos)
            if taken and not test["valid"]:
                return "wrong"
            if test["valid"] and not taken:
                verdict = "narrow"
            elif times and taken:
                self.time_masks(grammar, text)
        return verdict

    def time_masks(self, grammar: xgrammar.CompiledGrammar, text: str) -> None:
        """Time accepting each token of a text and computing the next mask."""
        matcher = xgrammar.GrammarMatcher(grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            began = time.perf_counter()
            matcher.accept_token(token)
            matcher.fill_next_token_bitmask(self.bitmask)
            self.masks.append(1e6 * (time.perf_counter() - began))


def shares(entries: list[Entry], judge: Judge, times: bool) -> dict[str, object]:
    """Counts of verdicts, with their shares in percent."""
    counts = Counter(judge.judge(entry, times) for entry in entries)
    total = len(entries)
    return {name: {"count": count, "percent": round(100 * count / total, 2)} for name, count in counts.most_common()}


def main() -> None:
    """Judge, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=Path, required=True)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0)
    args = parser.parse_args()
    judge = Judge(args.tokenizer)
    report: dict[str, object] = {"version": importlib.metadata.version("xgrammar")}
    report["maskbench"] = shares(read_schemas(args.schemas, args.limit), judge, times=True)
    report |= {"compile_us": quantiles(judge.compiles), "mask_us": quantiles(judge.masks)}
    if args.suite is not None:
        suite = read_suite(args.suite)
        report["suite"] = {draft: shares(groups, judge, times=False) for draft, groups in suite.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
