"""The outer-product template: `sum over rows of a type of x^T y`, the gradient of a typed weight.

Two passes and no atomics, so that the result is the same in every run: rows of a type are split among programs, each of
which sums its rows into a float32 partial; a second kernel adds the partials of each type up in their order.

Rows of x that are multiplied with wide rows can be multiplied with a few numbers a row in the same pass, one number in
registers and several by a second product of 16 columns: the gradient of a typed vector beside that of a typed weight.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton, tuned_tables
from dejax.pallas._checks import as_index, check_float, check_precision
from dejax.pallas._shapes import cdiv, divide, lanes, next_power_of_two
from dejax.pallas._tiles import steps, where, within
from dejax.pallas.formats.half_rows import (
    RAISED,
    HalfRows,
    exponents,
    finite_magnitude,
    halves,
    inverse_of,
    inverse_power,
    power,
    power_of_any,
    powers_of_tile,
    raised_exponents,
    two_parts,
    whole_max,
)
from dejax.pallas.products import schedule as schedules
from dejax.pallas.products.schedule import OuterSchedule, merged_groups, outer_schedule
from dejax.pallas.products.sums import sum_rows_of_all

# Numbers of narrow rows: the columns of the smallest product.
MAX_NARROW = 16
# A biased exponent below those of all products of two float32 numbers.
_LEAST = -400


@dataclass(frozen=True, slots=True)
class _Config:
    """Static facts of one call; `names` are the first kernel's references in order.

    A program takes `merged` groups at once and keeps the diagonal blocks, `group_k` by `group_n`, of their `k` by `n`
    product; `blocks` such sets of groups make a row. `narrow` are the columns of the narrow rows, of each group.
    """

    names: tuple[str, ...]
    blocks: int
    merged: int
    group_k: int
    group_n: int
    k: int
    n: int
    narrow: int
    schedule: OuterSchedule
    precision: str
    dtype: jnp.dtype
    x_rows: int
    y_rows: int
    scaled: bool  # products in float16 with powers of two beside
    exact: bool  # the same of float16 numbers in two parts
    x_part: int  # columns that share an exponent where x comes as `HalfRows`
    y_part: int
    x_behind: int  # zeros behind the features of a row of x
    y_behind: int
    measured: tuple[str, ...]  # of x and y, which is divided by the powers of two of its columns, measured here


@dataclass(frozen=True, slots=True)
class _Left:
    """A tile of x as the products take it: as it is, in 16 bits and below 2^15 in magnitude, or in two parts.

    `exponent` [rows, 1] are the powers of two of its rows, biased.
    """

    tile: Any
    exponent: jax.Array | None


def _normalized(tile: jax.Array, exponent: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """A tile's rows below 2^15 in magnitude, and the exponent of each row [rows, 1], biased."""
    if exponent is not None:
        return tile, exponent
    tile = tile.astype(jnp.float32)
    exponent, inverse = raised_exponents(tile, 1)
    return tile * inverse, exponent


def _left(x: jax.Array, exponent: jax.Array | None, c: _Config) -> _Left:
    if c.scaled:
        x, exponent = _normalized(x, exponent)
        return _Left(x.astype(jnp.float16), exponent)
    if c.exact:
        x = x.astype(jnp.float32)
        exponent, inverse = raised_exponents(x, 1)
        return _Left(two_parts(x * inverse), exponent)
    return _Left(x.astype(c.dtype), None)


Sum = tuple[jax.Array, jax.Array]
"""Of products of tiles, float32; where they are scaled relative to a power of two that follows, biased."""

_dot = functools.partial(_triton.dot, transpose_x=True)


def _added(sum_: Sum, x: _Left, y: jax.Array, y_exponent: jax.Array | None, c: _Config) -> Sum:
    """The sum and x^T y, y of wide rows."""
    if c.exact:
        return sum_[0] + _exact_product(x, y), sum_[1]
    if not c.scaled:
        return sum_[0] + _dot(x.tile, y.astype(c.dtype), c.precision), sum_[1]
    assert x.exponent is not None
    y, y_exponent = _normalized(y, y_exponent)
    of_row = x.exponent + y_exponent - 127
    total, unit = _relative(sum_, whole_max(of_row))
    relative = power(jnp.maximum(of_row - unit + 127, 1))  # at most 1, and in float16 at least 2^-24
    return total + _dot(x.tile, (y * relative.astype(y.dtype)).astype(jnp.float16), "tf32"), unit


def _several_added(sum_: Sum, x: _Left, y: jax.Array, c: _Config) -> Sum:
    """The sum and x^T y, y of a few numbers a row: in two parts, so that x alone is rounded."""
    if c.exact:
        return _added(sum_, x, y, None, c)
    y, (total, unit), dtype = y.astype(jnp.float32), sum_, c.dtype
    if c.scaled:  # powers of two of x's rows multiply the numbers in float32
        assert x.exponent is not None
        y, dtype = y * power(x.exponent), jnp.dtype(jnp.float16)
        total, unit = _relative(sum_, exponents(y, None)[0] - RAISED)
        y = y * inverse_power(unit)
    for part in reversed(halves(y, dtype)):
        total = total + _dot(x.tile, part, c.precision)
    return total, unit


def _one_added(total: jax.Array, x: jax.Array, x_exponent: jax.Array | None, y: jax.Array) -> jax.Array:
    """The sum, some rows of numbers, and the rows of x times y [rows, 1], in float32.

    With 8 numbers for each thread what a thread adds up is its own until the last step, and no step has a barrier for
    it. A product of which one column is not zero takes longer: am's RGAT 0.32 ms, so 0.24.
    """
    y = y.astype(jnp.float32)
    y = y if x_exponent is None else y * power(x_exponent)
    return total + lax.reduce_sum((x.astype(jnp.float32) * y).reshape(-1, *total.shape), (0,))


def _relative(sum_: Sum, largest: jax.Array) -> Sum:
    """The sum relative to the power `largest`, biased, if it was relative to a smaller one.

    So rows much smaller than the largest keep their bits. What was added up is scaled, and not the product, so
    that tensor cores add to it: 128 by 128 takes 64 registers a thread less.
    """
    total, unit = sum_
    now = jnp.maximum(unit, largest)
    return total * power(jnp.maximum(unit - now + 127, 1)), now  # 2^-126 and less is 0


def _exact_product(x: _Left, y: jax.Array) -> jax.Array:
    """x^T y in float32. Row p's powers of two multiply y."""
    assert x.exponent is not None
    y, y_exponent = _normalized(y.astype(jnp.float32), None)
    of_row = x.exponent + y_exponent - 127
    largest = whole_max(of_row)
    y = y * power(jnp.maximum(of_row - largest + 127, 1))
    return power_of_any(_triton.exact_dot(x.tile, two_parts(y), transpose_x=True), largest)


def _powers_of_columns(tiles: dict[str, Any], c: _Config) -> dict[str, jax.Array]:
    """Powers of two near the largest magnitudes of the columns of float32 tiles, [1, columns].

    A program measures its first rows: what is far from the truth by some thousands costs no digits.
    """
    found = {}
    for name in c.measured:
        largest = lax.expand_dims(lax.reduce_max(finite_magnitude(tiles[name][0]), (0,)), (0,))
        found[name] = powers_of_tile(largest, whole_max(largest))
    return found


def _partial_kernel(*refs: Any, c: _Config) -> None:
    ref = dict(zip(c.names, refs, strict=True))
    s = c.schedule
    split, g, block_k, block_n = _triton.program_ids(c.blocks, cdiv(c.k, s.block_k), cdiv(c.n, s.block_n))
    start, end = ref["split_start"][split], ref["split_end"][split]
    number = ref["split_number"][split] if "split_number" in ref else split
    leads = block_n == 0  # its rows are multiplied with the narrow ones
    k = (block_k * s.block_k + lanes(s.block_k, 0, 1))[None, :]
    n = (block_n * s.block_n + lanes(s.block_n, 0, 1))[None, :]
    count = c.merged * c.narrow  # numbers of narrow rows
    m = lanes(max(16, next_power_of_two(count)) if count > 1 else 1, 0, 1)[None, :]

    def indices(position: jax.Array) -> tuple[jax.Array, ...]:
        """The rows of x and of y at positions, as far as they are not the positions."""
        found = (ref[f"{name}_index"] for name in "xy" if f"{name}_index" in ref)
        return tuple(_triton.load(index, (position,), position < end) for index in found)

    def load(
        name: str,
        row: jax.Array,
        valid: jax.Array,
        column: jax.Array,
        first: jax.Array | int,
        width: int,
        rows: int,
        part_width: int,
    ) -> tuple[jax.Array, jax.Array | None]:
        row_mask = within(row, rows, valid)[:, None]
        mask = row_mask & (column < width) if width % column.shape[1] else row_mask
        exponent = None
        if f"{name}_exponent" in ref:
            # The first column's part is every column's: `typed_outer` sees to that.
            part = lax.div(g * width + first, jnp.int32(part_width)) + jnp.zeros_like(row[:, None])
            exponent = _triton.load(ref[f"{name}_exponent"], (row[:, None], part), row_mask).astype(jnp.int32)
        return _triton.load(ref[name], (row[:, None], g * width + column), mask), exponent

    def scaled_by(rows: jax.Array, position: jax.Array, valid: jax.Array, column: jax.Array, width: int) -> jax.Array:
        if "scale" not in ref:
            return rows
        group = g * c.merged + divide(column, width)[0] if c.merged > 1 else g
        scale = _triton.load(ref["scale"], (position[:, None], group), valid[:, None])
        return rows.astype(jnp.float32) * scale.astype(jnp.float32)

    first = start + lanes(s.block_rows, 0, 1)

    def wide_rows(position: jax.Array, here: tuple[jax.Array, ...]) -> Any:
        """The row of y at each position, and tiles of x and y with the exponents of their rows."""
        valid, rows = position < end, iter(here)
        x_row, y_row = (next(rows) if f"{name}_index" in ref else position for name in "xy")
        y = load("y", y_row, valid, n, block_n * s.block_n, c.n + c.y_behind, c.y_rows, c.y_part)
        x = load("x", x_row, valid, k, block_k * s.block_k, c.k + c.x_behind, c.x_rows, c.x_part)
        return y_row, x, y

    at_first = indices(first)
    powers = _powers_of_columns(dict(zip("xy", wide_rows(first, at_first)[1:], strict=True)), c) if c.measured else {}
    inverses = {name: inverse_of(of_columns) for name, of_columns in powers.items()}

    def powers_of_side(name: str, column: jax.Array, width: int) -> jax.Array | None:
        """The powers of two that multiply the sums: measured, or those of `HalfRows`."""
        if f"{name}_columns" not in ref:
            return powers.get(name)
        return _triton.load(ref[f"{name}_columns"], (g * width + column,), column < width, 1.0).astype(jnp.float32)

    def divided(name: str, rows: jax.Array) -> jax.Array:
        return rows.astype(jnp.float32) * inverses[name] if name in inverses else rows

    def step(i: jax.Array, carry: tuple[list[Sum], tuple[jax.Array, ...]]) -> Any:
        sums, here = carry
        position = first + i * s.block_rows
        valid = position < end
        ahead = indices(position + s.block_rows)  # waits for memory together with this step's rows
        y_row, (x, x_exponent), (y, y_exponent) = wide_rows(position, here)
        x, y = (divided(name, rows) for name, rows in (("x", x), ("y", y)))
        left = _left(x, x_exponent, c)
        found = [_added(sums[0], left, scaled_by(y, position, valid, n, c.group_n), y_exponent, c)]
        if count:
            some = valid & leads if c.n > s.block_n else valid
            numbers, _ = load("narrow", y_row, some, m, 0, count, c.y_rows, 1)
            numbers = scaled_by(numbers, position, valid, m, c.narrow)
            if count == 1:
                found.append((_one_added(sums[1][0], x, x_exponent, numbers), sums[1][1]))
            else:
                found.append(_several_added(sums[1], left, numbers, c))
        return found, ahead

    empty = lambda shape, unit=_LEAST: (jnp.zeros(shape, jnp.float32), lax.full((), unit, jnp.int32))  # noqa: E731
    nothing = [empty((s.block_k, s.block_n))]
    if count == 1:  # relative to 1
        nothing.append(empty((min(s.block_rows, 256 * s.num_warps // s.block_k), s.block_k), 127))
    elif count:
        nothing.append(empty((s.block_k, m.shape[1])))
    sums, _ = _triton.fori_loop(0, steps(end - start, s.block_rows), step, (nothing, at_first))
    wide, *narrow = (power_of_any(total, unit) if c.scaled else total for total, unit in sums)
    of_n, of_k = powers_of_side("y", n, c.n), powers_of_side("x", k, c.k)
    if of_n is not None:
        wide = wide * of_n
    if count == 1:
        narrow = [lax.reduce_sum(narrow[0], (0,)).reshape(-1, 1)]
    k = k.reshape(-1, 1)
    if of_k is not None:
        wide, *narrow = (total * of_k.reshape(-1, 1) for total in (wide, *narrow))

    def store(name: str, total: jax.Array, column: jax.Array, width: int, inside: jax.Array) -> None:
        """Stores the blocks on the diagonal, `group_k` by `width`, of a tile of the result."""
        inside, row, group = inside & (k < c.k) & (column < c.merged * width), k, g
        if c.merged > 1:
            (group_of_row, row), (group_of_column, column) = divide(k, c.group_k), divide(column, width)
            inside = inside & (group_of_row == group_of_column)
            group = where(inside, g * c.merged + group_of_column, c.blocks * c.merged)
        _triton.store(ref[name], (number, group, row, column), total, inside)

    store("partial", wide, n, c.group_n, jnp.ones((1, 1), jnp.bool_))
    for total in narrow:
        store("narrow_partial", total, m, c.narrow, lax.broadcast(leads, (1, 1)))


def split_table(offsets: jax.Array, rows_per_split: int, num_positions: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts each type's positions in splits of `rows_per_split`.

    Returns:
      start and end of each split, int32[num_positions // rows_per_split + types] with unused splits empty, and the
      first split of each type, int32[types + 1].
    """
    types = offsets.shape[0] - 1
    if rows_per_split >= num_positions:  # one split a type
        return offsets[:-1], offsets[1:], jnp.arange(types + 1, dtype=jnp.int32)
    counts = offsets[1:] - offsets[:-1]
    splits = (counts + (rows_per_split - 1)) // rows_per_split
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(splits, dtype=jnp.int32)])
    number = jnp.arange(num_positions // rows_per_split + types, dtype=jnp.int32)
    t = jnp.clip(jnp.searchsorted(first, number, side="right").astype(jnp.int32) - 1, 0, types - 1)
    start = offsets[t] + (number - first[t]) * rows_per_split
    end = jnp.minimum(start + rows_per_split, offsets[t + 1])
    return start, jnp.where(number < first[-1], end, start), first


def typed_outer(
    x: jax.Array | HalfRows,
    y: jax.Array | HalfRows,
    *,
    offsets: jax.Array,
    num_positions: int,
    x_index: jax.Array | None = None,
    y_index: jax.Array | None = None,
    scale: jax.Array | None = None,
    narrow: jax.Array | HalfRows | None = None,
    precision: str = "tf32",
    out_dtype: Any = jnp.float32,
    rows_per_split: int | None = None,
    splits: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None] | None = None,
    schedule: OuterSchedule | None = None,
    interpret: bool | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The sum of outer products of each type: `out[t, g] = sum_p scale[p, g] * x[i(p), g]^T y[j(p), g]`.

    The sum goes over positions p of type t, `offsets[t]` to `offsets[t + 1]`; i(p) = `x_index[p]` and j(p) =
    `y_index[p]`, or p without an index. The order of additions is fixed, so the result is the same in every run.

    Args:
      x: float[rows, groups, k], or float[rows, k] for one group, which the result then has no axis for either; or
        `HalfRows` of such a shape.
      y: float[rows, groups, n], or float[rows, n] where `x` has no groups; or `HalfRows`.
      offsets: int32[types + 1].
      num_positions: length of the indices, and of the range of positions.
      x_index: int32[num_positions], the row of `x` at each position; one out of range reads as zeros.
      y_index: int32[num_positions], likewise for `y`.
      scale: float[num_positions, groups] or float[num_positions], a factor of each product.
      narrow: float[rows, groups, m], or float[rows, m], m up to 16 (`MAX_NARROW`): other rows by which those of `x` are
        multiplied in the same pass; row j(p) at position p.
      precision: of float32 operands: `tf32` (10-bit mantissa; done in float16 with powers of two for each row, see
        `half_rows`), `f32` (22 bits; three such products) or `bf16` (cast). Sums are float32.
      out_dtype: of the result.
      rows_per_split: positions that one program sums; about a thousandth of all by default.
      splits: `split_table(offsets, rows_per_split, num_positions)` where it was made before, and then None or, where
        starts and ends are in another order, the number of each split, int32[splits].
      schedule: the tile; by default the tuned table's, else the heuristic's.
      interpret: run the kernels interpreted; by default where there is no GPU.

    Returns:
      out_dtype[types, groups, k, n], exact zeros for types without positions; with `narrow` that and its own sum,
      out_dtype[types, groups, k, m].

    Raises:
      NotImplementedError: a dtype that the kernel does not have, or narrow rows of too many numbers.
      ValueError: shapes that do not fit each other.
    """
    check_precision(precision)
    check_float(x, "x")
    check_float(y, "y")
    flat = x.ndim == 2
    if flat and x.ndim == y.ndim:
        x, y = x.reshape(x.shape[0], 1, x.shape[1]), y.reshape(y.shape[0], 1, y.shape[1])
        narrow = narrow.reshape(narrow.shape[0], 1, -1) if narrow is not None and narrow.ndim == 2 else narrow
    if x.ndim != 3 or y.ndim != 3 or x.shape[1] != y.shape[1]:
        raise ValueError(
            "x and y must be [rows, groups, width] with the same groups, or both [rows, width]; "
            f"got ranks {x.ndim - flat} and {y.ndim - flat}, shapes {x.shape} and {y.shape}"
        )
    sides = x.shape[2], y.shape[2]
    if x.shape[1] > 1:  # products with zeros behind the features of each group are left out of the result
        x, y = (a.whole() if isinstance(a, HalfRows) else a for a in (x, y))
    (x_rows, groups, k), (y_rows, _, n) = x.shape, y.shape
    types = offsets.shape[0] - 1
    numbers = _check_narrow(narrow, y_rows, groups)
    shapes = [(types, groups, k, width) for width in (n, *numbers)]

    def shaped(totals: Any) -> Any:
        """The sums as they are returned."""
        if (k, n) != sides:
            totals = (t[:, :, : sides[0], :width] for t, width in zip(totals, (sides[1], *numbers), strict=True))
        totals = tuple(total[:, 0] for total in totals) if flat else tuple(totals)
        return totals if numbers else totals[0]

    if min(types, groups, k, n, num_positions, x_rows, y_rows) == 0:
        return shaped(jnp.zeros(shape, out_dtype) for shape in shapes)
    merged = merged_groups(groups, k, n, precision, x.dtype) if schedule is None else 1
    if schedule is None:
        half = "".join("h" if isinstance(a, HalfRows) else "f" for a in (x, y))
        beside = "".join(f"+{count}" for count in numbers)
        heuristic = outer_schedule(
            merged * k, merged * n, precision, half=(_in_16_bits(x), _in_16_bits(y)), narrow=narrow is not None,
            num_positions=num_positions,
        )  # fmt: skip
        call = functools.partial(
            typed_outer, x, y, offsets=offsets, num_positions=num_positions, x_index=x_index, y_index=y_index,
            scale=scale, narrow=narrow, precision=precision, out_dtype=out_dtype, rows_per_split=rows_per_split,
            splits=splits, interpret=interpret,
        )  # fmt: skip
        fields = tuned_tables.choose(
            "outer",
            f"{next_power_of_two(k)}x{next_power_of_two(n)}{beside}x{groups}-{precision}-{x.dtype}-{half}"
            f"-{tuned_tables.bucket(num_positions)}",
            asdict(heuristic),
            # Groups side by side are the heuristic's choice; their tiles are not searched.
            lambda: tuned_tables.outer_candidates(k, n) if merged == 1 else [],
            lambda fields: call(schedule=OuterSchedule(**fields)),
        )
        schedule = OuterSchedule(**fields)
    scaled = precision == "tf32" and jnp.float32 in (x.dtype, y.dtype)
    if isinstance(x, HalfRows) and not (scaled and x.one_exponent(merged * k, schedule.block_k)):
        x = x.decode()
    if isinstance(y, HalfRows) and not (scaled and scale is None and y.one_exponent(merged * n, schedule.block_n)):
        y = y.decode()
    per_split = rows_per_split or schedules.rows_per_split(num_positions, types)
    if splits is None:
        splits = (*split_table(jnp.asarray(offsets), per_split, num_positions), None)
    start, end, first, number = splits
    stored_x, stored_y = (a.mantissa if isinstance(a, HalfRows) else a for a in (x, y))
    stored_x, stored_y = (a.reshape(a.shape[0], math.prod(a.shape[1:])) for a in (stored_x, stored_y))
    operands = {
        "x": stored_x,
        "y": stored_y,
        "split_start": start,
        "split_end": end,
    }
    if number is not None:
        operands["split_number"] = number
    exact = precision == "f32" and jnp.float32 in (x.dtype, y.dtype)
    measured = []  # what is divided by the powers of two of its columns
    for name, a in (("x", x), ("y", y)):
        if not isinstance(a, HalfRows):
            measured += [name] if (scaled or exact) and a.dtype == jnp.float32 else []
            continue
        operands[f"{name}_exponent"] = a.exponent
        if a.columns is not None:
            operands[f"{name}_columns"] = a.columns.reshape(-1)
    if x_index is not None:
        operands["x_index"] = as_index(x_index, "x_index", num_positions)
    if y_index is not None:
        operands["y_index"] = as_index(y_index, "y_index", num_positions)
    if scale is not None:
        check_float(scale, "scale")
        scale = scale[:, None] if scale.ndim == 1 else scale
        if scale.shape not in ((num_positions, groups), (num_positions, 1)):
            raise ValueError(f"scale must be [{num_positions}, {groups}] or [{num_positions}], got {scale.shape}")
        operands["scale"] = jnp.broadcast_to(scale, (num_positions, groups))
    if narrow is not None:
        narrow = narrow.decode() if isinstance(narrow, HalfRows) else narrow
        operands["narrow"] = narrow.reshape(y_rows, -1)
    outs = ("partial", "narrow_partial")[: len(shapes)]
    interpreted = _triton.use_interpreter(interpret)
    config = _Config(
        names=(*operands, *outs),
        blocks=groups // merged,
        merged=merged,
        group_k=k,
        group_n=n,
        k=merged * k,
        n=merged * n,
        narrow=sum(numbers),
        schedule=schedule,
        precision=precision,
        dtype=_triton.product_dtype(x.dtype, y.dtype, precision),
        x_rows=x_rows,
        y_rows=y_rows,
        scaled=scaled,
        exact=exact,
        x_part=x.part_width if isinstance(x, HalfRows) else 1,
        y_part=y.part_width if isinstance(y, HalfRows) else 1,
        x_behind=stored_x.shape[1] - groups * k,
        y_behind=stored_y.shape[1] - groups * n,
        measured=tuple(measured),
    )
    num_splits = start.shape[0]
    partials = _triton.pallas_call(
        functools.partial(_partial_kernel, c=config),
        name="typed_outer",
        num_programs=num_splits
        * (groups // merged)
        * cdiv(merged * k, schedule.block_k)
        * cdiv(merged * n, schedule.block_n),
        out_shape=[jax.ShapeDtypeStruct((num_splits, *shape[1:]), jnp.dtype(jnp.float32)) for shape in shapes],
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=interpreted,
    )(*operands.values())
    if per_split >= num_positions:  # one split a type: its partial is the sum
        return shaped(partial.astype(out_dtype) for partial in partials)
    return shaped(sum_rows_of_all(partials, first, dtype=out_dtype, name="typed_outer_sum", interpret=interpret))


def _in_16_bits(rows: jax.Array | HalfRows) -> bool:
    return isinstance(rows, HalfRows) or rows.dtype.itemsize == 2


def _check_narrow(narrow: jax.Array | HalfRows | None, rows: int, groups: int) -> tuple[int, ...]:
    """How many numbers narrow rows have for each group, if there are any."""
    if narrow is None:
        return ()
    check_float(narrow, "narrow")
    if narrow.ndim != 3 or narrow.shape[:2] != (rows, groups):
        raise ValueError(f"narrow must be [{rows}, {groups}, numbers], rows and groups as of y; got {narrow.shape}")
    if not 0 < narrow.shape[2] <= MAX_NARROW:
        raise NotImplementedError(f"narrow must have 1 to {MAX_NARROW} numbers for each group, got {narrow.shape[2]}")
    return (narrow.shape[2],)
