"""Work on blocks by several threads. numpy releases the interpreter's lock, so threads use all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dejax.datasets._progress import Progress


def available_cores() -> int:
    """The cores that the process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def for_blocks(
    work: Callable[[int, int, int], None],
    total: int,
    size: int,
    *,
    threads: int | None = None,
    label: str = "fill",
    progress: bool | None = None,
) -> None:
    """Calls `work(number, start, stop)` for each block of `size` of `total` items.

    What a block does may depend on its number, never on the thread. So results do not depend on the number of threads.

    Args:
        work: called from several threads at once.
        total: number of items.
        size: items of a block; the last one may have fewer.
        threads: by default one for each core that the process may use.
        label: of the progress bar.
        progress: draw a bar; None draws on a terminal only.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, or None for all cores, got {threads}")
    count = threads or available_cores()
    starts = range(0, total, size)
    with Progress(label, total, enabled=progress) as bar:
        if count == 1 or len(starts) <= 1:
            for number, start in enumerate(starts):
                work(number, start, min(start + size, total))
                bar.update(min(size, total - start))
            return
        with ThreadPoolExecutor(count) as pool:
            # In the order of blocks: the bar advances, and the first error is raised.
            done = pool.map(lambda block: work(block[0], block[1], min(block[1] + size, total)), enumerate(starts))
            for start, _ in zip(starts, done, strict=True):
                bar.update(min(size, total - start))
