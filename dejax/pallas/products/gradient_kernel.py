"""The first kernel of the grouped weight gradient: a program sums `x^T y` over a split of one type's positions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import cdiv, divide, lanes
from dejax.pallas._tiles import steps, where, within
from dejax.pallas.formats.row_scaled import (
    inverse_of,
    power,
    power_of_any,
    powers_of_columns,
    raised_exponents,
    two_parts,
    whole_max,
)
from dejax.pallas.products.product_schedule import MergedHeads, WeightGradientSchedule

# A biased exponent below those of all products of two float32 values.
_LEAST = -400


@dataclass(frozen=True, slots=True)
class GradientPlan(MergedHeads):
    """The static facts of a call; `names` are the kernel's references in order.

    A program takes `merged` heads at once and keeps the diagonal blocks, `head_k` by `head_n`, of their `k` by `n`
    product. A row has `head_blocks` such sets of heads.
    """

    names: tuple[str, ...]
    schedule: WeightGradientSchedule
    head_blocks: int
    merged: int
    head_k: int
    head_n: int
    precision: str
    arithmetic: str  # see `requests.arithmetic`

    @property
    def blocks(self) -> tuple[int, int, int]:
        """How many sets of heads, blocks of k and blocks of n the result of a split has."""
        return self.head_blocks, cdiv(self.k, self.schedule.block_k), cdiv(self.n, self.schedule.block_n)


@dataclass(frozen=True, slots=True)
class Left:
    """A tile of x as the products take it: cast, in float16 below 2^15 in magnitude, or in two float16 parts.

    `exponent`, [rows, 1], has the biased exponents of the powers of two that multiply its rows.
    """

    tile: Any
    exponent: jax.Array | None


def _normalized(tile: jax.Array, exponent: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """A tile whose rows are below 2^15 in magnitude, and the biased exponent of each row, [rows, 1]."""
    if exponent is not None:
        return tile, exponent
    tile = tile.astype(jnp.float32)
    exponent, inverse = raised_exponents(tile, 1)
    return tile * inverse, exponent


def _left(x: jax.Array, exponent: jax.Array | None, c: GradientPlan, dtype: Any) -> Left:
    if c.arithmetic == "scaled":
        x, exponent = _normalized(x, exponent)
        return Left(x.astype(jnp.float16), exponent)
    if c.arithmetic == "exact":
        x = x.astype(jnp.float32)
        exponent, inverse = raised_exponents(x, 1)
        return Left(two_parts(x * inverse), exponent)
    return Left(x.astype(dtype), None)


Sum = tuple[jax.Array, jax.Array]
"""A float32 sum of products and the biased exponent of its unit: scaled products are summed in units of a power of two.
"""

_dot = functools.partial(_triton.dot, transpose_x=True)


def _added(sum_: Sum, x: Left, y: jax.Array, y_exponent: jax.Array | None, c: GradientPlan) -> Sum:
    """Adds x^T y to the sum."""
    if c.arithmetic == "exact":
        return sum_[0] + exact_transposed_product(x, y), sum_[1]
    if c.arithmetic == "direct":
        return sum_[0] + _dot(x.tile, y.astype(x.tile.dtype), c.precision), sum_[1]
    assert x.exponent is not None
    y, y_exponent = _normalized(y, y_exponent)
    of_row = x.exponent + y_exponent - 127
    total, unit = _relative(sum_, whole_max(of_row))
    # At most 1, and in float16 at least 2^-24 each. Both operands take a part: a row may be 10^12 times the others and
    # have zeros in some columns, whose sums are of the others.
    relative = of_row - unit
    for_x = lax.shift_right_arithmetic(relative, lax.full_like(relative, 1))
    left, right = (
        (tile * power(jnp.maximum(part + 127, 1)).astype(tile.dtype)).astype(jnp.float16)
        for tile, part in ((x.tile, for_x), (y, relative - for_x))
    )
    return total + _dot(left, right, "tf32"), unit


def _relative(sum_: Sum, largest: jax.Array) -> Sum:
    """The sum in units of the power of biased exponent `largest`, unless its unit is larger already.

    So rows much smaller than the largest keep their bits. The sum is scaled and not the product: then tensor cores add
    the product to it, and fewer registers are needed.
    """
    total, unit = sum_
    now = jnp.maximum(unit, largest)
    return total * power(jnp.maximum(unit - now + 127, 1)), now  # 2^-126 and less is 0


def exact_transposed_product(x: Left, y: jax.Array) -> jax.Array:
    """x^T y in float32. The powers of two of x's rows multiply y."""
    assert x.exponent is not None
    y, y_exponent = _normalized(y.astype(jnp.float32), None)
    of_row = x.exponent + y_exponent - 127
    largest = whole_max(of_row)
    y = y * power(jnp.maximum(of_row - largest + 127, 1))
    return power_of_any(_triton.exact_dot(x.tile, two_parts(y), transpose_x=True), largest)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The columns of one input array that a program reads."""

    name: str
    ref: Any
    exponent: Any  # the reference of the exponents of `RowScaled`; else None
    column: jax.Array  # [1, columns]
    first: jax.Array  # of the columns
    width: int  # of a set of heads, as it is stored
    part: int  # columns that share an exponent

    @classmethod
    def of(
        cls, ref: Mapping[str, Any], name: str, column: jax.Array, first: jax.Array, heads: int, width: int
    ) -> _Side:
        """Columns of an array of rows of `heads` sets of heads, each with `width` features."""
        exponent = ref.get(f"{name}_exponent")
        part = 1 if exponent is None else heads * width // exponent.shape[1]
        # A row of one head may be stored with zeros behind its features.
        return cls(name, ref[name], exponent, column, first, ref[name].shape[1] // heads, part)

    def is_measured(self, arithmetic: str) -> bool:
        """Whether the kernel divides rows by powers of two of their columns, measured there."""
        return arithmetic != "direct" and self.exponent is None and self.ref.dtype == jnp.float32


@dataclass(frozen=True, slots=True, eq=False)
class _SplitSum:
    """The sum of one program: over a split of a type's positions, for a set of heads and a tile of their result."""

    ref: dict[str, Any]
    c: GradientPlan
    number: jax.Array  # of the split
    heads: jax.Array  # the number of its set of merged heads
    start: jax.Array
    end: jax.Array
    x: _Side
    y: _Side
    first: jax.Array  # [block_rows], the positions of the first step


Indices = tuple[jax.Array, ...]
"""The rows of x and of y at some positions, of those that are not the positions themselves."""

Tile = tuple[jax.Array, jax.Array | None]
"""Rows of a tile, and the exponent of each row [rows, 1] where they come as `RowScaled`."""


def partial_kernel(*refs: Any, c: GradientPlan) -> None:
    """Sums `x^T y` over one split, for a tile of the result."""
    p = _located(dict(zip(c.names, refs, strict=True)), c)
    at_first = _indices(p, p.first)
    powers = _measured_powers(p, at_first)
    inverses = {name: inverse_of(of_columns) for name, of_columns in powers.items()}
    empty = (jnp.zeros((c.schedule.block_k, c.schedule.block_n), jnp.float32), lax.full((), _LEAST, jnp.int32))
    count = steps(p.end - p.start, c.schedule.block_rows)
    sum_, _ = _triton.fori_loop(0, count, functools.partial(_step, p, inverses), (empty, at_first))
    _store(p, _with_units(p, sum_, powers))


def _located(ref: dict[str, Any], c: GradientPlan) -> _SplitSum:
    s = c.schedule
    split, heads, block_k, block_n = _triton.program_ids(*c.blocks)
    start, end = ref["split_start"][split], ref["split_end"][split]
    number = ref["split_number"][split] if "split_number" in ref else split
    k = (block_k * s.block_k + lanes(s.block_k, 0, 1))[None, :]
    n = (block_n * s.block_n + lanes(s.block_n, 0, 1))[None, :]
    x = _Side.of(ref, "x", k, block_k * s.block_k, c.head_blocks, c.k)
    y = _Side.of(ref, "y", n, block_n * s.block_n, c.head_blocks, c.n)
    return _SplitSum(ref, c, number, heads, start, end, x, y, start + lanes(s.block_rows, 0, 1))


# --- loads -----------------------------------------------------------------------------------------------------------


def _indices(p: _SplitSum, position: jax.Array) -> Indices:
    found = (p.ref[f"{name}_index"] for name in "xy" if f"{name}_index" in p.ref)
    return tuple(_triton.load(index, (position,), position < p.end) for index in found)


def _rows(p: _SplitSum, position: jax.Array, here: Indices) -> tuple[Tile, Tile]:
    """Tiles of x and of y."""
    valid, rows = position < p.end, iter(here)
    x_row, y_row = (next(rows) if f"{name}_index" in p.ref else position for name in "xy")
    y = _load(p, p.y, y_row, valid)
    x = _load(p, p.x, x_row, valid)
    return x, y


def _load(p: _SplitSum, side: _Side, row: jax.Array, valid: jax.Array) -> Tile:
    row_mask = within(row, side.ref.shape[0], valid)[:, None]
    mask = row_mask & (side.column < side.width) if side.width % side.column.shape[1] else row_mask
    exponent = None
    if side.exponent is not None:
        # The first column's part is every column's: `grouped_weight_gradient` decodes other rows beforehand.
        part = lax.div(p.heads * side.width + side.first, jnp.int32(side.part)) + jnp.zeros_like(row[:, None])
        exponent = _triton.load(side.exponent, (row[:, None], part), row_mask).astype(jnp.int32)
    return _triton.load(side.ref, (row[:, None], p.heads * side.width + side.column), mask), exponent


def _measured_powers(p: _SplitSum, at_first: Indices) -> dict[str, jax.Array]:
    """Powers of two near the largest magnitudes of the columns of float32 operands, [1, columns].

    A program measures the rows of its first step. A power that is wrong by a factor of some thousands costs no digits.
    """
    found: dict[str, jax.Array] = {}
    if not any(side.is_measured(p.c.arithmetic) for side in (p.x, p.y)):
        return found
    for side, (rows, _) in zip((p.x, p.y), _rows(p, p.first, at_first), strict=True):
        if side.is_measured(p.c.arithmetic):
            found[side.name] = powers_of_columns(rows)
    return found


def _powers_of_columns(p: _SplitSum, side: _Side, width: int, measured: dict[str, jax.Array]) -> jax.Array | None:
    """The powers of two by which the sums are multiplied: measured ones, or those of the `RowScaled`."""
    if f"{side.name}_columns" not in p.ref:
        return measured.get(side.name)
    at, inside = (p.heads * width + side.column,), side.column < width
    return _triton.load(p.ref[f"{side.name}_columns"], at, inside, 1.0).astype(jnp.float32)


# --- sums ------------------------------------------------------------------------------------------------------------


def _step(
    p: _SplitSum, inverses: Mapping[str, jax.Array], i: jax.Array, carry: tuple[Sum, Indices]
) -> tuple[Sum, Indices]:
    """The sum with the next `block_rows` positions, and the indices of the step after."""
    c, (sum_, here) = p.c, carry
    position = p.first + i * c.schedule.block_rows
    ahead = _indices(p, position + c.schedule.block_rows)  # waits for memory together with this step's rows
    (x, x_exponent), (y, y_exponent) = _rows(p, position, here)
    x, y = (
        rows.astype(jnp.float32) * inverses[name] if name in inverses else rows for name, rows in (("x", x), ("y", y))
    )
    left = _left(x, x_exponent, c, _triton.product_dtype(x.dtype, y.dtype, c.precision))
    return _added(sum_, left, y, y_exponent, c), ahead


def _with_units(p: _SplitSum, sum_: Sum, powers: dict[str, jax.Array]) -> jax.Array:
    """The sum, multiplied by its unit and by the powers of two of columns."""
    c, (total, unit) = p.c, sum_
    total = power_of_any(total, unit) if c.arithmetic == "scaled" else total
    of_n, of_k = _powers_of_columns(p, p.y, c.n, powers), _powers_of_columns(p, p.x, c.k, powers)
    total = total if of_n is None else total * of_n
    return total if of_k is None else total * of_k.reshape(-1, 1)


def _store(p: _SplitSum, total: jax.Array) -> None:
    """Stores the blocks on the diagonal, `head_k` by `head_n`, of a tile of the result."""
    c, row, column, head = p.c, p.x.column.reshape(-1, 1), p.y.column, p.heads
    inside = (row < c.k) & (column < c.n)
    if c.merged > 1:
        (head_of_row, row), (head_of_column, column) = divide(row, c.head_k), divide(column, c.head_n)
        inside = inside & (head_of_row == head_of_column)
        head = where(inside, p.heads * c.merged + head_of_column, c.head_blocks * c.merged)
    _triton.store(p.ref["partial"], (p.number, head, row, column), total, inside)
