"""Lines in, streamed answers out: the loop of ``rustvllm chat`` and ``rustvllm complete``."""

import sys
from collections.abc import Callable, Generator
from contextlib import closing

from rustvllm.entrypoints.cli.api_client import ApiError

Answer = Callable[[str], Generator[str]]
"""What was asked → pieces of the answer."""

EXIT_OK, EXIT_FAILURE, EXIT_INTERRUPTED = 0, 1, 130


def hold_dialogue(program: str, quick: str | None, answer: Answer) -> int:
    """Answer ``quick``, or every line of standard input until it ends.

    Ctrl-C ends the answer that is being written, and at a prompt the program. An error ends neither at a terminal.

    Returns:
        The exit code: 0, 1 after an error, 130 after Ctrl-C.
    """
    if quick is not None:
        return _say(program, quick, answer)
    is_terminal = sys.stdin.isatty()
    code = EXIT_OK
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return code
        except KeyboardInterrupt:
            print()
            return EXIT_OK
        if line.strip():
            code = _say(program, line, answer)
            if code != EXIT_OK and not is_terminal:
                return code


def _say(program: str, asked: str, answer: Answer) -> int:
    try:
        with closing(answer(asked)) as pieces:  # closing it ends the request, if it is not at its end
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    except ApiError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    print()
    return EXIT_OK
