"""What a traversal is given and what it gives: checks, and arrays in the form in which its kernels take them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas._checks import FLOATS
from dejax.pallas._shapes import padded, padded_size
from dejax.pallas.formats.row_scaled import RowScaled, encode, of_stored, stored
from dejax.pallas.traversal.plan import Name
from dejax.pallas.traversal.request import BY_ROW, SHARED, Output, TileOperand

# Padded features of one row that a program can hold: 8 warps of 32 threads with 16 elements each.
MAX_WIDTH = 4096


def check_width(shapes: Sequence[tuple[int, ...]]) -> int:
    """The widest padded feature shape."""
    for shape in shapes:
        if len(shape) > 2 or 0 in shape:
            raise NotImplementedError(f"a feature shape has at most two axes, none empty; got {shape}")
    width = max((padded_size(s) for s in shapes), default=1)
    if width > MAX_WIDTH:
        raise NotImplementedError(f"features padded to powers of two have at most {MAX_WIDTH} elements, got {width}")
    return width


def check_operands(
    arrays: Sequence[Any],
    operands: Sequence[TileOperand],
    index_tables: Sequence[jax.Array],
    num_entries: int,
    num_rows: int | None,
) -> tuple[list[Any], tuple[tuple[int, ...], ...]]:
    """Checks arrays; returns them with a leading axis of at least 1, and the feature shape in which each is stored."""
    if len(arrays) != len(operands):
        raise ValueError(f"operands must have one entry for each array: {len(arrays)} arrays, {len(operands)} operands")
    ready: list[Any] = []
    features: list[tuple[int, ...]] = []
    for i, (array, operand) in enumerate(zip(arrays, operands, strict=True)):
        if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype not in FLOATS:
            raise NotImplementedError(f"arrays[{i}] is {array.dtype}; the kernels compute in float32")
        if isinstance(array, RowScaled) and (operand.access in SHARED or operand.columns is not None):
            array = array.decode()
        of = operand.index
        before = of is not None and 0 <= of < i
        if operand.access == "times_row" and not (before and padded(features[of or 0]) == padded(array.shape)):
            raise ValueError(
                f"operands[{i}].index must be the number of an operand before it that is read by row and has features "
                f"of shape {array.shape}, got {operand.index}"
            )
        if operand.access in SHARED:
            array = array[None]
        elif operand.access == "row" and num_rows is not None:
            _check_length(array, num_rows, f"arrays[{i}]", "rows", or_more=True)
        elif operand.access in ("entry", "position"):
            _check_length(array, num_entries, f"arrays[{i}]", "entries", or_more=num_rows is None)
        elif operand.access in ("indexed", "positioned") or (operand.access == "row_indexed" and num_rows is not None):
            if operand.index is None or not 0 <= operand.index < len(index_tables):
                raise ValueError(
                    f"operands[{i}].index must name one of {len(index_tables)} index tables, got {operand.index}"
                )
        else:
            known = "entry, position, indexed, positioned, shared, slots"
            known += "" if num_rows is None else ", row, row_indexed, epilogue, times_row"
            raise ValueError(f"operands[{i}].access must be one of {known}, got {operand.access!r}")
        if operand.columns is not None:
            start, shape = operand.columns
            fits = array.ndim == 2 and len(shape) <= 1 and start + math.prod(shape) <= array.shape[1]
            if operand.access in BY_ROW or not fits:
                raise ValueError(
                    f"operands[{i}].columns must name columns of a 2-dimensional array by entry, got {operand.columns} "
                    f"for access {operand.access!r} of shape {array.shape}"
                )
        rows = array.mantissa if isinstance(array, RowScaled) else array
        if operand.part is not None:
            first, count = operand.part
            if array.ndim != 3 or not 0 <= first < first + count <= array.shape[1] or operand.access in SHARED:
                raise ValueError(
                    f"operands[{i}].part must name a range of the second axis of a 3-dimensional array, got "
                    f"{operand.part} for access {operand.access!r} of shape {array.shape}"
                )
        features.append(operand.features(rows.shape))
        ready.append(not_empty(array))
    return ready, tuple(features)


def _check_length(array: jax.Array, length: int, name: str, what: str, or_more: bool = False) -> None:
    if array.ndim == 0 or array.shape[0] < length or (array.shape[0] > length and not or_more):
        raise ValueError(f"{name} must have {length} {what} on its first axis, got shape {array.shape}")


def not_empty(array: Any) -> Any:
    """A buffer that a kernel can be given: one row of zeros for none. Masks keep it from being read."""
    if isinstance(array, RowScaled):
        return replace(array, mantissa=not_empty(array.mantissa), exponent=not_empty(array.exponent))
    return jnp.zeros((1, *array.shape[1:]), array.dtype) if array.shape[0] == 0 else array


Structs = dict[Name, jax.ShapeDtypeStruct]


def named(arrays: Sequence[Any], tables: Sequence[jax.Array]) -> dict[Name, jax.Array]:
    """The arrays of operands, mantissas in place of `RowScaled`, then the exponents of those; and index tables."""
    scaled = {i: a for i, a in enumerate(arrays) if isinstance(a, RowScaled)}
    found = {("arrays", i): scaled[i].mantissa if i in scaled else a for i, a in enumerate(arrays)}
    found |= {("exponents", i): a.exponent for i, a in scaled.items()}
    return found | {("tables", i): not_empty(table) for i, table in enumerate(tables)}


def written(what: str, outputs: Sequence[Output], length: int, row_scaled: Sequence[int] = ()) -> Structs:
    """The arrays that a kernel writes: mantissas for outputs in `row_scaled`, and their exponents after all outputs."""
    found: Structs = {}
    for i, (shape, dtype) in enumerate(outputs):
        stored_as = (stored(shape), jnp.dtype(jnp.float16)) if i in row_scaled else (shape, dtype)
        found[what, i] = jax.ShapeDtypeStruct((length, *stored_as[0]), stored_as[1])
    exponent = jax.ShapeDtypeStruct((length, 1), jnp.dtype(jnp.uint8))
    return found | {("row_exponents", i): exponent for i in row_scaled}


def results(
    made: Mapping[Name, jax.Array], what: str, outputs: Sequence[Output], row_scaled: Sequence[int] = ()
) -> tuple[Any, ...]:
    """Makes the outputs from the arrays that a kernel wrote; arguments as in `written`."""
    return tuple(
        of_stored(made[what, i], made["row_exponents", i], shape) if i in row_scaled else made[what, i]
        for i, (shape, _) in enumerate(outputs)
    )


def nothing(outputs: Sequence[Output], length: int, row_scaled: Sequence[int] = ()) -> tuple[Any, ...]:
    """The outputs of a traversal without rows or entries: zeros."""
    zeros = (jnp.zeros((length, *shape), dtype) for shape, dtype in outputs)
    return tuple(encode(x) if i in row_scaled else x for i, x in enumerate(zeros))
