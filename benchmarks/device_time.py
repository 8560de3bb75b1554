"""Device time of a call from the profilers of jax and PyTorch: span, sum and number of kernels.

A layer of 20 us cannot be timed from Python, where one dispatch costs about 0.1 ms. The profilers give the start and
the duration of each kernel, copy and fill on the device. Several calls in a row are recorded. Each has the same number
of records, which separates one call from the next.

While it is profiled, XLA launches kernels one by one instead of as CUDA graphs, so that 100 small kernels seem slower
than they are. `XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true` keeps the CUDA graphs.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Record = tuple[float, float]
"""Start and duration on the device, ns."""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Times of one call: medians over the recorded calls."""

    span_ms: float
    """From the start of the first kernel to the end of the last."""
    kernels_ms: float
    """Sum of the durations of kernels, copies and fills."""
    launches: float
    """Number of kernels, copies and fills."""

    def as_dict(self) -> dict[str, float]:
        return {key: round(value, 6) for key, value in asdict(self).items()}


def summarize(records: Sequence[Record], calls: int) -> DeviceTime | None:
    """Splits the records of `calls` equal calls; None if there are no records (on a CPU).

    If the number of records is no multiple of the number of calls (the host decides what to launch), the calls are
    split at the longest pauses.
    """
    if not records:
        return None
    ordered = sorted(records)
    if len(ordered) % calls == 0:
        size = len(ordered) // calls
        groups = [ordered[i * size : (i + 1) * size] for i in range(calls)]
    else:
        ends, latest = [], 0.0
        for start, duration in ordered:
            latest = max(latest, start + duration)
            ends.append(latest)
        pauses = sorted(range(1, len(ordered)), key=lambda i: ends[i - 1] - ordered[i][0])
        cuts = [0, *sorted(pauses[: calls - 1]), len(ordered)]
        groups = [ordered[a:b] for a, b in itertools.pairwise(cuts)]
    spans = [max(start + duration for start, duration in group) - group[0][0] for group in groups]
    sums = [sum(duration for _, duration in group) for group in groups]
    return DeviceTime(statistics.median(spans) / 1e6, statistics.median(sums) / 1e6, len(ordered) / calls)


def profile_jax(call: Callable[[], Any], calls: int) -> DeviceTime | None:
    """Records `calls` calls with jax's profiler. They must be compiled already."""
    return summarize([record for _, record in _jax_records(call, calls)], calls)


def kernels_jax(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Milliseconds of each kernel in one call, by name."""
    found: dict[str, float] = {}
    for name, (_, duration) in _jax_records(call, calls):
        found[name] = found.get(name, 0.0) + duration / calls / 1e6
    return found


def _jax_records(call: Callable[[], Any], calls: int) -> list[tuple[str, Record]]:
    import jax

    from dejax.pallas.profile import record

    found = record(lambda: jax.block_until_ready([call() for _ in range(calls)]))
    return [(r.name, (r.start_ns, r.duration_ns)) for r in found]


def profile_torch(call: Callable[[], Any], calls: int) -> DeviceTime | None:
    """Records `calls` calls with PyTorch's profiler."""
    import torch

    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return summarize([(1e3 * e["ts"], 1e3 * e["dur"]) for e in events if e.get("cat") in kinds], calls)
