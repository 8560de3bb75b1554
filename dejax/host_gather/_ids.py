"""The one check of ids: every function that takes ids of rows, nodes or types calls it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._dtypes import INT32_MAX, clipped_to_int32, known_array, native_order


def checked_ids(what: str, ids: Any, rows: int, name: str = "ids", form: str = "integers") -> Array:
    """Ids of any integer dtype as int32 or int64.

    Args:
        what: the caller's name, for the error.
        ids: int[...]: a jax or numpy array, a list, a scalar, a tensor or column of another library.
        rows: the number of rows, nodes or types. Ids out of range stay out of range.
        name: the argument's name, for the error.
        form: the argument's required form, for the error.

    Raises:
        TypeError: a mask, floats, or unsigned integers of 32 bits or more.
        ValueError: 2**31 ids or more, or an id that needs jax's 64-bit mode.
    """
    ids = known_array(ids)
    if not hasattr(ids, "dtype"):
        ids = np.asarray(ids)
        if ids.size == 0:
            ids = ids.astype(np.int32)
    kind = ids.dtype
    if kind == np.bool_:
        raise TypeError(
            f"{what}: `{name}` must be {form}, got a mask; use jnp.nonzero(mask, size=..., fill_value=-1)[0]"
        )
    if not jnp.issubdtype(kind, jnp.integer):
        raise TypeError(f"{what}: `{name}` must be {form}, got {kind}; use {name}.astype(jnp.int32)")
    ids, kind = native_order(ids), np.dtype(kind)
    if isinstance(ids, np.ndarray | np.generic) and kind.itemsize == 8 and not jax.config.values["jax_enable_x64"]:
        ids = _narrowed(what, np.asarray(ids), rows, name)
    elif kind.itemsize < 4:
        # Before any arithmetic: `node * relations` of uint8 would wrap, and so would a comparison with a count.
        ids = jnp.asarray(ids).astype(jnp.int32)
    elif jnp.issubdtype(kind, jnp.unsignedinteger):
        raise TypeError(f"{what}: `{name}` must be signed integers, got {kind}; use {name}.astype(jnp.int32)")
    ids = jnp.asarray(ids)
    if ids.size > INT32_MAX:
        raise ValueError(f"{what}: `{name}` must have at most 2**31 - 1 elements, got {ids.size}")
    return ids


def _narrowed(what: str, ids: np.ndarray, rows: int, name: str) -> np.ndarray:
    """Ids of 64 bits as int32. jax would drop their upper bits, and an id out of range could become one in range."""
    if rows > INT32_MAX and ids.size and int(ids.max()) >= INT32_MAX:
        raise ValueError(
            f"{what}: `{name}` beyond 2**31 - 2 need jax's 64-bit mode: jax.config.update('jax_enable_x64', True)"
        )
    narrow: np.ndarray = clipped_to_int32(ids)
    return narrow


def in_range(ids: Array, rows: int) -> Array:
    """Which ids are in range. `rows` may be beyond the ids' dtype."""
    return (ids >= 0) & (ids < rows) if rows <= np.iinfo(ids.dtype).max else ids >= 0


def nearest(ids: Array, rows: int) -> Array:
    """Ids clipped to the nearest row."""
    return jnp.clip(ids, 0, min(rows - 1, int(np.iinfo(ids.dtype).max)))


def check_known_ids(what: str, name: str, ids: np.ndarray, rows: int) -> None:
    """Checks ids whose values are known, outside of compiled programs; no copy is made of them.

    Args:
        what, name: the caller's and the argument's name, for the error.
        ids: int[...]; an empty array of any dtype.
        rows: the number of rows or nodes.

    Raises:
        ValueError: no integers, or an id out of range.
    """
    if not ids.size:
        return
    wanted = f"{what}: `{name}` must be integers from 0 to {rows - 1}"
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{wanted}, got {ids.dtype}")
    if ids.min() < 0 or ids.max() >= rows:
        raise ValueError(f"{wanted}, got {ids.min()} to {ids.max()}")


def distinct_ids(what: str, name: str, ids: Any, rows: int) -> np.ndarray:
    """int64[ids], after the checks of `check_known_ids`.

    Raises:
        ValueError: also where an id occurs twice.
    """
    found = np.asarray(ids).reshape(-1)
    check_known_ids(what, name, found, rows)
    found = found.astype(np.int64)
    seen = np.zeros(rows, bool)  # tables have up to 10^8 ids on the device: no sort
    seen[found] = True
    if np.count_nonzero(seen) < found.size:
        values, counts = np.unique(found, return_counts=True)
        raise ValueError(f"{what}: `{name}` must be distinct, got {values[counts.argmax()]} {counts.max()} times")
    return found
