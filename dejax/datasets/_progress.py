"""A progress bar on stderr: one line redrawn on a terminal, silent elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

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
