"""The rows of a Parquet file, read a few row groups at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax._optional import optional


class ParquetRows:
    """Numbers [rows, columns] or [rows, width of lists] of a Parquet file, of which slices are read.

    Attributes:
        shape, ndim: the shape and ndim of the rows.
        dtype: the dtype that all columns have together.
    """

    ndim = 2

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        """Looks at the file.

        Raises:
            ValueError: no such columns, or lists among several columns.
            TypeError: a column that is not numeric.
            ModuleNotFoundError: pyarrow is missing.
        """
        with optional("pyarrow", of=f"reading {path}"):
            import pyarrow.parquet as parquet
        self._path, self._file, self._lock = path, parquet.ParquetFile(path), threading.Lock()
        schema, metadata = self._file.schema_arrow, self._file.metadata
        self._columns = list(schema.names if columns is None else columns)
        if missing := [name for name in self._columns if name not in schema.names]:
            raise ValueError(f"{path}: `columns` must be of {schema.names}, got {missing[0]!r}")
        groups = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(groups, dtype=np.int64)])
        first = self._read(0, 1)
        self.shape, self.dtype = (int(self._starts[-1]), first.shape[1]), first.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        low = int(np.searchsorted(self._starts, start, side="right")) - 1
        high = int(np.searchsorted(self._starts, stop, side="left"))
        found = self._read(low, high)
        if found.shape[1] != self.shape[1]:
            raise ValueError(f"{self._path}: lists must have {self.shape[1]} elements, got {found.shape[1]}")
        return found[start - self._starts[low] : stop - self._starts[low]]

    def _read(self, low: int, high: int) -> np.ndarray:
        """The rows of row groups."""
        with self._lock:  # a ParquetFile has one reader
            table = self._file.read_row_groups(
                list(range(low, min(high, self._file.metadata.num_row_groups))), self._columns
            )
        found = [self._numbers(table.column(name).combine_chunks(), name) for name in self._columns]
        if len(found) > 1 and any(each.ndim > 1 for each in found):
            raise ValueError(f"{self._path}: a column of lists must be the only one, got {self._columns}")
        return found[0] if found[0].ndim > 1 else np.stack(found, axis=1)

    def _numbers(self, column: Any, name: str) -> np.ndarray:
        if column.null_count:
            raise ValueError(
                f"{self._path}: the column {name!r} must have no missing values, got {column.null_count}; replace "
                "them first"
            )
        if hasattr(column, "flatten") and str(column.type).startswith(("list", "fixed_size_list", "large_list")):
            inner = column.flatten()
            rows = max(1, len(column))
            if len(inner) % rows or (len(column) and set(_lengths(column)) != {len(inner) // rows}):
                raise ValueError(
                    f"{self._path}: the lists of the column {name!r} must have one length, got several; pad them first"
                )
            return self._numbers(inner, name).reshape(len(column), len(inner) // rows)
        found: np.ndarray = column.to_numpy(zero_copy_only=False)
        if found.dtype.kind not in "biuf":
            raise TypeError(f"{self._path}: the column {name!r} must be numeric, got {column.type}")
        return found


def _lengths(column: Any) -> list[int]:
    if str(column.type).startswith("fixed"):
        return [column.type.list_size]
    return np.unique(np.diff(column.offsets.to_numpy())).tolist()
