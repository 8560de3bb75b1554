"""The outer-product template: `sum over rows of a type of x^T y`, the gradient of a typed weight.

Two passes and no atomics, so that the result is the same in every run: rows of a type are split among programs, each of
which sums its rows into a float32 partial; a second kernel adds the partials of each type up in their order.

Rows of x that are multiplied with wide rows can be multiplied with a few numbers a row in the same pass: the gradient
of a typed vector beside that of a typed weight.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton, tuned_tables
from dejax.pallas import schedule as schedules
from dejax.pallas._checks import as_index, check_float, check_precision
from dejax.pallas._shapes import cdiv, divide, lanes, next_power_of_two
from dejax.pallas._tiles import steps, where, within
from dejax.pallas.half_rows import RAISED, HalfRows, exponents, halves, inverse_power, power, raised, whole_max
from dejax.pallas.schedule import OuterSchedule, merged_groups, outer_schedule
from dejax.pallas.sums import sum_rows_of_all

# Each number takes a sum over the rows of a tile, across its threads.
MAX_NARROW = 4


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


def _normalized(tile: jax.Array, exponent: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """A tile's rows below 2 in magnitude, and the exponent of each row [rows, 1], biased."""
    if exponent is not None:
        return tile.astype(jnp.float32), exponent
    tile = tile.astype(jnp.float32)
    exponent, inverse = exponents(tile, 1)
    return tile * inverse, exponent


def _scaled_product(x: Any, y: Any, x_exponent: Any, y_exponent: Any) -> jax.Array:
    """x^T y in float16. Row p's powers of two multiply y, relative to the largest such power of the tile."""
    x, x_exponent = _normalized(x, x_exponent)
    y, y_exponent = _normalized(y, y_exponent)
    total = x_exponent + y_exponent - 127
    largest = jnp.minimum(jnp.maximum(whole_max(total), 1), 254)
    relative = jnp.maximum(total - largest + 127, 1)  # 2^-126 and less is 0 in float16
    half = jnp.float16
    return _triton.dot(x.astype(half), (y * power(relative)).astype(half), "tf32", transpose_x=True) * power(largest)


def _exact_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x^T y in float32. Row p's powers of two multiply y, as in `_scaled_product`."""
    x_exponent, _ = exponents(x, 1)
    x_exponent = raised(x_exponent)
    y, y_exponent = _normalized(y, None)
    total = x_exponent + y_exponent - 127
    largest = jnp.minimum(jnp.maximum(whole_max(total), 1), 254)
    y = y * power(jnp.maximum(total - largest + 127 + RAISED, 1))
    x = x * inverse_power(x_exponent)
    return _triton.exact_dot(halves(x), halves(y), transpose_x=True) * 2.0**-RAISED * power(largest)


def _partial_kernel(*refs: Any, c: _Config) -> None:
    ref = dict(zip(c.names, refs, strict=True))
    s = c.schedule
    split, g, block_k, block_n = _triton.program_ids(c.blocks, cdiv(c.k, s.block_k), cdiv(c.n, s.block_n))
    start, end = ref["split_start"][split], ref["split_end"][split]
    number = ref["split_number"][split] if "split_number" in ref else split
    leads = block_n == 0  # its rows are multiplied with the narrow ones
    k = (block_k * s.block_k + lanes(s.block_k, 0, 1))[None, :]
    n = (block_n * s.block_n + lanes(s.block_n, 0, 1))[None, :]

    def indices(position: jax.Array) -> tuple[jax.Array, ...]:
        """The rows of x and of y at positions, as far as they are not the positions."""
        found = (ref[f"{name}_index"] for name in "xy" if f"{name}_index" in ref)
        return tuple(_triton.load(index, (position,), position < end) for index in found)

    def load(
        name: str,
        row: jax.Array,
        valid: jax.Array,
        column: jax.Array,
        first: jax.Array,
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

    def groups_of(column: jax.Array, width: int) -> jax.Array:
        return g * c.merged + divide(column, width)[0] if c.merged > 1 else g

    def scaled_by(rows: jax.Array, position: jax.Array, valid: jax.Array, group: jax.Array) -> jax.Array:
        if "scale" not in ref:
            return rows
        scale = _triton.load(ref["scale"], (position[:, None], group), valid[:, None])
        return rows.astype(jnp.float32) * scale.astype(jnp.float32)

    def load_narrow(row: jax.Array, position: jax.Array, valid: jax.Array) -> list[jax.Array]:
        """The narrow columns, each [rows, 1], or [rows, k] where columns of x are of several groups."""
        group = groups_of(k, c.group_k)
        mask = within(row, c.y_rows, valid & leads if c.n > s.block_n else valid)[:, None]
        mask = mask & (k < c.k) if c.merged > 1 else mask
        found = []
        for j in range(c.narrow):
            rows = _triton.load(ref["narrow"], (row[:, None], group * c.narrow + j), mask).astype(jnp.float32)
            found.append(scaled_by(rows, position, valid, group))
        return found

    first = start + lanes(s.block_rows, 0, 1)
    held = _held(s)

    def step(i: jax.Array, carry: tuple[jax.Array, list[jax.Array], tuple[jax.Array, ...]]) -> Any:
        total, sums, here = carry
        position = first + i * s.block_rows
        valid = position < end
        ahead = indices(position + s.block_rows)  # waits for memory together with this step's rows
        found = iter(here)
        x_row, y_row = (next(found) if f"{name}_index" in ref else position for name in "xy")
        narrow = load_narrow(y_row, position, valid)
        y, y_exponent = load("y", y_row, valid, n, block_n * s.block_n, c.n, c.y_rows, c.y_part)
        x, x_exponent = load("x", x_row, valid, k, block_k * s.block_k, c.k, c.x_rows, c.x_part)
        y = scaled_by(y, position, valid, groups_of(n, c.group_n))
        if narrow:
            whole = x.astype(jnp.float32)
            by = narrow if x_exponent is None else [v * power(x_exponent) for v in narrow]
            parts = [(whole * v).reshape(-1, *held) for v in by]
            sums = [a + lax.reduce_sum(part, (0,)) for a, part in zip(sums, parts, strict=True)]
        if c.exact:
            product = _exact_product(x.astype(jnp.float32), y.astype(jnp.float32))
        elif c.scaled:
            product = _scaled_product(x, y, x_exponent, y_exponent)
        else:
            product = _triton.dot(x.astype(c.dtype), y.astype(c.dtype), c.precision, transpose_x=True)
        return total + product, sums, ahead

    zeros = jnp.zeros((s.block_k, s.block_n), jnp.float32)
    no_sums = [jnp.zeros(held, jnp.float32)] * c.narrow
    total, sums, _ = _triton.fori_loop(0, steps(end - start, s.block_rows), step, (zeros, no_sums, indices(first)))
    if sums:
        mine = k.reshape(-1)
        inside = (mine < c.k) & leads
        group = where(inside, groups_of(mine, c.group_k), c.blocks * c.merged)
        mine = divide(mine, c.group_k)[1] if c.merged > 1 else mine
        for j, a in enumerate(sums):
            a = lax.reduce_sum(a, (0,)) if a.ndim == 2 else a
            _triton.store(ref["narrow_partial"], (number, group, mine, lax.full((), j, jnp.int32)), a, inside)
    k = k.reshape(-1, 1)
    inside, group = (k < c.k) & (n < c.n), g
    if c.merged > 1:
        (group_of_k, k), (group_of_n, n) = divide(k, c.group_k), divide(n, c.group_n)
        inside = inside & (group_of_k == group_of_n)
        group = where(inside, g * c.merged + group_of_n, c.blocks * c.merged)
    _triton.store(ref["partial"], (number, group, k, n), total, inside)


def _held(s: OuterSchedule) -> tuple[int, ...]:
    """The tile in which products with narrow rows are added up over steps: some rows of numbers, or one.

    With 8 numbers for each thread what a thread adds up is its own until the last step, and no step has a barrier for
    it: 64 by 64, 466 instructions a step, 540 with one row. Of wider tiles of the result numbers would be spilled.
    """
    return (min(s.block_rows, 256 * s.num_warps // s.block_k), s.block_k) if s.block_k <= 64 else (s.block_k,)


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
      narrow: float[rows, groups, m], or float[rows, m], m up to `MAX_NARROW`: other rows by which those of `x` are
        multiplied in the same pass, in float32; row j(p) at position p.
      precision: of float32 operands: `tf32` (10-bit mantissa; done in float16 with powers of two for each row, see
        `half_rows`), `f32` (22 bits; three such products) or `bf16` (cast). Sums are float32.
      out_dtype: of the result.
      rows_per_split: positions that one program sums; about a thousandth of all by default.
      splits: `split_table(offsets, rows_per_split, num_positions)` where it was made before, and then None or, where
        starts and ends are in another order, the number of each split, int32[splits].
      schedule: the tile; by default the tuned one, with `narrow` the heuristic's.
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
    (x_rows, groups, k), (y_rows, _, n) = x.shape, y.shape
    types = offsets.shape[0] - 1
    numbers = _check_narrow(narrow, y_rows, groups)
    shapes = [(types, groups, k, width) for width in (n, *numbers)]

    def shaped(totals: Any) -> Any:
        """The sums as they are returned."""
        totals = tuple(total[:, 0] for total in totals) if flat else tuple(totals)
        return totals if numbers else totals[0]

    if min(types, groups, k, n, num_positions, x_rows, y_rows) == 0:
        return shaped(jnp.zeros(shape, out_dtype) for shape in shapes)
    merged = merged_groups(groups, k, n, precision, x.dtype) if schedule is None else 1
    if schedule is None and narrow is not None:
        # Tuned schedules are of sums without: with two stages and narrow rows numbers are spilled, 660 bytes a thread.
        schedule = outer_schedule(merged * k, merged * n, precision)
    if schedule is None:
        half = "".join("h" if isinstance(a, HalfRows) else "f" for a in (x, y))
        heuristic = outer_schedule(merged * k, merged * n, precision)
        call = functools.partial(
            typed_outer, *((x, y) if not flat else (x.reshape(x_rows, k), y.reshape(y_rows, n))), offsets=offsets,
            num_positions=num_positions, x_index=x_index, y_index=y_index, scale=scale, precision=precision,
            out_dtype=out_dtype, rows_per_split=rows_per_split, splits=splits, interpret=interpret,
        )  # fmt: skip
        fields = tuned_tables.choose(
            "outer",
            f"{next_power_of_two(k)}x{next_power_of_two(n)}x{groups}-{precision}-{x.dtype}-{half}"
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
    operands = {
        "x": (x.mantissa if isinstance(x, HalfRows) else x).reshape(x_rows, groups * k),
        "y": (y.mantissa if isinstance(y, HalfRows) else y).reshape(y_rows, groups * n),
        "split_start": start,
        "split_end": end,
    }
    if number is not None:
        operands["split_number"] = number
    for name, a in (("x", x), ("y", y)):
        if isinstance(a, HalfRows):
            operands[f"{name}_exponent"] = a.exponent
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
        exact=precision == "f32" and jnp.float32 in (x.dtype, y.dtype),
        x_part=x.part_width if isinstance(x, HalfRows) else 1,
        y_part=y.part_width if isinstance(y, HalfRows) else 1,
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
