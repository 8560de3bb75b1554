"""Sums of a few wide rows each: partial weight gradients, or matrices of edge types by node type.

Reference: `products.reference.sum_rows`. Contract test: `test_sum_rows` of `tests/pallas/test_sums.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._checks import as_index, check_float
from dejax.pallas._shapes import cdiv, lanes, next_power_of_two
from dejax.pallas._tiles import steps

# Rows that are added at once, and elements of them that a program takes.
_TILE = (8, 512)
# A sum of many rows waits for each of its steps, and few sums make few programs: this tile is taller and narrower.
_TILE_OF_MANY = (32, 128)
_MANY_ROWS, _FEW_PROGRAMS = 8, 264


def _kernel(*refs: Any, widths: tuple[int, ...], summed: int, block: int) -> None:
    count = len(widths)
    arrays, (offsets, *order), outs = refs[:count], refs[count:-count], refs[-count:]
    blocks = [cdiv(width, block) for width in widths]
    row, column = _triton.program_ids(sum(blocks))
    start, end = offsets[row], offsets[row + 1]

    def sums(x: Any, out: Any, width: int, first: int) -> None:
        columns = ((column - first if first else column) * block + lanes(block, 0, 1))[None, :]

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

    if count == 1:
        sums(arrays[0], outs[0], widths[0], 0)
        return
    for number, (x, out, width) in enumerate(zip(arrays, outs, widths, strict=True)):
        first = sum(blocks[:number])
        mine = (column >= first) & (column < first + blocks[number])
        _triton.when(mine, functools.partial(sums, x, out, width, first))


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
      dtype: of the result; that of `x` by default. Sums are float32.
      name: of the kernel in profiles.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      dtype[rows, ...], zeros for rows without entries.

    Raises:
      NotImplementedError: a dtype that the kernel does not have.
      ValueError: `order` has another length than `x`.
    """
    (total,) = sum_rows_of_all((x,), offsets, order=order, dtype=dtype, name=name, interpret=interpret)
    return total


def sum_rows_of_all(
    arrays: Sequence[jax.Array],
    offsets: jax.Array,
    *,
    order: jax.Array | None = None,
    dtype: Any = None,
    name: str = "sum_rows",
    interpret: bool | None = None,
) -> tuple[jax.Array, ...]:
    """`sum_rows` of several arrays of one length, in one kernel."""
    x = arrays[0]
    for a in arrays:
        check_float(a, "x")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    rows, widths = offsets.shape[0] - 1, tuple(math.prod(a.shape[1:]) for a in arrays)
    if rows == 0 or any(a.size == 0 for a in arrays):
        return tuple(jnp.zeros((rows, *a.shape[1:]), dtype) for a in arrays)
    given = [*(a.reshape(a.shape[0], n) for a, n in zip(arrays, widths, strict=True)), offsets]
    if order is not None:
        given.append(as_index(order, "order", x.shape[0]))
    widest = max(widths)
    many = x.shape[0] >= _MANY_ROWS * rows or rows * cdiv(widest, _TILE[1]) < _FEW_PROGRAMS
    summed, most = _TILE_OF_MANY if many else _TILE
    block = min(next_power_of_two(widest), most)
    totals = _triton.pallas_call(
        functools.partial(_kernel, widths=widths, summed=summed, block=block),
        name=name,
        num_programs=rows * sum(cdiv(n, block) for n in widths),
        out_shape=[jax.ShapeDtypeStruct((rows, n), dtype) for n in widths],
        num_warps=4 if block == most else 1,
        num_stages=2,
        interpret=_triton.use_interpreter(interpret),
    )(*given)
    return tuple(total.reshape(rows, *a.shape[1:]) for total, a in zip(totals, arrays, strict=True))
