"""float32 rows to `RowScaled` (row-scaled float16) in one pass over them.

Reference: `row_scaled.encode`, in plain XLA. Contract test: `tests/pallas/test_row_scaled.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas import _triton
from dejax.pallas._shapes import cdiv, lanes, next_power_of_two
from dejax.pallas._tiles import resized, where
from dejax.pallas.formats.row_scaled import RowScaled, encode, inverse_of, of_stored, raised_exponents, stored

# A program holds a whole row.
MAX_WIDTH = 8192
_ELEMENTS = 4096  # elements that a program holds


def _kernel(x: Any, *refs: Any, rows: int, width: int, length: int, block: int) -> None:
    *columns_ref, mantissa, exponent = refs
    (program,) = _triton.program_ids()
    row = program * block + lanes(block, 0, 1)
    columns = lanes(next_power_of_two(width), 1, 2)
    inside = row < rows
    mask = inside[:, None] & (columns < width)
    tile = _triton.load(x, (row[:, None], columns), mask)
    if columns_ref:
        tile = tile * inverse_of(_triton.load(columns_ref[0], (columns,), columns < width, 1.0))
    found, inverse = raised_exponents(tile, 1)
    row = where(inside, row, rows)
    mask = mask if length == width else inside[:, None] & (columns < length)
    _triton.store(mantissa, (row[:, None], columns), tile * inverse, mask)
    _triton.store(exponent, (row, jnp.zeros_like(row)), resized(found, row.shape), inside)


def to_row_scaled(x: jax.Array, columns: jax.Array | None = None, *, interpret: bool | None = None) -> RowScaled:
    """Converts rows to `RowScaled`: float16 with one power of two for each row.

    Args:
      x: float32[rows, *features].
      columns: bfloat16[*features], powers of two near the largest elements of the columns of `x` (`column_powers`).
      interpret: run the kernel interpreted; by default where there is no GPU.

    Raises:
      ValueError: `x` is not float32.
    """
    if x.dtype != jnp.float32:
        raise ValueError(f"`x` must be float32, got {x.dtype}")
    rows, width = x.shape[0], math.prod(x.shape[1:])
    if rows == 0 or width == 0 or width > MAX_WIDTH:
        return encode(x, columns=columns)
    # A program stores a row as one axis, so the zeros behind its features must come after all of them.
    features = stored(x.shape[1:]) if width in x.shape[1:] else x.shape[1:]
    length = math.prod(features)
    block = max(1, _ELEMENTS // next_power_of_two(width))
    mantissa, exponent = _triton.pallas_call(
        functools.partial(_kernel, rows=rows, width=width, length=length, block=block),
        name="to_row_scaled",
        num_programs=cdiv(rows, block),
        out_shape=[
            jax.ShapeDtypeStruct((rows, length), jnp.dtype(jnp.float16)),
            jax.ShapeDtypeStruct((rows, 1), jnp.dtype(jnp.uint8)),
        ],
        num_warps=4,
        num_stages=1,
        interpret=_triton.use_interpreter(interpret),
    )(x.reshape(rows, width), *([] if columns is None else [columns.reshape(width)]))
    return of_stored(mantissa.reshape(rows, *features), exponent, x.shape[1:], columns)
