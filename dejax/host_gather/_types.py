"""Element types of table rows: their numbers in native/, and the unsigned integers that carry them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# kernels/convert.h has the same numbers.
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
MOVE_BYTES = -1


def element_dtype(dtype: Any, what: str) -> np.dtype:
    """`dtype` as numpy's in this machine's byte order, if its elements are whole bytes."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{what}: a dtype of numbers is needed, {dtype} was given; use jax.random.key_data for keys")
    found = np.dtype(dtype)
    if found.hasobject or found.names is not None or found.kind in "SUmM":
        raise TypeError(f"{what}: a dtype of numbers is needed, {found} was given")
    if found.name.endswith(("int4", "int2", "int1", "e2m1fn")):
        raise TypeError(f"{what}: a dtype of whole bytes is needed, {found} was given; use int8")
    return found.newbyteorder("=")


def native_order(array: Any) -> Any:
    """A numpy array whose elements have the bytes of this machine's order; others as they are."""
    if isinstance(array, np.ndarray | np.generic) and not array.dtype.isnative:
        return np.asarray(array, array.dtype.newbyteorder("="))
    return array


def word_bits(dtype: np.dtype) -> int:
    """Bits of the unsigned integers that carry elements of `dtype`: wider ones would need jax's 64-bit mode."""
    return 8 * min(dtype.itemsize, 4)


def words_per_row(row: tuple[int, ...], dtype: np.dtype) -> int:
    """Unsigned integers in one row."""
    return math.prod(row) * max(1, dtype.itemsize // 4)


def store_unit(row_bytes: int) -> int:
    """The largest power of two up to 16 that divides a row's bytes: what a kernel can store at once."""
    return min(16, row_bytes & -row_bytes) if row_bytes else 16
