"""The default size of host memory: control groups and other processes."""

import os

import pytest

from dejax.offload.activations import memory
from tests.offload.processes import popen

GIB = 1 << 30


def machine(root, files, available=100):
    """A file system with /proc and /sys of a test machine."""
    files = {"proc/meminfo": f"MemTotal: {200 << 20} kB\nMemAvailable: {available << 20} kB\n", **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 32 0:30 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def group(folder, limit, used, cache=0, version=2):
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{used}\n",
        f"{folder}/memory.stat": f"anon 7\nactive_file 9\n{names[2]} {cache}\n",
    }


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 100),
        # Version 2: the group itself, one above it, none, "max", a group that a container sees as the outermost.
        ({"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2.format(root="/"),
          **group("sys/fs/cgroup/a/b", 10 * GIB, 4 * GIB, GIB)}, 7),
        ({"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2.format(root="/"),
          **group("sys/fs/cgroup/a/b", "max", GIB), **group("sys/fs/cgroup/a", 50 * GIB, 20 * GIB)}, 30),
        ({"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2.format(root="/"),
          **group("sys/fs/cgroup/a", "max", GIB)}, 100),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2.format(root="/"),
          **group("sys/fs/cgroup", 8 * GIB, 2 * GIB)}, 6),
        ({"proc/self/cgroup": "0::/../..\n", "proc/self/mountinfo": V2.format(root="/"),
          **group("sys/fs/cgroup", 8 * GIB, 2 * GIB)}, 6),
        ({"proc/self/cgroup": "0::/docker/x\n", "proc/self/mountinfo": V2.format(root="/docker/x"),
          **group("sys/fs/cgroup", 8 * GIB, 3 * GIB)}, 5),
        # Used up, and a limit above what the machine has.
        ({"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2.format(root="/"),
          **group("sys/fs/cgroup/a", GIB, 2 * GIB)}, 0),
        ({"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2.format(root="/"),
          **group("sys/fs/cgroup/a", 500 * GIB, GIB)}, 100),
        # Version 1, alone, in a container, with no limit, and alongside version 2 without memory.
        ({"proc/self/cgroup": "5:cpu,cpuacct:/c\n4:memory:/m\n", "proc/self/mountinfo": V1.format(root="/"),
          **group("sys/fs/cgroup/memory/m", 12 * GIB, 4 * GIB, 2 * GIB, version=1)}, 10),
        ({"proc/self/cgroup": "4:memory:/docker/x\n", "proc/self/mountinfo": V1.format(root="/docker/x"),
          **group("sys/fs/cgroup/memory", 12 * GIB, 4 * GIB, version=1)}, 8),
        ({"proc/self/cgroup": "4:memory:/m\n", "proc/self/mountinfo": V1.format(root="/"),
          **group("sys/fs/cgroup/memory/m", 2**63 - 4096, 4 * GIB, version=1)}, 100),
        ({"proc/self/cgroup": "4:memory:/m\n0::/u\n",
          "proc/self/mountinfo": V1.format(root="/") + V2.format(root="/").replace("group rw", "group/unified rw"),
          **group("sys/fs/cgroup/memory/m", 12 * GIB, 4 * GIB, version=1), "sys/fs/cgroup/unified/u/x": ""}, 8),
        # Nonsense is no limit.
        ({"proc/self/cgroup": "0::/gone\n", "proc/self/mountinfo": "a b c\n - \n" + V2.format(root="/")}, 100),
    ],
)  # fmt: skip
def test_control_groups(files, gib, tmp_path):
    assert memory.available_memory(machine(tmp_path, files)) == gib * GIB


def test_this_machine():
    assert 0 < memory.available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_shares():
    assert memory.share(1200, 1, 1) == 600
    for launched in (2, 4, 8):  # each gets the same, whoever comes first
        assert {memory.share(1600, k, launched) for k in range(1, launched + 1)} == {800 // launched}
    assert sum(memory.share(10**9, k, 1) for k in range(1, 200)) < 10**9


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 1), ({"LOCAL_WORLD_SIZE": "4"}, 4), ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8), ({"MPI_LOCALNRANKS": "nonsense"}, 1),
        ({"LOCAL_WORLD_SIZE": ""}, 1),
    ],
)  # fmt: skip
def test_number_of_processes_from_launchers(variables, count, monkeypatch):
    for name in memory._LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert memory.launched_processes() == count


# Tests that run at the same time have stores, too: these processes use another folder for their files.
PROCESS = """
import sys
from pathlib import Path
from dejax.offload import ActivationStore
from dejax.offload.activations import memory
memory._folder = lambda: Path(sys.argv[1])
store = ActivationStore()
other = ActivationStore()  # of the same process: it shares with itself
assert abs(other.host_bytes - store.host_bytes) < 1 << 28
print(store.host_bytes, flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_processes_that_share_a_machine(tmp_path):
    """Together they get no more than there is; a killed process does not count any more."""
    import subprocess

    available = memory.available_memory()
    processes = []

    def share() -> int:
        processes.append(popen(PROCESS, str(tmp_path), stdin=subprocess.PIPE))
        return int(processes[-1].stdout.readline())

    def end() -> None:
        for process in processes:
            process.kill()
            process.communicate()
        processes.clear()

    try:
        shares = [share() for _ in range(3)]
        assert sum(shares) <= available and min(shares) > 0
        assert share() < available / 10
        end()
        assert share() > available / 4
    finally:
        end()
