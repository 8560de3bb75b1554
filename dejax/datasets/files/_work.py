"""Long work on the host: blocks on several threads, and a progress bar on stderr, silent where there is no terminal.

numpy releases the interpreter's lock, so threads use all cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TextIO


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
        label: the label of the progress bar.
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


_REDRAW_SECONDS = 0.1


class Progress:
    """Counts finished work and draws it; `with Progress("parse", total) as bar: bar.update(n)`.

    Args:
        label: the name of the work.
        total: units of work in all; None if unknown (only the count and the rate are drawn).
        unit: "B" draws sizes in MiB; any other unit follows the count.
        enabled: None draws on a terminal only.
        stream: the stream to draw on; stderr by default.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        *,
        unit: str = "",
        enabled: bool | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._stream = stream or sys.stderr
        self._enabled = self._stream.isatty() if enabled is None else enabled
        self._start = self._drawn = time.perf_counter()
        self.count = 0

    def update(self, amount: int = 1) -> None:
        """Adds `amount` finished units, and redraws at most ten times per second."""
        self.count += amount
        if self._enabled and (now := time.perf_counter()) - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            self._draw("\r")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._draw("\r", end="\n")

    def _draw(self, begin: str, end: str = "") -> None:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        scale, unit = (2**20, "MiB") if self._unit == "B" else (1, self._unit)
        count = f"{self.count / scale:,.1f}" if self._unit == "B" else f"{self.count:,}"
        rate = f"{self.count / scale / seconds:,.1f}/s"
        if self._total:
            share = min(self.count / self._total, 1.0)
            bar = "#" * round(24 * share)
            total = f"{self._total / scale:,.1f}" if self._unit == "B" else f"{self._total:,}"
            line = f"{self._label:<24.24} [{bar:<24}] {100 * share:3.0f}% {count}/{total} {unit} {rate}"
        else:
            line = f"{self._label:<24.24} {count} {unit} {rate}"
        self._stream.write(f"{begin}{line:<100}{end}")
        self._stream.flush()
