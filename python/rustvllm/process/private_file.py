"""``open_private``: opens files for data about requests, so that other users cannot read them.

Traces name requests, and journals and outputs hold prompts and answers. A new file is therefore readable for its owner
only, whatever the umask is. An existing file keeps its mode, because its creator has chosen who may read it.
"""

import os
from typing import Final

PRIVATE_MODE: Final = 0o600


def open_private(path: str, flags: int) -> int:
    """Open a file with mode 600 if it is new; an ``opener`` for :func:`open`."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_MODE)
