"""``rustvllm``: finds the command and runs it.

Nothing slow is imported here, so that ``--help`` and ``--version`` are instant.
"""

import argparse
import sys
from collections.abc import Sequence

from rustvllm.entrypoints.cli.parser import FlexibleArgumentParser

COMMANDS = {
    "serve": "serve a model behind an OpenAI-compatible HTTP server",
    "chat": "talk with a model that a server serves",
    "complete": "have a model that a server serves continue texts",
    "trace": "print the life of a request, step by step",
    "run-batch": "answer a file of requests, in the format of OpenAI's batches",
    "bench": "measure the scheduler, an engine or a server",
    "collect-env": "print versions, machine and settings, for a report of a problem",
}
EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


def make_parser() -> FlexibleArgumentParser:
    """The parser of the bare command; each command has its own."""
    lines = "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items())
    parser = FlexibleArgumentParser(
        prog="rustvllm",
        usage="rustvllm [--help] [--version] COMMAND ...",
        description="Serve language models.",
        epilog=f"commands:\n{lines}\n\n'rustvllm COMMAND --help' says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--version", action="store_true", help="show the version and end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None: those of the process.

    Returns:
        The exit code: 0, 1 for a failure, 2 for wrong usage.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    if not args or args[0] in ("-h", "--help"):
        parser.print_help()
        return EXIT_OK if args else EXIT_USAGE
    if args[0] in ("-v", "--version"):
        import rustvllm

        print(rustvllm.__version__)
        return EXIT_OK
    command, *rest = args
    if command == "serve":
        try:
            from rustvllm.entrypoints.cli.serve import serve

            return serve(rest)
        except KeyboardInterrupt:  # before serve takes care of it: the imports take a moment
            return EXIT_OK
    if command == "bench":
        from rustvllm.entrypoints.cli.bench.main import bench

        return bench(rest)
    if command == "trace":
        from rustvllm.entrypoints.cli.trace import trace

        return trace(rest)
    if command == "chat":
        from rustvllm.entrypoints.cli.chat import chat

        return chat(rest)
    if command == "complete":
        from rustvllm.entrypoints.cli.complete import complete

        return complete(rest)
    if command == "run-batch":
        from rustvllm.entrypoints.cli.run_batch import run_batch

        return run_batch(rest)
    if command == "collect-env":
        from rustvllm.entrypoints.cli.collect_env import collect_env

        return collect_env(rest)
    print(f"rustvllm: error: there is no command {command!r}; commands are {', '.join(COMMANDS)}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
