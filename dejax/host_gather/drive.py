"""`DriveTable`: rows in files on a drive, which compiled steps read through a cache in host memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax import Array

from dejax.host_gather import _storage
from dejax.host_gather._drive_files import (
    ReadingOptions,
    check_size,
    files_of,
    layout_of_one_file,
    open_reader,
    reader_of,
)
from dejax.host_gather._lifetime import TableClosedError
from dejax.host_gather._spec import TableSpec, table_spec
from dejax.host_gather.table import _TABLES, LocalTable


class DriveTable(LocalTable):
    """A table [rows, *row] whose rows lie in files: for features that are larger than memory.

    Functions that read a `HostTable` read it. Rows that were read stay in a cache in host memory, from which S3-FIFO
    evicts. Missing rows are read past the page cache, by io_uring, or by threads where a container forbids io_uring. A
    block of 4 KiB that has several of the rows is read once. `gather_start` begins to read, and the rows arrive while
    the step computes.

    For reading only: a table that is trained must lie in memory. `CachedTable.from_ids(table, ids)` keeps copies of
    rows on the device, and `SplitTable.from_parts(table, device_table, ids)` reads the other rows from the drive.

    A pytree. The files must not change while the table is used: reads that find them changed raise.

    Attributes:
        shape: (rows, *row).
        dtype: of the elements.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/rows.npy"
    >>> np.save(path, np.arange(12.0, dtype=np.float32).reshape(6, 2))
    >>> table = DriveTable.from_npy(path, cache_bytes=1 << 20)
    >>> table[np.array([5, 0])]
    Array([[10., 11.],
           [ 0.,  1.]], dtype=float32)
    >>> table.stats()["drive_rows"]
    2
    """

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]] = ("reader",)

    def __init__(self, leaf: Any, spec: TableSpec) -> None:
        """For dejax itself: use `from_npy` or `from_file`."""
        super().__init__(leaf, spec)

    @classmethod
    def from_npy(
        cls, path: str | os.PathLike[str], *, cache_bytes: int, device: jax.Device | None = None, **options: Any
    ) -> DriveTable:
        """The array of an `.npy` file. Arguments and errors as `from_file`, whose shape and dtype are in the file.

        Raises:
            ValueError: also for a file that is no `.npy` file of a C-ordered array, or that does not name its dtype.
        """
        shape, dtype, offset = _storage.npy_header(path, f"DriveTable.from_npy({os.fspath(path)!r})")
        return cls.from_file(path, shape, dtype, offset=offset, cache_bytes=cache_bytes, device=device, **options)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        shape: Sequence[int],
        dtype: Any,
        *,
        cache_bytes: int,
        offset: int = 0,
        visits: Any = None,
        direct: bool = True,
        io_uring: bool = True,
        threads: int | None = None,
        device: jax.Device | None = None,
    ) -> DriveTable:
        """The rows of a file.

        Args:
            path: the file. Rows need no alignment; those that lie within one block of 4 KiB cost one read.
            shape: (rows, *row).
            dtype: of whole bytes, in this machine's byte order.
            cache_bytes: host memory for rows, pinned on a GPU. It should hold the rows of several mini-batches. The
                table takes 4 bytes a row besides.
            offset: bytes before the first row.
            visits: real[rows], how often each row is expected to be read (`dejax.minibatch.expected_visits`): as many
                of the most visited rows as the cache holds are evicted last. By default the cache learns alone.
            direct: whether reads go past the page cache, where the file system allows it.
            io_uring: whether reads may use io_uring, where the kernel allows it.
            threads: that read: by default one for each four cores, at most 4, with io_uring, else 32.
            device: the device whose steps read the table; by default jax's default device.

        Raises:
            ValueError: a file that is shorter than the shape, a cache without room for a row, the other byte order,
                visits of another shape or with NaN.
            OSError: the file cannot be opened.
            MemoryError: the cache cannot be pinned.
        """
        what = f"DriveTable.from_file({os.fspath(path)!r})"
        if not np.dtype(dtype).isnative:
            raise ValueError(
                f"{what}: `dtype` must be in this machine's byte order, got {np.dtype(dtype).str}; write the file "
                "again with numpy.save(path, array.astype(array.dtype.newbyteorder('=')))"
            )
        spec = dataclasses.replace(table_spec(shape, dtype, device, what), read_only=True, on_drive=True)
        files = layout_of_one_file(path, spec, offset)
        check_size(files, spec, what)
        reading = ReadingOptions(cache_bytes, visits, direct, io_uring, threads)
        return cls(open_reader(files, spec, reading, device, what), spec)

    def stats(self) -> dict[str, Any]:
        """What the reader has done so far, outside of jitted functions.

        Returns:
            device_rows, cache_rows, drive_rows: how many rows were found where. read_bytes, reads: of the drive, in
            whole blocks. waits, wait_seconds: how often and how long a gather waited for rows. rows_in_cache, and
            cache_rows_capacity, its room. hit_rate: the part of the rows that did not come from the drive.
            engine: "io_uring", or "threads" with the reason.

        Raises:
            TableClosedError: the table was closed.
        """
        found = self._reader("stats")
        counted: dict[str, Any] = found.stats()
        total = sum(counted[place] for place in ("device_rows", "cache_rows", "drive_rows"))
        counted["hit_rate"] = (total - counted["drive_rows"]) / total if total else 0.0
        counted["cache_rows_capacity"] = found.slots
        counted["engine"] = found.engine
        return counted

    def _reader(self, what: str) -> Any:
        found = reader_of(self._concrete(what))
        if found is None:
            raise TableClosedError(f"DriveTable.{what}: the table was closed")
        return found

    def _host_rows(self, leaf: Array) -> np.ndarray:
        rows = files_of(self._reader("numpy")).numpy(self._spec)
        rows.flags.writeable = False
        return rows


_TABLES["drive"] = DriveTable
