""":func:`reap_orphans`: takes the exit codes of processes that were left to this one.

The kernel gives a process whose parent ended to process 1 of its container, or to a subreaper above it. A server that
is process 1, as in a container without an init, would otherwise keep an entry of the process table for each of them.
"""

import contextlib
import os
from collections.abc import Collection


def reap_orphans(children: Collection[int]) -> None:
    """Reap every ended child process that this process did not start; never waits.

    Args:
        children: Ids of the processes that this one started. Their exit codes are left to those who wait for them;
            while such a code is waiting, orphans behind it stay for a later call.
    """
    with contextlib.suppress(ChildProcessError):  # there are no children at all
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in children:
                return
            os.waitpid(ended.si_pid, 0)
