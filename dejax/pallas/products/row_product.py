"""The template of one long product, `x^T y` summed over all rows: the gradient of a weight that all rows share.

The result has few tiles and the sum is long, so that the rows are cut into parts, for which programs sum float32
partials. XLA adds the partials in their order. There are no atomics, so the result is the same in every run. XLA by
itself copies both operands, in order to pad the rows to a multiple of its parts. Here a part may have any rows.

Tiles of float32 are multiplied by the tensor cores as they are (`tf32`). So they need no registers on their way from
memory, and are loaded steps ahead. Grouped products convert them instead (`gradient_kernel`).

Reference: `products.reference.row_product`. Contract test: `tests/pallas/test_row_product.py`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._checks import check_float, check_precision
from dejax.pallas._shapes import cdiv, lanes
from dejax.pallas._tiles import steps, where
from dejax.pallas.formats.row_scaled import raised_exponents, two_parts
from dejax.pallas.products.gradient_kernel import Left, exact_transposed_product
from dejax.pallas.products.requests import arithmetic
from dejax.pallas.products.schedule import WeightGradientSchedule, row_product_schedule, rows_per_part


@dataclass(frozen=True, slots=True)
class _Plan:
    """Static facts of one call."""

    schedule: WeightGradientSchedule
    rows: int
    heads: int
    k: int
    n: int
    per_part: int  # rows of a part, whole steps
    masked: bool
    exact: bool  # in two float16 parts of each operand
    dtype: Any  # that operands are cast to otherwise

    @property
    def blocks(self) -> tuple[int, int, int]:
        """How many heads, blocks of k and blocks of n the result has."""
        return self.heads, cdiv(self.k, self.schedule.block_k), cdiv(self.n, self.schedule.block_n)

    @property
    def parts(self) -> int:
        return cdiv(self.rows, self.per_part)


def row_product(
    x: jax.Array,
    y: jax.Array,
    *,
    mask: jax.Array | None = None,
    precision: str = "tf32",
    schedule: WeightGradientSchedule | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """The sum of `x[r]^T y[r]` over the rows r, for each head if there are some.

    Args:
      x: float[rows, k] or float[rows, heads, k], float32, bfloat16 or float16.
      y: float[rows, n] or float[rows, heads, n].
      mask: bool[rows]: the rows to sum. What is in the others, be it NaN, has no effect.
      precision: of float32 operands: `tf32`, `f32` (22 bits; three float16 products) or `bf16` (cast). Operands that
        are both bfloat16, or both float16, are multiplied as they are.
      schedule: the tile; by default the heuristic's.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      float32[k, n] or float32[heads, k, n].

    Raises:
      NotImplementedError: a dtype that the kernel does not have.
      ValueError: shapes that do not fit each other.
    """
    check_precision(precision)
    check_float(x, "x")
    check_float(y, "y")
    if x.ndim not in (2, 3) or x.shape[:-1] != y.shape[:-1]:
        raise ValueError(
            "`x` and `y` must be [rows, k] and [rows, n], or [rows, heads, k] and [rows, heads, n]; "
            f"got {x.shape} and {y.shape}"
        )
    if mask is not None and mask.shape != x.shape[:1]:
        raise ValueError(f"`mask` must have shape {x.shape[:1]}, got {mask.shape}")
    (rows, *heads, k), n = x.shape, y.shape[-1]
    if 0 in (*x.shape, n):
        return jnp.zeros((*heads, k, n), jnp.float32)
    exact = arithmetic(precision, x.dtype, y.dtype) == "exact"
    dtype = _triton.product_dtype(x.dtype, y.dtype, precision)
    schedule = schedule or row_product_schedule(k, n, dtype, exact=exact)
    tiles = math.prod((*heads, cdiv(k, schedule.block_k), cdiv(n, schedule.block_n)))
    per_part = rows_per_part(rows, tiles, schedule.block_rows)
    plan = _Plan(schedule, rows, math.prod(heads), k, n, per_part, mask is not None, exact, dtype)
    (partials,) = _triton.pallas_call(
        functools.partial(_kernel, c=plan),
        name="row_product",
        num_programs=plan.parts * tiles,
        out_shape=[jax.ShapeDtypeStruct((plan.parts, plan.heads, k, n), jnp.dtype(jnp.float32))],
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=_triton.use_interpreter(interpret),
    )(x.reshape(rows, -1), y.reshape(rows, -1), *(() if mask is None else (mask.astype(jnp.int8),)))
    total = partials[0] if plan.parts == 1 else partials.sum(0)
    return total.reshape(*heads, k, n)


def _kernel(*refs: Any, c: _Plan) -> None:
    x, y, *mask, out = refs
    s = c.schedule
    part, head, block_k, block_n = _triton.program_ids(*c.blocks)
    k = (block_k * s.block_k + lanes(s.block_k, 0, 1))[None, :]
    n = (block_n * s.block_n + lanes(s.block_n, 0, 1))[None, :]
    first = part * c.per_part
    end = lax.min(first + c.per_part, np.int32(c.rows))

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        row = first + i * s.block_rows + lanes(s.block_rows, 0, 1)
        inside = row < end
        left, right = _tile(x, row, inside, head, k, c.k), _tile(y, row, inside, head, n, c.n)
        if c.masked:
            valid = (_triton.load(mask[0], (row,), inside) != 0)[:, None]
            left, right = (where(valid, tile, 0) for tile in (left, right))
        return total + _multiplied(left, right, c)

    count = steps(end - first, s.block_rows)
    total = _triton.fori_loop(0, count, step, jnp.zeros((s.block_k, s.block_n), jnp.float32))
    k = k.reshape(-1, 1)
    _triton.store(out, (part, head, k, n), total, (k < c.k) & (n < c.n))


def _tile(ref: Any, row: jax.Array, inside: jax.Array, head: jax.Array, column: jax.Array, width: int) -> jax.Array:
    mask = inside[:, None]
    if width % column.shape[1]:
        mask = mask & (column < width)
    return _triton.load(ref, (row[:, None], head * width + column), mask)


def _multiplied(x: jax.Array, y: jax.Array, c: _Plan) -> jax.Array:
    if c.exact:
        x = x.astype(jnp.float32)
        exponent, inverse = raised_exponents(x, 1)
        return exact_transposed_product(Left(two_parts(x * inverse), exponent), y)
    return _triton.dot(x.astype(c.dtype), y.astype(c.dtype), "tf32", transpose_x=True)
