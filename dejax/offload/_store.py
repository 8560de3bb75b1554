"""`ActivationStore`: where offloaded tensors are between forward and backward."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from dejax import _native
from dejax.offload import _current, _files
from dejax.offload._calls import DEVICE
from dejax.offload._notes import notes
from dejax.offload._stats import StoreStats

Engine = Literal["auto", "direct", "buffered", "tensorstore"]
_PAGE = 4096

_open: weakref.WeakSet[ActivationStore] = weakref.WeakSet()
_default_lock = threading.Lock()
_default: ActivationStore | None = None


class ActivationStore:
    """Memory for what forward passes hand to backward passes: the device's ring, then pinned host memory, then disk.

    A context manager: steps that this thread dispatches inside `with` use it, unless they were traced with a store of
    their own. Leaving waits for them and closes the store. Other threads enter it themselves, with `with` or `use`; the
    last `with` to be left closes it. Tensors move down a tier only when the one above is full; the last ones of a
    forward pass, which backward wants first, stay highest.

    Args:
        path: a folder, or several, for the disk tier; chunks are striped over them. None: no disk tier. In each, the
            store makes a folder of its own, which goes when the store closes; those of processes that died are
            removed first.
        device_bytes: of the ring on each device. None: what one call of an offloaded function stores; where its
            arithmetic takes less time than the bus, twice that, at least six tensors (see `ring_bytes` in
            `_transform.py` for the figures). 0: no ring; the compute stream then waits for each copy.
        host_bytes: cap of pinned (on the CPU: ordinary) host memory. None: half of what the machine has available now.
        disk_bytes: cap of the disk tier. None: as much as there is.
        engine: how files are written: "direct" (O_DIRECT where the file system takes it), "buffered" (through the
            page cache), "tensorstore", or "auto", which is "direct": it takes least of the processor.
        checksum: verify what is read from disk. A damaged file then is an error and never a wrong gradient.
        chunk_bytes: unit of a read or write, a multiple of 4,096.
        io_threads: that read and write at a time.

    Raises:
        FileNotFoundError, NotADirectoryError, PermissionError: a path does not serve; the message says which and why.
        ValueError: a size does not make sense.
        NativeExtensionError: the extension is not there.

    >>> with ActivationStore(host_bytes=1 << 30) as store:
    ...     print(store.stats().stored_bytes)
    0
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        disk_bytes: int | None = None,
        engine: Engine = "auto",
        checksum: bool = True,
        chunk_bytes: int = 8 << 20,
        io_threads: int = 8,
    ) -> None:
        extension = _native.extension("ActivationStore")
        for name, value in (("device_bytes", device_bytes), ("host_bytes", host_bytes), ("disk_bytes", disk_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"ActivationStore: `{name}` is a number of bytes or None; {value} was given")
        if chunk_bytes <= 0 or chunk_bytes % _PAGE:
            raise ValueError(f"ActivationStore: `chunk_bytes` must be a multiple of {_PAGE}; {chunk_bytes} was given")
        if io_threads < 1:
            raise ValueError(f"ActivationStore: `io_threads` must be at least 1; {io_threads} was given")
        if engine not in ("auto", "direct", "buffered", "tensorstore"):
            raise ValueError(
                f"ActivationStore: `engine` is 'auto', 'direct', 'buffered' or 'tensorstore'; {engine!r} was given"
            )
        paths = [] if path is None else [path] if isinstance(path, (str, os.PathLike)) else list(path)
        self.device_bytes = device_bytes
        self.host_bytes = _available_memory() // 2 if host_bytes is None else host_bytes
        self.disk_bytes = disk_bytes
        self.engine = engine
        self.paths = tuple(Path(os.fspath(p)).absolute() for p in paths)
        self._claims: list[_files.Claim] = []
        self._io: Any = None
        self._native: Any = None
        self._began = time.monotonic()
        self._entered = 0
        self._entered_lock = threading.Lock()
        # As they were given: what is made of None differs between machines, and programs carry a name made of these.
        options = (
            tuple(os.fspath(place) for place in paths),
            device_bytes,
            host_bytes,
            disk_bytes,
            engine,
            chunk_bytes,
        )
        try:
            for place in self.paths:
                self._claims.append(_files.claim(place))
            self._native = extension.OffloadStore.open(
                device_bytes=-1 if device_bytes is None else device_bytes,
                host_bytes=self.host_bytes,
                disk_bytes=disk_bytes or 0,
                folders=[str(claim.folder) for claim in self._claims],
                chunk_bytes=chunk_bytes,
                num_threads=io_threads,
                direct=engine in ("auto", "direct"),
                checksum=checksum,
                external=engine == "tensorstore",
            )
            if engine == "tensorstore" and self._claims:
                from dejax.offload._tensorstore import TensorStoreIO

                folders = [claim.folder for claim in self._claims]
                self._io = TensorStoreIO(self._native, folders, chunk_bytes, io_threads)
        except BaseException:
            for claim in self._claims:
                claim.release()
            raise
        self._sectors = [_files.sectors_written(place) for place in self.paths]
        _open.add(self)
        self._binding = _current.own_binding(self, options)

    def __repr__(self) -> str:
        where = ", ".join(map(str, self.paths)) or "host memory"
        return f"ActivationStore({where}{'' if self.is_open else ', closed'})"

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self in _open

    @property
    def id(self) -> int:
        """Its number among the stores that are open in this process."""
        return self._native.id

    def __enter__(self) -> ActivationStore:
        self._require_open()
        _current.enter(self)
        with self._entered_lock:
            self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            _current.wait_for_steps()
        finally:
            _current.leave(self)
            with self._entered_lock:
                self._entered -= 1
                last = self._entered <= 0
            if last:
                self._close()

    @contextlib.contextmanager
    def use(self) -> Iterator[ActivationStore]:
        """Like `with` on the store itself, for one thread of several: leaving waits, but does not close the store.

        Raises:
            RuntimeError: the store is closed.
        """
        self._require_open()
        _current.enter(self)
        try:
            yield self
        finally:
            try:
                _current.wait_for_steps()
            finally:
                _current.leave(self)

    def _require_open(self) -> None:
        if not self.is_open:
            raise RuntimeError("ActivationStore: it is closed; make another")

    def close(self) -> None:
        """Waits for the steps that this thread has dispatched, gives the memory back and removes the files.

        Steps of other threads that still use the store fail. A second call does nothing.
        """
        if not self.is_open:
            return
        _current.wait_for_steps()
        self._close()

    def _close(self) -> None:
        if not self.is_open:
            return
        _open.discard(self)
        _current.forget(self)
        _current.release_own(self._binding)
        self._final = self.stats()
        self._native.begin_close()
        if self._io is not None:
            self._io.join()
        self._native.close()
        for claim in self._claims:
            claim.release()

    def check(self) -> None:
        """Raises what a device found wrong in an earlier step, if anything; later steps do so themselves."""
        self._native.check()

    def clear(self) -> None:
        """Gives up everything stored and not fetched, as after a step that was interrupted. Not while a step runs."""
        self._native.clear()

    def drain(self) -> None:
        """Waits until nothing is being read or written."""
        self._native.drain()

    def stats(self) -> StoreStats:
        """What went where since the store was opened."""
        if not self.is_open and hasattr(self, "_final"):
            return self._final
        sectors = 0
        for place, before in zip(self.paths, self._sectors if self._claims else (), strict=True):
            now = _files.sectors_written(place)
            sectors += now - before if now is not None and before is not None else 0
        return StoreStats(
            **self._native.stats(), drive_written_bytes=sectors, open_seconds=time.monotonic() - self._began
        )

    def summary(self, *, endurance_bytes: float | None = None) -> str:
        """Some lines about `stats()`; `endurance_bytes` is the drive's rated endurance (its TBW)."""
        return "\n".join([self.stats().summary(endurance_bytes=endurance_bytes), *notes()])


def binding_of(store: ActivationStore | Literal["device"] | None) -> int:
    """What a program carries for a store: the store's name, or which of the current ones; of these there is always one.

    Raises:
        ValueError: another word.
        RuntimeError: the store is closed.
    """
    if isinstance(store, str):
        if store != "device":
            raise ValueError(f"offload: `store` must be an ActivationStore, 'device' or None, got {store!r}")
        return DEVICE
    if store is None:
        default_store()
        return _current.current_binding()
    if not isinstance(store, ActivationStore):
        raise ValueError(
            f"offload: `store` must be an ActivationStore, 'device' or None, got {type(store).__name__}; for a path "
            "write store=ActivationStore(path)"
        )
    if not store.is_open:
        raise RuntimeError("offload: `store` is closed; make another")
    return store._binding


def default_store() -> ActivationStore:
    """The store that steps use outside any `with`: host memory only, for the life of the process."""
    global _default
    with _default_lock:
        if _default is None or not _default.is_open:
            _default = ActivationStore()
            _current.bind_default(_default)
        return _default


def _available_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@atexit.register
def _close_all() -> None:
    for store in list(_open):
        store._close()
