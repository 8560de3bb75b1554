"""Columns of tables as fixed float32 features of rows, for models that have no encoders of their own."""

from __future__ import annotations

import numpy as np

from dejax.datasets.columns import Column, hashes_of


def features_of(column: Column, fitted: np.ndarray, max_categories: int, text_width: int) -> np.ndarray:
    """float32[rows, features] of one column.

    Args:
        column: the column.
        fitted: bool[rows], the rows that decide about means, deviations and categories, and whether there is a feature
            for missing values.
        max_categories, text_width: as in `from_tables`.
    """
    if column.kind in ("number", "time"):
        return _standardised(column, fitted)
    if column.kind == "vector":
        rows = _float32(np.where(column.missing[:, None], 0, column.values))
        return np.concatenate([rows, column.missing[:, None]], axis=1) if column.missing[fitted].any() else rows
    lengths = np.where(column.missing, 0, 1) if column.offsets is None else np.diff(column.offsets)
    rows = np.repeat(np.arange(len(column)), lengths)
    if column.kind == "text":
        return _hashed(rows, column.values, len(column), text_width)
    codes = column.values[column.values >= 0]
    names = np.array(column.categories, object)
    there = np.unique(codes[fitted[rows]])
    if len(there) <= max_categories:
        place = np.full(len(names), -1)
        place[sorted(there, key=names.__getitem__)] = np.arange(len(there))
        made = np.zeros((len(column), len(there) + 1), np.float32)
        made[rows, place[codes]] = 1.0  # the last column takes categories that no fitted row has
        return made[:, :-1]
    words = [hashes_of(name) for name in names]
    counts = np.array([len(part) for part in words])
    each = np.concatenate([np.zeros(0, np.uint32), *(words[code] for code in codes)])
    return _hashed(np.repeat(rows, counts[codes]), each, len(column), text_width)


def _hashed(rows: np.ndarray, hashes: np.ndarray, count: int, width: int) -> np.ndarray:
    """Signed sums of words by their hashes, with norm 1 (arXiv 0902.2206)."""
    made = np.zeros((count, width), np.float32)
    np.add.at(made, (rows, (hashes >> np.uint32(1)) % np.uint32(width)), np.where(hashes & np.uint32(1), 1.0, -1.0))
    return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)


def _standardised(column: Column, fitted: np.ndarray) -> np.ndarray:
    missing = column.missing
    found = np.where(missing, 0.0, column.values.astype(np.float64))
    known = found[fitted & ~missing]
    largest = float(np.abs(known).max(initial=0.0)) or 1.0  # squares of values of size 1 neither overflow nor vanish
    mean, deviation = ((known / largest).mean(), (known / largest).std()) if known.size else (0.0, 1.0)
    # Of equal values rounding leaves a deviation, by which another value would be huge.
    varies = deviation > 1e-12
    with np.errstate(over="ignore"):  # of rows that are not fitted
        scaled = (found / largest - mean) / deviation if varies else found - mean * largest
    parts = [np.where(missing, 0.0, scaled), missing] if missing[fitted].any() else [scaled]
    return _float32(np.stack(parts, axis=1))


def _float32(values: np.ndarray) -> np.ndarray:
    """The values in float32; those beyond its range become its largest ones, since infinity would make losses NaN."""
    most = np.finfo(np.float32).max
    return np.clip(values, -most, most).astype(np.float32)
