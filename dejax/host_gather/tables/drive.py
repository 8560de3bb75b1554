"""`DriveTable`: rows in files on a drive, which compiled steps read through a cache in host memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax import Array

from dejax._drive_layout import DriveLayout
from dejax.host_gather._spec import TableSpec, table_spec
from dejax.host_gather.tables import _storage
from dejax.host_gather.tables._drive_files import ReadingOptions, check_size, open_reader, reader_of, rows_of
from dejax.host_gather.tables._lifetime import TableClosedError
from dejax.host_gather.tables.table import _TABLES, LocalTable


class DriveTable(LocalTable):
    """A read-only table whose rows lie in files on a drive, for features that are larger than host memory.

    Use it wherever a `HostTable` can be read. Rows that were read stay in a cache in host memory, which evicts rows by
    the S3-FIFO policy. Rows that are not in the cache are read from the drive with io_uring (or with threads, where a
    container forbids io_uring), past the page cache. A block of 4 KiB that holds several of the rows is read once.
    `gather_start` begins to read, so that rows arrive while the step computes.

    A table that is trained must lie in memory instead. To keep copies of the most used rows on the device, wrap the
    table in `CachedTable.from_ids(table, ids)`; to hold these rows on the device only, use
    `SplitTable.from_parts(table, device_table, ids)`.

    A DriveTable is a pytree. The files must not change while the table is used; a read of a changed file raises an
    error.

    Attributes:
        shape: (rows, *row).
        dtype: dtype of the elements.

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
        """For dejax itself: use `from_npy`, `from_file` or `open`."""
        super().__init__(leaf, spec)

    @classmethod
    def from_npy(
        cls, path: str | os.PathLike[str], *, cache_bytes: int, device: jax.Device | None = None, **options: Any
    ) -> DriveTable:
        """Opens an `.npy` file as a table.

        The arguments and errors are those of `from_file`; the file has the shape and dtype.

        Raises:
            ValueError: also if the file is not an `.npy` file of a C-ordered array, or does not name its dtype.
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
        """Opens a file of consecutive rows as a table.

        Args:
            path: the file. Rows need no alignment; those that lie within one block of 4 KiB cost one read.
            shape: (rows, *row).
            dtype: dtype of the elements, whole bytes in this machine's byte order.
            cache_bytes: host memory for cached rows, pinned on a GPU. It should hold the rows of several mini-batches.
                The table takes another 4 bytes for each row.
            offset: number of bytes in the file before the first row.
            visits: real[rows], how often each row is expected to be read (`dejax.minibatch.expected_visits`). The most
                visited rows, as many as fit into the cache, are then evicted last. By default the cache learns from the
                reads alone.
            direct: whether reads bypass the page cache, if the file system allows it.
            io_uring: whether reads may use io_uring, if the kernel allows it.
            threads: number of threads that read. With io_uring the most, of which one reads while it keeps up with the
                drive: by default one for each four cores, at most 4. Otherwise 32.
            device: the device whose steps read the table; by default jax's default device.

        Raises:
            ValueError: the file is shorter than the shape, the cache has no room for one row, the byte order is not the
                machine's, or `visits` has another shape or a NaN.
            OSError: the file cannot be opened.
            MemoryError: the memory of the cache cannot be pinned.
        """
        what = f"DriveTable.from_file({os.fspath(path)!r})"
        if not np.dtype(dtype).isnative:
            raise ValueError(
                f"{what}: `dtype` must be in this machine's byte order, got {np.dtype(dtype).str}; write the file "
                "again with numpy.save(path, array.astype(array.dtype.newbyteorder('=')))"
            )
        spec = dataclasses.replace(table_spec(shape, dtype, device, what), read_only=True, on_drive=True)
        files = DriveLayout.of_one_file(path, spec.shape, spec.dtype, offset)
        check_size(files, spec, what)
        reading = ReadingOptions(cache_bytes, visits, direct, io_uring, threads)
        return cls(open_reader(files, spec, reading, device, what), spec)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        cache_bytes: int,
        verify: bool = False,
        visits: Any = None,
        direct: bool = True,
        io_uring: bool = True,
        threads: int | None = None,
        device: jax.Device | None = None,
    ) -> DriveTable:
        """Opens a table that `dejax.datasets.write_drive_table` wrote. The rows come without scales, if they have any:
        `dejax.minibatch.NodeFeatures.from_drive` multiplies by them.

        Args:
            folder: the folder, or the first of several.
            cache_bytes, visits, direct, io_uring, threads, device: as in `from_file`.
            verify: whether each block that is read must have the checksum with which it was written: a damaged one
                raises an error that names the file and the byte.

        Raises:
            ValueError: no finished table, one without checksums to verify, files that are too short; as `from_file`.
            OSError, MemoryError: as `from_file`.
        """
        what = f"DriveTable.open({os.fspath(folder)!r})"
        files = DriveLayout.read(folder)
        found = table_spec(files.shape, files.dtype, device, what)
        spec = dataclasses.replace(found, read_only=True, on_drive=True)
        reading = ReadingOptions(cache_bytes, visits, direct, io_uring, threads, verify)
        return cls(open_reader(files, spec, reading, device, what), spec)

    def stats(self) -> dict[str, Any]:
        """Counters of the reads so far. Call it outside of jitted functions.

        Returns:
            A dict. device_rows, cache_rows, drive_rows: number of rows that were found on the device, in the cache and
            on the drive. hit_rate: share of the rows that did not come from the drive. read_bytes, reads: bytes (in
            whole blocks) and number of reads of the drive. waits, wait_seconds: how often and how long gathers waited
            for rows. rows_in_cache, cache_rows_capacity: number of rows that the cache holds and can hold. engine:
            "io_uring", or "threads" with the reason. reader: number of the reader.

        Raises:
            TableClosedError: the table was closed.
        """
        found = self._reader("stats")
        counted: dict[str, Any] = found.stats()
        total = sum(counted[place] for place in ("device_rows", "cache_rows", "drive_rows"))
        counted["hit_rate"] = (total - counted["drive_rows"]) / total if total else 0.0
        counted["cache_rows_capacity"] = found.slots
        counted["engine"], counted["reader"] = found.engine, found.number
        return counted

    def _rows_at_once(self) -> int:
        return max(1, int(self._reader("numpy").slots))

    def _reader(self, what: str) -> Any:
        found = reader_of(self._concrete(what))
        if found is None:
            raise TableClosedError(f"DriveTable.{what}: the table was closed")
        return found

    def _host_rows(self, leaf: Array) -> np.ndarray:
        rows = rows_of(self._reader("numpy"), self._spec, "DriveTable.numpy")
        rows.flags.writeable = False
        return rows


_TABLES["drive"] = DriveTable
