"""A private directory for the sockets of one server's processes."""

import os
import tempfile
from pathlib import Path

from rustvllm.engine.address import MAX_SOCKET_PATH_BYTES
from rustvllm.exceptions import ConfigError

PREFIX = "rustvllm-"
SOCKET_NAME = "engine-{rank}.sock"
_LONGEST_NAME = len("/" + SOCKET_NAME.format(rank=9999))
_USUAL_PLACES = ("/tmp", "/var/tmp")  # noqa: S108 -- a directory of mode 700 is made there, under a name of its own


def make_run_directory() -> Path:
    """Make a directory of mode 700 whose path is short enough for sockets in it.

    It lies in ``$TMPDIR`` where that is possible, else in ``/tmp`` or ``/var/tmp``.

    Raises:
        ConfigError: None of these will do; says why for each.
    """
    failures = []
    for place in dict.fromkeys((os.environ.get("TMPDIR") or _USUAL_PLACES[0], *_USUAL_PLACES)):
        try:
            directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as error:
            failures.append(f"{place}: {error.strerror or error}")
            continue
        length = len(os.fsencode(directory)) + _LONGEST_NAME
        if length <= MAX_SOCKET_PATH_BYTES:
            return directory
        directory.rmdir()
        failures.append(f"{place}: a socket's path there has {length} bytes, and may have {MAX_SOCKET_PATH_BYTES}")
    raise ConfigError(
        f"no directory for the engine's socket ({'; '.join(failures)}): set TMPDIR to one that this user can write to "
        "and whose path is short"
    )
