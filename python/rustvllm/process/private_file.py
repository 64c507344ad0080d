"""``open_private``: how every file is opened that this program writes about requests, steps and answers.

Traces name requests, and journals and outputs hold prompts and answers, so only its owner can read a new file, whatever
the umask is. An existing file keeps its mode: its creator has chosen who may read it.
"""

import os
from typing import Final

PRIVATE_MODE: Final = 0o600


def open_private(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open`."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_MODE)
