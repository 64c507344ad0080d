"""The limit on a process's open files (RLIMIT_NOFILE), and how many of them connections may use.

The kernel gives a new file the lowest free number, so a connection's number shows how near the limit is. Nothing has to
be counted, and all other open files of the process are included.
"""

import contextlib
import os
import resource
from dataclasses import dataclass

from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

MIN_OPEN_FILES = 64
"""Fewest files that a server can work with: an API process has about 30 open before its first connection."""
WHAT_WOULD_WORK = "raise it with `ulimit -Hn`, systemd's LimitNOFILE= or a container's --ulimit nofile="
_MOST_RESERVED, _MOST_SPARE = 32, 64
_OWN_FILES = 32


@dataclass(frozen=True)
class OpenFiles:
    """The limit of a process, and its division between connections and other files.

    Attributes:
        limit: Number of files that the process may have open.
    """

    limit: int

    @classmethod
    def of_this_process(cls) -> "OpenFiles":
        """Read the current soft limit of this process."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(1 << 30 if soft == resource.RLIM_INFINITY else soft)

    @property
    def last_accepted(self) -> int:
        """Highest file number at which connections are accepted; higher numbers are reserved for other files."""
        return self.limit - min(_MOST_RESERVED, self.limit // 8)

    @property
    def last_served(self) -> int:
        """Highest file number at which a connection is served; above it, a connection gets a 503 and is closed."""
        return self.last_accepted - min(_MOST_SPARE, self.limit // 8)

    @property
    def num_connections(self) -> int:
        """Approximate number of connections that can be served at once."""
        return max(0, self.last_served - _OWN_FILES)


def raise_limit() -> OpenFiles:
    """Raise the soft limit of this process, and of those that it starts, to the hard limit.

    Raises:
        ConfigError: The limit is still lower than ``MIN_OPEN_FILES``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it; the limit then stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = OpenFiles.of_this_process()
    if files.limit < MIN_OPEN_FILES:
        raise ConfigError(
            f"this process may have {files.limit} files open (RLIMIT_NOFILE), and a server needs {MIN_OPEN_FILES} or "
            f"more: {WHAT_WOULD_WORK}"
        )
    return files


def warn_if_small(files: OpenFiles, num_api_processes: int, num_wanted: int) -> None:
    """Log a warning if the limit allows fewer connections than the engines can have requests.

    Args:
        files: The limit of each API process.
        num_api_processes: Number of API processes that share the clients.
        num_wanted: Number of requests that the engines take at once.
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
    """The number that the kernel would give the next file, found by duplicating an open one.

    Raises:
        OSError: No number is left.
    """
    copy = os.dup(descriptor)
    os.close(copy)
    return copy
