"""The disk tier through TensorStore: threads that take chunks from the native queue and give them to it.

A chunk is a file of its own, an array chunk of exactly the slot's bytes, so that a write copies nothing: TensorStore
refers to the slot until the write is done, which the thread waits for. It writes a new file each time and renames it,
so that each write pays for new pages: on tmpfs one core writes 2.0 GB/s (such files by hand 2.2, into pages that are
there 7.1). A read goes straight from TensorStore's buffer to the slot.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ROWS = 1 << 40  # chunks that an array can have; files exist only for those written


class TensorStoreIO:
    """Threads between a native store and TensorStore arrays, one array for each folder.

    Args:
        native: the store, opened with `external=True`.
        folders: of the disk tier.
        chunk_bytes: of a chunk.
        num_threads: that each handle one chunk at a time.
    """

    def __init__(self, native: Any, folders: Sequence[Path], chunk_bytes: int, num_threads: int) -> None:
        import tensorstore as ts

        self._native = native
        self._context = ts.Context(
            {
                "file_io_sync": False,  # what survives a crash is of no use here
                "file_io_locking": {"mode": "none"},
                "file_io_concurrency": {"limit": num_threads},
                "cache_pool": {"total_bytes_limit": 0},
            }
        )
        self._ts = ts
        self._arrays = [self._open(folder, chunk_bytes) for folder in folders]
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _open(self, folder: Path, chunk_bytes: int) -> Any:
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(folder / "array") + "/"},
            "metadata": {
                "dtype": "|u1",
                "shape": [_ROWS, chunk_bytes],
                "chunks": [1, chunk_bytes],
                "compressor": None,
                "fill_value": None,
                "order": "C",
                "filters": None,
                "zarr_format": 2,
            },
            "open": True,
            "create": True,
            "assume_metadata": True,
        }
        return self._ts.open(spec, context=self._context).result()

    def _work(self) -> None:
        while (job := self._native.next_job(1.0)) is not None:
            number, write, path, index, address, nbytes = job
            if number == 0:
                continue
            error = ""
            try:
                memory = self._ts.array(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
                row = self._arrays[path][index, :nbytes]
                # Not can_reference_source_data_indefinitely: with it a NumPy array is copied.
                (row.write(memory) if write else memory.write(row)).result()
            except Exception as caught:
                what = "writing" if write else "reading"
                error = f"offload: {what} chunk {index} of {self._arrays[path].kvstore.path} failed: {caught}"
            self._native.finish_job(number, error)

    def join(self) -> None:
        """Waits for the threads, after the native store began to close."""
        for thread in self._threads:
            thread.join()
