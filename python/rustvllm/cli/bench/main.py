"""``rustvllm bench``: finds the measurement and runs it."""

import argparse
import sys
from collections.abc import Sequence

from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.exceptions import RustVLLMError

COMMANDS = {
    "kernels": "attention, dense layers and the sampler, each alone, by every contender of the device",
    "latency": "time of one batch, offline",
    "serve": "send requests to a server and time their streams",
    "startup": "how long a server takes until it is ready",
    "step": "cost of one step of the scheduler, in Rust and as seen from Python",
    "throughput": "many prompts at once, offline",
    "trace": "replay a request trace through the scheduler: its cost, hit rate and queue times",
}

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def make_parser() -> FlexibleArgumentParser:
    """The parser of the bare command; each measurement has its own."""
    lines = "\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items())
    return FlexibleArgumentParser(
        prog="rustvllm bench",
        usage="rustvllm bench [--help] MEASUREMENT ...",
        description="Measure the scheduler, which needs no model, an engine or a server.",
        epilog=f"measurements:\n{lines}\n\n'rustvllm bench MEASUREMENT --help' says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def bench(argv: Sequence[str]) -> int:
    """Run ``rustvllm bench``.

    Returns:
        The exit code: 0, 1 for a failure whose message was printed, 2 for wrong usage, 130 after Ctrl-C.
    """
    parser = make_parser()
    if not argv or argv[0] in ("-h", "--help"):
        parser.print_help()
        return EXIT_OK if argv else EXIT_USAGE
    command, *rest = argv
    try:
        if command == "kernels":
            from rustvllm.cli.bench.kernels import bench_kernels

            return bench_kernels(rest)
        if command == "latency":
            from rustvllm.cli.bench.latency import bench_latency

            return bench_latency(rest)
        if command == "serve":
            from rustvllm.cli.bench.serve import bench_serve

            return bench_serve(rest)
        if command == "startup":
            from rustvllm.cli.bench.startup import bench_startup

            return bench_startup(rest)
        if command == "step":
            from rustvllm.cli.bench.step import bench_step

            return bench_step(rest)
        if command == "throughput":
            from rustvllm.cli.bench.throughput import bench_throughput

            return bench_throughput(rest)
        if command == "trace":
            from rustvllm.cli.bench.trace import bench_trace

            return bench_trace(rest)
    except BrokenPipeError:
        raise  # a ConnectionError, too; not one of a server, but of the reader of the output
    # The core refuses numbers outside their limits with a plain ValueError.
    except (RustVLLMError, ValueError, ConnectionError) as error:
        print(f"rustvllm bench {command}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    problem = f"there is no measurement {command!r}; measurements are {', '.join(COMMANDS)}"
    print(f"rustvllm bench: error: {problem}", file=sys.stderr)
    return EXIT_USAGE
