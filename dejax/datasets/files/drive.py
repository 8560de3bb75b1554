"""`write_drive_table`: rows of features in the files that `dejax.host_gather.DriveTable` reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dejax._drive_layout import BLOCK, DriveLayout, checksums_of
from dejax._files import mapped_npy, new_npy, save_npy, writing
from dejax.datasets.files._narrow_rows import Encoder, block_rows
from dejax.datasets.files._parquet_rows import ParquetRows
from dejax.datasets.files._work import for_blocks

Folder = str | os.PathLike[str]


def write_drive_table(
    folder: Folder | Sequence[Folder],
    rows: Any,
    *,
    dtype: Any = None,
    scale: str | None = None,
    align: bool | None = None,
    columns: Sequence[str] | None = None,
) -> Path:
    """Writes rows to files that `dejax.host_gather.DriveTable.open` reads, block by block.

    Neither the given rows nor the files need to fit in memory.

    Args:
        folder: the folder of the table. With several folders on several drives, each gets a part of the rows; pass the
            first one to `DriveTable.open`.
        rows: [rows, *row]: an array, a memory map, the path of an `.npy` file, or the path of a Parquet file whose
            columns are numbers, or one column of lists of equal length.
        dtype: dtype of the table, such as float32, bfloat16, float16, float8_e4m3fn or int8; by default that of the
            rows.
        scale: for int8 and FP8: "row" or "column" stores a factor for each row or column, as in
            `FeatureStore.from_arrays`; None stores none.
        align: whether rows are placed so that each lies in the fewest blocks of 4 KiB. By default, if this takes at
            most a quarter more bytes.
        columns: columns of a Parquet file to read; by default all.

    Returns:
        The (first) folder.

    Raises:
        ValueError: `scale` is unknown, the format cannot hold a value, the folder has a table already, or rows of a
            Parquet file have missing values or several lengths.
        TypeError: the rows are not numeric.
        OSError: a drive is full.
        ModuleNotFoundError: `rows` is a Parquet file, and pyarrow (the extra `tables`) is not installed.

    >>> import tempfile
    >>> folder = write_drive_table(tempfile.mkdtemp(), np.arange(6.0).reshape(3, 2), dtype="float16")
    >>> sorted(path.name for path in folder.iterdir())
    ['checksums0.npy', 'rows0.bin', 'table.json']
    """
    what = "write_drive_table"
    given_folders = [folder] if isinstance(folder, str | os.PathLike) else folder
    folders = [Path(each).absolute() for each in given_folders]
    if not folders:
        raise ValueError(f"{what}: `folder` must be one folder or several, got none")
    given = _rows_of(what, rows, columns)
    if given.ndim == 0 or given.dtype.hasobject or given.dtype.kind in "SUmMc":
        raise TypeError(f"{what}: `rows` must be numbers [rows, *row], got {given.dtype}{list(given.shape)}")
    wanted = (
        given.dtype
        if dtype is None
        else np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
    )
    encoder = Encoder.of(what, given, wanted.newbyteorder("="), scale)
    layout = DriveLayout.new(folders, given.shape, encoder.dtype, scale, align)
    for each in folders:
        each.mkdir(parents=True, exist_ok=True)
        if (each / "table.json").exists() or any(Path(path).exists() for path in layout.paths):
            raise ValueError(
                f"{what}: {each} must be a folder without a table, got one that has a table; remove the table, or "
                "choose another folder"
            )
    row_scale = _write_rows(layout, given, encoder)
    scales = row_scale if scale == "row" else encoder.column_scale
    if scales is not None:
        save_npy(folders[0] / "scale.npy", scales)
    layout.write()
    return folders[0]


def _rows_of(what: str, rows: Any, columns: Sequence[str] | None) -> Any:
    if not isinstance(rows, str | os.PathLike):
        if columns is not None:
            raise ValueError(
                f"{what}: `columns` must be None unless `rows` is the path of a Parquet file, got {columns!r}"
            )
        return rows if isinstance(rows, np.ndarray) else np.asarray(rows)
    path = Path(rows)
    if path.suffix == ".npy":
        return mapped_npy(path)
    if path.suffix in (".parquet", ".pq"):
        return ParquetRows(path, columns)
    raise ValueError(f"{what}: `rows` must be an array, or the path of an .npy or .parquet file, got {path}")


def _write_rows(layout: DriveLayout, rows: Any, encoder: Encoder) -> np.ndarray:
    """Writes files and checksums. Returns float32[rows], the scale of each row, of which those without one are 1."""
    files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644) for path in layout.paths]
    try:
        return _write_into(files, layout, rows, encoder)
    except BaseException:  # what is there is no table, and takes the room of the next one
        for path in layout.paths:
            Path(path).unlink(missing_ok=True)
        raise
    finally:
        for file in files:
            os.close(file)


def _write_into(files: Sequence[int], layout: DriveLayout, rows: Any, encoder: Encoder) -> np.ndarray:
    """Writes the rows to open files, and the checksums beside them."""
    row_scale = np.ones(len(rows), np.float32)
    sums = [_new_sums(layout, number) for number in range(len(files))]
    per_round = layout.stripe_rows * len(files)  # rows of one stripe in each file
    rounds = max(1, block_rows(rows) // per_round)

    def write(number: int, start: int, stop: int) -> None:
        encoded, scales = encoder(np.ascontiguousarray(rows[start:stop]))
        if scales is not None:
            row_scale[start:stop] = scales
        stripes = -(-len(encoded) // layout.stripe_rows)
        held = np.zeros((stripes * layout.stripe_rows, layout.row_bytes), np.uint8)
        held[: len(encoded)] = np.ascontiguousarray(encoded).reshape(len(encoded), -1).view(np.uint8)
        padded = np.zeros((stripes, layout.stripe_bytes), np.uint8)
        padded[:, : layout.stripe_rows * layout.row_bytes] = held.reshape(stripes, -1)
        for each, file in enumerate(files):
            own = np.ascontiguousarray(padded[each :: len(files)])
            at = number * rounds * layout.stripe_bytes
            if own.size:
                with writing(layout.paths[each]):
                    _write_all(file, own, at)
                sums[each][at // BLOCK : (at + own.size) // BLOCK] = checksums_of(own.reshape(-1, BLOCK))

    if layout.row_bytes:
        for_blocks(write, len(rows), rounds * per_round, label="write rows")
    for file, path in zip(files, layout.paths, strict=True):
        with writing(path):
            os.fsync(file)
    for each in sums:
        if isinstance(each, np.memmap):
            each.flush()
    return row_scale


def _new_sums(layout: DriveLayout, number: int) -> np.ndarray:
    """The file of a file's checksums, to be filled."""
    path, count = os.path.join(layout.folder or "", f"checksums{number}.npy"), layout.blocks(number)
    if not count:
        save_npy(Path(path), np.zeros(0, np.uint64))
        return np.zeros(0, np.uint64)
    return new_npy(Path(path), np.uint64, (count,))


def _write_all(file: int, data: np.ndarray, offset: int) -> None:
    left = memoryview(data.reshape(-1))  # type: ignore[arg-type]
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written
