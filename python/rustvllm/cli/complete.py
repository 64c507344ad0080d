"""``rustvllm complete``: texts that a server continues."""

import sys
from collections.abc import Generator, Sequence

from rustvllm.cli.api_client import ApiError, add_client_flags, choices_of, make_client, sampling
from rustvllm.cli.dialogue import EXIT_FAILURE, hold_dialogue
from rustvllm.cli.parser import FlexibleArgumentParser

PROGRAM = "rustvllm complete"


def complete(argv: Sequence[str]) -> int:
    """Run ``rustvllm complete``.

    Returns:
        The exit code: 0, 1 after an error, 130 after Ctrl-C during an answer.
    """
    parser = FlexibleArgumentParser(prog=PROGRAM, description="Continue texts with a model on a server.")
    add_client_flags(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="continue this text, print the result and exit")
    args = parser.parse_args(argv)
    try:
        client = make_client(args)
    except ApiError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE

    def answer(text: str) -> Generator[str]:
        for event in client.stream("/completions", {"prompt": text, **sampling(args)}):
            yield from (choice.get("text") or "" for choice in choices_of(event))

    return hold_dialogue(PROGRAM, args.quick, answer)
