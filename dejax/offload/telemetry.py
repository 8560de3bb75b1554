"""What a store holds over time: sampled by a thread, drawn, or written for Perfetto."""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from dejax._optional import new_figure

_GIB = 2**30


class Recording:
    """Samples the counters of an `ActivationStore` over time. `ActivationStore.record` makes one, as a context manager.

    Args:
        store: the store.
        interval: seconds between samples.

    Attributes:
        samples: the `StoreStats` of the store, in order of time.

    >>> import tempfile
    >>> from dejax.offload import ActivationStore
    >>> with ActivationStore() as store, store.record() as recording:
    ...     pass  # your steps
    >>> recording.trace(f"{tempfile.mkdtemp()}/trace.json")  # for ui.perfetto.dev
    """

    def __init__(self, store: Any, interval: float = 0.002) -> None:
        if interval <= 0:
            raise ValueError(f"ActivationStore.record: `interval` must be positive, got {interval}")
        self.samples: list[Any] = []
        self._store = weakref.ref(store)
        self._interval = interval
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Recording:
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
            self.samples.append(store.stats())
        except RuntimeError:  # the store closes meanwhile
            return False
        return True

    def plot(self, path: str | Path) -> None:
        """Draws the bytes in each tier (device, host memory, disk) over time, and the share of time spent waiting."""
        figure = new_figure("the plot of a recording", (7.0, 4.5))
        samples = self._some("plot")
        at = [sample.open_seconds - samples[0].open_seconds for sample in samples]
        tiers, waits = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        for name, style in (("live", "k-"), ("ring", "-"), ("host", "-"), ("disk", "-")):
            label = {"live": "stored, not fetched", "ring": "device ring", "host": "host memory"}.get(name, name)
            tiers.plot(at, [getattr(s, f"{name}_bytes") / _GIB for s in samples], style, lw=1, label=label)
        tiers.set_ylabel("GiB")
        tiers.legend(fontsize=7)
        waited = itertools.pairwise([sample.waited_seconds for sample in samples])
        shares = [
            (b - a) / max(1e-9, end - begin)
            for (a, b), (begin, end) in zip(waited, itertools.pairwise(at), strict=True)
        ]
        waits.fill_between(at[1:], shares, step="pre", color="tab:red", lw=0)
        waits.set_ylabel("waiting")
        waits.set_xlabel("seconds")
        figure.savefig(path, bbox_inches="tight")

    def trace(self, path: str | Path) -> None:
        """Writes a JSON trace for Perfetto or chrome://tracing, with a counter track for each tier and the waits."""
        samples = self._some("trace")
        began = samples[0].open_seconds
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "dejax offload"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "waits"}},
        ]
        for sample in samples:
            at = (sample.open_seconds - began) * 1e6  # microseconds
            for name in ("ring", "host", "disk", "live"):
                nbytes = getattr(sample, f"{name}_bytes")
                events.append({"name": f"{name}, bytes", "ph": "C", "pid": 1, "ts": at, "args": {"bytes": nbytes}})
        for a, b in itertools.pairwise(samples):
            waited = min(b.waited_seconds - a.waited_seconds, b.open_seconds - a.open_seconds)
            if waited > 0:
                at = (a.open_seconds - began) * 1e6
                events.append({"name": "wait", "ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": waited * 1e6})
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")

    def _some(self, what: str) -> list[Any]:
        if len(self.samples) < 2:
            count = len(self.samples)
            raise ValueError(f"Recording.{what}: there must be at least two samples, got {count}; record a step")
        return self.samples
