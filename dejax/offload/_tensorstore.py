"""The disk tier through TensorStore: threads that take chunks from the native queue and give them to it.

A chunk is a file of its own: one row of an array whose rows have exactly so many bytes. A write is then of a whole
chunk, and TensorStore reads nothing first. A chunk whose tensor was fetched is written over. TensorStore opens a file
that it writes with O_TRUNC, through the page cache, so each write pays for new pages. That is what it costs over the
direct engine, which writes into pages that are there; docs/offload.md has the figures.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ROWS = 1 << 40  # chunks that an array can have; files exist only for those written
_MOST_ARRAYS = 256  # kept open: one for each size of chunk and each folder
# Written in place, else to a file that is renamed: an older TensorStore has no "non_atomic". Nobody else writes here.
_LOCKING = ("non_atomic", "none")


class TensorStoreIO:
    """Threads between a native store and TensorStore arrays.

    Args:
        native: the store, opened with `external=True`.
        folders: of the disk tier.
        num_threads: that each handle one chunk at a time.

    Raises:
        RuntimeError: a thread cannot be started. None is left then, and the native store closes.
    """

    def __init__(self, native: Any, folders: Sequence[Path], num_threads: int) -> None:
        import tensorstore as ts

        self._native = native
        self._ts = ts
        self._folders = list(folders)
        self._context = self._make_context(num_threads)
        self._arrays: dict[tuple[int, int], Any] = {}
        self._threads: list[threading.Thread] = []
        try:
            for i in range(num_threads):
                thread = threading.Thread(target=self._work, name=f"dejax-offload-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            native.begin_close()
            self.join()
            raise RuntimeError(
                f"offload: I/O thread {len(self._threads) + 1} of {num_threads} cannot be started ({error}); give a "
                "smaller io_threads, or raise the limits of the process"
            ) from error

    def _make_context(self, num_threads: int) -> Any:
        options = {
            "file_io_sync": False,  # what survives a crash is of no use here
            "file_io_concurrency": {"limit": num_threads},
            "data_copy_concurrency": {"limit": num_threads},
            "cache_pool": {"total_bytes_limit": 0},
        }
        for mode in _LOCKING:
            try:
                context = self._ts.Context({**options, "file_io_locking": {"mode": mode}})
                context["file_io_locking"]
                return context
            except ValueError:
                if mode == _LOCKING[-1]:
                    raise
        raise AssertionError

    def _array(self, path: int, nbytes: int) -> Any:
        """The array in a folder whose rows have so many bytes; threads may make it twice, to the same effect."""
        array = self._arrays.get((path, nbytes))
        if array is not None:
            return array
        spec = {
            "driver": "zarr",
            # The native store names a chunk's file in the same way, to remove it: disk.cc.
            "kvstore": {"driver": "file", "path": str(self._folders[path] / f"array{nbytes}") + "/"},
            "metadata": {
                "dtype": "|u1",
                "shape": [_ROWS, nbytes],
                "chunks": [1, nbytes],
                "compressor": None,
                "fill_value": None,
                "order": "C",
                "filters": None,
                "zarr_format": 2,
            },
            "open": True,
            "create": True,
            "assume_metadata": True,
            "fill_missing_data_reads": False,  # a file that somebody removed is an error, not zeros
        }
        array = self._ts.open(spec, context=self._context).result()
        if len(self._arrays) >= _MOST_ARRAYS:
            self._arrays = {}
        self._arrays[path, nbytes] = array
        return array

    def _work(self) -> None:
        while (job := self._native.next_job(1.0)) is not None:
            number, write, path, index, address, nbytes = job
            if number == 0:
                continue
            error = ""
            try:
                memory = self._ts.array(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
                row = self._array(path, nbytes)[index]
                # Not can_reference_source_data_indefinitely: with it a NumPy array is copied.
                (row.write(memory) if write else memory.write(row)).result()
            except Exception as caught:
                error = f"offload: {'writing' if write else 'reading'} a chunk failed: {caught}"
                if not write:
                    error += "; if something truncated or removed files of the store, leave them to it"
            self._native.finish_job(number, error)

    def is_worker(self) -> bool:
        """Whether this thread is one of them."""
        return threading.current_thread() in self._threads

    def join(self) -> None:
        """Waits for the threads, after the native store began to close."""
        for thread in self._threads:
            thread.join()
