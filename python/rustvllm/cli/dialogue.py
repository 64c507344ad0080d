"""Lines in, streamed answers out: the loop of ``rustvllm chat`` and ``rustvllm complete``."""

import sys
from collections.abc import Callable, Generator
from contextlib import closing, suppress

from rustvllm.cli.api_client import ApiError
from rustvllm.parameter_checks import is_valid_unicode

Answer = Callable[[str], Generator[str]]
"""What was asked → pieces of the answer."""

Command = Callable[[str], bool]
"""A line that begins with a slash → whether the dialogue goes on."""

EXIT_OK, EXIT_FAILURE, EXIT_INTERRUPTED = 0, 1, 130


def hold_dialogue(program: str, quick: str | None, answer: Answer, command: Command | None = None) -> int:
    """Answer ``quick``, or every line of standard input until it ends.

    At a terminal, lines can be edited and recalled, and those that begin with a slash go to ``command``; lines of a
    pipe are all asked as they are. Ctrl-C ends the answer that is being written, and at a prompt the program. At a
    terminal an error ends neither.

    Returns:
        The exit code: 0, 1 after an error, 130 after Ctrl-C.
    """
    if quick is not None:
        return _say(program, quick, answer)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _edit_lines()
    code = EXIT_OK
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return code
        except KeyboardInterrupt:
            print()
            return EXIT_OK
        if is_terminal and command is not None and line.startswith("/"):
            if not command(line):
                return EXIT_OK
        elif line.strip():
            code = _say(program, line, answer)
            if code != EXIT_OK and not is_terminal:
                return code


def _edit_lines() -> None:
    """Have ``input`` offer arrow keys and the lines before, where this Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401 -- input uses it once it is imported


def _say(program: str, asked: str, answer: Answer) -> int:
    if not is_valid_unicode(asked):  # Python has put halves of characters where bytes are none
        print(f"{program}: error: the text has bytes that are not UTF-8: {asked!r:.80}", file=sys.stderr)
        return EXIT_FAILURE
    try:
        with closing(answer(asked)) as pieces:  # closing it ends the request, if it is not at its end
            for piece in pieces:
                print(piece, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    except ApiError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK
