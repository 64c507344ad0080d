"""``rustvllm chat``: a conversation with a server."""

import sys
from collections.abc import Generator, Sequence

from rustvllm.entrypoints.cli.api_client import ApiClient, ApiError, add_client_flags, make_client, sampling
from rustvllm.entrypoints.cli.dialogue import EXIT_FAILURE, hold_dialogue
from rustvllm.entrypoints.cli.parser import FlexibleArgumentParser

PROGRAM = "rustvllm chat"


def chat(argv: Sequence[str]) -> int:
    """Run ``rustvllm chat``.

    Returns:
        The exit code: 0, 1 after an error, 130 after Ctrl-C during an answer.
    """
    parser = FlexibleArgumentParser(prog=PROGRAM, description="Talk with a model that a server serves.")
    add_client_flags(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="begin the conversation with it")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="say this, print the answer and end")
    args = parser.parse_args(argv)
    try:
        client = make_client(args)
    except ApiError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    conversation = Conversation(client, messages, sampling(args))
    return hold_dialogue(PROGRAM, args.quick, conversation.answer)


class Conversation:
    """What was said so far; an answer that broke off counts as far as it came."""

    def __init__(self, client: ApiClient, messages: list[dict[str, str]], parameters: dict[str, object]) -> None:
        self.messages = messages
        self._client = client
        self._parameters = parameters

    def answer(self, text: str) -> Generator[str]:
        """Say something, and hear the answer piece by piece.

        Raises:
            ApiError: The server cannot be reached or refuses; then nothing was said.
        """
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            body = {"messages": self.messages, **self._parameters}
            for event in self._client.stream("/chat/completions", body):
                for choice in event.get("choices", []):
                    piece = choice["delta"].get("content") or ""
                    said.append(piece)
                    yield piece
        finally:
            if any(said):
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()
