"""The dtypes of tables of features, and their rows times their scales.

`datasets/files/_narrow_rows.py` makes narrow rows.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.host_gather._spec import ELEMENT_CODES, RESULT_CODES

RESULTS = tuple(RESULT_CODES)
"""Names of the dtypes to which rows can be converted."""


def table_dtype(what: str, dtype: Any) -> np.dtype:
    """`dtype` as one that can be gathered and converted.

    Raises:
        TypeError: it cannot be.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{what}: `dtype` must be a dtype or its name, got {dtype!r}") from None
    if found.name not in ELEMENT_CODES:
        raise TypeError(f"{what}: `dtype` must be one of {', '.join(sorted(ELEMENT_CODES))}, got {found}")
    return np.dtype(found)


def result_dtype(dtype: np.dtype, scaled: bool) -> np.dtype:
    """The dtype of rows that were read from a table of `dtype`, where none is asked for.

    That of the table, if it is one to compute with, or of integers without a scale; else float32.
    """
    kept = dtype.name in RESULTS or (dtype.kind in "iu" and not scaled)
    return dtype if kept else np.dtype(np.float32)


def times_scales(rows: Array, result: Any, row_scale: Array | None, column_scale: Array | None) -> Array:
    """Rows [n, *row] of a table times their scales, in float32 with one rounding to the result's dtype at the end."""
    if row_scale is None and column_scale is None:
        return rows.astype(result)
    rows = rows.astype(jnp.float32)
    if row_scale is not None:
        rows = rows * row_scale.reshape(-1, *[1] * (rows.ndim - 1))
    if column_scale is not None:
        rows = rows * column_scale
    return rows.astype(result)
