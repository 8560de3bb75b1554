"""Times `dejax.segment` next to `jax.ops`, from 10^5 to 10^8 entries, and the reproducers of four issues of JAX.

    python -m benchmarks segments --out benchmarks/results     # on a GPU, some minutes
    python -m benchmarks segments --quick                      # small shapes, for a test

A row is one reduction: its time by `jax.ops`, by `dejax.segment` without a plan and with one, what
`dejax.segment._cost` predicts, and the time of reading the entries at the bandwidth of a copy. Shapes whose arrays
would not fit in memory are left out. Times are of the device where a call takes less than 2 ms, else of the caller.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.provenance import Save
from benchmarks.tables import markdown
from dejax import segment
from dejax.segment import _cost

BYTES_PER_SECOND = 4.3e12
LARGEST = 16e9
"""Bytes of the entries of a shape: with their copies and results they fit in the memory of an H200."""


@dataclass(frozen=True, slots=True)
class Case:
    """A reduction of random entries."""

    entries: int
    segments: int
    width: int
    dtype: str = "float32"
    kind: str = "sum"
    is_sorted: bool = False
    gathered: bool = False
    deterministic: bool = False
    batch: int = 0
    name: str = ""

    @property
    def label(self) -> str:
        order = "sorted" if self.is_sorted else "unsorted"
        extra = "gathered " if self.gathered else "fixed order " if self.deterministic else ""
        return self.name or f"{extra}{self.kind} {order} {self.dtype}"

    @property
    def nbytes(self) -> float:
        return float(self.entries) * self.width * max(1, self.batch) * jnp.dtype(self.dtype).itemsize


def grid(quick: bool) -> Iterator[Case]:
    """Entries, widths, dtypes and orders."""
    if quick:
        for width in (1, 8):
            for is_sorted in (False, True):
                yield Case(1000, 100, width, is_sorted=is_sorted)
        yield Case(1000, 100, 4, "bfloat16", gathered=True)
        return
    degree = 10
    sizes = [(100_000, (1, 64, 512)), (2_000_000, (1, 16, 64, 512)), (20_000_000, (1, 8, 64)), (100_000_000, (1, 16))]
    for entries, widths in sizes:
        for width in widths:
            for dtype in ("float32", "float16"):
                for is_sorted in (True, False):
                    yield Case(entries, entries // degree, width, dtype, is_sorted=is_sorted)
    for entries, width in ((2_000_000, 64), (20_000_000, 64)):
        yield Case(entries, entries // degree, width, gathered=True)
        yield Case(entries, entries // degree, width, "bfloat16", gathered=True)
    for dtype in ("float32", "float16"):
        for entries in (100_000, 2_000_000, 20_000_000):
            yield Case(entries, entries // degree, 1, dtype, deterministic=True)
    yield Case(20_000_000, 2_000_000, 64, kind="max")
    yield Case(20_000_000, 2_000_000, 1, "int32")
    yield Case(2_000_000, 200_000, 64, "bfloat16")


def issues(quick: bool) -> Iterator[Case]:
    """The shapes of jax-ml/jax issues 26227, 38806, 39959 and 17844, as their public text has them.

    Of 39959 the text has the result, [1024, 12123]; four entries a segment are ours. 17844 is the one of
    `--xla_gpu_deterministic_ops=true`, which is of the whole process: run it with that flag in XLA_FLAGS.
    """
    small = 1000 if quick else 1
    for is_sorted in (False, True):
        shape = (100_000_000 // small, 1_000_000 // small)
        yield Case(*shape, 1, "float16", is_sorted=is_sorted, name=f"jax#26227 {'sorted' if is_sorted else 'unsorted'}")
    for size in (1, 16, 1024):
        yield Case(100_000 // small, size, 1, name=f"jax#38806 into {size}")
    yield Case(4 * 12_123 // small, 12_123 // small, 1, batch=1024 // small or 2, name="jax#39959 vmap")
    yield Case(4 * 4096, 4096, 1, name="jax#17844")
    yield Case(4 * 4096, 4096, 1, batch=100 if not quick else 2, name="jax#17844 vmap")


def arrays(case: Case) -> tuple[Any, Any, Any]:
    """Data, ids and senders (or None), made on the device."""
    keys = jax.random.split(jax.random.key(case.entries + case.width), 3)
    ids = jax.random.randint(keys[0], (case.entries,), 0, case.segments, jnp.int32)
    ids = jnp.sort(ids) if case.is_sorted else ids
    rows = case.segments if case.gathered else case.entries
    shape = (*((case.batch,) if case.batch else ()), rows, *((case.width,) if case.width > 1 else ()))
    dtype = jnp.dtype(case.dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        data = jax.random.randint(keys[1], shape, -100, 100, dtype)
    else:
        data = jax.random.normal(keys[1], shape, dtype)
    senders = jax.random.randint(keys[2], (case.entries,), 0, rows, jnp.int32) if case.gathered else None
    return data, ids, senders


def theirs(case: Case) -> Callable[..., Any]:
    operator = getattr(jax.ops, f"segment_{case.kind}")

    def run(data: Any, ids: Any, senders: Any, _: Any) -> Any:
        data = data if senders is None else data[senders]
        return operator(data, ids, case.segments, indices_are_sorted=case.is_sorted)

    return jax.jit(jax.vmap(run, (0, None, None, None)) if case.batch else run)


def ours(case: Case) -> Callable[..., Any]:
    def run(data: Any, ids: Any, senders: Any, plan: Any) -> Any:
        if case.gathered:
            return segment.gather_segment_sum(
                data, senders, ids, case.segments, indices_are_sorted=case.is_sorted, plan=plan
            )
        operator = getattr(segment, f"segment_{case.kind}")
        return operator(data, ids, case.segments, case.is_sorted, plan=plan, deterministic=case.deterministic)

    return jax.jit(jax.vmap(run, (0, None, None, None)) if case.batch else run)


def milliseconds(call: Callable[[], Any]) -> float:
    """Of one call: the device's time where it is short and there is a GPU, else the caller's, best of three rounds."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    once = time.perf_counter() - start
    if once < 2e-3 and jax.default_backend() == "gpu":
        from benchmarks import device_time

        found = device_time.profile_jax(call, 5)
        if found is not None:
            return found.span_ms
    calls = max(1, min(10, int(0.05 / once)))
    rounds = []
    for _ in range(3 if once < 0.3 else 1):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        rounds.append((time.perf_counter() - start) / calls)
    return min(rounds) * 1e3


def check(case: Case, found: Any, data: Any, ids: Any, senders: Any) -> float:
    """The largest error over the largest sum of magnitudes of a segment, against float64 by numpy."""
    data, ids = np.asarray(data.astype(jnp.float32), np.float64), np.asarray(ids)
    data = data if senders is None else data[np.asarray(senders)]
    found = np.asarray(found.astype(jnp.float32), np.float64)
    if case.kind == "max":
        want = np.full(found.shape, -np.inf)
        np.maximum.at(want, ids, data)
        return 0.0 if (found == want).all() else math.inf
    want, scale = np.zeros(found.shape), np.zeros(found.shape)
    axis = (slice(None), ids) if case.batch else ids
    np.add.at(want, axis, data)
    np.add.at(scale, axis, np.abs(data))
    return float(np.max(np.abs(found - want) / np.maximum(scale, 1e-30)))


def measure(case: Case, peers: bool = True) -> dict[str, Any]:
    """The times of a case; `error` where it is small enough to be computed by numpy."""
    data, ids, senders = arrays(case)
    args = (data, ids, senders)
    count = case.segments
    call = ours(case)
    row: dict[str, Any] = {"label": case.label, **asdict(case)}
    if case.nbytes <= 4e7:
        row["error"] = check(case, call(*args, None), *args)
        limit = 2.0**-24 if case.dtype in ("float32", "int32") else 2.0**-7
        assert row["error"] <= 64 * limit, (case, row["error"])
    row["ours_ms"] = milliseconds(lambda: call(*args, None))
    plan = segment.edge_plan(senders, ids, data.shape[0], count) if case.gathered else segment.plan(ids, count)
    row["plan_ms"] = milliseconds(functools.partial(call, *args, plan))
    if peers:
        their = theirs(case)
        row["jax_ms"] = milliseconds(lambda: their(*args, None))
        row["ratio"] = row["jax_ms"] / row["ours_ms"]
        row["plan_ratio"] = row["jax_ms"] / row["plan_ms"]
    shape = _cost.ReductionSize(case.entries, count, case.width * max(1, case.batch), case.dtype)
    row["predicted_ms"] = 1e3 * _cost.kernel_seconds(shape, case.is_sorted)
    row["bound_ms"] = 1e3 * case.nbytes / BYTES_PER_SECOND
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    names = ("jax_ms", "ours_ms", "plan_ms", "predicted_ms", "bound_ms", "ratio", "plan_ratio")
    shape = ("label", "entries", "segments", "width")
    figures = ([f"{r[n]:.3g}" if n in r else "" for n in names] for r in rows)
    lines = [[*(str(r[n]) for n in shape), *each] for r, each in zip(rows, figures, strict=True)]
    return markdown(["case", *shape[1:], *names], lines)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means and the least of the ratios."""
    found: dict[str, float] = {}
    for column in ("ratio", "plan_ratio"):
        for name, some in (
            ("all", rows),
            ("16 bits", [r for r in rows if jnp.dtype(r["dtype"]).itemsize == 2]),
            ("issues", [r for r in rows if r["name"]]),
        ):
            ratios = [r[column] for r in some if column in r]
            if ratios:
                found[f"{column} {name}, geometric mean"] = statistics.geometric_mean(ratios)
                found[f"{column} {name}, least"] = min(ratios)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--only", default="", help="cases whose label contains this")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many seconds")


def run(args: argparse.Namespace, save: Save) -> None:
    start, rows = time.perf_counter(), []
    for case in [*issues(args.quick), *grid(args.quick)]:
        if args.only in case.label and case.nbytes <= LARGEST and time.perf_counter() - start < args.seconds:
            rows.append(measure(case))
            print(table(rows[-1:]).splitlines()[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    print(table(rows))
    for name, value in summary(rows).items():
        print(f"{name}: {value:.2f}")
    save({"rows": rows})
