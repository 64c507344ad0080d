"""``rustvllm bench throughput``: many prompts through ``LLM.generate`` at once."""

import time
from collections.abc import Sequence

from rustvllm.entrypoints.cli.bench.arguments import whole_number
from rustvllm.entrypoints.cli.bench.offline import describe, make_llm, make_parser, parse, random_prompts
from rustvllm.entrypoints.cli.bench.report import publish
from rustvllm.sampling_params import SamplingParams


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
        "Measure offline throughput: random prompts, handed to LLM.generate all at once; greedy, EOS ignored.",
        input_len=128,
        output_len=128,
    )
    parser.add_argument("--num-prompts", type=whole_number(1), default="100", metavar="N", help="(default: 100)")
    args = parse(parser, argv)
    llm = make_llm(args)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
        prompts = random_prompts(llm, args.num_prompts + 1, args.input_len)
        llm.generate(prompts.pop(), params, use_tqdm=False)  # what is done once is not measured
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - begin
        num_input = sum(len(output.prompt_token_ids) for output in outputs)
        num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
        report = describe(llm, args) | {
            "num_requests": len(outputs),
            "elapsed_time": elapsed,
            "total_num_tokens": num_input + num_output,
            "total_output_tokens": num_output,
            "requests_per_second": len(outputs) / elapsed,
            "tokens_per_second": (num_input + num_output) / elapsed,
            "output_tokens_per_second": num_output / elapsed,
        }
    finally:
        llm.shutdown()
    text = (
        f"Throughput: {report['requests_per_second']:.2f} requests/s, "
        f"{report['tokens_per_second']:.2f} total tokens/s, "
        f"{report['output_tokens_per_second']:.2f} output tokens/s"
    )
    publish(args, report, text)
    return 0
