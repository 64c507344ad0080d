"""What a server says on the terminal: where it listens, how it starts, that it is ready, what went wrong."""

import contextlib
import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO

from rustvllm import envs
from rustvllm.logger import init_logger, redact
from rustvllm.server.launch.listen import Listener

logger = init_logger(__name__)


def say(message: str) -> None:
    """One line for the operator who started the server; with ``--log-format json`` a line of the log."""
    if _is_json():
        logger.info("%s", message)
    else:
        _print(f"rustvllm: {message}", sys.stdout)


def complain(message: str) -> None:
    """One line for what ended it, without secrets."""
    if _is_json():
        logger.error("%s", message)
    else:
        _print(redact(f"rustvllm serve: error: {message}"), sys.stderr)


def warn(message: str) -> None:
    """One line about a command line that is served all the same; before the log is set up, hence always text."""
    _print(redact(f"rustvllm serve: warning: {message}"), sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """Print, and go on if that fails: a closed terminal must not end a server."""
    with contextlib.suppress(OSError, ValueError):  # nothing reads it, the disk is full; it is closed
        print(text, file=stream, flush=True)


def _is_json() -> bool:
    return envs.logging_format() == "json"


def say_listening(listener: Listener) -> None:
    """The socket is bound."""
    say(f"listening on {where(listener)}, loading the model")


def say_phases(name: str, seconds: float, phases: Mapping[str, float]) -> None:
    """A process is ready; what its start was spent on, in seconds."""
    parts = ", ".join(f"{phase} {spent:.2f} s" for phase, spent in phases.items())
    say(f"{name} ready after {seconds:.2f} s ({parts})")


_TRIES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    # what the engine does -> a path, and what may be sent there
    "generate": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}),
    "embed": ("/v1/embeddings", {"input": "Once upon a time"}),
    "classify": ("/classify", {"input": "Once upon a time"}),
}


def say_ready(listener: Listener, model: str, *, task: str, needs_key: bool, has_page: bool) -> None:
    """The server serves; how to try it.

    Args:
        listener: Where.
        model: Its first name.
        task: What the engine does: ``generate``, ``embed`` or ``classify``.
        needs_key: Clients must have a key.
        has_page: The live page is on.
    """
    key = ' -H "Authorization: Bearer YOUR_KEY"' if needs_key else ""
    if _is_json():
        say(f"ready, serving {model} on {where(listener)}")
        return
    path, fields = _TRIES[task]
    tries = []
    if listener.uds is None:
        if task == "generate":
            tries.append(f"  rustvllm chat --url {listener.url}{' --api-key YOUR_KEY' if needs_key else ''}\n")
        if has_page:
            tries.append(f"  {listener.url}/dashboard in a browser\n")
    _print(
        f"rustvllm: ready, serving {model} on {where(listener)}\n"
        f"Try it:\n{''.join(tries)}"
        f"  curl {listener.curl_target()}{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps({'model': model, **fields}))}",
        sys.stdout,
    )


def where(listener: Listener) -> str:
    """Where clients find it."""
    return listener.url if listener.uds is None else str(listener.uds)
