"""What this process may use of its machine: memory and cores within its control groups, not those of the host."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_CPU_LISTS = ("core_cpus_list", "thread_siblings_list")


def memory_limit(root: Path = _ROOT) -> int:
    """Bytes of memory that this process may ever use: the lowest control-group limit (v1 and v2), else the machine's.

    Args:
        root: The folder with ``proc`` and ``sys``; tests pass another.
    """
    limits = [limit for limit, _, _ in _memory_groups(root)]
    return min([_meminfo(root)["MemTotal"], *limits])


def memory_available(root: Path = _ROOT) -> int:
    """Bytes that could be allocated now without swapping: what the machine, every control-group limit and the limit on
    the address space (``ulimit -v``) leave.

    File pages that the kernel would drop first (``inactive_file``) count as available.
    """
    rooms = [max(0, limit - usage + reclaimable) for limit, usage, reclaimable in _memory_groups(root)]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = _text(root / "proc/self/statm").split()
        rooms.append(max(0, limit - (int(pages[0]) * resource.getpagesize() if pages else 0)))
    return min([_meminfo(root)["MemAvailable"], *rooms])


def num_compute_threads(root: Path = _ROOT, cpus: set[int] | None = None) -> int:
    """The best number of compute threads: one per physical core that this process may run on, within its CPU quota.

    Args:
        root: The folder with ``sys``.
        cpus: Logical CPUs of this process; None asks the kernel.
    """
    if cpus is None:
        cpus = os.sched_getaffinity(0)
    cores = {_siblings(root, cpu) for cpu in cpus}
    quota = min(_cpu_quotas(root), default=math.inf)
    return max(1, int(min(len(cores), math.ceil(quota)) if math.isfinite(quota) else len(cores)))


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[0] if rest.split() else ""
        if number.isdigit():
            values[name] = int(number) * 1024
    values.setdefault("MemAvailable", values.get("MemFree", values["MemTotal"]))
    return values


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Control groups of this process, innermost first, with their version (1 or 2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = mounts, 2
        elif controller in controllers.split(","):
            base, version = mounts / controllers, 1
            if not base.is_dir():
                base = mounts / controller
        else:
            continue
        # Inside a container the path may be the host's and not exist here, but the groups above it do.
        group = base / path.lstrip("/")
        while True:
            yield group, version
            if group in (base, base.parent):
                break
            group = group.parent


def _memory_groups(root: Path) -> Iterator[tuple[int, int, int]]:
    """``(limit, usage, reclaimable)`` in bytes of every control group of this process that has a limit."""
    for group, version in _groups(root, "memory"):
        limit = _number(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit is None or limit >= 1 << 62:  # version 1 says "no limit" with a huge number
            continue
        usage = _number(group / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0
        yield (
            limit,
            usage,
            _statistic(group / "memory.stat", "inactive_file" if version == 2 else "total_inactive_file"),
        )


def _cpu_quotas(root: Path) -> Iterator[float]:
    """The CPU quota of each control group of this process, in cores."""
    for group, version in _groups(root, "cpu"):
        if version == 2:
            fields = _text(group / "cpu.max").split()
            quota, period = (fields[0], fields[1]) if len(fields) == 2 else ("max", "")
        else:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)


def _siblings(root: Path, cpu: int) -> str:
    """The logical CPUs of a CPU's physical core, as the kernel lists them; the CPU alone if it lists none."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return next((text for name in _CPU_LISTS if (text := _text(topology / name))), str(cpu))


def _statistic(file: Path, name: str) -> int:
    for line in _text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
