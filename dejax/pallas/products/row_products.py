"""The template of long products, `x^T y` summed over all rows: gradients of weights that all rows share.

The result has few tiles and the sum is long, so that the rows are cut into parts, for which programs sum float32
partials. XLA adds the partials in their order. There are no atomics, so the result is the same in every run. XLA by
itself copies both operands, in order to pad the rows to a multiple of its parts. Here a part may have any rows.

Several arrays can be multiplied by the same rows of y, and these rows summed, in one pass: programs that read the same
rows run side by side, so that memory is read once.

Tiles of float32 are multiplied by the tensor cores as they are (`tf32`). So they need no registers on their way from
memory, and are loaded steps ahead. Grouped products convert them instead (`gradient_kernel`).

Reference: `products.reference.row_product`. Contract test: `tests/pallas/test_row_products.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from dejax.pallas.products.product_schedule import WeightGradientSchedule, row_product_schedule, rows_per_part
from dejax.pallas.products.requests import arithmetic


@dataclass(frozen=True, slots=True)
class _RowProductPlan:
    """Static facts of one call; `widths` are those of each x, `arithmetics` how each is multiplied."""

    schedule: WeightGradientSchedule
    rows: int
    heads: int
    widths: tuple[int, ...]
    n: int
    per_part: int  # rows of a part, whole steps
    masked: bool
    total: bool
    arithmetics: tuple[tuple[bool, Any], ...]  # whether in two float16 parts, and the dtype otherwise

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks of rows the results of each x have."""
        return tuple(cdiv(k, self.schedule.block_k) for k in self.widths)

    @property
    def tiles(self) -> tuple[int, int, int]:
        """How many blocks of columns, heads, and blocks of rows there are; the last are side by side."""
        return cdiv(self.n, self.schedule.block_n), self.heads, sum(self.blocks)

    @property
    def parts(self) -> int:
        return cdiv(self.rows, self.per_part)


def row_products(
    xs: Sequence[jax.Array],
    y: jax.Array,
    *,
    total: bool = False,
    mask: jax.Array | None = None,
    precision: str = "tf32",
    schedule: WeightGradientSchedule | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, ...]:
    """The sum of `x[r]^T y[r]` over the rows r, for each of `xs`, and for each head if there are some.

    Args:
      xs: float[rows, k] or float[rows, heads, k], float32, bfloat16 or float16; each may have its own k, and
        more rows than y, which are not read.
      y: float[rows, n] or float[rows, heads, n].
      total: also returns the sum of the rows of y.
      mask: bool[rows]: the rows to sum. What is in the others, be it NaN, has no effect.
      precision: the precision of float32 operands: `tf32`, `f32` (22 bits; three float16 products) or `bf16` (cast).
        Operands that are both bfloat16, or both float16, are multiplied as they are.
      schedule: the sizes of the tile. None: those that a heuristic chooses.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      float32[k, n] or float32[heads, k, n] for each x; with `total` also float32[n] or float32[heads, n].

    Raises:
      NotImplementedError: a dtype that the kernel does not have.
      ValueError: shapes that do not fit each other.
    """
    _check(xs, y, mask, precision)
    (*heads, n), widths = y.shape[1:], tuple(x.shape[-1] for x in xs)
    shapes = [(*heads, k, n) for k in widths] + [(*heads, n)] * total
    if 0 in (*y.shape, *widths):
        return tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    plan = _plan(xs, y, total, mask is not None, precision, schedule)
    partials = _triton.pallas_call(
        functools.partial(_kernel, c=plan),
        name="row_products",
        num_programs=plan.parts * math.prod(plan.tiles),
        out_shape=[
            jax.ShapeDtypeStruct((plan.parts, plan.heads, *shape[len(heads) :]), jnp.dtype(jnp.float32))
            for shape in shapes
        ],
        num_warps=plan.schedule.num_warps,
        num_stages=plan.schedule.num_stages,
        interpret=_triton.use_interpreter(interpret),
    )(*(a.reshape(a.shape[0], -1) for a in (*xs, y)), *(() if mask is None else (mask.astype(jnp.int8),)))
    found = (p[0] if plan.parts == 1 else p.sum(0) for p in partials)
    return tuple(sum_.reshape(shape) for sum_, shape in zip(found, shapes, strict=True))


def _check(xs: Sequence[jax.Array], y: jax.Array, mask: jax.Array | None, precision: str) -> None:
    check_precision(precision)
    check_float(y, "y")
    for x in xs:
        check_float(x, "x")
        if x.ndim not in (2, 3) or x.ndim != y.ndim or x.shape[1:-1] != y.shape[1:-1] or x.shape[0] < y.shape[0]:
            raise ValueError(
                "`x` and `y` must be [rows, k] and [rows, n], or [rows, heads, k] and [rows, heads, n], `x` with at "
                f"least the rows of `y`; got {x.shape} and {y.shape}"
            )
    if mask is not None and mask.shape != y.shape[:1]:
        raise ValueError(f"`mask` must have shape {y.shape[:1]}, got {mask.shape}")


def _plan(
    xs: Sequence[jax.Array],
    y: jax.Array,
    total: bool,
    masked: bool,
    precision: str,
    schedule: WeightGradientSchedule | None,
) -> _RowProductPlan:
    (rows, *heads, n), widths = y.shape, tuple(x.shape[-1] for x in xs)
    exact = [arithmetic(precision, x.dtype, y.dtype) == "exact" for x in xs]
    dtypes = [_triton.product_dtype(x.dtype, y.dtype, precision) for x in xs]
    if schedule is None:
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        schedule = row_product_schedule(max(widths), n, widest, exact=any(exact))
    arithmetics = tuple(zip(exact, dtypes, strict=True))
    plan = _RowProductPlan(schedule, rows, math.prod(heads), widths, n, rows, masked, total, arithmetics)
    return replace(plan, per_part=rows_per_part(rows, math.prod(plan.tiles), schedule.block_rows))


def _kernel(*refs: Any, c: _RowProductPlan) -> None:
    count = len(c.widths)
    part, block_n, head, block = _triton.program_ids(*c.tiles)
    if count == 1:
        _sum_part(refs, c, 0, part, head, block, block_n)
        return
    for number in range(count):
        first = sum(c.blocks[:number])
        mine = (block >= first) & (block < first + c.blocks[number])
        _triton.when(mine, functools.partial(_sum_part, refs, c, number, part, head, block - first, block_n))


def _sum_part(
    refs: Sequence[Any],
    c: _RowProductPlan,
    number: int,
    part: jax.Array,
    head: jax.Array,
    block_k: jax.Array,
    block_n: jax.Array,
) -> None:
    """Sums the products of a part for a tile of one result, and the rows of y for the first tile of its columns."""
    s, count, width = c.schedule, len(c.widths), c.widths[number]
    x, y, outs = refs[number], refs[count], refs[count + 1 + c.masked :]
    k = (block_k * s.block_k + lanes(s.block_k, 0, 1))[None, :]
    n = (block_n * s.block_n + lanes(s.block_n, 0, 1))[None, :]
    first = part * c.per_part
    end = lax.min(first + c.per_part, np.int32(c.rows))
    sums = [jnp.zeros((s.block_k, s.block_n), jnp.float32)]
    if c.total and number == 0:  # each row of the tile apart until the end, so that no step waits for other threads
        sums.append(jnp.zeros((s.block_rows, s.block_n), jnp.float32))

    def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        row = first + i * s.block_rows + lanes(s.block_rows, 0, 1)
        inside = row < end
        left, right = _tile(x, row, inside, head, k, width), _tile(y, row, inside, head, n, c.n)
        if c.masked:
            valid = (_triton.load(refs[count + 1], (row,), inside) != 0)[:, None]
            left, right = (where(valid, tile, 0) for tile in (left, right))
        product, *rest = sums
        return [product + _multiplied(left, right, *c.arithmetics[number]), *(r + right for r in rest)]

    product, *rest = _triton.fori_loop(0, steps(end - first, s.block_rows), step, sums)
    rows = k.reshape(-1, 1)
    _triton.store(outs[number], (part, head, rows, n), product, (rows < width) & (n < c.n))
    for each in rest:
        n = n.reshape(-1)
        _triton.store(outs[count], (part, head, n), lax.reduce_sum(each, (0,)), (n < c.n) & (block_k == 0))


def _tile(ref: Any, row: jax.Array, inside: jax.Array, head: jax.Array, column: jax.Array, width: int) -> jax.Array:
    mask = inside[:, None]
    if width % column.shape[1]:
        mask = mask & (column < width)
    return _triton.load(ref, (row[:, None], head * width + column), mask)


def _multiplied(x: jax.Array, y: jax.Array, exact: bool, dtype: Any) -> jax.Array:
    if exact:
        x = x.astype(jnp.float32)
        exponent, inverse = raised_exponents(x, 1)
        return exact_transposed_product(Left(two_parts(x * inverse), exponent), y)
    return _triton.dot(x.astype(dtype), y.astype(dtype), "tf32", transpose_x=True)
