"""How many files a process may have open (RLIMIT_NOFILE), and how many of them its connections may be.

The kernel gives a new file the lowest number that is free, so a connection's number says how near the limit is: nothing
has to be counted, and whatever else the process has open is counted in.
"""

import contextlib
import os
import resource
from dataclasses import dataclass

from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

MIN_OPEN_FILES = 64
"""An API process has some thirty open before its first connection."""
WHAT_WOULD_WORK = "raise it with `ulimit -Hn`, LimitNOFILE= of systemd or --ulimit nofile= of a container"
_MOST_RESERVED, _MOST_SPARE = 32, 64
_OWN_FILES = 32


@dataclass(frozen=True)
class OpenFiles:
    """A limit, and how it is divided.

    Attributes:
        limit: Files that the process may have open.
    """

    limit: int

    @classmethod
    def of_this_process(cls) -> "OpenFiles":
        """As the kernel says."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(1 << 30 if soft == resource.RLIM_INFINITY else soft)

    @property
    def last_accepted(self) -> int:
        """Beyond this number no connection is accepted: the rest is for other files."""
        return self.limit - min(_MOST_RESERVED, self.limit // 8)

    @property
    def last_served(self) -> int:
        """Beyond this number a connection gets an answer that there is no room, and is closed."""
        return self.last_accepted - min(_MOST_SPARE, self.limit // 8)

    @property
    def num_connections(self) -> int:
        """Connections that are served at once, about."""
        return max(0, self.last_served - _OWN_FILES)


def raise_limit() -> OpenFiles:
    """Let this process, and those that it starts, have as many files open as this user may have.

    Raises:
        ConfigError: These are too few to serve with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a sandbox forbids it: then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = OpenFiles.of_this_process()
    if files.limit < MIN_OPEN_FILES:
        raise ConfigError(
            f"this process may have {files.limit} files open (RLIMIT_NOFILE), and a server needs {MIN_OPEN_FILES} or "
            f"more: {WHAT_WOULD_WORK}"
        )
    return files


def warn_if_small(files: OpenFiles, num_api_processes: int, num_wanted: int) -> None:
    """Say that there may be more clients than connections.

    Args:
        files: Of each API process.
        num_api_processes: How many share the clients.
        num_wanted: Requests that the engines take at once.
    """
    num_connections = files.num_connections * num_api_processes
    if num_connections < num_wanted:
        logger.warning(
            "a process may have %d files open (RLIMIT_NOFILE), which is enough for about %d connections, but the "
            "engines take %d requests at once; further requests get a 503: %s",
            files.limit,
            num_connections,
            num_wanted,
            WHAT_WOULD_WORK,
        )


def next_number(descriptor: int) -> int:
    """The number that the next file would have, found with a copy of an open one.

    Raises:
        OSError: None is left.
    """
    copy = os.dup(descriptor)
    os.close(copy)
    return copy
