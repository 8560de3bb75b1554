"""Tuned schedules: the table on disk, the choice between a tuner, the table and the heuristic, and the tuner.

`rgnn.Program.tune` writes the table of a device. A tuner runs every candidate of a kernel on the real arrays and times
it on the device. Times come from the profiler, which sees what a
kernel takes on the device however short it is; one recording holds all candidates of a kernel, told apart by the names
that they are given.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from dejax._files import cache_folder, locked, write_whole
from dejax._platform import default_device, on_gpu
from dejax.pallas import _triton
from dejax.pallas._shapes import next_power_of_two
from dejax.pallas.profile import record

Fields = dict[str, Any]
"""The fields of a schedule by name."""
Table = dict[str, dict[str, Fields]]
"""Fields by kernel (`gemm`, `outer` or `traversal`) and key, which shapes that are alike share."""
Call = Callable[[Fields], Any]
# (candidates, call) -> seconds of each, None for one that cannot run.
Measure = Callable[[Sequence[Fields], Call], list[float | None]]

_REPEATS = 3
_COMPILERS = 8  # candidates compiled at once
# A schedule must be faster than the heuristic's by this much to be kept: less is noise.
_GAIN = 0.03


# --- tables ----------------------------------------------------------------------------------------------------------


def cache_file() -> Path:
    """Where schedules tuned on this machine's device are kept: `$DEJAX_CACHE_DIR`, or the user's cache folder."""
    return cache_folder() / f"schedules_{device_name()}.json"


def device_name() -> str:
    """The default device, as part of a file's name: `nvidia_h200`."""
    return re.sub(r"[^a-z0-9]+", "_", default_device().device_kind.lower()).strip("_")


def read_table(path: Path) -> Table:
    """The table in a file; empty where there is none, or none that can be read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {kernel: {key: dict(fields) for key, fields in schedules.items()} for kernel, schedules in table.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        warnings.warn(f"{path} holds no table of schedules ({error}); delete it or tune again", stacklevel=2)
        return {}


@functools.cache
def _table_of(device: str) -> Table:
    return read_table(cache_file())


def forget_table() -> None:
    """Forgets the table that was read: the next kernel reads the file again."""
    _table_of.cache_clear()


# --- the choice ------------------------------------------------------------------------------------------------------

_tuner: contextvars.ContextVar[Tuner | None] = contextvars.ContextVar("dejax_tuner", default=None)


def choose(kernel: str, key: str, heuristic: Fields, candidates: Callable[[], list[Fields]], call: Call) -> Fields:
    """Fields of the schedule for a kernel: from a tuner at work, else from the table, else the heuristic's.

    Args:
      kernel: `gemm`, `outer` or `traversal`.
      key: what is alike in shape shares a key.
      heuristic: the fields by the heuristic.
      candidates: gives other fields to try.
      call: runs the kernel with given fields, for a tuner to time.
    """
    tuner = _tuner.get()
    if tuner is not None:
        return tuner.choose(kernel, key, heuristic, candidates(), call)
    fields = _table_of(device_name()).get(kernel, {}).get(key) if on_gpu() else None
    # Another version of dejax may have written other fields.
    return dict(fields if fields and fields.keys() <= heuristic.keys() else heuristic)


def bucket(count: float) -> int:
    """The power of two that stands for a count, so that similar counts share a schedule."""
    return next_power_of_two(max(1, round(count)))


# --- the tuner -------------------------------------------------------------------------------------------------------


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
        with _set_tuner(self):
            yield self

    def choose(self, kernel: str, key: str, heuristic: Fields, candidates: list[Fields], call: Call) -> Fields:
        """The fastest of the heuristic's schedule and the candidates."""
        known = self.found.get((kernel, key))
        if known is not None:
            return dict(known.fields)
        tries = [heuristic, *(c for c in candidates if c != heuristic)]
        with _set_tuner(None):  # kernels that this kernel calls are not tuned inside
            measured = (self.measure or measure_on_device)(tries, call)
        times = {i: seconds for i, seconds in enumerate(measured) if seconds is not None}
        if 0 not in times:
            return heuristic
        best = min(times, key=times.__getitem__)
        if times[best] > times[0] * (1 - _GAIN):
            best = 0
        tuned = Tuned(kernel, key, tries[best], times[best], times[0], len(times))
        self.found[kernel, key] = tuned
        self.progress(
            f"{kernel:<10}{key:<44}{tuned.heuristic_seconds * 1e6:>10.1f} us -> {tuned.seconds * 1e6:>8.1f} us  "
            f"{tuned.tried} tried"
        )
        return dict(tuned.fields)

    def save(self, path: Path) -> None:
        """Adds what tuning changed or confirmed to a table on disk. Other entries stay; the file is replaced."""
        with locked(path.parent):  # another process may add its entries
            table = read_table(path)
            for (kernel, key), tuned in self.found.items():
                table.setdefault(kernel, {})[key] = tuned.fields
            text = json.dumps({k: dict(sorted(v.items())) for k, v in sorted(table.items())}, indent=1)
            write_whole(path, f"{text}\n".encode())
        forget_table()


@contextlib.contextmanager
def _set_tuner(tuner: Tuner | None) -> Iterator[None]:
    token = _tuner.set(tuner)
    try:
        yield
    finally:
        _tuner.reset(token)


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
