"""What a process holds, compared before and after many stores: descriptors, our threads, and all threads.

A thread is listed under /proc for some milliseconds after it was joined, and longer on a busy machine: Python's `join`
and the kernel's both return before the kernel has removed it. So a comparison waits until the ends are seen. Threads
with other names belong to XLA and TensorStore. Their pools grow at any time, by a few threads in all.
"""

import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

OURS = "dejax-offload"
PATIENCE = 20.0  # seconds; a passing test waits milliseconds


@dataclass(frozen=True)
class Held:
    """Counts of this process.

    Attributes:
        descriptors: open files.
        python_threads: Python threads of stores.
        native_threads: C++ threads of stores.
        threads: all threads.
    """

    descriptors: int
    python_threads: int
    native_threads: int
    threads: int


def held() -> Held:
    """What this process holds now."""
    native = 0
    tasks = list(Path("/proc/self/task").iterdir())
    for task in tasks:
        try:
            native += (task / "comm").read_text().strip() == OURS
        except OSError:  # it ended
            pass
    return Held(
        descriptors=len(os.listdir("/proc/self/fd")),
        python_threads=sum(thread.name.startswith(OURS) for thread in threading.enumerate()),
        native_threads=native,
        threads=len(tasks),
    )


def assert_given_back(before: Held, stores: int, patience: float = PATIENCE) -> None:
    """Asserts that `stores` stores, all closed or dropped since `before`, have left no descriptor and no thread."""
    end = time.monotonic() + patience
    while True:
        gc.collect()
        now = held()
        left = {
            "descriptors": now.descriptors > before.descriptors,
            "Python threads": now.python_threads > before.python_threads,
            "C++ threads": now.native_threads > before.native_threads,
            "threads, in proportion to stores": now.threads - before.threads >= max(stores / 10, 1),
        }
        if not any(left.values()):
            return
        assert time.monotonic() < end, f"{stores} stores left {[k for k, v in left.items() if v]}: {before}, {now}"
        time.sleep(0.01)


def eventually(holds, patience: float = PATIENCE) -> bool:
    """Whether `holds()` becomes true within the patience, which only a failing test uses up."""
    end = time.monotonic() + patience
    while not holds():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True
