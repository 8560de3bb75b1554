"""Element types of table rows: their codes in native/, and the unsigned integers that carry them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# dejax/include/element_types.h has the same codes.
ELEMENT_CODES = {
    "float32": 0,
    "float64": 1,
    "bfloat16": 2,
    "float16": 3,
    "float8_e4m3fn": 4,
    "float8_e5m2": 5,
    "int8": 6,
    "uint8": 7,
    "int16": 8,
    "uint16": 9,
    "int32": 10,
    "uint32": 11,
}
RESULT_CODES = {"float32": 0, "bfloat16": 2, "float16": 3}
MOVE_BYTES = -1  # the code of rows that are moved without conversion


def element_dtype(dtype: Any, what: str) -> np.dtype:
    """`dtype` as a numpy dtype in this machine's byte order. Its elements must have whole bytes."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{what}: the dtype must be numeric, got {dtype}; use jax.random.key_data for keys")
    found = np.dtype(dtype)
    if found.hasobject or found.names is not None or found.kind in "SUmM":
        raise TypeError(f"{what}: the dtype must be numeric, got {found}")
    if found.type is np.void:
        raise TypeError(
            f"{what}: the dtype must be named, got {found}, as numpy.save leaves of bfloat16 and FP8; give the dtype, "
            "as by array.view(jnp.bfloat16)"
        )
    if found.name.endswith(("int4", "int2", "int1", "e2m1fn")):
        raise TypeError(f"{what}: the dtype must have whole bytes, got {found}; use int8")
    return found.newbyteorder("=")


def word_bits(dtype: np.dtype) -> int:
    """Bits of the unsigned integers that carry elements of `dtype`: wider ones would need jax's 64-bit mode."""
    return 8 * min(dtype.itemsize, 4)


def words_per_row(row: tuple[int, ...], dtype: np.dtype) -> int:
    """Unsigned integers in one row."""
    return math.prod(row) * max(1, dtype.itemsize // 4)


def store_unit(row_bytes: int) -> int:
    """Bytes that a kernel can store at once: the largest power of two up to 16 that divides the bytes of a row."""
    return min(16, row_bytes & -row_bytes) if row_bytes else 16
