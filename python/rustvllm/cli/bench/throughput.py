"""``rustvllm bench throughput``: many prompts at once through ``LLM.generate``, or also through transformers."""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rustvllm.cli.bench.arguments import whole_number
from rustvllm.cli.bench.datasets.known_texts import DRAFT_DATASETS
from rustvllm.cli.bench.offline import (
    describe,
    known_prompts,
    make_llm,
    make_parser,
    parse,
    random_prompts,
    sampling_params,
)
from rustvllm.cli.bench.report.output import publish
from rustvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rustvllm.llm import LLM

NUM_TURNS = 3
"""Of each side of a comparison."""


def bench_throughput(argv: Sequence[str]) -> int:
    """Run ``rustvllm bench throughput``.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The core is a debug build, or a flag is wrong.
        ModelLoadError: The model cannot be found or read.
    """
    parser = make_parser(
        "rustvllm bench throughput",
        "Measure offline throughput: prompts handed to LLM.generate all at once; greedy unless --n asks for several "
        "answers, EOS ignored.",
        input_len=128,
        output_len=128,
    )
    parser.add_argument(
        "--num-prompts", type=whole_number(1), default="100", metavar="N", help="number of prompts (default: 100)"
    )
    parser.add_argument(
        "--dataset-name",
        choices=("random", *DRAFT_DATASETS),
        default="random",
        help="repeat and edit: texts whose answers speculative decoding can predict (default: %(default)s)",
    )
    parser.add_argument(
        "--compare",
        choices=["transformers"],
        help=f"run the same prompts by transformers' generate as well, {NUM_TURNS} times by turns (same model, device, "
        "dtype; batches of --max-num-seqs)",
    )
    args = parse(parser, argv)
    llm = make_llm(args)
    try:
        name = args.dataset_name
        make = random_prompts if name == "random" else partial(known_prompts, name)
        prompts = make(llm, args.num_prompts + 1, args.input_len)
        params = sampling_params(args)
        measure(llm, [prompts.pop()], params)  # what is done once is not measured
        report = describe(llm, args) | {"dataset_name": name} | measure(llm, prompts, params)
        if args.compare:
            report["comparison"] = compare(llm, prompts, args)
    finally:
        llm.shutdown()
    publish(args, report, summary(report))
    return 0


def measure(llm: "LLM", prompts: list[Any], params: SamplingParams) -> dict[str, Any]:
    """All prompts at once."""
    before = _draft_counters(llm)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - begin
    num_input = sum(len(output.prompt_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    after = _draft_counters(llm)
    drafts = {name: after[name] - before[name] for name in after}
    return {
        "num_requests": len(outputs),
        "elapsed_time": elapsed,
        "total_num_tokens": num_input + num_output,
        "total_output_tokens": num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        **drafts,
    }


def _draft_counters(llm: "LLM") -> dict[str, int]:
    """What was drafted and accepted so far; nothing without drafts."""
    if llm.llm_engine.config.speculation is None:
        return {}
    counters = llm.llm_engine.engine_core.core.scheduler.stats()
    return {name: int(counters[name]) for name in ("num_draft_tokens", "num_accepted_tokens")}


def compare(llm: "LLM", prompts: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """By turns with transformers: output tokens per second of each, and the ratio of each turn.

    Raises:
        ModelLoadError: transformers cannot load the model.
    """
    from rustvllm.cli.bench.transformers_generate import TransformersGenerate

    config = llm.llm_engine.config
    peer = TransformersGenerate(config.model, config.device.device, is_dummy=config.load.load_format == "dummy")
    batch_size = config.scheduler.max_num_seqs
    token_ids = [prompt["prompt_token_ids"] for prompt in prompts]
    peer.generate(token_ids[:1], args.output_len, batch_size)
    ours, theirs = [], []
    for _ in range(NUM_TURNS):
        ours.append(measure(llm, prompts, sampling_params(args))["output_tokens_per_second"])
        seconds, num_drawn = peer.generate(token_ids, args.output_len, batch_size)
        theirs.append(num_drawn / seconds)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {
        "with": "transformers",
        "batch_size": min(batch_size, len(prompts)),
        "output_tokens_per_second": ours,
        "output_tokens_per_second_of_transformers": theirs,
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
    }


def summary(report: dict[str, Any]) -> str:
    """For people."""
    text = (
        f"Throughput: {report['requests_per_second']:.2f} requests/s, "
        f"{report['tokens_per_second']:.2f} total tokens/s, "
        f"{report['output_tokens_per_second']:.2f} output tokens/s"
    )
    if comparison := report.get("comparison"):
        theirs = statistics.median(comparison["output_tokens_per_second_of_transformers"])
        ratios = comparison["ratios"]
        text += (
            f"\ntransformers: {theirs:.2f} output tokens/s; rustvllm is {comparison['median_ratio']:.2f} times as fast "
            f"({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} turns)"
        )
    return text
