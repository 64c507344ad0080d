"""Loading and forgetting adapters, asked of the thread that steps an engine as a ``Query`` between two steps.

| kind | payload, JSON | answer |
|---|---|---|
| ``add_adapter`` | ``number``, ``name``, ``path`` | ``true`` |
| ``remove_adapter`` | ``number`` | whether there was one |
"""

import json
from typing import Final, Protocol

from rustvllm.exceptions import RustVLLMError
from rustvllm.logger import init_logger
from rustvllm.observe.inspect.queries import Query

logger = init_logger(__name__)

ADD, REMOVE = "add_adapter", "remove_adapter"
KINDS: Final = (ADD, REMOVE)
LOAD_SECONDS: Final = 120.0
"""How long a front end waits for an adapter: the engine may be in a long step, and the disk slow."""


class AdapterHolder(Protocol):
    """Has a model to which adapters are added."""

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Load one."""

    def remove_adapter(self, number: int) -> bool:
        """Forget one."""


def answer(holder: AdapterHolder, query: Query) -> None:
    """Do what is asked. What cannot be loaded says why; the engine goes on."""
    try:
        wanted = json.loads(query.payload)
        if query.kind == ADD:
            holder.add_adapter(int(wanted["number"]), str(wanted["name"]), str(wanted["path"]))
            done = True
        else:
            done = holder.remove_adapter(int(wanted["number"]))
    except RustVLLMError as error:
        query.fail(str(error))
    except Exception as error:
        logger.exception("the query %r failed", query.kind)
        query.fail(f"the query {query.kind!r} failed: {type(error).__name__}: {error}")
    else:
        query.answer(json.dumps(done).encode())


def add_payload(number: int, name: str, path: str) -> bytes:
    """The payload of an ``add_adapter``."""
    return json.dumps({"number": number, "name": name, "path": path}).encode()


def remove_payload(number: int) -> bytes:
    """The payload of a ``remove_adapter``."""
    return json.dumps({"number": number}).encode()
