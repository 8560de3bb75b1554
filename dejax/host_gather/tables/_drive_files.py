"""The files of a table on a drive, and what reads them: the native reader with its cache in host memory."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any

import numpy as np
from jax import Array

from dejax import _native
from dejax._drive_layout import DriveLayout
from dejax.host_gather._spec import TableSpec, device_or_default, ordinal_of
from dejax.host_gather.tables._memory import address_of, array_of, is_kept_for, keep_for, memory_of, pin

_NUMBER_BYTES = 4096  # before the cache, whose rows begin at a page


@dataclasses.dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How a reader reads. `DriveTable.from_file` documents them.

    Attributes:
        cache_bytes: the bytes of host memory for rows.
        visits: real[rows], or None.
        direct: whether reads go past the page cache.
        io_uring: whether io_uring may be used.
        threads: the number of threads that read; None: chosen from the machine.
        verify: whether each block that is read must have its checksum.
    """

    cache_bytes: int
    visits: Any = None
    direct: bool = True
    io_uring: bool = True
    threads: int | None = None
    verify: bool = False


def open_reader(files: DriveLayout, spec: TableSpec, options: ReadingOptions, device: Any, what: str) -> Array:
    """The leaf array of a table: the number of a new reader.

    Raises:
        ValueError: a file is shorter than the layout says, a cache without room for a row, visits that do not fit,
            blocks to verify without checksums.
        OSError: a file cannot be opened.
        MemoryError: the memory of the cache cannot be pinned.
    """
    slots = min(spec.rows, int(options.cache_bytes) // max(1, spec.row_bytes), 2**31 - 2)
    if slots < 1 <= spec.nbytes:
        raise ValueError(
            f"{what}: `cache_bytes` must be at least {spec.row_bytes}, the bytes of a row, got {options.cache_bytes}; "
            "the cache should have room for the rows of several mini-batches"
        )
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"{what}: `threads` must be at least 1, got {options.threads}")
    wanted = _wanted(options.visits, spec.rows, slots, what)
    ordinal = ordinal_of(spec, device)
    size = _NUMBER_BYTES + slots * spec.row_bytes
    memory = pin(what, lambda module: module.HostMemory.allocate(size, ordinal, from_drive=True))
    checksums = files.checksums() if options.verify else []
    sums = np.concatenate([*checksums, np.zeros(0, np.uint64)])
    try:
        native = _native.extension(what).RowReader.open(
            memory=memory,
            paths=list(files.paths),
            rows=spec.rows,
            row_bytes=spec.row_bytes,
            first=files.first,
            stripe_rows=files.stripe_rows,
            stripe_bytes=files.stripe_bytes,
            cache=memory.address + _NUMBER_BYTES,
            slots=slots,
            wanted=(wanted.ctypes.data, len(wanted)),
            checksums=(sums.ctypes.data, len(sums)),
            pages=[len(some) for some in checksums],
            direct=options.direct,
            use_ring=options.io_uring,
            threads=options.threads or 0,
            depth=128,
        )
    except RuntimeError as error:
        raise (ValueError if "must have" in str(error) else OSError)(f"{what}: {error}") from error
    number = np.array([native.number], np.int64)
    memory.copy_in(0, number.ctypes.data, number.nbytes)
    leaf = array_of(memory, spec, device_or_default(device))
    keep_reader(leaf)
    return leaf


def keep_reader(leaf: Array) -> None:
    """Keeps the reader for a copy of its number, such as one on another device, as long as the copy lives."""
    if is_kept_for(leaf) or leaf.is_deleted() or memory_of(leaf.block_until_ready()) is not None:
        return
    if (reader := reader_of(leaf)) is not None:
        keep_for(leaf, _native.extension("DriveTable").HostMemory.find(reader.cache - _NUMBER_BYTES))


def reader_of(leaf: Array) -> Any:
    """The native reader of a table's leaf array, or of a copy of it on another device; None where it was closed."""
    return _native.extension("DriveTable").RowReader.find(_number_of(leaf))


def _number_of(leaf: Array) -> int:
    if next(iter(leaf.devices())).platform != "cpu" and leaf.sharding.memory_kind != "pinned_host":
        return int(np.asarray(leaf.addressable_data(0)).view(np.int64)[0])  # a copy in the GPU's memory
    return ctypes.c_int64.from_address(address_of(leaf)).value


def rows_of(reader: Any, spec: TableSpec, what: str) -> np.ndarray:
    """All rows, of the files that a native reader has open: a memory map, or a copy (`DriveLayout.numpy`).

    Raises:
        ValueError: a file was written or became shorter while the table was used.
    """
    try:
        reader.require_unchanged()
        rows = DriveLayout(spec.shape, spec.dtype, tuple(reader.open_paths), *reader.layout).numpy()
        reader.require_unchanged()  # while the rows were copied
    except RuntimeError as error:
        raise ValueError(f"{what}: {error}") from error
    return rows


class RowsAhead:
    """Reads rows of a table on a drive into its cache, before the gathers that need them.

    Args:
        leaf: the leaf array of a table on one device.
        slots: for each row its place on the device, below 0 where it has none: `~k` of a split table for row k on the
            drive. None: no rows lie on the device.
        is_split: whether the table is a split one.
    """

    def __init__(self, leaf: Array, slots: np.ndarray | None, is_split: bool) -> None:
        self._reader, self._slots, self._is_split = reader_of(leaf), slots, is_split

    def begin(self, ids: np.ndarray) -> int | None:
        """Begins to read as many of the rows as half of the cache holds. They stay there until `end`.

        Args:
            ids: int32[...]; those out of range have no row.

        Returns:
            What `end` takes.
        """
        if self._reader is None:
            return None
        if self._slots is not None:
            ids = ids[(ids >= 0) & (ids < len(self._slots))]
            places = self._slots[ids]
            ids = ~places[places < 0] if self._is_split else ids[places < 0]
        ids = np.ascontiguousarray(ids.reshape(-1)[: self._reader.slots // 2], np.int32)
        number: int = self._reader.read_ahead(ids.ctypes.data, ids.size)
        return number

    def end(self, number: int | None) -> None:
        """The rows may leave the cache."""
        if number is not None:
            self._reader.release(number)


def _wanted(visits: Any, rows: int, slots: int, what: str) -> np.ndarray:
    """A bit for each row, as uint64: set for the rows with most visits, as many as the cache holds."""
    if visits is None:
        return np.zeros(0, np.uint64)
    given = np.asarray(visits)
    if given.shape != (rows,) or given.dtype.kind not in "biuf":
        raise ValueError(f"{what}: `visits` must be real[{rows}], got {given.dtype}{list(given.shape)}")
    if np.isnan(given).any():
        raise ValueError(
            f"{what}: `visits` must be numbers, got NaN in {int(np.isnan(given).sum())} of {rows} rows; replace NaN "
            "by 0"
        )
    most = np.zeros(-(-rows // 64) * 64, bool)
    most[np.argpartition(given, rows - slots)[rows - slots :] if slots < rows else np.arange(rows)] = True
    most[:rows] &= given > 0
    return np.packbits(most, bitorder="little").view(np.uint64)


def check_size(files: DriveLayout, spec: TableSpec, what: str) -> None:
    """Raises ValueError where the one file of a table is shorter than its rows."""
    path = files.paths[0]
    size, needed = os.path.getsize(path), files.first + spec.nbytes
    if files.first < 0 or size < needed:
        raise ValueError(
            f"{what}: shape {spec.shape} of {spec.dtype} after {files.first} bytes needs a file of {needed} bytes, "
            f"{path} has {size}; copy or write it again"
        )
