"""A private directory for the sockets of one server's processes: where it is to be.

It is made, with mode 700, by the first engine that listens in it, and not before: whatever is killed during a load,
which is most of a start, leaves nothing on the disk.
"""

import os
import secrets
from pathlib import Path

from rustvllm.exceptions import ConfigError
from rustvllm.process.address import MAX_SOCKET_PATH_BYTES

PREFIX = "rustvllm-"
SOCKET_NAME = "engine-{rank}.sock"
_LONGEST_NAME = len("/" + SOCKET_NAME.format(rank=9999))
_USUAL_PLACES = ("/tmp", "/var/tmp")  # noqa: S108 -- the directory is private, and its name cannot be guessed


def choose_run_directory() -> Path:
    """Choose an unused path that is short enough for sockets: in ``$TMPDIR``, else in ``/tmp`` or ``/var/tmp``.

    Raises:
        ConfigError: None of these will do; says why for each.
    """
    failures = []
    for place in dict.fromkeys((os.environ.get("TMPDIR") or _USUAL_PLACES[0], *_USUAL_PLACES)):
        directory = Path(place).absolute() / f"{PREFIX}{secrets.token_hex(6)}"
        length = len(os.fsencode(directory)) + _LONGEST_NAME
        if not Path(place).is_dir():
            failures.append(f"{place}: not a directory")
        elif not os.access(place, os.W_OK | os.X_OK):
            failures.append(f"{place}: this user cannot write there")
        elif length > MAX_SOCKET_PATH_BYTES:
            failures.append(f"{place}: a socket's path there has {length} bytes, and may have {MAX_SOCKET_PATH_BYTES}")
        else:
            return directory
    raise ConfigError(
        f"no directory for the engine's socket ({'; '.join(failures)}): set TMPDIR to one that this user can write to "
        "and whose path is short"
    )
