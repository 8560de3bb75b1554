"""Kernel for sums of few wide rows, such as partial weight gradients, or matrices of edge types added by node type.

Reference: `products.reference.sum_rows`. Contract test: `test_sum_rows` of `tests/pallas/test_sums.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._checks import as_index, check_float
from dejax.pallas._shapes import cdiv, lanes, next_power_of_two
from dejax.pallas._tiles import steps

# Rows that are added at once, and elements of each row that a program takes.
_TILE = (8, 512)
# A sum of many rows waits for each of its steps, and few sums make few programs: this tile is taller and narrower.
_TILE_OF_MANY = (32, 128)
_MANY_ROWS, _FEW_PROGRAMS = 8, 264


def _kernel(x: Any, offsets: Any, *rest: Any, width: int, summed: int, block: int) -> None:
    *order, out = rest
    row, column = _triton.program_ids(cdiv(width, block))
    start, end = offsets[row], offsets[row + 1]
    columns = (column * block + lanes(block, 0, 1))[None, :]

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        entry = start + i * summed + lanes(summed, 0, 1)
        valid = entry < end
        if order:
            entry = _triton.load(order[0], (entry,), valid)
        mask = valid[:, None] & (columns < width)
        return total + _triton.load(x, (entry[:, None], columns), mask).astype(jnp.float32)

    total = _triton.fori_loop(0, steps(end - start, summed), step, jnp.zeros((summed, block), jnp.float32))
    columns = columns.reshape(-1)
    _triton.store(out, (row, columns), lax.reduce_sum(total, (0,)), columns < width)


def sum_rows(
    x: jax.Array,
    offsets: jax.Array,
    *,
    order: jax.Array | None = None,
    dtype: Any = None,
    name: str = "sum_rows",
    interpret: bool | None = None,
) -> jax.Array:
    """Row r of the result is the sum of rows `order[offsets[r]:offsets[r + 1]]`, in a fixed order of additions.

    Args:
      x: float[entries, ...], float32, bfloat16 or float16.
      offsets: int32[rows + 1].
      order: int32[entries]; None where the rows of `x` are in order.
      dtype: the dtype of the result; that of `x` by default. Sums are float32.
      name: the name of the kernel in profiles.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      dtype[rows, ...], zeros for rows without entries.

    Raises:
      NotImplementedError: a dtype that the kernel does not have.
      ValueError: `order` has another length than `x`.
    """
    check_float(x, "x")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    rows, width = offsets.shape[0] - 1, math.prod(x.shape[1:])
    if rows == 0 or x.size == 0:
        return jnp.zeros((rows, *x.shape[1:]), dtype)
    given = [x.reshape(x.shape[0], width), offsets]
    if order is not None:
        given.append(as_index(order, "order", x.shape[0]))
    many = x.shape[0] >= _MANY_ROWS * rows or rows * cdiv(width, _TILE[1]) < _FEW_PROGRAMS
    summed, most = _TILE_OF_MANY if many else _TILE
    block = min(next_power_of_two(width), most)
    (total,) = _triton.pallas_call(
        functools.partial(_kernel, width=width, summed=summed, block=block),
        name=name,
        num_programs=rows * cdiv(width, block),
        out_shape=[jax.ShapeDtypeStruct((rows, width), dtype)],
        num_warps=4 if block == most else 1,
        num_stages=2,
        interpret=_triton.use_interpreter(interpret),
    )(*given)
    return total.reshape(rows, *x.shape[1:])
