"""What front ends ask an engine about adapters, as a ``Query``; ``engine/adapters.py`` answers.

| kind | payload, JSON | answer |
|---|---|---|
| ``add_adapter`` | ``number``, ``name``, ``path``; ``row``: publish it, retire what had its name | null, or as that |
| ``retire_adapter`` | ``number`` | ``true``; it goes as soon as no request needs it |
| ``publish_adapter`` | a row of the list, and ``load_inplace`` | ``replaced``: a number or null; ``num_changes`` |
| ``withdraw_adapter`` | ``name`` | the number that it had, or null |
| ``list_adapters`` | | ``adapters``, the rows of the list; ``num_changes`` |
| ``restore_adapters`` | the list, to an engine that was started again; null: only ask | whether it has been given one |
| ``live_adapters`` | | names of the adapters of ``running`` and of ``waiting`` requests |

A row has ``number``, ``name``, ``path``, ``lora_int_id`` and ``base_model_name``; ``num_changes`` are the list's.
The list of names is that of engine 0; each engine has the weights.
"""

import json
from typing import Any, Final

ADD, RETIRE = "add_adapter", "retire_adapter"
PUBLISH, WITHDRAW, LIST, RESTORE = "publish_adapter", "withdraw_adapter", "list_adapters", "restore_adapters"
LIVE = "live_adapters"
KINDS: Final = frozenset((ADD, RETIRE, PUBLISH, WITHDRAW, LIST, RESTORE, LIVE))
LOAD_SECONDS: Final = 120.0
"""How long a front end waits for an adapter: the engine may be in a long step, and the disk slow."""
LIST_SECONDS: Final = 30.0
"""How long a front end waits for the list, which needs the end of a step."""
LIVE_SECONDS: Final = 0.5
"""How long a scrape waits to hear whose adapters run."""


def payload(**members: Any) -> bytes:
    """What is said with a query."""
    return json.dumps(members).encode()


def already_loaded(name: str) -> str:
    """What is said to those who load a name that is taken; the words are vLLM's."""
    return (
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True."
    )
