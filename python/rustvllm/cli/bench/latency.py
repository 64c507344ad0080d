"""``rustvllm bench latency``: one batch through ``LLM.generate``, again and again."""

import statistics
import time
from collections.abc import Sequence

from rustvllm.cli.bench.arguments import whole_number
from rustvllm.cli.bench.offline import describe, make_llm, make_parser, parse, random_prompts, sampling_params
from rustvllm.cli.bench.report.output import publish

PERCENTILES = (10, 25, 50, 75, 90, 99)


def bench_latency(argv: Sequence[str]) -> int:
    """Run ``rustvllm bench latency``.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The core is a debug build, or a flag is wrong.
        ModelLoadError: The model cannot be found or read.
    """
    parser = make_parser(
        "rustvllm bench latency",
        "Measure the time of one batch of random prompts from beginning to end; greedy unless --n asks for several "
        "answers, EOS ignored. Prompts are read anew each time: the prefix cache is off unless asked for.",
        input_len=32,
        output_len=128,
    )
    numbers = (
        ("--batch-size", "8", "prompts of the batch"),
        ("--num-iters", "10", "batches measured"),
        ("--num-iters-warmup", "2", "batches before them"),
    )
    for flag, default, text in numbers:
        low = 0 if flag == "--num-iters-warmup" else 1
        parser.add_argument(
            flag, type=whole_number(low), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.set_defaults(enable_prefix_caching=False)
    args = parse(parser, argv)
    llm = make_llm(args)
    try:
        params = sampling_params(args)
        prompts = random_prompts(llm, args.batch_size, args.input_len)
        latencies = []
        for iteration in range(args.num_iters_warmup + args.num_iters):
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if iteration >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - begin)
        report = describe(llm, args) | {
            "batch_size": args.batch_size,
            "avg_latency": statistics.mean(latencies),
            "std_latency": statistics.pstdev(latencies),
            "latencies": latencies,
            "percentiles": {str(at): _percentile(latencies, at) for at in PERCENTILES},
        }
    finally:
        llm.shutdown()
    lines = [f"Avg latency: {report['avg_latency']:.4f} seconds", f"Std latency: {report['std_latency']:.4f} seconds"]
    lines += [f"{at}% percentile latency: {seconds:.4f} seconds" for at, seconds in report["percentiles"].items()]
    publish(args, report, "\n".join(lines))
    return 0


def _percentile(values: Sequence[float], at: int) -> float:
    """Linear interpolation between the two nearest."""
    ordered = sorted(values)
    place = at / 100 * (len(ordered) - 1)
    below = ordered[int(place)]
    above = ordered[min(int(place) + 1, len(ordered) - 1)]
    return below + (above - below) * (place % 1)
