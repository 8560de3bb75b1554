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
from dejax.pallas._shapes import cdiv, divide, lanes, next_power_of_two
from dejax.pallas._tiles import steps, where, within
from dejax.pallas.formats.row_scaled import (
    RAISED,
    exponents,
    finite_magnitude,
    inverse_of,
    inverse_power,
    max_magnitude,
    power,
    power_of_any,
    powers_of_tile,
    raised_exponents,
    two_floats,
    two_parts,
    whole_max,
)
from dejax.pallas.products.schedule import MergedHeads, WeightGradientSchedule

# A biased exponent below those of all products of two float32 values.
_LEAST = -400


@dataclass(frozen=True, slots=True)
class GradientPlan(MergedHeads):
    """Static facts of one call; `names` are the kernel's references in order.

    A program takes `merged` heads at once and keeps the diagonal blocks, `head_k` by `head_n`, of their `k` by `n`
    product. A row has `head_blocks` such sets of heads.
    """

    names: tuple[str, ...]
    schedule: WeightGradientSchedule
    head_blocks: int
    merged: int
    head_k: int
    head_n: int
    narrow: int  # columns of the narrow rows, of each head
    precision: str
    arithmetic: str  # see `requests.arithmetic`
    dtype: jnp.dtype  # that operands are cast to where the arithmetic is direct
    x_rows: int
    y_rows: int
    x_part: int  # columns that share an exponent where x comes as `RowScaled`
    y_part: int
    x_behind: int  # zeros behind the features of a row of x
    y_behind: int
    measured: tuple[str, ...]  # which of x and y the kernel divides by powers of two of its columns, measured there

    @property
    def narrow_width(self) -> int:
        return self.merged * self.narrow

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


def _left(x: jax.Array, exponent: jax.Array | None, c: GradientPlan) -> Left:
    if c.arithmetic == "scaled":
        x, exponent = _normalized(x, exponent)
        return Left(x.astype(jnp.float16), exponent)
    if c.arithmetic == "exact":
        x = x.astype(jnp.float32)
        exponent, inverse = raised_exponents(x, 1)
        return Left(two_parts(x * inverse), exponent)
    return Left(x.astype(c.dtype), None)


Sum = tuple[jax.Array, jax.Array]
"""A float32 sum of products and the biased exponent of its unit: scaled products are summed in units of a power of two.
"""

_dot = functools.partial(_triton.dot, transpose_x=True)


def _added(sum_: Sum, x: Left, y: jax.Array, y_exponent: jax.Array | None, c: GradientPlan) -> Sum:
    """The sum plus x^T y, where y are wide rows."""
    if c.arithmetic == "exact":
        return sum_[0] + exact_transposed_product(x, y), sum_[1]
    if c.arithmetic == "direct":
        return sum_[0] + _dot(x.tile, y.astype(c.dtype), c.precision), sum_[1]
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


def _narrow_added(sum_: Sum, x: Left, y: jax.Array, c: GradientPlan) -> Sum:
    """The sum plus x^T y, where y are narrow rows of several columns: in two parts, so that x alone is rounded."""
    if c.arithmetic == "exact":
        return _added(sum_, x, y, None, c)
    y, (total, unit), dtype = y.astype(jnp.float32), sum_, c.dtype
    if c.arithmetic == "scaled":  # powers of two of x's rows multiply y in float32
        assert x.exponent is not None
        y, dtype = y * power(x.exponent), jnp.dtype(jnp.float16)
        total, unit = _relative(sum_, exponents(y, None)[0] - RAISED)
        y = y * inverse_power(unit)
    for part in reversed(two_floats(y, dtype)):
        total = total + _dot(x.tile, part, c.precision)
    return total, unit


def _column_added(total: jax.Array, x: jax.Array, x_exponent: jax.Array | None, y: jax.Array) -> jax.Array:
    """The sum plus the rows of x times y, [rows, 1], in float32, in several partial rows that are added at the end.

    Tensor cores would multiply 15 columns of zeros. With 8 elements of the sum for each thread, a thread adds to its
    own elements until the last step, so that no step has a barrier.
    """
    y = y.astype(jnp.float32)
    y = y if x_exponent is None else y * power(x_exponent)
    return total + lax.reduce_sum((x.astype(jnp.float32) * y).reshape(-1, *total.shape), (0,))


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
    column: jax.Array  # [1, columns]
    block: jax.Array | None  # the number of their block, of `size` columns; None: the program reads all columns
    size: int
    width: int  # of a set of heads, as it is stored
    rows: int
    part: int  # columns that share an exponent


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """What one program sums: a split of a type's positions, for a set of heads and a tile of their result."""

    ref: dict[str, Any]
    c: GradientPlan
    number: jax.Array  # of the split
    heads: jax.Array  # the number of its set of merged heads
    start: jax.Array
    end: jax.Array
    leads: jax.Array  # whether the program multiplies the narrow rows, too
    x: _Side
    y: _Side
    narrow: _Side
    first: jax.Array  # [block_rows], the positions of the first step


Indices = tuple[jax.Array, ...]
"""The rows of x and of y at some positions, of those that are not the positions themselves."""

Tile = tuple[jax.Array, jax.Array | None]
"""Rows of a tile, and the exponent of each row [rows, 1] where they come as `RowScaled`."""


def partial_kernel(*refs: Any, c: GradientPlan) -> None:
    """Sums one split: `x^T y` for a tile of the result, and `x^T narrow` where the tile is the first of its rows."""
    p = _located(dict(zip(c.names, refs, strict=True)), c)
    at_first = _indices(p, p.first)
    powers = _measured_powers(p, at_first) if c.measured else {}
    inverses = {name: inverse_of(of_columns) for name, of_columns in powers.items()}
    empty = _empty_sums(p)
    count = steps(p.end - p.start, c.schedule.block_rows)
    sums, _ = _triton.fori_loop(0, count, functools.partial(_step, p, inverses), (empty, at_first))
    _store_all(p, *_with_units(p, sums, powers))


def _located(ref: dict[str, Any], c: GradientPlan) -> _Program:
    s, count = c.schedule, c.narrow_width
    split, heads, block_k, block_n = _triton.program_ids(*c.blocks)
    start, end = ref["split_start"][split], ref["split_end"][split]
    number = ref["split_number"][split] if "split_number" in ref else split
    leads = block_n == 0
    k = (block_k * s.block_k + lanes(s.block_k, 0, 1))[None, :]
    n = (block_n * s.block_n + lanes(s.block_n, 0, 1))[None, :]
    m = lanes(max(16, next_power_of_two(count)) if count > 1 else 1, 0, 1)[None, :]
    x = _Side("x", k, block_k, s.block_k, c.k + c.x_behind, c.x_rows, c.x_part)
    y = _Side("y", n, block_n, s.block_n, c.n + c.y_behind, c.y_rows, c.y_part)
    narrow = _Side("narrow", m, None, 0, count, c.y_rows, 1)
    return _Program(ref, c, number, heads, start, end, leads, x, y, narrow, start + lanes(s.block_rows, 0, 1))


# --- loads -----------------------------------------------------------------------------------------------------------


def _indices(p: _Program, position: jax.Array) -> Indices:
    found = (p.ref[f"{name}_index"] for name in "xy" if f"{name}_index" in p.ref)
    return tuple(_triton.load(index, (position,), position < p.end) for index in found)


def _wide_rows(p: _Program, position: jax.Array, here: Indices) -> tuple[jax.Array, Tile, Tile]:
    """The row of y at each position, and tiles of x and of y."""
    valid, rows = position < p.end, iter(here)
    x_row, y_row = (next(rows) if f"{name}_index" in p.ref else position for name in "xy")
    y = _load(p, p.y, y_row, valid)
    x = _load(p, p.x, x_row, valid)
    return y_row, x, y


def _load(p: _Program, side: _Side, row: jax.Array, valid: jax.Array) -> Tile:
    first = 0 if side.block is None else side.block * side.size
    row_mask = within(row, side.rows, valid)[:, None]
    mask = row_mask & (side.column < side.width) if side.width % side.column.shape[1] else row_mask
    exponent = None
    if f"{side.name}_exponent" in p.ref:
        # The first column's part is every column's: `grouped_weight_gradient` decodes other rows beforehand.
        part = lax.div(p.heads * side.width + first, jnp.int32(side.part)) + jnp.zeros_like(row[:, None])
        exponent = _triton.load(p.ref[f"{side.name}_exponent"], (row[:, None], part), row_mask).astype(jnp.int32)
    return _triton.load(p.ref[side.name], (row[:, None], p.heads * side.width + side.column), mask), exponent


def _times_scale(
    p: _Program, rows: jax.Array, position: jax.Array, valid: jax.Array, column: jax.Array, width: int
) -> jax.Array:
    """Rows times the scale of their position and of the head that each column, of heads of `width`, belongs to."""
    if "scale" not in p.ref:
        return rows
    head = p.heads * p.c.merged + divide(column, width)[0] if p.c.merged > 1 else p.heads
    scale = _triton.load(p.ref["scale"], (position[:, None], head), valid[:, None])
    return rows.astype(jnp.float32) * scale.astype(jnp.float32)


def _measured_powers(p: _Program, at_first: Indices) -> dict[str, jax.Array]:
    """Powers of two near the largest magnitudes of the columns of float32 operands, [1, columns].

    A program measures the rows of its first step. A power that is wrong by a factor of some thousands costs no digits.
    """
    _, *tiles = _wide_rows(p, p.first, at_first)
    found = {}
    for name, (rows, _) in zip("xy", tiles, strict=True):
        if name in p.c.measured:
            largest = max_magnitude(finite_magnitude(rows), 0)
            found[name] = powers_of_tile(largest, whole_max(largest))
    return found


def _powers_of_columns(p: _Program, side: _Side, width: int, measured: dict[str, jax.Array]) -> jax.Array | None:
    """The powers of two that multiply the sums: measured, or those of `RowScaled`."""
    if f"{side.name}_columns" not in p.ref:
        return measured.get(side.name)
    at, inside = (p.heads * width + side.column,), side.column < width
    return _triton.load(p.ref[f"{side.name}_columns"], at, inside, 1.0).astype(jnp.float32)


# --- sums ------------------------------------------------------------------------------------------------------------


def _empty_sums(p: _Program) -> list[Sum]:
    s, count = p.c.schedule, p.c.narrow_width
    empty = lambda shape, unit=_LEAST: (jnp.zeros(shape, jnp.float32), lax.full((), unit, jnp.int32))  # noqa: E731
    found = [empty((s.block_k, s.block_n))]
    if count == 1:  # relative to 1
        found.append(empty((min(s.block_rows, 256 * s.num_warps // s.block_k), s.block_k), 127))
    elif count:
        found.append(empty((s.block_k, p.narrow.column.shape[1])))
    return found


def _step(
    p: _Program, inverses: Mapping[str, jax.Array], i: jax.Array, carry: tuple[list[Sum], Indices]
) -> tuple[list[Sum], Indices]:
    """The sums with the next `block_rows` positions, and the indices of the step after."""
    c, (sums, here) = p.c, carry
    position = p.first + i * c.schedule.block_rows
    valid = position < p.end
    ahead = _indices(p, position + c.schedule.block_rows)  # waits for memory together with this step's rows
    y_row, (x, x_exponent), (y, y_exponent) = _wide_rows(p, position, here)
    x, y = (
        rows.astype(jnp.float32) * inverses[name] if name in inverses else rows for name, rows in (("x", x), ("y", y))
    )
    left = _left(x, x_exponent, c)
    y = _times_scale(p, y, position, valid, p.y.column, c.head_n)
    found = [_added(sums[0], left, y, y_exponent, c)]
    if c.narrow:
        some = valid & p.leads if c.n > c.schedule.block_n else valid
        narrow, _ = _load(p, p.narrow, y_row, some)
        narrow = _times_scale(p, narrow, position, valid, p.narrow.column, c.narrow)
        if c.narrow_width == 1:
            found.append((_column_added(sums[1][0], x, x_exponent, narrow), sums[1][1]))
        else:
            found.append(_narrow_added(sums[1], left, narrow, c))
    return found, ahead


def _with_units(p: _Program, sums: list[Sum], powers: dict[str, jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
    """The sums of wide and of narrow rows, and the powers of x's columns, by which they are yet to be multiplied."""
    c = p.c
    wide, *narrow = (power_of_any(total, unit) if c.arithmetic == "scaled" else total for total, unit in sums)
    of_n, of_k = _powers_of_columns(p, p.y, c.n, powers), _powers_of_columns(p, p.x, c.k, powers)
    if of_n is not None:
        wide = wide * of_n
    if c.narrow_width == 1:
        narrow = [lax.reduce_sum(narrow[0], (0,)).reshape(-1, 1)]
    return [wide, *narrow], of_k


def _store_all(p: _Program, totals: list[jax.Array], of_k: jax.Array | None) -> None:
    k = p.x.column.reshape(-1, 1)
    wide, *narrow = (total if of_k is None else total * of_k.reshape(-1, 1) for total in totals)
    _store(p, "partial", wide, k, p.y.column, p.c.head_n, jnp.ones((1, 1), jnp.bool_))
    for total in narrow:
        _store(p, "narrow_partial", total, k, p.narrow.column, p.c.narrow, lax.broadcast(p.leads, (1, 1)))


def _store(
    p: _Program, name: str, total: jax.Array, k: jax.Array, column: jax.Array, width: int, inside: jax.Array
) -> None:
    """Stores the blocks on the diagonal, `head_k` by `width`, of a tile of the result."""
    c = p.c
    inside, row, head = inside & (k < c.k) & (column < c.merged * width), k, p.heads
    if c.merged > 1:
        (head_of_row, row), (head_of_column, column) = divide(k, c.head_k), divide(column, width)
        inside = inside & (head_of_row == head_of_column)
        head = where(inside, p.heads * c.merged + head_of_column, c.head_blocks * c.merged)
    _triton.store(p.ref[name], (p.number, head, row, column), total, inside)
