"""``rustvllm``: finds the command and runs it.

Nothing slow is imported here, so that ``--help`` and ``--version`` are instant.
"""

import argparse
import difflib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rustvllm import envs
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.exceptions import ConfigError
from rustvllm.process.output.standard_streams import discard_output, leave, open_missing, replace_unwritable
from rustvllm.process.startup_memory import check_address_space, explain_shortage

COMMANDS = {
    "serve": "serve a model behind an OpenAI-compatible HTTP server",
    "chat": "talk to a model on a server",
    "complete": "continue texts with a model on a server",
    "inspect": "show what a checkpoint is and what memory it needs, without loading it",
    "trace": "print the life of a request, step by step",
    "run-batch": "answer a file of requests, in the format of OpenAI's batches",
    "bench": "measure the scheduler, an engine or a server",
    "collect-env": "print versions, machine and settings, for a report of a problem",
}
EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_NO_READER = 141
"""What a shell reports of a program that SIGPIPE ended, because nothing reads its output any more."""
_LOADING_TORCH = ("serve", "trace", "run-batch", "bench")
_MEMORY = Path("/proc/meminfo")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    parser.add_argument("-v", "--version", action="store_true", help="show the version and exit")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None: those of the process.

    Returns:
        The exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C, 141 when nothing reads the output.
    """
    open_missing()  # before a socket or a pipe takes one of their numbers
    replace_unwritable()
    args = list(sys.argv[1:] if argv is None else argv)
    program = " ".join(["rustvllm", *args[:1]])
    try:
        try:
            code = _run(args)
        finally:
            sys.stdout.flush()  # the interpreter would do it later, where nothing catches what it raises
    except ConfigError as error:  # an environment variable that is read while modules are imported
        print(f"{program}: error: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader of the output has gone
        discard_output()
        return EXIT_NO_READER
    except KeyboardInterrupt:
        return _end(EXIT_INTERRUPTED, may_leave=argv is None)
    except OSError as error:
        if error.errno in _NO_ROOM:
            discard_output()
            print(f"{program}: error: cannot write {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        elif not _explains(error, program):
            raise
    except (RuntimeError, MemoryError, ImportError) as error:
        if not _explains(error, program):
            raise
    else:
        return _end(code, may_leave=argv is None)
    return EXIT_FAILURE


def _explains(error: Exception, program: str) -> bool:
    """Whether too little memory or too few threads explain an error; then the message is printed."""
    shortage = explain_shortage(error)
    if shortage is not None:
        print(f"{program}: error: {shortage}", file=sys.stderr)
    return shortage is not None


def _end(code: int, *, may_leave: bool) -> int:
    """The exit code; an interrupted process ends itself with it."""
    if code == EXIT_INTERRUPTED and may_leave:
        leave(code)  # the interpreter would wait for downloads, and take torch apart first, for a second or two
    return code


def _check_surroundings() -> None:
    """Check that the working folder and ``/proc`` exist.

    From a folder that was removed torch's libraries do not find each other; ``/proc`` says how much memory there is.

    Raises:
        ConfigError: One of them does not.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working folder has been removed; change to a folder that exists (cd)") from None
    if not _MEMORY.exists():
        raise ConfigError(f"there is no {_MEMORY}; mount the kernel's files (mount -t proc proc /proc)")


def _collect_env(args: list[str]) -> int:
    """Report wrong environment variables, which end all other commands: imports that read them must not see them."""
    problems = envs.wrong_values()
    values = {name: os.environ.pop(name) for name in problems}
    try:
        from rustvllm.cli.collect_env import collect_env

        return collect_env(args, values, problems)
    finally:
        os.environ.update(values)


def _run(args: list[str]) -> int:
    """Run a command; its exit code."""
    parser = make_parser()
    if not args or args[0] in ("-h", "--help"):
        parser.print_help()
        return EXIT_OK if args else EXIT_USAGE
    if args[0] in ("-v", "--version"):
        import rustvllm

        print(rustvllm.__version__)
        return EXIT_OK
    command, *rest = args
    check_address_space()
    for message in envs.misspelt() if command == "collect-env" else envs.check_all():
        print(f"rustvllm {command}: warning: {message}", file=sys.stderr)
    if command in _LOADING_TORCH:
        _check_surroundings()
    if command == "serve":
        try:
            from rustvllm.cli.serve import serve

            return serve(rest)
        except KeyboardInterrupt:  # before serve takes care of it: the imports take a moment
            return EXIT_OK
    if command == "bench":
        from rustvllm.cli.bench.main import bench

        return bench(rest)
    if command == "trace":
        try:
            from rustvllm.cli.trace import trace

            return trace(rest)
        except KeyboardInterrupt:  # before trace takes care of it: the imports take a moment
            return EXIT_INTERRUPTED
    if command == "chat":
        from rustvllm.cli.chat import chat

        return chat(rest)
    if command == "complete":
        from rustvllm.cli.complete import complete

        return complete(rest)
    if command == "run-batch":
        from rustvllm.cli.run_batch import run_batch

        return run_batch(rest)
    if command == "inspect":
        from rustvllm.cli.inspect import inspect

        return inspect(rest)
    if command == "collect-env":
        return _collect_env(rest)
    likely = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean {likely[0]!r}? Commands" if likely else "commands"
    print(f"rustvllm: error: unknown command {command!r}; {hint} are {', '.join(COMMANDS)}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
