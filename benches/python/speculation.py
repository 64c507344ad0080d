"""Measures tokens per second with and without drafts, in alternating turns, for texts that are known beforehand.

    python benches/python/speculation.py --text repeating random --streams 1 8 32 --output-json report.json
    python benches/python/speculation.py --text edited --prediction --quantization int8
    python benches/python/speculation.py --text random --method draft_model --num-speculative-tokens 4 --wrong-every 5

The model has the shape of GPT-2 small and is constructed to say a given text (``scripted_text.py``): the text repeats
itself, repeats nothing, alternates, misleads, or is the next version of a source file. ``sampled`` is what any model
draws at temperature 1 among 1,000 ids; with ``--embedded`` the model is the embedded one, whose steps are short.

Each setting is its own engine in this process. Engines alternate step by step, so other work on the machine affects all
of them. Each figure is the median over the rounds, and ratios are those of one round. The script measures decoding,
from the moment on at which each stream has its first token. All engines compute with the core's products, unless
``RUSTVLLM_LINEAR_KERNEL`` says otherwise, so that they only differ in drafts. Each request has its own salt, so that no
answer is a draft of another one, unless ``--shared`` is given. With ``--method draft_model`` a model of two layers
guesses, and is wrong at regular places.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_report import new_report, publish
from scripted_text import NUM_IDS, Text, texts, use_tokenizer
from tiny_checkpoint import SCRIPT_SCALE, write_gpt2_small
from tokenizer_folder import DATA, folder_with_tokenizer

from rustvllm import LLM, SamplingParams

COUNTERS = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "num_withheld_draft_tokens", "num_draft_pauses")
MAX_MODEL_LEN = 1536


class Scripted:
    """One engine whose model says what a script says.

    Args:
        folder: The model's folder; None: the embedded model.
        options: Options of ``LLM``.
    """

    def __init__(self, folder: str | None, **options: Any) -> None:
        # Otherwise each engine would choose by its own measurements, which may differ by chance.
        os.environ.setdefault("RUSTVLLM_LINEAR_KERNEL", "core")
        self.llm = LLM(folder, enable_prefix_caching=False, seed=0, **options)
        executor: Any = self.llm.llm_engine.engine_core.core.executor
        worker = executor._worker  # noqa: SLF001 -- to change its weights
        self._model = worker.runner.model if folder is not None else None

        draft_model = worker.runner.draft_model
        self._draft_model = None if draft_model is None else draft_model.model
        self.wrong_every = 0

    def say(self, script: list[int]) -> None:
        """Set the script that the model says from now on."""
        put(self._model, script)
        if self._draft_model is not None:
            wrong = [
                (token_id + 1) % NUM_IDS if self.wrong_every and place % self.wrong_every == 0 else token_id
                for place, token_id in enumerate(script)
            ]
            put(self._draft_model, wrong)

    def begin(
        self, prompts: list[dict[str, Any]], num_tokens: int | list[int], allowed: list[int] | None = None
    ) -> None:
        """Queue prompts with the lengths of their answers; ``step`` generates them."""
        self.wall = self.cpu = 0.0
        self.times: list[list[tuple[float, float]]] = []
        self.token_ids: list[list[int]] = []
        lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
        for prompt, length in zip(prompts, lengths, strict=True):
            self.add(prompt, length, allowed)

    def add(self, prompt: dict[str, Any], num_tokens: int, allowed: list[int] | None = None) -> None:
        """Queue one more prompt."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        index = len(self.token_ids)
        if allowed is not None:
            params = replace(params, temperature=1, seed=allowed[index], allowed_token_ids=allowed)
        self.llm.llm_engine.add_request(str(index), prompt, params)
        self.times.append([])
        self.token_ids.append([])

    def drop(self) -> None:
        """Abort all unfinished requests."""
        self.llm.llm_engine.abort_all()

    def step(self) -> bool:
        """Run and time one step; returns whether there is another one."""
        engine = self.llm.llm_engine
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = engine.step()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        for output in outputs:
            index, ids = int(output.request_id), output.outputs[0].token_ids
            self.times[index] += [(self.wall, self.cpu)] * (len(ids) - len(self.times[index]))
            self.token_ids[index] = list(ids)
        return engine.has_unfinished_requests()

    def counters(self) -> dict[str, int]:
        """The numbers of proposed, accepted and withheld drafts so far."""
        counters = self.llm.llm_engine.engine_core.core.scheduler.stats()
        return {name: counters[name] for name in COUNTERS}


def put(model: Any, script: list[int]) -> None:
    """Change a model's weights so that it says a script."""
    embedding, positions = model.embed_tokens.weight, model.wpe.weight
    with torch.inference_mode():
        positions[: len(script)] = SCRIPT_SCALE * embedding[torch.tensor(script)]


def prompts_of(text: Text, num_streams: int, turn: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A prompt for each stream."""
    prompts: list[dict[str, Any]] = []
    for stream in range(num_streams):
        prompt: dict[str, Any] = {"prompt_token_ids": text.of_stream(stream)}
        if not args.shared:
            prompt["cache_salt"] = f"{turn} {stream}"
        if args.prediction:
            prompt["prediction"] = list(text.expected)
        prompts.append(prompt)
    return prompts


def measure(engines: dict[str, Scripted], name: str, num_streams: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one text with ``num_streams`` streams at once, in alternating turns."""
    make = texts(args.corpus)["random" if name == "sampled" else name]
    runs: dict[str, list[tuple[float, float]]] = {each: [] for each in engines}
    parts: dict[str, list[list[float]]] = {each: [] for each in engines}
    before: dict[str, dict[str, int]] = {}
    for turn in range(-1, args.rounds):  # the first warms up
        text = make(turn + 1, args.tokens + 7 * num_streams)
        if turn == 0:
            before = {each: engine.counters() for each, engine in engines.items()}
        num_tokens = min(args.tokens, len(text.answer) - 7 * (num_streams - 1))
        allowed = random.Random(turn).sample(range(10, 2000), 1000) if name == "sampled" else None
        expected = [text.answer[7 * stream :][:num_tokens] for stream in range(num_streams)]
        for engine in engines.values():
            if allowed is None:
                engine.say(text.script())
            engine.begin(prompts_of(text, num_streams, f"{name} {num_streams} {turn}", args), num_tokens, allowed)
        unfinished = list(engines.values())
        while unfinished:
            unfinished = [engine for engine in unfinished if engine.step()]
        for each, engine in engines.items():
            if allowed is None and engine.token_ids != expected:
                raise SystemExit(f"{each}: the model did not say the text {name!r}")
            if turn >= 0:
                # Every step has its own time, so tokens and times are in the same order.
                first = max(of_one[0] for of_one in engine.times)
                last = max(of_one[-1] for of_one in engine.times)
                num_decoded = sum(at > first for of_one in engine.times for at in of_one)
                wall, cpu = (num_decoded / (end - begin) for begin, end in zip(first, last, strict=True))
                runs[each].append((wall, cpu))
                parts[each].append(speeds_of_parts([wall for wall, _ in engine.times[0]]))
    pairs = list(zip(runs["with"], runs["without"], strict=True))
    ratios = [with_[0] / without[0] for with_, without in pairs]
    report: dict[str, Any] = {
        "text": name,
        "streams": num_streams,
        "tokens_per_second": {each: round(statistics.median(wall for wall, _ in of), 1) for each, of in runs.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio_of_processor_time": round(statistics.median(with_[1] / without[1] for with_, without in pairs), 3),
    }
    for each, engine in engines.items():
        if each != "without":
            after = engine.counters()
            report[f"counted {each}"] = {key: after[key] - before[each][key] for key in COUNTERS}
    if name == "alternating":
        report["tokens_per_second_of_parts"] = {
            each: [round(statistics.median(column), 1) for column in zip(*of_all, strict=True)]
            for each, of_all in parts.items()
        }
    return report


def speeds_of_parts(times: list[float], part: int = 200) -> list[float]:
    """Tokens per second of each part of a stream, by default 200 tokens."""
    ends = [times[0], *times[part - 1 :: part]]
    return [part / (end - begin) for begin, end in pairwise(ends)]


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=["repeating", "random"], help="names of scripted_text.py")
    parser.add_argument("--method", default="auto", help="ngram, suffix, auto or draft_model")
    parser.add_argument(
        "--num-speculative-tokens", type=int, help="at most; the method's own number by default, else 16"
    )
    parser.add_argument("--wrong-every", type=int, default=5, help="places at which the second model is wrong; 0: none")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=256, help="per stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", help="of the weights")
    parser.add_argument("--prediction", action="store_true", help="requests say what they expect")
    parser.add_argument("--shared", action="store_true", help="answers may be drafts of other requests")
    parser.add_argument("--always", action="store_true", help="measure also without the controller")
    parser.add_argument("--embedded", action="store_true", help="measure the model in the package, with --text sampled")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, made if it is not there")
    parser.add_argument(
        "--tokenizer",
        type=folder_with_tokenizer,
        default=str(DATA / "gpt2-tokenizer"),
        help="a folder with GPT-2's tokenizer.json",
    )
    parser.add_argument("--corpus", type=Path, help="a text file, for --text ordinary")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    use_tokenizer(args.tokenizer)
    speculation: dict[str, Any] = {"method": args.method}
    if args.num_speculative_tokens or args.method in ("ngram", "draft_model"):
        speculation["num_speculative_tokens"] = args.num_speculative_tokens or 16
    if args.method == "ngram":
        speculation |= {"prompt_lookup_min": 3, "prompt_lookup_max": 5}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or Path(temporary) / "gpt2-small"
        common: dict[str, Any] = {"quantization": args.quantization, "max_num_seqs": max(args.streams)}
        if not args.embedded:
            if not (folder / "config.json").exists():
                write_gpt2_small(folder, args.tokenizer, num_positions=MAX_MODEL_LEN)
            common["max_model_len"] = MAX_MODEL_LEN
        if args.method == "draft_model":
            draft = Path(temporary) / "draft"
            write_gpt2_small(draft, args.tokenizer, num_positions=MAX_MODEL_LEN, num_layers=2)
            speculation["model"] = str(draft)
        name = None if args.embedded else str(folder)
        engines = {
            "without": Scripted(name, **common),
            "with": Scripted(name, **common, speculative_config=speculation),
        }
        if args.always:
            engines["always"] = Scripted(name, **common, speculative_config={**speculation, "adaptive": False})
        for engine in engines.values():
            engine.wrong_every = args.wrong_every
        results = []
        for name in args.text:
            for num_streams in args.streams:
                results.append(measure(engines, name, num_streams, args))
                print(results[-1], file=sys.stderr, flush=True)
    report = {**new_report(), "speculation": speculation, "quantization": args.quantization, "results": results}
    publish(report, args.output_json)


if __name__ == "__main__":
    main()
