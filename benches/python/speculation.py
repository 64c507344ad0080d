"""Tokens per second with drafts and without, by turns: text that repeats itself, that does not, that is predicted.

    python benches/python/speculation.py                      # the model in the package, 1 and 8 streams
    python benches/python/speculation.py --model gpt2 --method ngram --rounds 5

Text repeats because its prompt does and the model goes on greedily; it does not at temperature 1 among ids that were
drawn at random. Predicted text is drawn at temperature 1 among all ids and has a prediction in which every sixteenth
token is wrong. Each setting is an engine of its own in this process; they take turns, and each figure is the median.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

from rustvllm import LLM, PromptType, SamplingParams

REPEATING = "one two three four five six seven eight nine ten. " * 3
NUM_ALLOWED = 1000


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name (default: the model in the package)")
    parser.add_argument("--load-format", default="auto", help="dummy: a model of that shape without its weights")
    parser.add_argument("--method", default="auto", help="ngram, suffix or auto")
    parser.add_argument("--num-speculative-tokens", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="per stream")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    speculation = {"method": arguments.method, "num_speculative_tokens": arguments.num_speculative_tokens}
    common = {"model": arguments.model, "load_format": arguments.load_format, "max_model_len": 512}
    engines = {
        "without": LLM(**common),
        "with": LLM(**common, speculative_config=speculation),
    }
    results = []
    for text in ("repeating", "random", "predicted"):
        for num_streams in arguments.streams:
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            before = stats_of(engines["with"])
            for turn in range(arguments.rounds + 1):
                for name, llm in engines.items():
                    speed = tokens_per_second(llm, text, num_streams, arguments.tokens, turn)
                    if turn:  # the first one warms up
                        speeds[name].append(speed)
            after = stats_of(engines["with"])
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            counted = {name: after[name] - before[name] for name in after}
            results.append(
                {
                    "text": text,
                    "streams": num_streams,
                    "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
                    "range": {name: [round(min(values), 1), round(max(values), 1)] for name, values in speeds.items()},
                    "ratio": round(medians["with"] / medians["without"], 3),
                    **counted,
                }
            )
            print(json.dumps(results[-1]), file=sys.stderr)
    about = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    about |= {name: version(name) for name in ("rustvllm", "torch")}
    print(json.dumps({"about": about, "speculation": speculation, "tokens": arguments.tokens, "results": results}))


def tokens_per_second(llm: LLM, text: str, num_streams: int, num_tokens: int, turn: int) -> float:
    """One turn of one engine."""
    prompts: list[PromptType] = [f"{stream} {turn}. {REPEATING}" for stream in range(num_streams)]
    # Seeds of its own: an answer that was given before would not be random to who keeps answers.
    params = [params_of(text, 1000 * turn + stream, num_tokens) for stream in range(num_streams)]
    if text == "predicted":
        answers = llm.generate(prompts, params, use_tqdm=False)
        prompts = [
            {"prompt": str(prompt), "prediction": edited(answer.outputs[0].token_ids)}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def edited(token_ids: Sequence[int]) -> list[int]:
    """An answer of which every sixteenth token is another one."""
    return [abs(token_id - 1) if index % 16 == 8 else token_id for index, token_id in enumerate(token_ids)]


def params_of(text: str, seed: int, num_tokens: int) -> SamplingParams:
    """How one stream's text comes about."""
    if text == "repeating":
        return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    if text == "predicted":
        return SamplingParams(temperature=1, seed=seed, max_tokens=num_tokens, ignore_eos=True)
    allowed = random.Random(seed).sample(range(10, 2000), NUM_ALLOWED)
    return SamplingParams(temperature=1, seed=seed, max_tokens=num_tokens, ignore_eos=True, allowed_token_ids=allowed)


def stats_of(llm: LLM) -> dict[str, int]:
    """What was drafted, accepted and withheld so far."""
    names = ("num_draft_tokens", "num_accepted_tokens", "num_withheld_draft_tokens", "num_draft_pauses")
    counters = llm.llm_engine.engine_core.scheduler.stats()
    return {name: counters[name] for name in names}


if __name__ == "__main__":
    main()
