"""Tuning schedules: every candidate of a kernel is run on the real arrays and timed on the device.

Times come from the profiler, which sees what a kernel takes on the device however short it is; one recording holds all
candidates of a kernel, told apart by the names that they are given.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from dejax.pallas import _triton, tuned_tables
from dejax.pallas.profile import record

Fields = dict[str, Any]
Call = Callable[[Fields], Any]
# (candidates, call) -> seconds of each, None for one that cannot run.
Measure = Callable[[Sequence[Fields], Call], list[float | None]]

_REPEATS = 3
_COMPILERS = 8  # candidates compiled at once
# A schedule must be faster than the heuristic's by this much to be kept: less is noise.
_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning found for one kernel and shape.

    Attributes:
      kernel: `gemm`, `outer` or `traversal`.
      key: the shape, as in the tables.
      fields: the schedule chosen.
      seconds: its time.
      heuristic_seconds: the time of the heuristic's schedule.
      tried: candidates that could run.
    """

    kernel: str
    key: str
    fields: Fields
    seconds: float
    heuristic_seconds: float
    tried: int


@dataclass
class Tuner:
    """Chooses schedules by trying them; `with tuner.at_work():` makes kernels ask it."""

    measure: Measure | None = None
    progress: Callable[[str], None] = lambda line: None
    found: dict[tuple[str, str], Tuned] = field(default_factory=dict)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Tuner]:
        token = tuned_tables.chooser.set(self.choose)
        try:
            yield self
        finally:
            tuned_tables.chooser.reset(token)

    def choose(self, kernel: str, key: str, heuristic: Fields, candidates: list[Fields], call: Call) -> Fields:
        """The fastest of the heuristic's schedule and the candidates."""
        known = self.found.get((kernel, key))
        if known is not None:
            return dict(known.fields)
        token = tuned_tables.chooser.set(None)  # what the kernel calls in its turn is not tuned inside
        try:
            tries = [heuristic, *(c for c in candidates if c != heuristic)]
            times = (self.measure or measure_on_device)(tries, call)
        finally:
            tuned_tables.chooser.reset(token)
        if times[0] is None:
            return heuristic
        best = min((i for i, t in enumerate(times) if t is not None), key=lambda i: times[i])  # type: ignore[arg-type, return-value]
        if times[best] > times[0] * (1 - _GAIN):  # type: ignore[operator]
            best = 0
        ran = sum(t is not None for t in times)
        tuned = Tuned(kernel, key, tries[best], times[best], times[0], ran)  # type: ignore[arg-type]
        self.found[kernel, key] = tuned
        self.progress(
            f"{kernel:<10}{key:<44}{tuned.heuristic_seconds * 1e6:>10.1f} us -> {tuned.seconds * 1e6:>8.1f} us  "
            f"{tuned.tried} tried"
        )
        return dict(tuned.fields)

    def table(self) -> dict[str, dict[str, Fields]]:
        """`{kernel: {key: fields}}`, of what tuning changed and what it confirmed."""
        out: dict[str, dict[str, Fields]] = {}
        for tuned in self.found.values():
            out.setdefault(tuned.kernel, {})[tuned.key] = tuned.fields
        return out

    def save(self, path: Path) -> None:
        """Adds what was found to a table on disk; others' entries stay. The file is replaced as a whole."""
        table = tuned_tables.read_table(path)
        for kernel, entries in self.table().items():
            table.setdefault(kernel, {}).update(entries)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({k: dict(sorted(v.items())) for k, v in sorted(table.items())}, file, indent=1)
            file.write("\n")
        Path(temporary).replace(path)
        tuned_tables.forget_tables()


def measure_on_device(candidates: Sequence[Fields], call: Call) -> list[float | None]:
    """Seconds on the device of each candidate, the median of some repeats; None where it does not compile or run.

    Raises:
      RuntimeError: the profiler recorded no kernel at all (there is no GPU, or another profiler is at work).
    """
    with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
        futures = [
            pool.submit(contextvars.copy_context().run, _compiled, number, fields, call)
            for number, fields in enumerate(candidates)
        ]
        runs = {number: run for number, future in enumerate(futures) if (run := future.result()) is not None}
    records: dict[str, list[float]] = {}
    for kernel in record(lambda: _repeat(runs.values())):
        records.setdefault(kernel.name, []).append(kernel.duration_ns)
    if runs and not records:
        raise RuntimeError(
            "the profiler recorded no kernels: tuning needs a GPU, and no other profiler may be at work in the process"
        )
    times: list[float | None] = [None] * len(candidates)
    for number in runs:
        # A candidate's kernels run the same number of times each: their medians add up to one call.
        mine = [durations for name, durations in records.items() if name.startswith(_name(number) + "_")]
        if mine:
            times[number] = sum(statistics.median(d) * (len(d) / _REPEATS) for d in mine) / 1e9
    return times


def _compiled(number: int, fields: Fields, call: Call) -> Callable[[], Any] | None:
    """The candidate as one compiled program, run once; None where it needs too many registers or too much memory."""
    try:
        with _triton.label(_name(number)):
            jaxpr = jax.make_jaxpr(lambda: call(fields))()
        # The arrays that `call` holds are given as arguments: as constants they would be copied into the program.
        run = jax.jit(lambda arrays: jax.core.eval_jaxpr(jaxpr.jaxpr, arrays)).lower(jaxpr.consts).compile()
        jax.block_until_ready(run(jaxpr.consts))
    except Exception:  # whatever the compiler or the driver says: this one is out
        return None
    return lambda: run(jaxpr.consts)


def _repeat(runs: Iterable[Callable[[], Any]]) -> None:
    for run in runs:
        for _ in range(_REPEATS):
            jax.block_until_ready(run())


def _name(number: int) -> str:
    return f"candidate{number}"
