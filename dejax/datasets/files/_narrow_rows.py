"""Narrow rows of features: float32 rows as float16, bfloat16, FP8 or int8, with a scale per row or per column."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from dejax.datasets.files._work import for_blocks

SCALES = (None, "row", "column")
_BLOCK_BYTES = 16 << 20  # of float32 rows that are converted at once


def largest(dtype: np.dtype) -> float:
    """The largest value that rows of `dtype` use: 127 of int8, so that its range is symmetric."""
    if dtype.kind in "iu":
        return float(np.iinfo(dtype).max)
    return float(ml_dtypes.finfo(dtype).max)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """How rows of an array become rows of a table: `row ~ encoded * row scale * column scale`.

    Attributes:
        what: the caller's name, for errors.
        dtype: the dtype of the table.
        by_row: whether each row has its own scale.
        column_scale: float32[*row], or None.
    """

    what: str
    dtype: np.dtype
    by_row: bool
    column_scale: np.ndarray | None

    @classmethod
    def of(cls, what: str, array: np.ndarray, dtype: np.dtype, scale: str | None) -> Encoder:
        """Looks at the array's columns, where they are scaled.

        Raises:
            ValueError: an unknown scale, or values that are not finite.
        """
        if scale not in SCALES:
            raise ValueError(f"{what}: `scale` must be one of {SCALES}, got {scale!r}")
        if scale is not None and (dtype.itemsize != 1 or dtype.kind == "u"):
            raise ValueError(
                f"{what}: `scale` must be None for rows of {dtype}, got {scale!r}; only int8 and FP8 rows take a scale"
            )
        if scale != "column":
            return cls(what, dtype, scale == "row", None)
        tops = [np.zeros(array.shape[1:], np.float32)]

        def look(_: int, start: int, stop: int) -> None:
            tops.append(np.abs(_finite(what, np.asarray(array[start:stop]))).max(axis=0, initial=0.0))

        for_blocks(look, len(array), block_rows(array), label="look at columns")
        return cls(what, dtype, False, _scale_of(np.max(tops, axis=0), dtype))

    def __call__(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Encoded rows, and float32[len(rows)], the scale of each, or None.

        Raises:
            ValueError: values that the format cannot hold.
        """
        if rows.dtype == self.dtype and not self.by_row and self.column_scale is None:
            return rows, None
        if self.dtype.itemsize != 1:
            return self._wide(rows), None
        x = _finite(self.what, rows)
        scale = None
        if self.column_scale is not None:
            x = x / self.column_scale
        if self.by_row:
            scale = _scale_of(np.abs(x).reshape(len(x), -1).max(axis=1, initial=0.0), self.dtype)
            x = x / scale.reshape(-1, *[1] * (x.ndim - 1))
        bound = largest(self.dtype)
        if scale is None and self.column_scale is None:
            low = -bound - 1 if self.dtype.kind == "i" else 0.0 if self.dtype.kind == "u" else -bound
            if x.size and (x.max() > bound or x.min() < low):
                raise ValueError(
                    f"{self.what}: rows of {self.dtype} hold values from {low:g} to {bound:g}, got {x.min():g} to "
                    f"{x.max():g}; give scale='row' or scale='column'"
                )
        else:
            x = np.clip(x, -bound, bound)
        return (np.rint(x) if self.dtype.kind in "iu" else x).astype(self.dtype), scale

    def _wide(self, rows: np.ndarray) -> np.ndarray:
        """Rows of 16 bits and more, which have no scale."""
        if self.dtype.kind in "iu":
            bounds = np.iinfo(self.dtype)
            low, high = (rows.min().item(), rows.max().item()) if rows.size else (0, 0)
            if not bounds.min <= low <= high <= bounds.max:  # NaN is not in between
                remedy = "take a wider `dtype`" if low == low else "replace NaN first"
                raise ValueError(
                    f"{self.what}: rows of {self.dtype} hold values from {bounds.min} to {bounds.max}, got {low} "
                    f"to {high}; {remedy}"
                )
            return (rows if rows.dtype.kind in "iu" else np.rint(rows)).astype(self.dtype)
        with np.errstate(over="ignore"):
            encoded = rows.astype(self.dtype)
        if np.isinf(encoded).any() and (lost := np.isinf(encoded) & np.isfinite(rows)).any():
            wider = "'bfloat16' or 'float32'" if self.dtype.name == "float16" else "'float32'"
            raise ValueError(
                f"{self.what}: rows of {self.dtype} hold values up to {largest(self.dtype):g}, got "
                f"{float(rows[lost][0]):g}; take dtype={wider}, or scale the features first"
            )
        return encoded


def block_rows(array: np.ndarray) -> int:
    """Rows of an array or a memory map that a thread converts at once."""
    row_bytes = 4 * int(np.prod(array.shape[1:], dtype=np.int64))
    return max(1, _BLOCK_BYTES // max(1, row_bytes))


def _finite(what: str, rows: np.ndarray) -> np.ndarray:
    x = rows.astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError(f"{what}: features of 8 bits must be finite, got NaN or infinity; replace them first")
    return x


def _scale_of(top: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Scales under which `top` becomes the largest value of the format; 1 where all values are 0."""
    scale = (top / largest(dtype)).astype(np.float32)
    return np.where(scale > 0, scale, np.float32(1.0))
