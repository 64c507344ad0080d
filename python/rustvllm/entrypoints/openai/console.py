"""What a server says on the terminal: where it listens, how it starts, that it is ready, what went wrong."""

import json
import shlex
import sys
from collections.abc import Mapping

from rustvllm import envs
from rustvllm.entrypoints.openai.listen import Listener
from rustvllm.logger import init_logger, redact

logger = init_logger(__name__)


def say(message: str) -> None:
    """One line for whoever started the server; with ``--log-format json`` a line of the log."""
    if _is_json():
        logger.info("%s", message)
    else:
        print(f"rustvllm: {message}", flush=True)


def complain(message: str) -> None:
    """One line for what ended it, without secrets."""
    if _is_json():
        logger.error("%s", message)
    else:
        print(redact(f"rustvllm serve: error: {message}"), file=sys.stderr, flush=True)


def _is_json() -> bool:
    return envs.logging_format() == "json"


def say_listening(listener: Listener) -> None:
    """The socket is bound."""
    say(f"listening on {where(listener)}, loading the model")


def say_phases(name: str, seconds: float, phases: Mapping[str, float]) -> None:
    """A process is ready; what its start was spent on, in seconds."""
    parts = ", ".join(f"{phase} {spent:.2f} s" for phase, spent in phases.items())
    say(f"{name} ready after {seconds:.2f} s ({parts})")


def say_ready(listener: Listener, model: str, *, needs_key: bool) -> None:
    """The server serves; how to try it."""
    key = ' -H "Authorization: Bearer YOUR_KEY"' if needs_key else ""
    if _is_json():
        say(f"ready, serving {model} on {where(listener)}")
        return
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 32})
    print(
        f"rustvllm: ready, serving {model} on {where(listener)}\n"
        "Try it:\n"
        f"  curl {listener.curl_target()}/v1/completions -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}",
        flush=True,
    )


def where(listener: Listener) -> str:
    """Where clients find it."""
    return listener.url if listener.uds is None else str(listener.uds)
