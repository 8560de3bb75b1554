"""Columns of tables as float32 features of rows."""

from __future__ import annotations

import numbers
import re
import warnings
import zlib

import numpy as np

from dejax.datasets._columns import as_numbers, missing_in
from dejax.datasets._known_from import TimeColumn, time_of_text

_LOOKED_AT = 1000  # values of a text column that are tried as numbers and times
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)?([.,]\d+)?(e[+-]?\d+)?", re.IGNORECASE)
"""A number as text. Text with leading zeros is a name, such as a postcode."""


def features_of(
    column: str, values: np.ndarray, fitted: np.ndarray, max_categories: int, text_width: int
) -> np.ndarray:
    """float32[rows, features] of one column.

    Args:
        column: its name, for errors and warnings.
        values: the column.
        fitted: bool[rows], the rows of which means, deviations and categories are taken.
        max_categories, text_width: as in `from_tables`.

    Raises:
        ValueError: values that are no features, such as infinite or complex numbers.
    """
    values = as_numbers(values)
    if values.dtype.kind != "O":
        return _numbers(column, values, fitted)
    known = ~missing_in(values)
    texts = [str(value) if not isinstance(value, bytes) else value.hex() for value in values]
    categories = sorted({texts[row] for row in np.flatnonzero(known & fitted)})
    one_hot = len(categories) <= max_categories
    _warn_of_numbers(column, values[known], "one-hot" if one_hot else "as hashed words")
    if one_hot:
        place = {category: number for number, category in enumerate(categories)}
        made = np.zeros((len(values), len(categories)), np.float32)
        for row in np.flatnonzero(known):
            if texts[row] in place:
                made[row, place[texts[row]]] = 1.0
        return made
    made = np.zeros((len(values), text_width), np.float32)
    for row in np.flatnonzero(known):
        for word in texts[row].lower().split():
            code = zlib.crc32(word.encode())
            made[row, (code >> 1) % text_width] += 1.0 if code & 1 else -1.0
    return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)


def _warn_of_numbers(column: str, values: np.ndarray, how: str) -> None:
    """Warns of a text column whose values are mostly numbers or times."""
    some = values[:: max(1, len(values) // _LOOKED_AT)].tolist()
    for what, reads in (("numbers", _is_number), ("times", lambda value: time_of_text(value) is not None)):
        fit = [value for value in some if reads(value)]
        if 2 * len(fit) > len(some):
            others = [value for value in some if not reads(value)]
            shown = f"{fit[0]!r}" + (f", and others such as {others[0]!r}" if others else "")
            warnings.warn(
                f"the column {column} is encoded {how}, but {len(fit)} of {len(some)} of its values are {what}, such "
                f"as {shown}; convert the column to {what}, with None for missing values, unless they are names",
                stacklevel=4,
            )
            return


def _is_number(value: object) -> bool:
    if not isinstance(value, str):
        return isinstance(value, numbers.Number)
    return any(sign.isdecimal() for sign in value) and _NUMBER.fullmatch(value.strip()) is not None


def _numbers(column: str, values: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "biufmM":
        raise ValueError(f"the column {column} must have numbers, times or text, got {values.dtype}")
    missing = missing_in(values)
    found = TimeColumn.of(column, values).values if values.dtype.kind == "M" else values
    found = np.where(missing, 0.0, found.astype(np.float64))
    if not np.isfinite(found).all():
        raise ValueError(f"the column {column} must be finite, got infinity; replace it by NaN where it means missing")
    known = found[fitted & ~missing]
    mean, deviation = (known.mean(), known.std()) if known.size else (0.0, 1.0)
    scaled = np.where(missing, 0.0, (found - mean) / (deviation if deviation > 0 else 1.0))
    parts = [scaled, missing] if missing.any() else [scaled]
    return np.stack(parts, axis=1).astype(np.float32)
