"""Measures how drafts of other requests affect requests without drafts, compared with an engine without drafts.

    python benches/python/speculation_neighbours.py --output-json report.json

The engines alternate step by step. There are four scenes with the model of ``speculation.py``: 31 streams that repeat
nothing next to one that repeats itself (time between their tokens); a prompt of 8,192 tokens that arrives next to four
streams that repeat themselves (its time to the first token); prompts of 128 tokens that arrive one after the other, at
any time within a step, next to eight such streams (their times to the first token); and a KV cache of which streams
that repeat themselves need 95 % or 110 % at their end (preemptions).
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_report import new_report, publish
from scripted_text import NUM_IDS, STAGGER, drawn, repeating
from speculation import Scripted
from tiny_checkpoint import write_gpt2_small
from tokenizer_folder import DATA, folder_with_tokenizer

NUM_OTHERS, NUM_TOKENS = 31, 128
REPEATED_FROM = 640
"""Where the repeating text begins: no other stream gets this far."""
LONG_PROMPT, NUM_DECODING = 8192, 4
NUM_POSITIONS = LONG_PROMPT + 256
NUM_REPEATING, NEWCOMER_LEN = 8, 128
NUM_NEWCOMERS, STEPS_BETWEEN = 8, 3
BLOCK_SIZE = 16


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, made if it is not there")
    parser.add_argument(
        "--tokenizer",
        type=folder_with_tokenizer,
        default=str(DATA / "gpt2-tokenizer"),
        help="a folder with GPT-2's tokenizer.json",
    )
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or Path(temporary) / "gpt2-small"
        if not (folder / "config.json").exists():
            write_gpt2_small(folder, args.tokenizer, num_positions=NUM_POSITIONS)
        for name in args.scene:
            results[name] = SCENES[name](folder, args.rounds)
            print({name: results[name]}, file=sys.stderr, flush=True)
    publish({**new_report(), "results": results}, args.output_json)


def make_engines(folder: Path, **options: Any) -> dict[str, Scripted]:
    """An engine without drafts and one with drafts."""
    return {
        "without": Scripted(str(folder), **options),
        "with": Scripted(str(folder), **options, speculative_config={"method": "auto"}),
    }


def next_to_one_that_repeats(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure milliseconds between the tokens of the 31 streams."""
    engines = make_engines(folder, max_num_seqs=NUM_OTHERS + 1, max_model_len=1536)
    walls: list[float] = []
    cpus: list[float] = []
    of_each: dict[str, list[float]] = {name: [] for name in engines}
    kept: list[int] = []
    for turn in range(-1, rounds):
        text, loop = drawn(turn + 1, 512), repeating(turn + 1, 700)
        script = (text.script() + [0] * REPEATED_FROM)[: REPEATED_FROM - 1] + loop.answer
        between: dict[str, tuple[float, float]] = {}
        for engine in engines.values():
            engine.say(script)
            prompts: list[dict[str, Any]] = [
                {"prompt_token_ids": text.of_stream(stream), "cache_salt": f"{turn} {stream}"}
                for stream in range(NUM_OTHERS)
            ]
            prompt = (loop.prompt * (REPEATED_FROM // 50 + 1))[-REPEATED_FROM:]
            prompts.append({"prompt_token_ids": prompt, "cache_salt": f"{turn} loop"})
            engine.begin(prompts, [NUM_TOKENS] * NUM_OTHERS + [600])
        busy = list(engines.items())
        while busy:
            for name, engine in busy:
                engine.step()
                if all(len(ids) >= NUM_TOKENS for ids in engine.token_ids[:NUM_OTHERS]):
                    firsts, lasts = ([times[at] for times in engine.times[:NUM_OTHERS]] for at in (0, NUM_TOKENS - 1))
                    spans = [
                        [(end[kind] - begin[kind]) / (NUM_TOKENS - 1) for begin, end in zip(firsts, lasts, strict=True)]
                        for kind in (0, 1)
                    ]
                    between[name] = (statistics.mean(spans[0]), statistics.mean(spans[1]))
            busy = [(name, engine) for name, engine in busy if name not in between]
        for name, engine in engines.items():
            if turn >= 0:
                of_each[name].append(1e3 * between[name][0])
                kept += [len(engine.token_ids[-1])] if name == "with" else []
            engine.drop()
        if turn >= 0:
            walls.append(between["with"][0] / between["without"][0])
            cpus.append(between["with"][1] / between["without"][1])
    return {
        "itl_ms": {name: round(statistics.median(values), 2) for name, values in of_each.items()},
        "ratio": round(statistics.median(walls), 3),
        "ratios": [round(value, 3) for value in walls],
        "ratio_of_processor_time": round(statistics.median(cpus), 3),
        "tokens_of_the_one_that_repeats": kept,
        "counted": engines["with"].counters(),
    }


def prompt_next_to_drafts(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure seconds from a long prompt's arrival to its first token."""
    engines = make_engines(folder, max_num_seqs=NUM_DECODING + 1, max_model_len=NUM_POSITIONS)
    walls: list[float] = []
    cpus: list[float] = []
    of_each: dict[str, list[float]] = {name: [] for name in engines}
    drafted = 0
    for turn in range(rounds):
        loop = repeating(turn, 1400)
        source = random.Random(turn)
        long = [source.randrange(NUM_IDS) for _ in range(LONG_PROMPT)]
        began: dict[str, tuple[float, float]] = {}
        took: dict[str, tuple[float, float]] = {}
        for engine in engines.values():
            engine.say(loop.script())
            prompts: list[dict[str, Any]] = [
                {"prompt_token_ids": loop.of_stream(stream), "cache_salt": f"{turn} {stream}"}
                for stream in range(NUM_DECODING)
            ]
            engine.begin(prompts, [1200] * NUM_DECODING)
        for _ in range(24):
            for engine in engines.values():
                engine.step()
        before = engines["with"].counters()["num_draft_tokens"]
        for name, engine in engines.items():
            began[name] = engine.wall, engine.cpu
            engine.add({"prompt_token_ids": long, "cache_salt": f"{turn} long"}, 1)
        while waiting := [name for name in engines if name not in took]:
            for name in waiting:
                engine = engines[name]
                engine.step()
                if engine.token_ids[-1]:
                    took[name] = engine.wall - began[name][0], engine.cpu - began[name][1]
        drafted += engines["with"].counters()["num_draft_tokens"] - before
        for name, engine in engines.items():
            of_each[name].append(took[name][0])
            engine.drop()
        walls.append(took["with"][0] / took["without"][0])
        cpus.append(took["with"][1] / took["without"][1])
    return {
        "ttft_s": {name: round(statistics.median(values), 2) for name, values in of_each.items()},
        "ratio": round(statistics.median(walls), 3),
        "ratios": [round(value, 3) for value in walls],
        "ratio_of_processor_time": round(statistics.median(cpus), 3),
        "drafts_next_to_the_prompt": drafted,
    }


def newcomer_next_to_drafts(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure milliseconds from a short prompt's arrival to its first token: half of the running step, and the rest.

    A prompt is more likely to arrive in a long step than in a short one, so each step counts by its length.
    """
    engines = make_engines(folder, max_num_seqs=NUM_REPEATING + 1, max_model_len=1536)
    met: dict[str, list[float]] = {name: [] for name in engines}
    waits: dict[str, list[float]] = {name: [] for name in engines}
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, rounds):
        loop = repeating(turn + 1, 1480)
        source = random.Random(turn)
        newcomers = [[source.randrange(NUM_IDS) for _ in range(NEWCOMER_LEN)] for _ in range(NUM_NEWCOMERS)]
        for engine in engines.values():
            engine.say(loop.script())
            prompts: list[dict[str, Any]] = [
                {"prompt_token_ids": loop.of_stream(stream), "cache_salt": f"{turn} {stream}"}
                for stream in range(NUM_REPEATING)
            ]
            engine.begin(prompts, [1400] * NUM_REPEATING)
            for _ in range(2 * STEPS_BETWEEN):
                engine.step()
        lengths: dict[str, list[float]] = {name: [] for name in engines}
        ttfts: dict[str, list[float]] = {name: [] for name in engines}
        for number, newcomer in enumerate(newcomers):
            for name, engine in engines.items():
                for _ in range(STEPS_BETWEEN - 1):
                    engine.step()
                before = engine.wall
                engine.step()
                lengths[name].append(engine.wall - before)
                began = engine.wall
                engine.add({"prompt_token_ids": newcomer, "cache_salt": f"{turn} new {number}"}, 1)
                while not engine.token_ids[-1]:
                    engine.step()
                ttfts[name].append(engine.wall - began)
        for name, engine in engines.items():
            if any(len(ids) >= 1400 for ids in engine.token_ids[:NUM_REPEATING]):
                raise SystemExit(f"{name}: the streams ended before the last newcomer came")
            engine.drop()
            if turn < 0:
                continue
            pairs = list(zip(lengths[name], ttfts[name], strict=True))
            waits[name].append(1e3 * sum(step * (step / 2 + ttft) for step, ttft in pairs) / sum(lengths[name]))
            met[name].append(1e3 * statistics.median(lengths[name]))
            firsts[name].append(1e3 * statistics.median(ttfts[name]))
    ratios = [with_ / without for with_, without in zip(waits["with"], waits["without"], strict=True)]
    return {
        "ttft_ms": {name: round(statistics.median(values), 1) for name, values in waits.items()},
        "step_that_runs_ms": {name: round(statistics.median(values), 1) for name, values in met.items()},
        "from_its_end_on_ms": {name: round(statistics.median(values), 1) for name, values in firsts.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(value, 3) for value in ratios],
        "counted": engines["with"].counters(),
    }


def pool_nearly_full(folder: Path, rounds: int) -> dict[str, Any]:
    """Count preemptions of 16 streams that repeat themselves, in KV caches that they fill to 95 % and to 110 %."""
    num_streams, num_tokens = 16, 160
    loop = repeating(rounds, num_tokens + STAGGER * num_streams)
    lengths = [len(loop.of_stream(stream)) + num_tokens for stream in range(num_streams)]
    needed = sum(-(-length // BLOCK_SIZE) for length in lengths)
    report: dict[str, Any] = {}
    for share in (0.95, 1.1):
        engines = make_engines(
            folder,
            max_num_seqs=num_streams,
            max_model_len=512,
            num_gpu_blocks_override=1 + round(needed / share),
            block_size=BLOCK_SIZE,
        )
        counted: dict[str, dict[str, int]] = {}
        for name, engine in engines.items():
            engine.say(loop.script())
            prompts: list[dict[str, Any]] = [
                {"prompt_token_ids": loop.of_stream(stream), "cache_salt": str(stream)} for stream in range(num_streams)
            ]
            engine.begin(prompts, [num_tokens] * num_streams)
            while engine.step():
                pass
            stats = engine.llm.llm_engine.engine_core.core.scheduler.stats()
            names = ("num_preemptions", "num_steps", "num_draft_tokens", "num_accepted_tokens")
            counted[name] = {each: stats[each] for each in names}
        report[f"{share:.0%}"] = counted
    return report


SCENES = {
    "next to one that repeats": next_to_one_that_repeats,
    "prompt next to drafts": prompt_next_to_drafts,
    "newcomer next to drafts": newcomer_next_to_drafts,
    "pool nearly full": pool_nearly_full,
}

if __name__ == "__main__":
    main()
