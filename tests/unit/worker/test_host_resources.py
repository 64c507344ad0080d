"""Memory and cores as control groups of both versions limit them, on made-up machines."""

import resource

import pytest

from rustvllm.worker.host_resources import memory_available, memory_limit, num_compute_threads

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    def write(files):
        defaults = {
            "proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"
        }
        for name, text in (defaults | files).items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(text))
        return tmp_path

    return write


def test_the_address_space_counts(machine, monkeypatch):
    root = machine({"proc/self/statm": f"{GIB // resource.getpagesize()} 9 9 9 9 9 9\n"})
    assert memory_available(root) == 8 * GIB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 * GIB, resource.RLIM_INFINITY))
    assert memory_available(root) == 2 * GIB


def test_without_control_groups_it_is_the_machine(machine):
    root = machine({})
    assert memory_limit(root) == 16 * GIB
    assert memory_available(root) == 8 * GIB
    assert num_compute_threads(root, {0, 1, 2}) == 3


def test_old_kernels_without_memavailable(machine):
    assert memory_available(machine({"proc/meminfo": "MemTotal: 4096 kB\nMemFree: 1024 kB\n"})) == 1 << 20


def test_version_2_takes_the_tightest_of_all_levels(machine):
    group = "sys/fs/cgroup/a/b"
    root = machine(
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{group}/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": 4 * GIB,
            "sys/fs/cgroup/a/memory.current": 3 * GIB,
            "sys/fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {GIB}\nfile 9\n",
            f"{group}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
        }
    )
    assert memory_limit(root) == 4 * GIB
    assert memory_available(root) == 2 * GIB, "file pages that would be dropped count as free"
    assert num_compute_threads(root, set(range(8))) == 3
    assert num_compute_threads(root, {5}) == 1


def test_version_1(machine):
    root = machine(
        {
            "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": 50000,
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
        }
    )
    assert memory_limit(root) == 2 * GIB
    assert memory_available(root) == GIB
    assert num_compute_threads(root, {0, 1}) == 1


def test_inside_a_container_the_path_may_be_the_hosts(machine):
    root = machine({"proc/self/cgroup": "0::/not/here\n", "sys/fs/cgroup/memory.max": GIB})
    assert memory_limit(root) == GIB


def test_a_limit_that_is_exceeded_leaves_nothing(machine):
    root = machine(
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 2 * GIB}
    )
    assert memory_available(root) == 0


def test_hyperthreads_share_a_core(machine):
    files = {f"sys/devices/system/cpu/cpu{i}/topology/core_cpus_list": f"{i % 2},{i % 2 + 2}\n" for i in range(4)}
    assert num_compute_threads(machine(files), {0, 1, 2, 3}) == 2
    assert num_compute_threads(machine(files), {0, 2}) == 1


def test_this_machine():
    assert 0 < memory_available() <= memory_limit()
    assert num_compute_threads() >= 1
