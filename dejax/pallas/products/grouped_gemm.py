"""The GEMM template: rows times the matrix of their type; gathered, scattered or accumulated rows, and epilogues."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._checks import as_index, check_float, check_precision
from dejax.pallas._shapes import cdiv, divide, lanes, next_power_of_two
from dejax.pallas._tiles import resized, where, within
from dejax.pallas.formats.float_bits import FloatBits
from dejax.pallas.formats.half_rows import (
    HalfRows,
    encode,
    inverse_of,
    of_stored,
    power,
    raised_exponents,
    stored,
    two_parts,
)
from dejax.pallas.products.schedule import SCALE_BEFOREHAND, GemmSchedule, gemm_schedule, merged_groups

# The widest result of which one program can hold all columns, as the product with a vector needs; and of which it
# should, so that a row has one exponent.
MAX_WHOLE_N, MAX_HALF_N = 512, 256


def apply_activation(name: str | None, y: jax.Array) -> jax.Array:
    """An elementwise epilogue: None, `relu`, `tanh`, `sigmoid` or `leaky_relu:<slope>`."""
    kind, _, argument = (name or "").partition(":")
    if kind == "":
        return y
    if kind == "relu":
        return where(y > 0, y, 0.0)
    if kind == "leaky_relu":
        return where(y > 0, y, float(argument or 0.01) * y)
    if kind == "tanh":
        return jnp.tanh(y)
    if kind == "sigmoid":
        return 1 / (1 + jnp.exp(-y))
    raise NotImplementedError(f"activation must be None, relu, tanh, sigmoid or leaky_relu:<slope>, got {name!r}")


@dataclass(frozen=True, slots=True)
class _Config:
    """Static facts of one typed product; `names` are the kernel's references in order.

    A program multiplies `merged` groups at once, by a block-diagonal matrix of `k` by `n` = `merged` times `group_k` by
    `group_n`; `blocks` such sets of groups make a row.
    """

    names: tuple[str, ...]
    block: int
    blocks: int
    merged: int
    group_k: int
    group_n: int
    k: int
    n: int
    schedule: GemmSchedule
    tiles: int
    transpose_w: bool
    activation: str | None
    accumulate: bool
    precision: str
    dtype: jnp.dtype
    positions: int
    x_rows: int
    out_rows: int
    scaled: bool  # products in float16 with powers of two beside
    exact: bool  # the same of float16 numbers in two parts
    whole_w: bool  # matrices are padded to whole tiles
    x_behind: int  # zeros behind the features of a row of x, which then has one group
    out_behind: int  # and behind those of each group of the result
    x_part: int  # columns that share an exponent where x comes as `HalfRows`
    divided: bool  # rows of x are divided by the powers of two of their columns here
    power_by_type: bool  # matrices have one power of two for each type
    x_bits_of: jnp.dtype | None  # what the integers of x carry where it comes as `FloatBits`
    dot_parts: int  # inner products with `dot_vector` that each row has


def _scaled_product(x: jax.Array, w: jax.Array, x_power: Any, w_power: Any) -> jax.Array:
    """The product of two tiles in float16; powers of two that are not given are found here.

    `x_power` are those of rows, [rows, 1], and `w_power` those of columns, [1, columns].
    """
    half = jnp.float16
    if w_power is None:
        exponent, inverse = raised_exponents(w, 0)
        w, w_power = w * inverse, power(exponent)
    w = w.astype(half)
    if x_power is None:
        exponent, inverse = raised_exponents(x, 1)
        x, x_power = x * inverse, power(exponent)
    # One after the other: the product of both powers may vanish where the result does not.
    return _triton.dot(x.astype(half), w, "tf32") * x_power * w_power


def _exact_product(x: jax.Array, w: jax.Array, w_low: jax.Array | None, w_power: Any) -> jax.Array:
    """The product of two tiles in float32; without `w_low` the powers of two of `w` are found here."""
    exponent, inverse = raised_exponents(x, 1)
    if w_low is None:
        w_exponent, w_inverse = raised_exponents(w, 0)
        w, w_low = two_parts(w * w_inverse)
        w_power = power(w_exponent)
    return _triton.exact_dot(two_parts(x * inverse), (w, w_low)) * power(exponent) * w_power


def _kernel(*refs: Any, c: _Config) -> None:
    ref = dict(zip(c.names, refs, strict=True))
    # Neighbouring programs share rows of x: columns are innermost, then groups.
    first, g, column = _triton.program_ids(c.blocks, cdiv(c.n, c.schedule.block_n))
    per_program = c.schedule.tiles_per_program
    if per_program == 1:
        _multiply_tile(ref, c, first, g, column)
        return

    # Nothing is carried from tile to tile, so that the compiler's pipeline loads the next ones' rows meanwhile.
    def one(i: Any, _: None) -> None:
        _multiply_tile(ref, c, first * per_program + i, g, column)

    _triton.fori_loop(0, per_program, one, None)


def _multiply_tile(ref: dict[str, Any], c: _Config, tile: Any, g: Any, column: Any) -> None:
    s = c.schedule
    blocks_n = cdiv(c.n, s.block_n)
    last = None
    if s.tiles_per_program > 1:  # past the last tile a program has nothing to do
        last = tile < c.tiles
        tile = jnp.minimum(tile, c.tiles - 1)
    t, start = ref["tile_type"][tile], ref["tile_start"][tile]
    end = ref["offsets"][t + 1]
    if last is not None:
        end = jnp.where(last, end, start)

    # Indices are loaded beside the tile's end and not behind it: a program waits for memory once less.
    position = start + lanes(c.block, 0, 1)
    valid, inside = position < end, position < c.positions
    out_row = _triton.load(ref["out_index"], (position,), inside) if "out_index" in ref else None
    row = position
    if "x_index" in ref:
        row = _triton.load(ref["x_index"], (position,), inside)
        # An index out of range reads zeros, never other memory.
        valid_x = within(row, c.x_rows, valid)
    else:
        valid_x = valid & (row < c.x_rows)
    row, valid_x = row[:, None], valid_x[:, None]
    n = (column * s.block_n + lanes(s.block_n, 0, 1))[None, :]
    even_k, even_n = c.k % s.block_k == 0, c.n % s.block_n == 0

    def x_power(i: Any) -> jax.Array:
        part = lax.div(g * c.k + i * s.block_k, jnp.int32(c.x_part)) + jnp.zeros_like(row)
        return power(_triton.load(ref["x_exponent"], (row, part), valid_x).astype(jnp.int32))

    # Powers of two that are the same in all steps multiply their sum, which tensor cores then add up by themselves.
    # Loaded here they come with the rows: 12.7 million take 0.85 ms, loaded after the product 0.97.
    row_power = column_power = None
    if "x_exponent" in ref and c.x_part % c.k == 0:
        row_power = x_power(0)
    if "w_power" in ref and c.power_by_type:
        column_power = ref["w_power"][t]
    elif "w_power" in ref:
        group_of_n, in_n = divide(n, c.group_n) if c.merged > 1 else (jnp.zeros_like(n), n)
        column_power = _triton.load(ref["w_power"], (t, g * c.merged + group_of_n, in_n), None if even_n else n < c.n)
    late = row_power is not None and column_power is not None

    def step(i: Any, total: jax.Array | None) -> jax.Array:
        k = i * s.block_k + lanes(s.block_k, 0, 1)
        x_mask = valid_x if even_k else valid_x & (k < c.k + c.x_behind)[None, :]
        x_at = (row, (g * c.k + k)[None, :])
        columns = None
        if "x_columns" in ref:
            columns = _triton.load(ref["x_columns"], ((g * c.k + k)[None, :],), None if even_k else (k < c.k)[None, :])
            columns = columns.astype(jnp.float32)
        k = k[:, None]
        w_mask = None
        if not even_k and not c.whole_w:
            w_mask = k < c.k
        if not even_n and not c.whole_w:
            w_mask = n < c.n if w_mask is None else w_mask & (n < c.n)
        group, in_k, in_n = g, k, n
        if c.merged > 1:
            (group_of_k, in_k), (group_of_n, in_n) = divide(k, c.group_k), divide(n, c.group_n)
            group, same = g * c.merged + group_of_n, group_of_k == group_of_n
            w_mask = same if w_mask is None else w_mask & same
        at = (t, group, in_n, in_k) if c.transpose_w else (t, group, in_k, in_n)
        # The matrix first, which waits for no index: it is scaled while the rows are on their way.
        w = _triton.load(ref["w"], at, w_mask)
        x = _triton.load(ref["x"], x_at, x_mask)
        if c.x_bits_of is not None:
            x = lax.bitcast_convert_type(x, c.x_bits_of)
        if columns is not None and c.divided:
            x = x.astype(jnp.float32) * inverse_of(columns)
        if c.exact or c.scaled:
            if column_power is None:
                w = w.astype(jnp.float32)
                w = w if columns is None else w * columns.reshape(-1, 1)
        if c.exact:
            w_low = _triton.load(ref["w_low"], at, w_mask) if "w_low" in ref else None
            product = _exact_product(x.astype(jnp.float32), w, w_low, column_power)
        elif late:
            product = _triton.dot(x, w, c.precision)
        elif c.scaled and "x_exponent" in ref:
            product = _scaled_product(x, w, x_power(i) if row_power is None else row_power, column_power)
        elif c.scaled:
            product = _scaled_product(x.astype(jnp.float32), w, None, column_power)
        else:
            product = _triton.dot(x.astype(c.dtype), w.astype(c.dtype), c.precision)
        return product if total is None else total + product

    if c.k <= s.block_k:
        y = step(0, None)
    else:
        zeros = jnp.zeros((c.block, s.block_n), jnp.float32)
        y = _triton.fori_loop(0, cdiv(c.k, s.block_k), step, zeros)
    if row_power is not None and column_power is not None:
        y = y * row_power * column_power

    if "scale" in ref:
        group = g * c.merged + divide(n, c.group_n)[0] if c.merged > 1 else g
        y = y * _triton.load(ref["scale"], (position[:, None], group), valid[:, None]).astype(jnp.float32)
    if "bias" in ref:
        y = y + _triton.load(ref["bias"], (t, g * c.n + n), None if even_n else n < c.n).astype(jnp.float32)
    y = apply_activation(c.activation, y)

    if out_row is None:
        out_row = position
    else:
        valid = within(out_row, c.out_rows, valid)
    out_row = where(valid, out_row, c.out_rows)
    mask = valid[:, None] if even_n else valid[:, None] & (n < c.n + c.out_behind)
    if c.out_behind:
        y = where(n < c.n, y, 0.0)
    stride = c.n + c.out_behind
    if c.accumulate:
        safe = where(valid, out_row, 0)[:, None]
        _triton.atomic_add(ref["y"], (safe, g * stride + n), y, jnp.broadcast_to(mask, y.shape))
    elif "y_exponent" in ref:
        kept = y
        if "out_columns" in ref:
            columns = _triton.load(ref["out_columns"], (g * c.n + n,), None if even_n else n < c.n)
            kept = y * inverse_of(columns)
        exponent, inverse = raised_exponents(kept, 1, finite=True)
        _triton.store(ref["y"], (out_row[:, None], g * stride + n), kept * inverse, mask)
        part = jnp.zeros_like(out_row) + (g * blocks_n + column)
        _triton.store(ref["y_exponent"], (out_row, part), resized(exponent, out_row.shape), valid)
    else:
        _triton.store(ref["y"], (out_row[:, None], g * stride + n), y, mask)
    if "dot_vector" in ref:
        vector = _triton.load(ref["dot_vector"], (t, g, n), None if even_n else n < c.n).astype(jnp.float32)
        product = y * vector if even_n else where(n < c.n, y * vector, 0.0)
        if c.dot_parts == 1:
            _triton.store(ref["dot"], (out_row, g), lax.reduce_sum(product, (1,)), valid)
        else:
            width = c.n // c.dot_parts
            parts = lax.reduce_sum(lax.reshape(product, (c.block, s.block_n // width, width)), (2,))
            part = lanes(s.block_n // width, 1, 2)
            inside = valid[:, None] if even_n else valid[:, None] & (part < c.dot_parts)
            _triton.store(ref["dot"], (out_row[:, None], g * c.dot_parts + part), parts, inside)


def _as_scaled(
    w: jax.Array, transposed: bool, exact: bool, by_type: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """float16 matrices, the rest of them where products are to be exact, and the power of two of each column.

    `w` is float32[types, groups, k, n], n before k where `transposed`; powers are float32[types, groups, n], or
    `by_type` float32[types].
    """
    exponent, inverse = raised_exponents(w, (1, 2, 3) if by_type else 3 if transposed else 2)
    powers = power(exponent).reshape((-1,) if by_type else (w.shape[0], w.shape[1], -1))
    w = w * inverse
    return (*two_parts(w), powers) if exact else (w.astype(jnp.float16), None, powers)


def typed_matmul(
    x: jax.Array | HalfRows | FloatBits,
    w: jax.Array,
    *,
    offsets: jax.Array,
    tile_type: jax.Array,
    tile_start: jax.Array,
    block: int,
    num_positions: int,
    x_index: jax.Array | None = None,
    out_index: jax.Array | None = None,
    num_out_rows: int | None = None,
    transpose_w: bool = False,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | None = None,
    dot_vector: jax.Array | None = None,
    dot_parts: int = 1,
    accumulate: bool = False,
    covers_all: bool = False,
    precision: str = "tf32",
    out_dtype: Any = None,
    half_out: bool = False,
    x_columns: jax.Array | None = None,
    out_columns: jax.Array | None = None,
    schedule: GemmSchedule | None = None,
    interpret: bool | None = None,
) -> Any:
    """Each row times the matrix of its type.

        out[o(p), g] = activation(scale[p, g] * (x[i(p), g] @ w[type(p), g]) + bias[type(p), g])

    Positions p = 0, 1, ... are sorted by type; those of type t are `offsets[t]` to `offsets[t + 1]`. Position p reads
    row i(p) = `x_index[p]` and writes row o(p) = `out_index[p]`; without an index, row p.

    Args:
      x: float[rows, groups, k], or float[rows, k] for one group, which the result then has no axis for either; or
        `HalfRows` of such a shape; or `FloatBits`, [rows, k].
      w: float[types, groups, k, n], or without the groups axis where `x` has none; with `transpose_w` n comes before k.
      offsets: int32[types + 1].
      tile_type: int32[tiles], the type of each tile.
      tile_start: int32[tiles], the first position of each tile; a tile has `block` positions or ends with its type. A
        tile that starts at or after its type's end is unused. `dejax.rgnn.graph.tile_table(offsets, block,
        num_positions)` makes both, as `row_type` and `start`, with numpy or inside `jax.jit`.
      block: positions a tile; a power of two, at least 16.
      num_positions: length of the indices, and of the range of positions.
      x_index: int32[num_positions], the row of `x` that a position reads; a row out of range reads as zeros.
      out_index: int32[num_positions], the row that a position writes; one out of range is not written. Without
        `accumulate` no two positions of a type may name the same row.
      num_out_rows: rows of the result; `num_positions` by default.
      transpose_w: multiply by the transposed matrices.
      scale: float[num_positions, groups] or float[num_positions], a factor of each product row.
      bias: float[types, groups, n] or, without the groups axis, float[types, n]; added after `scale`.
      activation: `relu`, `tanh`, `sigmoid` or `leaky_relu:<slope>`, after `bias`.
      dot_vector: float[types, groups, n]; asks for a second result `sum_n out[o(p), g, n] * dot_vector[type(p), g, n]`
        (before rounding to `out_dtype`).
      dot_parts: takes that inner product of so many equal parts of each row; more than one, and n, are powers of two.
      accumulate: adds product rows up in float32 result rows, atomically: the order of additions, and so the last bits,
        differ from run to run. Its result is float32.
      covers_all: the caller's word that every result row is written, so that none need be set to zero beforehand.
      precision: of float32 operands: `tf32` (10-bit mantissa; done in float16 with powers of two for the rows of `x`
        and the matrices of `w`, see `half_rows`), `f32` (22 bits; three such products) or `bf16` (cast). bfloat16 and
        float16 are multiplied as they are. Sums are float32.
      out_dtype: of the result; by default what `x` and `w` promote to.
      half_out: asks for the result as `HalfRows`, in half the bytes; only with `precision="tf32"` and a float32 result.
      x_columns: float32[groups, k] or [k], powers of two near the largest elements of the columns of float32 rows `x`,
        where those differ: `column_powers(x)`. `HalfRows` have their own.
      out_columns: float32[groups, n] or [n], powers of two: the `columns` of the result as `HalfRows`.
      schedule: the tile; by default the heuristic's.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      [num_out_rows, groups, n], zeros in rows that no position writes; with `dot_vector` a pair of that and
      [num_out_rows, groups], with `dot_parts` of more than one [num_out_rows, groups * dot_parts].

    Narrow groups are multiplied several at a time, by a block-diagonal matrix (not with `precision="f32"`): infinities
    and NaN in one group of a row then reach its other groups.

    Raises:
      NotImplementedError: a dtype or a width that the kernel does not have.
      ValueError: shapes that do not fit each other.
    """
    check_precision(precision)
    flat = x.ndim == 2
    if flat:
        x, w = x.reshape(x.shape[0], 1, x.shape[1]), w[:, None]
        bias, dot_vector = (a if a is None or a.ndim == 3 else a[:, None] for a in (bias, dot_vector))
    if x.ndim != 3 or w.ndim != 4:
        raise ValueError(
            "x must be [rows, groups, k] with w [types, groups, k, n], or [rows, k] with [types, k, n]; "
            f"got ranks {x.ndim - flat} and {w.ndim - flat}"
        )
    if isinstance(x, HalfRows) and x.width is not None and x.shape[1] > 1:
        # Zeros behind the features of each group meet zeros of the matrices; one group has them by masks.
        behind = (0, x.mantissa.shape[2] - x.shape[2])
        x, w = x.whole(), jnp.pad(w, ((0, 0), (0, 0), *((0, 0), behind)[:: 1 if transpose_w else -1]))
    rows, groups, k = x.shape
    w_k, n = (w.shape[3], w.shape[2]) if transpose_w else w.shape[2:]
    if w.shape[1] != groups or w_k != k:
        raise ValueError(
            f"w must have {groups} groups and a contracted width of {k}, as x has; got {w.shape[1]} groups and {w_k} "
            f"(transpose_w={transpose_w})"
        )
    if offsets.shape != (w.shape[0] + 1,):
        raise ValueError(f"offsets must have types + 1 = {w.shape[0] + 1} entries, got shape {offsets.shape}")
    if block < 16 or next_power_of_two(block) != block:
        raise ValueError(f"block must be a power of two of at least 16, got {block}")
    if accumulate and any(a is not None for a in (bias, dot_vector, activation)):
        raise ValueError("accumulate adds up product rows; it goes with no bias, no activation and no dot_vector")
    for name, a in (("x", x), ("w", w), ("scale", scale), ("bias", bias), ("dot_vector", dot_vector)):
        if a is not None:
            check_float(a, name)
    out_rows = num_positions if num_out_rows is None else num_out_rows
    dtype = jnp.dtype(jnp.float32 if accumulate else out_dtype or jnp.promote_types(x.dtype, w.dtype))
    if schedule is not None and dot_vector is not None and schedule.block_n < n:
        raise ValueError(
            f"dot_vector needs all {n} columns in one tile, got a schedule with block_n={schedule.block_n}"
        )
    if k == 0:
        raise NotImplementedError("x has no columns: its product is all zeros, which needs no kernel")
    if dot_parts > 1 and any(next_power_of_two(a) != a for a in (dot_parts, n)):
        raise NotImplementedError(f"dot_parts and columns must be powers of two, got {dot_parts} of {n} columns")
    if dot_vector is not None and next_power_of_two(n) > MAX_WHOLE_N:
        raise NotImplementedError(f"dot_vector needs a result of at most {MAX_WHOLE_N} columns, got {n}")

    if half_out and (precision != "tf32" or accumulate or dtype != jnp.float32):
        raise ValueError(
            f"half_out is for float32 results of precision='tf32' without accumulate, got {dtype} and {precision!r}"
        )

    # The kernel sees the groups of a row side by side.
    shapes = [jax.ShapeDtypeStruct((out_rows, groups * n), dtype)]
    outputs = ["y"]
    if dot_vector is not None:
        shapes.append(jax.ShapeDtypeStruct((out_rows, groups * dot_parts), jnp.dtype(jnp.float32)))
        outputs.append("dot")
    tiles = tile_type.shape[0]

    if min(tiles, num_positions, out_rows, groups, n, rows) == 0:
        results: list[Any] = [jnp.zeros(s.shape, s.dtype) for s in shapes]
        if half_out:
            results[0] = encode(results[0], columns=None if out_columns is None else out_columns.reshape(-1))
    else:
        merged = merged_groups(groups, k, n, precision, x.dtype) if schedule is None and dot_vector is None else 1
        if schedule is None:
            schedule = gemm_schedule(
                merged * k,
                merged * n,
                block,
                precision,
                num_positions=num_positions,
                # One exponent for a row, which loops read with it.
                whole_n=dot_vector is not None or (half_out and next_power_of_two(merged * n) <= MAX_HALF_N),
                half=x.dtype == w.dtype and x.dtype in (jnp.bfloat16, jnp.float16),
                half_rows=isinstance(x, HalfRows),
                transposed=transpose_w,
            )
        scaled = precision == "tf32" and jnp.float32 in (x.dtype, w.dtype)
        exact = precision == "f32" and jnp.float32 in (x.dtype, w.dtype)
        if isinstance(x, HalfRows) and not (scaled and x.one_exponent(merged * k, schedule.block_k)):
            x_columns = x.columns
            x = x.decode()
        mantissa = x.mantissa if isinstance(x, HalfRows) else x
        if isinstance(x, HalfRows):
            x_columns = x.columns
        x_columns = x_columns.reshape(groups, k) if x_columns is not None and (scaled or exact) else None
        out_columns = out_columns.reshape(groups, n) if out_columns is not None and half_out else None
        w_low = w_power = None
        beforehand = (scaled or exact) and num_positions >= SCALE_BEFOREHAND
        # What is stored is divided by `out_columns`: the matrices are, where the epilogue is linear, and then all their
        # columns have about one scale.
        divided_w = beforehand and out_columns is not None and bias is None and activation is None
        inverse = None if out_columns is None else inverse_of(out_columns)
        if beforehand:
            w = w.astype(jnp.float32)
            if x_columns is not None:
                w = w * (x_columns[:, None] if transpose_w else x_columns[:, :, None])
            if divided_w and out_columns is not None and inverse is not None:
                w = w * (inverse[:, :, None] if transpose_w else inverse[:, None])
                dot_vector = None if dot_vector is None else dot_vector * out_columns
            w, w_low, w_power = _as_scaled(w, transpose_w, exact, divided_w)
            if merged == 1:  # matrices of whole tiles need no mask
                sides = tuple((0, -a % b) for a, b in zip((k, n), (schedule.block_k, schedule.block_n), strict=True))
                sides = (0, 0), (0, 0), *(sides[::-1] if transpose_w else sides)
                w, w_low = jnp.pad(w, sides), None if w_low is None else jnp.pad(w_low, sides)
        x_length = math.prod(mantissa.shape[1:])  # one group may be stored longer
        operands = {
            "x": x.bits if isinstance(x, FloatBits) else mantissa.reshape(rows, x_length),
            "w": w,
            "offsets": offsets,
            "tile_type": tile_type,
            "tile_start": tile_start,
        }
        if isinstance(x, HalfRows):
            operands["x_exponent"] = x.exponent
        if w_power is not None:
            operands["w_power"] = w_power
        if x_columns is not None and not (isinstance(x, HalfRows) and w_power is not None):
            operands["x_columns"] = x_columns.reshape(groups * k)
        if w_low is not None:
            operands["w_low"] = w_low
        if x_index is not None:
            operands["x_index"] = as_index(x_index, "x_index", num_positions)
        if out_index is not None:
            operands["out_index"] = as_index(out_index, "out_index", num_positions)
        if scale is not None:
            scale = scale[:, None] if scale.ndim == 1 else scale
            if scale.shape not in ((num_positions, groups), (num_positions, 1)):
                raise ValueError(f"scale must be [{num_positions}, {groups}] or [{num_positions}], got {scale.shape}")
            operands["scale"] = jnp.broadcast_to(scale, (num_positions, groups))
        if bias is not None:
            if bias.shape != (w.shape[0], groups, n):
                raise ValueError(f"bias must be [{w.shape[0]}, {groups}, {n}], got {bias.shape}")
            operands["bias"] = bias.reshape(w.shape[0], groups * n)
        if dot_vector is not None:
            if dot_vector.shape != (w.shape[0], groups, n):
                raise ValueError(f"dot_vector must be [{w.shape[0]}, {groups}, {n}], got {dot_vector.shape}")
            operands["dot_vector"] = dot_vector
        blocks_n = cdiv(merged * n, schedule.block_n)
        half_out = half_out and (blocks_n == 1 or merged * n % schedule.block_n == 0)  # parts of one width
        out_length = stored((n,))[0] if half_out and merged == 1 and blocks_n == 1 else n
        if half_out and out_columns is not None and not divided_w:
            operands["out_columns"] = out_columns.reshape(groups * n)
        if half_out:
            shapes[0] = jax.ShapeDtypeStruct((out_rows, groups * out_length), jnp.dtype(jnp.float16))
            shapes.append(jax.ShapeDtypeStruct((out_rows, groups // merged * blocks_n), jnp.dtype(jnp.uint8)))
            outputs.append("y_exponent")
        aliases = {}
        if accumulate or not covers_all:
            for i, s in enumerate(shapes):
                aliases[len(operands)] = i
                operands[f"zeros{i}"] = jnp.zeros(s.shape, s.dtype)
        config = _Config(
            names=(*operands, *outputs),
            block=block,
            blocks=groups // merged,
            merged=merged,
            group_k=k,
            group_n=n,
            k=merged * k,
            n=merged * n,
            schedule=schedule,
            tiles=tiles,
            transpose_w=transpose_w,
            activation=activation,
            accumulate=accumulate,
            precision=precision,
            dtype=_triton.product_dtype(x.dtype, w.dtype, precision),
            positions=num_positions,
            x_rows=rows,
            out_rows=out_rows,
            scaled=scaled,
            exact=exact,
            whole_w=w_power is not None and merged == 1,
            x_behind=x_length - groups * k,
            out_behind=out_length - n,
            x_part=x.part_width if isinstance(x, HalfRows) else 1,
            divided=x_columns is not None and not isinstance(x, HalfRows),
            power_by_type=divided_w,
            x_bits_of=x.dtype if isinstance(x, FloatBits) else None,
            dot_parts=dot_parts,
        )
        results = list(
            _triton.pallas_call(
                functools.partial(_kernel, c=config),
                name="typed_matmul",
                num_programs=cdiv(tiles, schedule.tiles_per_program) * (groups // merged) * blocks_n,
                out_shape=shapes,
                num_warps=schedule.num_warps,
                num_stages=schedule.num_stages,
                interpret=_triton.use_interpreter(interpret),
                aliases=aliases,
            )(*operands.values())
        )
        if half_out:
            features = (n,) if groups == 1 else (groups, n)
            mantissa = results[0].reshape(out_rows, *features[:-1], out_length)
            columns = None if out_columns is None else out_columns.reshape(features)
            results[0] = of_stored(mantissa, results.pop(), features, columns)
    if not flat:
        results[0] = results[0].reshape(out_rows, groups, n)
    elif dot_vector is not None and dot_parts == 1:
        results[1] = results[1].reshape(out_rows)
    return results[0] if dot_vector is None else tuple(results)
