"""``rustvllm chat``: a conversation with a server."""

import json
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from rustvllm.cli.api_client import ApiClient, ApiError, add_client_flags, choices_of, make_client, sampling
from rustvllm.cli.dialogue import EXIT_FAILURE, hold_dialogue
from rustvllm.cli.parser import FlexibleArgumentParser

PROGRAM = "rustvllm chat"
HELP = """\
/help          show this list
/clear         forget the conversation, keep the system prompt
/system        show the system prompt
/system TEXT   replace the system prompt and forget the conversation
/bye           leave; Ctrl-D does too
Ctrl-C stops an answer, or leaves at the prompt. To send a message that begins with a slash, put a space before it."""


def chat(argv: Sequence[str]) -> int:
    """Run ``rustvllm chat``.

    Returns:
        The exit code: 0, 1 after an error, 130 after Ctrl-C during an answer.
    """
    parser = FlexibleArgumentParser(prog=PROGRAM, description="Talk to a model on a server.")
    add_client_flags(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="begin the conversation with this system prompt")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this message, print the answer and exit")
    parser.add_argument(
        "--tools",
        type=Path,
        metavar="FILE",
        help="JSON list of tools; after the model's calls, the next line that you type is their result",
    )
    args = parser.parse_args(argv)
    try:
        client = make_client(args)
        tools = {} if args.tools is None else {"tools": read_tools(args.tools)}
    except ApiError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_FAILURE
    conversation = Conversation(client, args.system_prompt, {**sampling(args), **tools})
    if args.quick is None and sys.stdin.isatty():
        print("Type a message, or /help for the commands.")
    return hold_dialogue(PROGRAM, args.quick, conversation.answer, conversation.command)


def read_tools(path: Path) -> list[Any]:
    """The tools of a file, as requests have them; a server says what is wrong with one.

    Raises:
        ApiError: The file cannot be read, or is not a JSON list.
    """
    try:
        tools = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ApiError(f"--tools {path}: {error}") from error
    if not isinstance(tools, list):
        raise ApiError(f"--tools {path}: expected a JSON list of tools, got {type(tools).__name__}")
    return tools


class Conversation:
    """The messages of a chat so far; an answer that broke off counts as far as it came.

    Args:
        client: The server.
        system_prompt: The first message; None or empty sends none.
        parameters: Fields of each request, next to the messages.
    """

    def __init__(self, client: ApiClient, system_prompt: str | None, parameters: dict[str, object]) -> None:
        self._client = client
        self._parameters = parameters
        self._begin(system_prompt)

    def _begin(self, system_prompt: str | None) -> None:
        self._system_prompt = system_prompt
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def command(self, line: str) -> bool:
        """Do what a line with a slash asks for; False ends the conversation."""
        name, _, text = line.strip().partition(" ")
        text = text.strip()
        if name in ("/bye", "/exit", "/quit"):
            return False
        if name in ("/help", "/?"):
            print(HELP)
        elif name == "/clear":
            self._begin(self._system_prompt)
            print("The conversation is forgotten.")
        elif name == "/system" and text:
            self._begin(text)
            print("The system prompt is replaced; the conversation is forgotten.")
        elif name == "/system":
            print(self._system_prompt or "There is no system prompt; /system TEXT sets one.")
        else:
            print(f"Unknown command {name}; /help lists the commands. Begin with a space to send it as a message.")
        return True

    def answer(self, text: str) -> Generator[str]:
        """Say something, and hear the answer piece by piece; thoughts stand before it in brackets, calls behind it.

        What is said behind calls is what they gave.

        Raises:
            ApiError: The server cannot be reached or refuses; then nothing was said.
        """
        num_before = len(self.messages)
        open_calls = self.messages[-1].get("tool_calls", ()) if self.messages else ()
        given = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in open_calls]
        self.messages += given or [{"role": "user", "content": text}]
        said: list[str] = []
        calls: list[dict[str, Any]] = []
        is_thinking = False
        try:
            body = {"messages": self.messages, **self._parameters}
            for event in self._client.stream("/chat/completions", body):
                for choice in choices_of(event):
                    delta = choice.get("delta") or {}
                    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                        yield thought if is_thinking else f"({thought}"
                        is_thinking = True
                    piece = delta.get("content") or ""
                    parts = delta.get("tool_calls") or []
                    if (piece or parts) and is_thinking:
                        is_thinking = False
                        yield ")\n"
                    said.append(piece)
                    yield piece
                    for part in parts:
                        yield _show(part, calls)
            if is_thinking:
                yield ")"
            if calls:
                yield "]"
        finally:
            if any(said) or calls:
                answer = {"role": "assistant", "content": "".join(said) or None}
                self.messages.append({**answer, "tool_calls": calls} if calls else answer)
            else:
                del self.messages[num_before:]


def _show(part: dict[str, Any], calls: list[dict[str, Any]]) -> str:
    """Put a part of a call with the calls so far; returns what is shown of it."""
    function = part["function"]
    if part["index"] < len(calls):
        calls[part["index"]]["function"]["arguments"] += function["arguments"]
        return str(function["arguments"])
    shown = "]\n[" if calls else "["
    calls.append({"id": part["id"], "type": "function", "function": dict(function)})
    return f"{shown}{function['name']} {function['arguments']}"
