"""Times the masks of llguidance in its own Python package, for the same texts as ours; prints one line of JSON.

Times are the thread's processor time, as in ``structured_output.py``. Grammars have the library's defaults; ours allow
less whitespace.
"""

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path

import llguidance
import llguidance.hf
import llguidance.numpy
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from schema_corpus import quantiles, read_schemas


class Timer:
    """A vocabulary, and the measured times in microseconds."""

    def __init__(self, folder: Path) -> None:
        file = str(folder / "tokenizer.json")
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")  # noqa: S106 -- text
        self.vocabulary = llguidance.hf.from_tokenizer(self.tokenizer)
        self.bitmask = llguidance.numpy.allocate_token_bitmask(1, self.vocabulary.vocab_size)
        self.compiles: list[float] = []
        self.masks: list[float] = []

    def time(self, schema: str, text: str) -> None:
        """Compile a schema and follow a text that obeys it, as far as the library accepts both."""
        began = time.thread_time_ns()
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
            matcher = llguidance.LLMatcher(self.vocabulary, grammar)
        except ValueError:
            return
        if matcher.is_error():
            return
        llguidance.numpy.fill_next_token_bitmask(matcher, self.bitmask)
        self.compiles.append((time.thread_time_ns() - began) / 1e3)
        masks = []
        for token in self.tokenizer.encode(text):
            began = time.thread_time_ns()
            is_taken = matcher.consume_token(token)
            llguidance.numpy.fill_next_token_bitmask(matcher, self.bitmask)
            masks.append((time.thread_time_ns() - began) / 1e3)
            if not is_taken:
                return
        self.masks += masks


def main() -> None:
    """Time, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0)
    args = parser.parse_args()
    timer = Timer(args.tokenizer)
    for entry in read_schemas(args.schemas, args.limit):
        for text in (json.dumps(test["data"], ensure_ascii=False) for test in entry.tests if test["valid"]):
            timer.time(json.dumps(entry.schema), text)
    times = {"compile_us": quantiles(timer.compiles), "mask_us": quantiles(timer.masks)}
    print(json.dumps({"version": importlib.metadata.version("llguidance"), **times}))


if __name__ == "__main__":
    main()
