"""Chat templates that come with requests, each rendered in a process of its own.

A template is a program. The sandbox keeps it away from everything but its messages; what it cannot do is bound a loop
or a text that doubles itself. So the process has little processor time, little memory, no file to write and nothing of
this one's environment, and it serves one template.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from types import SimpleNamespace
from typing import Any

from rustvllm.entrypoints.chat_template import render_chat, special_tokens
from rustvllm.exceptions import InvalidRequestError

CPU_SECONDS = 2
WALL_SECONDS = 20.0
"""On a machine that is busy otherwise; the processor time is what ends a loop."""
MEMORY_BYTES = 256 << 20
"""Beyond what the interpreter takes."""
MAX_TEXT_BYTES = 16 << 20
AT_A_TIME = 2
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ")
_NO_END = "it did not come to its end"

_slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


async def render_apart(tokenizer: Any, messages: Any, chat_template: str, **options: Any) -> str:
    """The same as :func:`render_chat` of a template that nobody has reason to trust.

    Raises:
        InvalidRequestError: As :func:`render_chat`, and for a template that goes over the limits.
    """
    order = {
        "tokens": special_tokens(tokenizer),
        "messages": messages,
        "chat_template": chat_template,
        "options": options,
    }
    answer = await _ask(json.dumps(order).encode())
    if "text" in answer:
        return str(answer["text"])
    raise InvalidRequestError(str(answer["message"]), answer["param"])


async def _ask(order: bytes) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    for other in [each for each in _slots if each.is_closed()]:
        del _slots[other]
    async with _slots.setdefault(loop, asyncio.Semaphore(AT_A_TIME)):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rustvllm.entrypoints.template_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            start_new_session=True,  # a Ctrl-C of the terminal is for the server
        )
        try:
            async with asyncio.timeout(WALL_SECONDS):
                return await _exchange(process, order)
        except TimeoutError:
            return _failure(_NO_END)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # process.kill() may take the exit code from who waits for it
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, order: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # it has ended already: what it said tells why, or nothing does
        process.stdin.write(order)
        await process.stdin.drain()
    process.stdin.close()
    said = bytearray()
    while piece := await process.stdout.read(1 << 16):
        said += piece
        if len(said) > 6 * MAX_TEXT_BYTES:  # as JSON a character has six bytes at most
            return _failure(f"its text is longer than {MAX_TEXT_BYTES} bytes")
    await process.wait()
    try:
        return dict(json.loads(said))
    except ValueError:
        return _failure(_NO_END)


def _failure(reason: str) -> dict[str, Any]:
    return {
        "message": f"The chat template of the request went over the limits: {reason} (a template that comes with "
        f"a request has {CPU_SECONDS} seconds, {MEMORY_BYTES >> 20} MiB of memory and {MAX_TEXT_BYTES >> 20} MiB of "
        "text).",
        "param": "chat_template",
    }


def main() -> None:
    """The process: one order from standard input, one answer to standard output."""
    order = json.loads(sys.stdin.buffer.read())
    _limit()
    try:
        text = render_chat(
            SimpleNamespace(special_tokens_map=order["tokens"], **order["tokens"]),
            order["messages"],
            chat_template=order["chat_template"],
            **order["options"],
        )
        too_long = len(text) > MAX_TEXT_BYTES
        answer = _failure(f"its text is longer than {MAX_TEXT_BYTES} bytes") if too_long else {"text": text}
    except InvalidRequestError as exc:
        message = str(exc)[:2000]
        out_of_memory = "MemoryError" in message
        answer = _failure("it needs more memory") if out_of_memory else {"message": message, "param": exc.param}
    except MemoryError:
        answer = _failure("it needs more memory")
    sys.stdout.write(json.dumps(answer))


def _limit() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 -- pathlib need not be loaded for it
        pages = int(file.read().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    main()
