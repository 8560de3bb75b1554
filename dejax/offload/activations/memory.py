"""The default size of a store's host memory: half of the available memory, shared by the processes on the machine."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from dejax import _compat
from dejax.offload import _files

_LAUNCHERS = (  # number of processes on this machine: torchrun, Open MPI, MPICH or Intel MPI, srun
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process could allocate now, by the machine's available memory and the control groups' limits.

    Args:
        root: the root of the file system with /proc and /sys.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return max(0, min([available, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Bytes left in each limited control group of this process (version 1 or 2), up to the outermost group."""
    for version, folder, top in _memory_groups(root):
        limits, usage, cache = (
            (("memory.max", "memory.high"), "memory.current", "inactive_file")
            if version == 2
            else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
        )
        while True:
            found = [limit for name in limits if (limit := _number(folder / name)) is not None]
            used = _number(folder / usage)
            if found and used is not None:
                # The page cache counts as used, but the kernel drops its inactive files when memory is needed.
                used -= sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache)
                yield min(found) - max(0, used)
            if folder == top or folder.parent == folder:
                break
            folder = folder.parent


def _memory_groups(root: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, folder, folder of the outermost visible group) of the memory control groups of this process."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            groups[2] = path
        elif "memory" in controllers.split(","):
            groups[1] = path
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        if len(left.split()) < 5 or len(right.split()) < 3:
            continue
        mounted, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version not in groups:
            continue
        top = root / point.lstrip("/")
        # A container sees its own group as the outermost: the path then begins with the mounted group, or with "..".
        group = Path(groups[version])
        inside = group.relative_to(mounted) if group.is_relative_to(mounted) else group.relative_to("/")
        folder = top if ".." in inside.parts else top / inside
        yield version, folder if folder.is_dir() else top, top


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None if the file does not exist or holds "max" (no limit)."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def share(available: int, processes: int, launched: int) -> int:
    """Bytes for one of several processes.

    Where the launcher tells the number of processes, each gets the same part of one half. Otherwise they get 1/2, 1/6,
    1/12, ... in the order in which they open a store: together never more than there is.

    Args:
        available: bytes.
        processes: number of processes on this machine that have a store of default size, this one included.
        launched: number of processes on this machine by the launcher; 1: unknown.
    """
    return available // (2 * launched if processes <= launched else processes * (processes + 1))


def launched_processes() -> int:
    """Number of processes on this machine, from the launcher's environment variables or from JAX; 1 if unknown."""
    counts = [int(n) for name in _LAUNCHERS for n in re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get(name, ""))[:1]]
    return max([1, _compat.processes_on_this_machine(), *counts])


class _Presence:
    """A locked file that tells other processes that this one has a store of default size."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._stores = 0
        self._mark: tuple[Path, int] | None = None

    def enter(self) -> int:
        """Counts a store of this process; returns the number of processes that have one."""
        with self._mutex:
            self._stores += 1
            with contextlib.suppress(OSError):  # without such a file processes do not see each other
                folder = _folder()
                if self._mark is None:
                    self._mark = _files.lock_new_file(folder, f"{os.getpid()}-")
                return 1 + sum(1 for path in folder.iterdir() if path != self._mark[0] and _files.is_locked(path))
            return 1

    def leave(self) -> None:
        """Counts a store of this process as closed."""
        with self._mutex:
            self._stores -= 1
            if self._stores > 0 or self._mark is None:
                return
            path, lock = self._mark
            self._mark = None
            path.unlink(missing_ok=True)
            os.close(lock)
            with contextlib.suppress(OSError):  # files of other processes are in the folder
                path.parent.rmdir()

    def forget(self) -> None:
        """In a forked child: the file is its parent's."""
        if self._mark is not None:
            os.close(self._mark[1])
        self.__init__()  # type: ignore[misc]


def _folder() -> Path:
    shared = Path("/dev/shm")
    folder = (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f".dejax-memory-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


presence = _Presence()
