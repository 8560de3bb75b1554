"""`ActivationStore` holds offloaded tensors between forward and backward."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from dejax import _compat, _native
from dejax.offload import _files
from dejax.offload._resources import Store, StoreResources, check_sizes
from dejax.offload.activations import current, memory
from dejax.offload.activations.calls import DEVICE
from dejax.offload.activations.notes import notes
from dejax.offload.activations.stats import StoreStats
from dejax.offload.activations.tensorstore import TensorStoreIO
from dejax.offload.telemetry import Recording

Engine = Literal["auto", "tensorstore", "direct"]

_entered: list[ActivationStore] = []
"""Stores inside their `with`: they stay open without other references."""
_default_lock = threading.Lock()
_default: ActivationStore | None = None


class ActivationResources(StoreResources):
    """`StoreResources` with the threads of an outside I/O engine and a share of the machine's memory."""

    def __init__(self, store: ActivationStore) -> None:
        super().__init__(store)
        self.io: Any = None
        self.shares_memory = False

    def _end(self) -> None:
        try:
            if self.native is not None:
                self.native.begin_close()
                if self.io is not None:
                    self.io.join()
                self.native.close()
        finally:
            if self.shares_memory:
                memory.presence.leave()

    def abandon(self) -> None:
        if self.is_open and self.io is not None and self.io.is_worker():  # a worker cannot wait for itself
            with contextlib.suppress(RuntimeError):  # without a thread the end of the process closes it
                threading.Thread(target=self.close, name="dejax-offload-close").start()
            return
        self.close()


class ActivationStore(Store):
    """Holds offloaded activations between forward and backward pass, on the device, in host memory or on disk.

    A tensor first goes to a buffer on the device (the ring), then to host memory, then to disk; it moves on only if the
    tier before is full. The last tensors of a forward pass stay nearest, because the backward pass needs them first.

    Use the store as a context manager: steps that this thread dispatches inside `with` use it, unless they were traced
    with their own `store=`. Leaving `with` waits for these steps and closes the store. Other threads enter it
    themselves, by `with` or `use`; leaving the last `with` closes it.

    Args:
        path: a folder for the disk tier, or several folders, over which data is striped. None means no disk tier. The
            store makes a folder of its own in each and removes it when it closes; it also removes folders that dead
            processes left. "{process_index}" in a path is replaced by the process's number in `jax.distributed`.
        device_bytes: size of the ring on each device. None means enough for one call of an offloaded function, or
            twice as much (at least eight tensors) if the bus takes longer for its tensors than the call computes. 0
            means no ring: the device then waits for each copy.
        host_bytes: largest amount of host memory, pinned on GPUs. None means half of the available memory (of the
            machine and its control groups), divided among the processes of the machine that the launcher started or
            that already have such a store. 0 means none, so that only tensors that stay in the ring can be stored.
        disk_bytes: largest total size of the files. None means no limit; 0 means no disk tier.
        engine: how files are written: "tensorstore" (through the page cache), "direct" (O_DIRECT if the file system has
            it, with the least processor time), or "auto", which is "tensorstore".
        checksum: whether to verify data read from disk. A damaged file then raises an error and never gives a wrong
            gradient.
        chunk_bytes: size of a read or write, a multiple of 4,096.
        io_threads: number of simultaneous reads and writes.

    Raises:
        FileNotFoundError, NotADirectoryError, PermissionError: a path cannot be used; the message has the reason.
        OSError: a path cannot be used for another reason: a full file system, too many open files.
        ValueError: a size is out of range.
        RuntimeError: the files or the I/O threads cannot be made.
        NativeExtensionError: dejax's native extension is missing.

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
        sizes = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
        check_sizes("ActivationStore", chunk_bytes, io_threads, **sizes)
        if engine not in ("auto", "direct", "tensorstore"):
            raise ValueError(f"ActivationStore: `engine` must be 'auto', 'direct' or 'tensorstore', got {engine!r}")
        paths = [] if path is None else [path] if isinstance(path, (str, os.PathLike)) else list(path)
        self.device_bytes = device_bytes
        self.disk_bytes = disk_bytes
        self.engine: Engine = "tensorstore" if engine == "auto" else engine
        self.paths = tuple(Path(_of_process(os.fspath(p))).absolute() for p in paths)
        self._began = time.monotonic()
        self._recording: Recording | None = None
        self._depth = 0
        self._depth_lock = threading.Lock()
        # As given: programs carry a hash of these, and the values that stand in for None differ between machines.
        options = (
            tuple(os.fspath(place) for place in paths),
            device_bytes,
            host_bytes,
            disk_bytes,
            engine,
            chunk_bytes,
        )
        self._resources = ActivationResources(self)
        try:
            folders = self._resources.claim(self.paths if disk_bytes != 0 else (), "ActivationStore")
            self.host_bytes = self._share_of_memory() if host_bytes is None else host_bytes
            self._open_native(extension, folders, chunk_bytes, io_threads, checksum)
        except BaseException:
            self._resources.close()
            raise
        self._binding = current.own_binding(self, options)
        self._sectors = [_files.sectors_written(claim.device) for claim in self._resources.claims]

    def _share_of_memory(self) -> int:
        self._resources.shares_memory = True
        processes = memory.presence.enter()
        return memory.share(memory.available_memory(), processes, memory.launched_processes())

    def _open_native(
        self, extension: Any, folders: Sequence[Path], chunk_bytes: int, io_threads: int, checksum: bool
    ) -> None:
        self._resources.native = extension.OffloadStore.open(
            device_bytes=-1 if self.device_bytes is None else self.device_bytes,
            host_bytes=self.host_bytes,
            disk_bytes=-1 if self.disk_bytes is None else self.disk_bytes,
            folders=[str(folder) for folder in folders],
            chunk_bytes=chunk_bytes,
            num_threads=io_threads,
            checksum=checksum,
            external=self.engine == "tensorstore",
        )
        if folders and self.engine == "tensorstore":
            self._resources.io = TensorStoreIO(self._resources.native, folders, io_threads)

    @property
    def _native(self) -> Any:
        return self._resources.native

    def __repr__(self) -> str:
        where = ", ".join(map(str, self.paths)) or "host memory"
        return f"ActivationStore({where}{'' if self.is_open else ', closed'})"

    @property
    def is_open(self) -> bool:
        """Whether the store can be used: it is not closed, and this process has opened it."""
        return self._resources.is_open

    @property
    def id(self) -> int:
        """The number of the store among the open stores of this process."""
        return self._native.id

    def __enter__(self) -> ActivationStore:
        self._require_open()
        current.enter(self)
        with self._depth_lock:
            self._depth += 1
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(ValueError):
            _entered.remove(self)
        if self._resources.process != os.getpid():
            return  # a forked child leaves its parent's `with`
        try:
            self._leave()
        finally:
            with self._depth_lock:
                self._depth -= 1
                last = self._depth <= 0
            if last:
                self._close()
        if kind is None:
            _raise_failure_of_shards()

    @contextlib.contextmanager
    def use(self) -> Iterator[ActivationStore]:
        """A context manager like the store itself, except that leaving it does not close the store.

        Use it in further threads.

        Raises:
            RuntimeError: the store is closed.
        """
        self._require_open()
        current.enter(self)
        try:
            yield self
        finally:
            self._leave()

    def _leave(self) -> None:
        try:
            current.wait_for_steps()
        finally:
            current.leave(self)

    def _require_open(self) -> None:
        if not self.is_open:
            raise RuntimeError("ActivationStore: the store is closed; make another")

    def close(self) -> None:
        """Waits for the steps that this thread has dispatched, then frees the memory and removes the files.

        Steps of other threads that still use the store fail. A second call does nothing.
        """
        if self.is_open:
            current.wait_for_steps()
        self._close()

    def _close(self) -> None:
        if self.is_open:
            self._final = self.stats()
            current.forget(self)
        self._resources.close()

    def check(self) -> None:
        """Raises the error of an earlier step on one of several devices, if there was one.

        Later steps raise it, too.
        """
        self.stats()  # raises in a process that only inherited the store
        _raise_failure_of_shards()

    def clear(self) -> None:
        """Drops all tensors that are not fetched yet, for example after an interrupted step.

        Do not call it while a step runs.
        """
        self._native.clear()

    def drain(self) -> None:
        """Waits until all reads and writes are finished, and frees disk space that no tensor uses."""
        self._native.drain()

    def stats(self) -> StoreStats:
        """The counters since the store was opened."""
        if not self.is_open and hasattr(self, "_final"):
            return self._final
        sectors = 0
        for claim, before in zip(self._resources.claims, self._sectors, strict=True):
            now = _files.sectors_written(claim.device)
            sectors += now - before if now is not None and before is not None else 0
        return StoreStats(
            **self._native.stats(), drive_written_bytes=sectors, open_seconds=time.monotonic() - self._began
        )

    def record(self, interval: float = 0.002) -> Recording:
        """Samples the counters every `interval` seconds: `with store.record() as recording:`."""
        self._recording = Recording(self, interval)
        return self._recording

    def plot(self, path: str | Path) -> None:
        """Draws the bytes in each tier and the waits of the last recording, see `record`."""
        if self._recording is None:
            raise RuntimeError(
                "ActivationStore.plot: a step must have been recorded, got none; run steps inside `with "
                "store.record():`"
            )
        self._recording.plot(path)

    def summary(self, *, endurance_bytes: float | None = None) -> str:
        """The main counters as text. `endurance_bytes` is the drive's rated endurance in bytes written (TBW)."""
        return "\n".join([self.stats().summary(endurance_bytes=endurance_bytes), *notes()])


def binding_of(store: ActivationStore | Literal["device"] | None) -> int:
    """The number by which a compiled program finds its store (its binding), for the argument `store`.

    Raises:
        ValueError: `store` is neither a store nor "device" nor None.
        RuntimeError: the store is closed.
    """
    if isinstance(store, str):
        if store != "device":
            raise ValueError(f"offload: `store` must be an ActivationStore, 'device' or None, got {store!r}")
        return DEVICE
    if store is None:
        default_store()
        return current.current_binding()
    if not isinstance(store, ActivationStore):
        raise ValueError(
            f"offload: `store` must be an ActivationStore, 'device' or None, got {type(store).__name__}; for a path "
            "write store=ActivationStore(path)"
        )
    if not store.is_open:
        raise RuntimeError("offload: `store` must be open, got a closed one; make another ActivationStore")
    return store._binding


def default_store() -> ActivationStore:
    """The store that steps use outside of any `with ActivationStore()`. It has host memory only and is never closed.

    >>> from dejax.offload import default_store
    >>> default_store() is default_store(), default_store().stats().disk_bytes
    (True, 0)
    """
    global _default
    with _default_lock:
        if _default is None or not _default.is_open:
            _default = ActivationStore()
            current.bind_default(_default)
        return _default


def _of_process(path: str) -> str:
    return path.replace("{process_index}", str(_compat.process_index()))


def _raise_failure_of_shards() -> None:
    """Raises the error of a step on one of several devices. The step itself goes on with NaN (together.h)."""
    if why := _native.extension("ActivationStore").take_failure_of_shards():
        raise RuntimeError(why)


def _after_fork() -> None:
    """In a forked child: forgets its parent's stores, and locks that other threads may hold."""
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()
    _entered.clear()
    memory.presence.forget()
    current.after_fork()


os.register_at_fork(after_in_child=_after_fork)
