r"""Compares rustvllm's drafts with those of other engines on the CPU: the same model and texts, in alternating turns.

The model has the shape of GPT-2 small and is constructed to say given texts (``scripted_text.py``), each from its own
starting place, so the right answer is known and checked. Before that place, a prompt has random ids. The text
``edited`` comes from this clone's history: a model says the text of the commit at which it was made, which is stored
with it. Each engine is its own process (``engines/``); while one is measured, the others are stopped. An engine's name
may end in ``-`` and a number of drafts; ``off`` means without drafts. The measurement is the time of the whole answers
minus the time of their first tokens.

    python benches/python/compare_drafts.py --prepare --text repeating --model scripted
    ov/bin/optimum-cli export openvino --model scripted --task text-generation-with-past --weight-format fp32 \
        ov-scripted
    lcpp/bin/python benches/python/engines/gguf_of.py scripted scripted
    python benches/python/compare_drafts.py --text repeating --model scripted --engine rustvllm-off=.venv/bin/python \
        --engine vllm-4=vllm/bin/python --engine vllm-off=vllm/bin/python --engine transformers-10=.venv/bin/python \
        --engine openvino-5=ov/bin/python:ov-scripted --engine llama_cpp-10=lcpp/bin/python:scripted-f32.gguf
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from compare_offline import Engine, end_on_signals, environment_of, vocab_size_of
from scripted_text import NUM_IDS, ROOT, STAGGER, Text, texts, use_tokenizer
from tiny_checkpoint import write_gpt2_small
from tokenizer_folder import DATA, folder_with_tokenizer

OURS = {"method": "auto", "suffix_decoding_max_cached_requests": 0}
"""No answer becomes a draft of another one, because each turn asks for the same answers."""
NUM_POSITIONS = 1024
MADE_OF = "script.json"
"""The file in a model's folder that says what the model says, and from which commit the texts are."""


def drafts_of(name: str) -> dict[str, Any] | None:
    """The draft setting in an engine's name."""
    engine, _, setting = name.partition("-")
    if setting == "off":
        return None
    if engine == "rustvllm":
        return OURS
    # The other engines' default is 3.
    longest = {"prompt_lookup_max": 5, "prompt_lookup_min": 2} if engine == "vllm" else {"prompt_lookup_max": 3}
    return {"method": "ngram", "num_speculative_tokens": int(setting), **longest}


def is_one_at_a_time(name: str) -> bool:
    """Whether an engine drafts only for a single stream; transformers also needs prompts of equal length."""
    return name.startswith("transformers") or (name.startswith("llama_cpp") and not name.endswith("-off"))


class Scene:
    """One text, beginning at its place.

    Args:
        text: The text.
        start: Its place.
        num_streams: The most streams.
        num_tokens: The most tokens of each answer.
    """

    def __init__(self, text: Text, start: int, num_streams: int, num_tokens: int) -> None:
        self.num_tokens = min(num_tokens, len(text.answer) - STAGGER * (num_streams - 1))
        self._text, self._start = text, start

    def script(self) -> list[int]:
        """What the model says after each place of the text."""
        return self._text.script()

    def prompts(self, num_streams: int, seed: int) -> list[list[int]]:
        """A prompt for each stream."""
        source = random.Random(seed)
        before = [[source.randrange(NUM_IDS) for _ in range(self._start)] for _ in range(num_streams)]
        return [ids + self._text.of_stream(stream) for stream, ids in enumerate(before)]

    def expected(self, num_streams: int) -> list[list[int]]:
        """The streams' right answers."""
        return [self._text.answer[STAGGER * stream :][: self.num_tokens] for stream in range(num_streams)]


def make_scenes(args: argparse.Namespace) -> dict[str, Scene]:
    """The scenes of all texts, one after the other."""
    most, start, scenes = max(args.streams), 0, {}
    for name in args.text:
        text = texts(args.corpus)[name](1, args.tokens + STAGGER * most)
        scenes[name] = Scene(text, start, most, args.tokens)
        start += len(scenes[name].script())
    if start > NUM_POSITIONS:
        raise SystemExit(f"the texts have {start} tokens, the model {NUM_POSITIONS} places: ask for fewer --tokens")
    return scenes


def commit() -> str:
    """The commit of this clone; empty if there is none."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def check_script(model: Path, script: list[int], asked: str) -> None:
    """End the program unless an existing model says these texts.

    Args:
        model: The model's folder; a folder without a note of its texts is accepted.
        script: What it should say.
        asked: The texts and their length, in words.
    """
    if not (model / MADE_OF).exists():
        return
    made = json.loads((model / MADE_OF).read_text(encoding="utf-8"))
    if made["script"] != script:
        raise SystemExit(
            f"{model} was made at commit {made['commit'] or 'unknown'} to say {made['asked']}, which is not what "
            f"{asked} is at commit {commit() or 'unknown'}: edits are those of the clone's history. Ask for the same "
            "at the same commit, or make the model anew with --prepare in another folder and convert it again"
        )


def measure(engines: dict[str, Engine], scene: Scene, num_streams: int, turns: int) -> dict[str, Any]:
    """Tokens per second of each engine, in alternating turns; the first turn warms up."""
    speeds: dict[str, list[float]] = {}
    for turn in range(-1, turns):
        for name, engine in engines.items():
            if num_streams > 1 and is_one_at_a_time(name):
                continue
            prompts, expected = scene.prompts(num_streams, turn), scene.expected(num_streams)
            num_tokens = scene.num_tokens if turn >= 0 else min(24, scene.num_tokens)
            first = engine.generate(prompts, 1)["seconds"]
            whole = engine.generate(prompts, num_tokens)
            if whole["token_ids"] != [ids[:num_tokens] for ids in expected]:
                raise SystemExit(f"{name}: the model did not say the text")
            if turn >= 0:
                speed = num_streams * (num_tokens - 1) / (whole["seconds"] - first)
                speeds.setdefault(name, []).append(speed)
    return {
        "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "range": {name: [round(min(values)), round(max(values))] for name, values in speeds.items()},
    }


def main() -> None:
    """Start all engines, measure in alternating turns, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=["repeating"], help="names of scripted_text.py")
    parser.add_argument("--corpus", type=Path, help="a text file, for --text ordinary")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=PYTHON[:CONVERTED]")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, made if it is not there")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument(
        "--tokenizer",
        type=folder_with_tokenizer,
        default=str(DATA / "gpt2-tokenizer"),
        help="a folder with GPT-2's tokenizer.json",
    )
    parser.add_argument("--log-folder", type=Path, help="what the engines print goes there")
    parser.add_argument("--prepare", action="store_true", help="make the checkpoint, and end")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    end_on_signals()
    use_tokenizer(args.tokenizer)
    scenes = make_scenes(args)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = args.log_folder or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = args.model or Path(folder) / "scripted"
        script = [token_id for scene in scenes.values() for token_id in scene.script()]
        asked = f"--text {' '.join(args.text)} --tokens {args.tokens} --streams {' '.join(map(str, args.streams))}"
        if not (model / "config.json").exists():
            write_gpt2_small(model, args.tokenizer, num_positions=NUM_POSITIONS, script=script)
            made = {"commit": commit(), "asked": asked, "script": script}
            (model / MADE_OF).write_text(json.dumps(made), encoding="utf-8")
        check_script(model, script, asked)
        if args.prepare:
            return
        engines: dict[str, Engine] = {}
        for entry in [f"rustvllm={sys.executable}", *args.engine]:
            name, _, where = entry.partition("=")
            python, _, converted = where.partition(":")
            settings = {
                "model": str(model),
                "converted": converted,
                "dtype": "float32",
                "max_model_len": NUM_POSITIONS,
                "vocab_size": vocab_size_of(model),
                "max_num_seqs": max(args.streams),
                "num_threads": args.num_threads,
                "drafts": drafts_of(name),
            }
            environment = environment_of(name.partition("-")[0], python, args.num_threads)
            engine = Engine(name, python, settings, environment, logs / f"{name}.log")
            engines[name] = stack.enter_context(engine)
            print(f"{name} loaded in {engine.load_seconds:.1f} s", file=sys.stderr, flush=True)
        results = []
        for name, scene in scenes.items():
            for num_streams in args.streams:
                row = {"text": name, "streams": num_streams, "tokens": scene.num_tokens}
                results.append(row | measure(engines, scene, num_streams, args.turns))
                print(results[-1], file=sys.stderr, flush=True)
        publish({**new_report(), "turns": args.turns, "results": results}, args.output_json)


if __name__ == "__main__":
    main()
