"""What a store holds over time: sampled by a thread, drawn, or written for Perfetto."""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dejax._optional import optional

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Moment:
    """The counters of a store at a time.

    Attributes:
        seconds: since the recording began.
        ring, host, disk: bytes that are allocated in each tier.
        live: bytes that are stored and not fetched.
        moved: bytes copied to host memory and back, written and read, so far.
        stalls: seconds for which launches and devices waited, so far.
    """

    seconds: float
    ring: int
    host: int
    disk: int
    live: int
    moved: int
    stalls: float

    @staticmethod
    def of(stats: Any, seconds: float) -> Moment:
        """From the counters of a store."""
        moved = stats.copied_out_bytes + stats.prefetched_bytes + stats.demand_bytes
        stalls = stats.store_stall_seconds + stats.fetch_stall_seconds
        stalls += stats.device_store_stall_seconds + stats.device_fetch_stall_seconds
        return Moment(
            seconds,
            stats.ring_bytes,
            stats.host_bytes,
            stats.disk_bytes,
            stats.live_bytes,
            moved + stats.written_bytes + stats.read_bytes,
            stalls,
        )


class Recording:
    """The counters of a store while it is recorded: a context manager, made by `ActivationStore.record`.

    Args:
        store: an `ActivationStore`.
        interval: seconds between samples.

    >>> import tempfile
    >>> from dejax.offload import ActivationStore
    >>> with ActivationStore() as store, store.record() as recording:
    ...     pass  # your steps
    >>> recording.trace(f"{tempfile.mkdtemp()}/trace.json")  # for ui.perfetto.dev
    """

    def __init__(self, store: Any, interval: float = 0.002) -> None:
        if interval <= 0:
            raise ValueError(f"ActivationStore.record: `interval` must be positive, got {interval}")
        self.moments: list[Moment] = []
        self._store = weakref.ref(store)
        self._interval = interval
        self._done = threading.Event()
        self._began = time.perf_counter()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Recording:
        self._began = time.perf_counter()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="dejax-offload-record", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the recording; a second call does nothing."""
        if self._done.is_set():
            return
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._done.wait(self._interval):
            if not self._sample():
                return

    def _sample(self) -> bool:
        store = self._store()
        if store is None or not store.is_open:
            return False
        try:
            self.moments.append(Moment.of(store.stats(), time.perf_counter() - self._began))
        except RuntimeError:  # the store closes meanwhile
            return False
        return True

    def plot(self, path: str | Path) -> None:
        """Draws the bytes in each tier, and the share of time that was spent waiting."""
        with optional("matplotlib", of="the plot of a recording"):
            import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        moments = _some(self.moments, "plot")
        at = [m.seconds for m in moments]
        figure, (tiers, waits) = plt.subplots(
            2, 1, figsize=(7, 4.5), sharex=True, gridspec_kw={"height_ratios": [3, 1]}
        )
        for name, style in (("live", "k-"), ("ring", "-"), ("host", "-"), ("disk", "-")):
            label = {"live": "stored, not fetched", "ring": "device ring", "host": "host memory"}.get(name, name)
            tiers.plot(at, [getattr(m, name) / _GIB for m in moments], style, lw=1, label=label)
        tiers.set_ylabel("GiB")
        tiers.legend(fontsize=7)
        shares = [(b.stalls - a.stalls) / max(1e-9, b.seconds - a.seconds) for a, b in itertools.pairwise(moments)]
        waits.fill_between(at[1:], shares, step="pre", color="tab:red", lw=0)
        waits.set_ylabel("waiting")
        waits.set_xlabel("seconds")
        figure.savefig(path, bbox_inches="tight")
        plt.close(figure)

    def trace(self, path: str | Path) -> None:
        """Writes a JSON trace that Perfetto and chrome://tracing show: a counter track for each tier, and waits."""
        moments = _some(self.moments, "trace")
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "dejax offload"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "waits"}},
        ]
        for moment in moments:
            tiers = {"ring": moment.ring, "host": moment.host, "disk": moment.disk, "live": moment.live}
            microseconds = moment.seconds * 1e6
            for name, value in tiers.items():
                events.append(
                    {"name": f"{name}, bytes", "ph": "C", "pid": 1, "ts": microseconds, "args": {"bytes": value}}
                )
        for a, b in itertools.pairwise(moments):
            waited = min(b.stalls - a.stalls, b.seconds - a.seconds)
            if waited > 0:
                events.append(
                    {"name": "wait", "ph": "X", "pid": 1, "tid": 1, "ts": a.seconds * 1e6, "dur": waited * 1e6}
                )
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _some(moments: Sequence[Moment], what: str) -> Sequence[Moment]:
    if len(moments) < 2:
        raise ValueError(f"Recording.{what}: there must be at least two samples, got {len(moments)}; record a step")
    return moments
