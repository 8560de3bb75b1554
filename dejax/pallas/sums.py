"""Sums of rows that are many numbers wide, over a few rows each: partial sums of weights, weights of types by type."""

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

# Rows that are added at once, and numbers of them that a program takes. Where a program took one row of a matrix,
# fb15k's 474 types of 64 by 64 took 20 us.
_TILE = (8, 512)
# Of many rows each sum waits for its steps, and few sums leave few programs: three of mutag's, of 212 rows in 7 types,
# took 10, 9 and 4 us with the other tile, and take 4 each.
_TILE_OF_MANY = (32, 128)
_MANY_ROWS, _FEW_PROGRAMS = 8, 264


def _kernel(*refs: Any, numbers: int, summed: int, block: int) -> None:
    x, offsets, *order, out = refs
    row, column = _triton.program_ids(cdiv(numbers, block))
    start, end = offsets[row], offsets[row + 1]
    columns = (column * block + lanes(block, 0, 1))[None, :]

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        item = start + i * summed + lanes(summed, 0, 1)
        valid = item < end
        if order:
            item = _triton.load(order[0], (item,), valid)
        mask = valid[:, None] & (columns < numbers)
        return total + _triton.load(x, (item[:, None], columns), mask).astype(jnp.float32)

    total = _triton.fori_loop(0, steps(end - start, summed), step, jnp.zeros((summed, block), jnp.float32))
    columns = columns.reshape(-1)
    _triton.store(out, (row, columns), lax.reduce_sum(total, (0,)), columns < numbers)


def sum_rows(
    x: jax.Array,
    offsets: jax.Array,
    *,
    order: jax.Array | None = None,
    dtype: Any = None,
    name: str = "sum_rows",
    interpret: bool | None = None,
) -> jax.Array:
    """The sums of rows `order[offsets[r]:offsets[r + 1]]` of an array, in one order of additions.

    Args:
      x: float[items, ...], float32, bfloat16 or float16.
      offsets: int32[rows + 1].
      order: int32[items]; None where the rows of `x` are in order.
      dtype: of the result; that of `x` by default. Sums are float32.
      name: of the kernel in profiles.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      dtype[rows, ...], zeros for rows of nothing.

    Raises:
      NotImplementedError: a dtype that the kernel does not have.
      ValueError: `order` is not of the items.
    """
    check_float(x, "x")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    rows, shape = offsets.shape[0] - 1, x.shape[1:]
    numbers = math.prod(shape)
    if rows == 0 or x.size == 0:
        return jnp.zeros((rows, *shape), dtype)
    given = [x.reshape(x.shape[0], numbers), offsets]
    if order is not None:
        given.append(as_index(order, "order", x.shape[0]))
    many = x.shape[0] >= _MANY_ROWS * rows or rows * cdiv(numbers, _TILE[1]) < _FEW_PROGRAMS
    summed, most = _TILE_OF_MANY if many else _TILE
    block = min(next_power_of_two(numbers), most)
    (total,) = _triton.pallas_call(
        functools.partial(_kernel, numbers=numbers, summed=summed, block=block),
        name=name,
        num_programs=rows * cdiv(numbers, block),
        out_shape=[jax.ShapeDtypeStruct((rows, numbers), dtype)],
        num_warps=4 if block == most else 1,
        num_stages=2,
        interpret=_triton.use_interpreter(interpret),
    )(*given)
    return total.reshape(rows, *shape)
