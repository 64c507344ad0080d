"""Chooses the private directory for the sockets of one server's processes.

The first engine that listens makes the directory, with mode 700. A server that is killed earlier, while models load,
leaves nothing on disk.
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
        ConfigError: None of these places can be used; gives the reason for each.
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
            failures.append(f"{place}: a socket's path would have {length} bytes, at most {MAX_SOCKET_PATH_BYTES} work")
        else:
            return directory
    raise ConfigError(
        f"no directory for the engine's socket ({'; '.join(failures)}): set TMPDIR to a directory with a short path "
        "that this user can write to"
    )
