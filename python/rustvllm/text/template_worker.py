"""The process in which chat templates are rendered: ``python -m rustvllm.text.template_worker``.

A template is a program. The sandbox gives it access to nothing but its variables, but cannot limit a loop or a string
that keeps doubling. So this process has little memory, cannot write to files, and inherits almost no environment
variables. Each order has little processor time; after that, the kernel ends the process.

Orders and answers pass through the socket that is the process's standard input. Each is preceded by its length in four
bytes.
"""

import json
import os
import signal
import socket
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rustvllm.exceptions import InvalidRequestError
from rustvllm.process.own_limits import limit_this_process
from rustvllm.text.chat_template import compile_chat_template, render_chat, walks_through_parts

CPU_SECONDS = 2
"""Processor time that one order may take."""
MEMORY_BYTES = 256 << 20
"""Address space in addition to what the interpreter has when it starts to serve."""
MAX_TEXT_CHARS = 16 << 20
LENGTH_BYTES = 4
TEXT, FACTS = b"t", b"j"
"""First byte of an answer: UTF-8 text follows, or a JSON object."""
_MAX_MESSAGE_CHARS = 2000


class TemplateWorker:
    """Serves orders, which are JSON objects.

    ``template`` sets the template for this order and later ones. An order with ``probe`` asks about the template's
    properties; any other order has ``messages``, ``tokens`` and ``options`` to render.
    """

    def __init__(self) -> None:
        self._template = ""

        self.is_well = True
        """False after memory ran out, when the interpreter's state cannot be trusted any more."""

    def serve(self, order: bytes) -> bytes:
        """Execute an order and return the answer."""
        try:
            return self._answer(json.loads(order))
        except InvalidRequestError as error:
            if "MemoryError" not in str(error):
                return _facts(message=str(error)[:_MAX_MESSAGE_CHARS], param=error.param)
        except RecursionError:
            return _facts(limit="it, or its input, is nested too deeply")
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
    """Serve orders until the other end closes the socket."""
    channel = socket.socket(fileno=os.dup(0))
    limit_this_process(MEMORY_BYTES)
    worker = TemplateWorker()
    while worker.is_well and (head := _receive(channel, LENGTH_BYTES)):
        order = _receive(channel, int.from_bytes(head, "big"))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF has no handler here, so it ends the process
        answer = worker.serve(order)
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)


def _receive(channel: socket.socket, size: int) -> bytes:
    """Read ``size`` bytes; empty if the socket ends before."""
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


if __name__ == "__main__":
    try:
        main()
    except (OSError, MemoryError):  # the parent has ended, or an order does not even fit into memory
        os._exit(1)
    os._exit(0)
