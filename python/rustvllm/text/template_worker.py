"""The process that renders chat templates for another one: ``python -m rustvllm.text.template_worker``.

A template is a program. The sandbox keeps it away from everything but its messages; what it cannot do is bound a loop
or a text that doubles itself. So the process has little memory, no file to write and nothing of its parent's
environment, and each order little processor time: when that is over, the kernel ends the process.

Orders come and answers go through the socket that is its standard input, each with its length in four bytes before it.
"""

import json
import os
import resource
import signal
import socket
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rustvllm.exceptions import InvalidRequestError
from rustvllm.text.chat_template import compile_chat_template, render_chat, walks_through_parts

CPU_SECONDS = 2
"""Of one order."""
MEMORY_BYTES = 256 << 20
"""Beyond what the interpreter takes."""
MAX_TEXT_CHARS = 16 << 20
LENGTH_BYTES = 4
TEXT, FACTS = b"t", b"j"
"""What an answer begins with: a text in UTF-8 follows, or a JSON object."""
_MAX_MESSAGE_CHARS = 2000


class TemplateWorker:
    """Serves orders, which are JSON objects.

    ``template`` is for this order and those that follow. ``probe`` asks what the template is like; otherwise
    ``messages``, ``tokens`` and ``options`` are rendered with it.
    """

    def __init__(self) -> None:
        self._template = ""

        self.is_well = True
        """Unless there was too little memory: what is left then may be in pieces."""

    def serve(self, order: bytes) -> bytes:
        """The answer to an order."""
        try:
            return self._answer(json.loads(order))
        except InvalidRequestError as error:
            if "MemoryError" not in str(error):
                return _facts(message=str(error)[:_MAX_MESSAGE_CHARS], param=error.param)
        except RecursionError:
            return _facts(limit="it, or what it is given, is nested too deeply")
        except MemoryError:
            pass
        self.is_well = False
        return _facts(limit="it needs more memory", ends=True)

    def _answer(self, order: Mapping[str, Any]) -> bytes:
        self._template = order.get("template", self._template)
        if "probe" in order:
            compile_chat_template(self._template)
            return _facts(walks_through_parts=walks_through_parts(self._template))
        tokens = order["tokens"]
        text = render_chat(
            SimpleNamespace(special_tokens_map=tokens, **tokens),
            order["messages"],
            chat_template=self._template,
            **order["options"],
        )
        if len(text) > MAX_TEXT_CHARS:
            return _facts(limit=f"its text is longer than {MAX_TEXT_CHARS} characters")
        return TEXT + text.encode(errors="surrogatepass")


def main() -> None:
    """Serve the orders that come, up to the end of the socket."""
    channel = socket.socket(fileno=os.dup(0))
    _limit()
    worker = TemplateWorker()
    while worker.is_well and (head := _receive(channel, LENGTH_BYTES)):
        order = _receive(channel, int.from_bytes(head, "big"))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal, which nothing here handles, ends the process
        answer = worker.serve(order)
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)


def _receive(channel: socket.socket, size: int) -> bytes:
    """``size`` bytes; none at the end."""
    received = bytearray(size)
    view, at = memoryview(received), 0
    while at < size:
        count = channel.recv_into(view[at:])
        if not count:
            return b""
        at += count
    return bytes(received)


def _facts(**facts: Any) -> bytes:
    return FACTS + json.dumps(facts).encode()


def _limit() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 -- pathlib need not be loaded for it
        pages = int(file.read().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    for what, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    try:
        main()
    except (OSError, MemoryError):  # the parent is gone, or an order that does not even fit
        os._exit(1)
    os._exit(0)
