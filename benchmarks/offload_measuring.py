"""Measurements for the benchmarks of offload: cases in processes of their own, steps, the bus, copies and compute."""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.clock import rounds
from benchmarks.provenance import Save
from benchmarks.tables import markdown

QUICK = "DEJAX_BENCHMARK_QUICK" in os.environ
"""Every case in a small form, also on a CPU: checks that it runs. GiB are then MiB."""
GIB = 2**20 if QUICK else 2**30


def say(*words: Any) -> None:
    print(*words, flush=True)


def keep(found: Any) -> None:
    """Writes the results that a case has so far. They remain if its time runs out."""
    if "DEJAX_BENCHMARK_PART" in os.environ:
        Path(os.environ["DEJAX_BENCHMARK_PART"]).write_text(json.dumps(found, default=str))


def in_processes(
    name: str,
    args: argparse.Namespace,
    save: Save,
    limit: Callable[[str], float],
    environment: Callable[[str], dict[str, str]],
) -> None:
    """Runs each of `args.cases` by `run_case` in a process of its own, and saves what it kept when its time is over.

    Args:
        name: the benchmark's.
        args, save: as it got them; `args.quick` makes all small.
        limit: the seconds of a case.
        environment: further variables of its process, which override none that are set.
    """
    report: dict[str, Any] = {"cases": {}}
    for case in args.cases:
        say(f"== {case}")
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part.json")
            variables = environment(case) | os.environ | {"DEJAX_BENCHMARK_PART": str(part)}
            if args.quick:
                variables["DEJAX_BENCHMARK_QUICK"] = "1"
            command = [sys.executable, "-m", "benchmarks", name, *args.argv, "--child", case]
            found: dict[str, Any] = {}
            try:
                status = subprocess.run(command, env=variables, timeout=limit(case), check=False).returncode
                if status:
                    found["error"] = f"exit status {status}"
            except subprocess.TimeoutExpired:
                found["error"] = f"its {limit(case):.0f} s were over"
            if part.exists():
                found |= json.loads(part.read_text())
        found["case_s"] = time.perf_counter() - begin
        say(f"{case}: {found.get('error', 'done')}, {found['case_s']:.1f} s")
        report["cases"][case] = found
        save(report)


def run_case(case: Callable[[], dict[str, Any]]) -> None:
    """In the process of a case: keeps what it finds; of one that fails, what it had and the error."""
    try:
        found = case()
    except Exception as error:
        traceback.print_exc()
        part = Path(os.environ["DEJAX_BENCHMARK_PART"])
        found = json.loads(part.read_text()) if part.exists() else {}
        found["error"] = f"{type(error).__name__}: {str(error)[:600]}"
    keep(found)


def time_step(
    step: Callable[..., Any], *args: Any, seconds: float = 0.6, fewest: int = 3, dispatched: int = 3, unseen: int = 2
) -> float:
    """Seconds per step: the median over groups of steps that are dispatched together, after a warm-up."""
    times = rounds(functools.partial(step, *args), dispatched, fewest=fewest, seconds=seconds, warm_up=unseen)
    return statistics.median(times)


def same_bits(a: Any, b: Any) -> bool:
    import jax

    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def bandwidths(nbytes: int = GIB, count: int = 4) -> dict[str, float]:
    """GB/s of the copy engine, device to pinned host and back, in turn: jax does not run both at once."""
    import jax
    import jax.numpy as jnp

    host, near = jax.memory.Space.Host, jax.memory.Space.Device
    x = jax.block_until_ready([jnp.full(nbytes // 4 // count, k, jnp.float32) for k in range(count)])
    y = jax.block_until_ready(jax.device_put(x, host))
    found = {}
    ways: dict[str, Callable[[], Any]] = {
        "device_to_host": lambda: jax.device_put(x, host),
        "host_to_device": lambda: jax.device_put(y, near),
    }
    for name, run in ways.items():
        found[name] = nbytes / min(rounds(run, fewest=5, warm_up=0)) / 1e9
    return found


def measure(
    name: str,
    compiled: Callable[[], Any],
    args: tuple[Any, ...],
    store: Any = None,
    reference: Any = None,
    **how: Any,
) -> dict[str, Any]:
    """Runs and times a step: a row of the table. `compiled` makes the step, so that the row can have its error."""
    row: dict[str, Any] = {"name": name}
    try:
        compiled = compiled()
        row["temp_gib"] = compiled.memory_analysis().temp_size_in_bytes / GIB
        out = compiled(*args)
        before = store.stats() if store else None
        row["ms"] = 1e3 * time_step(compiled, *args, **how)
        if reference is not None:
            row["same_bits"] = same_bits(compiled(*args), reference)
        if store and before:
            stats = store.stats()
            runs = max(1, stats.runs - before.runs)
            row["ring_gib"] = stats.ring_bytes / GIB
            row["saving"] = stats.saving
            row["host_gib"] = stats.host_bytes / GIB
            row["disk_gib"] = stats.disk_bytes / GIB
            for key in ("stored", "copied_out", "ring_hit", "prefetched", "demand", "written", "read", "cancelled"):
                row[f"{key}_gib"] = (getattr(stats, f"{key}_bytes") - getattr(before, f"{key}_bytes")) / runs / GIB
            since = lambda *names: sum(getattr(stats, n) - getattr(before, n) for n in names)  # noqa: E731
            row["launch_us"] = 1e6 * since("launch_seconds") / max(1, since("fetched_count", "stored_count"))
            row["store_stall_ms"] = 1e3 * since("store_stall_seconds") / runs
            row["fetch_stall_ms"] = 1e3 * since("fetch_stall_seconds") / runs
            stalls = since("device_store_stall_seconds", "device_fetch_stall_seconds")
            row["device_stall_ms"] = 1e3 * stalls / runs
        row["out"] = out
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        traceback.print_exc()
    return row


COLUMNS = (
    "name ms temp_gib ring_gib saving host_gib same_bits copied_out_gib ring_hit_gib prefetched_gib demand_gib "
    "launch_us store_stall_ms fetch_stall_ms device_stall_ms written_gib read_gib error"
)


def table(rows: list[dict[str, Any]]) -> None:
    keys = [key for key in COLUMNS.split() if any(key in row for row in rows)]
    shown = lambda value: f"{value:.3f}" if isinstance(value, float) else str(value)  # noqa: E731
    say(markdown(keys, ([shown(row.get(key, "")) for key in keys] for row in rows)))
