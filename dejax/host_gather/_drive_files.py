"""The files of a table on a drive, and what reads them: the native reader with its cache in host memory."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import weakref
from typing import Any

import numpy as np
from jax import Array

from dejax import _native
from dejax.host_gather._memory import address_of, array_of, pin
from dejax.host_gather._spec import TableSpec, device_or_default, ordinal_of

_NUMBER_BYTES = 4096  # before the cache, whose rows begin at a page


@dataclasses.dataclass(frozen=True, slots=True)
class DriveFiles:
    """Where the rows of a table lie in files.

    Attributes:
        paths: of the files. Stripes of rows go to them in turn.
        stride: bytes from the beginning of a row to that of the next one in its stripe.
        first: bytes of each file before its first row.
        stripe_rows: rows of a stripe.
        checksums: uint64[pages] of each file: the checksum of each 4 KiB; or none.
    """

    paths: tuple[str, ...]
    stride: int
    first: int
    stripe_rows: int
    checksums: tuple[np.ndarray, ...] = ()

    def numpy(self, spec: TableSpec) -> np.ndarray:
        """The rows: a memory map where they lie in one file without gaps, else a copy."""
        if not spec.nbytes:
            return np.zeros(spec.shape, spec.dtype)
        if len(self.paths) == 1 and self.stride == spec.row_bytes:
            return np.memmap(self.paths[0], spec.dtype, "r", self.first, spec.shape)
        out = np.empty((spec.rows, spec.row_bytes), np.uint8)
        for number, path in enumerate(self.paths):
            at = 0  # rows of this file
            with open(path, "rb") as file:
                for first in range(number * self.stripe_rows, spec.rows, len(self.paths) * self.stripe_rows):
                    count = min(self.stripe_rows, spec.rows - first)
                    file.seek(self.first + at * self.stride)
                    block = np.fromfile(file, np.uint8, (count - 1) * self.stride + spec.row_bytes)
                    block = np.pad(block, (0, self.stride - spec.row_bytes)).reshape(count, self.stride)
                    out[first : first + count] = block[:, : spec.row_bytes]
                    at += count
        return out.reshape(-1).view(spec.dtype).reshape(spec.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How a reader reads. `DriveTable.from_file` documents them.

    Attributes:
        cache_bytes: of host memory for rows.
        visits: real[rows], or None.
        direct: whether reads go past the page cache.
        io_uring: whether io_uring may be used.
        threads: that read; None: chosen from the machine.
    """

    cache_bytes: int
    visits: Any = None
    direct: bool = True
    io_uring: bool = True
    threads: int | None = None


def open_reader(files: DriveFiles, spec: TableSpec, options: ReadingOptions, device: Any, what: str) -> Array:
    """The leaf array of a table: the number of a new reader.

    Raises:
        ValueError: a file is shorter than the layout says, a cache without room for a row, visits that do not fit.
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
    memory = pin(what, lambda module: module.HostMemory.allocate(_NUMBER_BYTES + slots * spec.row_bytes, ordinal))
    sums = np.concatenate([*files.checksums, np.zeros(0, np.uint64)]).astype(np.uint64)
    try:
        native = _native.extension(what).RowReader.open(
            memory=memory,
            paths=list(files.paths),
            rows=spec.rows,
            row_bytes=spec.row_bytes,
            stride=files.stride,
            first=files.first,
            stripe_rows=max(1, files.stripe_rows),
            cache=memory.address + _NUMBER_BYTES,
            slots=slots,
            wanted=(wanted.ctypes.data, len(wanted)),
            checksums=(sums.ctypes.data, len(sums)),
            pages=[len(some) for some in files.checksums],
            direct=options.direct,
            use_ring=options.io_uring,
            threads=options.threads or 0,
            depth=128,
        )
    except RuntimeError as error:
        raise (ValueError if "must have" in str(error) else OSError)(f"{what}: {error}") from error
    number = np.array([native.number], np.int64)
    memory.copy_in(0, number.ctypes.data, number.nbytes)
    return array_of(memory, spec, device_or_default(device))


def reader_of(leaf: Array) -> Any:
    """The native reader of a table's leaf array, or of a copy of it on another device; None where it was closed."""
    number = ctypes.c_int64.from_address(address_of(leaf)).value
    return _native.extension("DriveTable").RowReader.find(number)


def files_of(reader: Any) -> DriveFiles:
    """The files that a native reader reads."""
    return DriveFiles(tuple(reader.paths), *reader.layout)


def keep_reader(leaf: Array, memory: Any) -> None:
    """Keeps the reader, which lives as long as the memory of its number, for an array of copies of the number."""
    weakref.finalize(leaf, lambda _: None, memory).atexit = False


def _wanted(visits: Any, rows: int, slots: int, what: str) -> np.ndarray:
    """A bit for each row, as uint64: set for the rows with most visits, as many as the cache holds."""
    if visits is None:
        return np.zeros(0, np.uint64)
    given = np.asarray(visits)
    if given.shape != (rows,) or given.dtype.kind not in "biuf":
        raise ValueError(f"{what}: `visits` must be real[{rows}], got {given.dtype}{list(given.shape)}")
    if np.isnan(given).any():
        raise ValueError(f"{what}: `visits` must not have NaN")
    most = np.zeros(-(-rows // 64) * 64, bool)
    most[np.argpartition(given, rows - slots)[rows - slots :] if slots < rows else np.arange(rows)] = True
    most[:rows] &= given > 0
    return np.packbits(most, bitorder="little").view(np.uint64)


def layout_of_one_file(path: str | os.PathLike[str], spec: TableSpec, offset: int) -> DriveFiles:
    """Rows that lie in one file, one after the other."""
    return DriveFiles((os.path.abspath(os.fspath(path)),), spec.row_bytes, offset, max(1, spec.rows))


def check_size(files: DriveFiles, spec: TableSpec, what: str) -> None:
    """Raises ValueError where the one file of a table is shorter than its rows."""
    path = files.paths[0]
    size, needed = os.path.getsize(path), files.first + spec.nbytes
    if files.first < 0 or size < needed:
        raise ValueError(
            f"{what}: shape {spec.shape} of {spec.dtype} after {files.first} bytes needs a file of {needed} bytes, "
            f"{path} has {size}; copy or write it again"
        )
