"""The disk tier through TensorStore: threads that take chunks from the native queue and give them to it.

Each chunk is a file: one row of an array whose rows have the size of the chunk. So every write covers a whole zarr
chunk, and TensorStore reads nothing first. The file of a fetched tensor is overwritten. docs/performance/offload.md
compares the engines.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax._optional import optional

_ROWS = 1 << 40  # of an array; files exist only for rows that were written
_MOST_ARRAYS = 256  # kept open: one for each size of chunk and each folder
# In place ("non_atomic"): nobody else writes here. An older TensorStore writes another file, which it renames ("none").
_LOCKING = ("non_atomic", "none")


class TensorStoreIO:
    """Threads between a native store and TensorStore arrays.

    Args:
        native: the store, opened with `external=True`.
        folders: the folders of the disk tier.
        num_threads: each handles one chunk at a time.

    Raises:
        RuntimeError: a thread cannot be started. All others have ended then, and the native store closes.
    """

    def __init__(self, native: Any, folders: Sequence[Path], num_threads: int) -> None:
        with optional("tensorstore", of="a store on disk with engine='tensorstore' (engine='direct' needs no package)"):
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
            "file_io_sync": False,  # the files are of no use after a crash
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
        """The array with rows of `nbytes` bytes in a folder. Two threads may open it at the same time."""
        array = self._arrays.get((path, nbytes))
        if array is not None:
            return array
        spec = {
            "driver": "zarr",
            # native/blocks/disk.cc uses the same file names, to remove files.
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
            "fill_missing_data_reads": False,  # a missing file is an error, not zeros
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
                # can_reference_source_data_indefinitely would copy a NumPy array.
                (row.write(memory) if write else memory.write(row)).result()
            except Exception as caught:
                error = f"offload: {'writing' if write else 'reading'} a chunk failed: {caught}"
                if not write:
                    error += "; do not truncate or remove the files of an open store"
            self._native.finish_job(number, error)

    def is_worker(self) -> bool:
        """Whether the calling thread is one of the I/O threads."""
        return threading.current_thread() in self._threads

    def join(self) -> None:
        """Waits for the threads, once the native store has begun to close."""
        for thread in self._threads:
            thread.join()
