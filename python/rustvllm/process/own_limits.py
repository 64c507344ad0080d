"""Limits that a process sets itself before it works on what is not trusted; it cannot take them back."""

import resource


def limit_this_process(memory_bytes: int) -> None:
    """Let this process write no file, leave no core dump, and have little more memory than now.

    Args:
        memory_bytes: Address space that it may have in addition to what it has now.
    """
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 -- avoids an import of pathlib
        pages = int(file.read().split()[0])
    memory = pages * resource.getpagesize() + memory_bytes
    for what, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (limit, limit))
