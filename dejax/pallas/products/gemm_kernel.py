"""The kernel of the grouped GEMM: a program multiplies tiles of rows of one type each by the matrix of their type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import cdiv, divide, lanes
from dejax.pallas._tiles import resized, where, within
from dejax.pallas.formats.row_scaled import inverse_of, power, raised_exponents, relative_powers_of_columns, two_parts
from dejax.pallas.products.product_schedule import GemmSchedule, MergedHeads


def apply_activation(name: str | None, y: jax.Array) -> jax.Array:
    """An elementwise epilogue: None, `relu`, `tanh`, `sigmoid` or `leaky_relu:<slope>`."""
    kind, _, argument = (name or "").partition(":")
    if kind == "":
        return y
    if kind == "relu":
        return where(y <= 0, 0.0, y)  # NaN stays
    if kind == "leaky_relu":
        return where(y > 0, y, float(argument or 0.01) * y)
    if kind == "tanh":
        return jnp.tanh(y)
    if kind == "sigmoid":
        return 1 / (1 + jnp.exp(-y))
    raise NotImplementedError(f"`activation` must be None, relu, tanh, sigmoid or leaky_relu:<slope>, got {name!r}")


# A tile without rows skips a loop of this many steps or more: sampled graphs have tiles for more rows than they hold.
# The bound of a shorter loop stays a constant, so that the compiler can unroll the loop.
_LONG_LOOP = 4
# Half of the 255 registers of a thread.
_NUMBERS_OF_A_THREAD = 128


@dataclass(frozen=True, slots=True)
class GemmPlan(MergedHeads):
    """The static facts of a call; `names` are the kernel's references in order.

    A program multiplies `merged` heads at once, by a block-diagonal matrix of `k` by `n`, whose blocks are `head_k` by
    `head_n`. A row has `head_blocks` such sets of heads.
    """

    schedule: GemmSchedule
    block: int
    positions: int
    head_blocks: int
    merged: int
    head_k: int
    head_n: int
    transpose_w: bool
    activation: str | None
    precision: str
    arithmetic: str  # see `requests.arithmetic`
    scaled_before: bool  # see `scales_beforehand`
    divided_w: bool = False  # matrices are divided by the powers of two of the result's columns, instead of the result
    names: tuple[str, ...] = ()

    @property
    def blocks_n(self) -> int:
        return cdiv(self.n, self.schedule.block_n)

    @property
    def even_k(self) -> bool:
        return self.k % self.schedule.block_k == 0

    @property
    def even_n(self) -> bool:
        return self.n % self.schedule.block_n == 0


def gemm_kernel(*refs: Any, c: GemmPlan) -> None:
    """Multiplies one tile of rows, or several one after the other."""
    ref = dict(zip(c.names, refs, strict=True))
    # Neighbouring programs share rows of x: columns are innermost, then heads.
    first, heads, column_block = _triton.program_ids(c.head_blocks, c.blocks_n)
    per_program = c.schedule.tiles_per_program
    if per_program == 1:
        _multiply_tile(ref, c, first, heads, column_block)
        return

    # No value is carried from tile to tile, so that the compiler's pipeline can load the rows of later tiles.
    def one(i: Any, _: None) -> None:
        _multiply_tile(ref, c, first * per_program + i, heads, column_block)

    _triton.fori_loop(0, per_program, one, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """One tile of the result: its place, and the rows that it reads and writes."""

    ref: dict[str, Any]
    c: GemmPlan
    type: jax.Array
    there: jax.Array  # whether the tile has rows
    heads: jax.Array  # the number of its set of merged heads
    column_block: jax.Array
    position: jax.Array  # [block]
    valid: jax.Array
    row: jax.Array  # [block, 1], of x
    row_valid: jax.Array
    n: jax.Array  # [1, block_n], columns of the result

    @property
    def x_behind(self) -> int:
        """Zeros behind the features of a row of x, which then has one head."""
        return int(self.ref["x"].shape[1]) - self.c.head_blocks * self.c.k

    @property
    def out_behind(self) -> int:
        """Zeros behind those of each head of the result."""
        return int(self.ref["y"].shape[1]) // self.c.head_blocks - self.c.n

    @property
    def x_part(self) -> int:
        """Columns of x that share an exponent."""
        return self.c.head_blocks * self.c.k // int(self.ref["x_exponent"].shape[1])

    @property
    def measures_columns(self) -> bool:
        """Whether the program measures the columns of its rows: no kernel did before, and matrices are scaled here."""
        x = self.ref["x"].dtype == jnp.float32
        return self.c.arithmetic != "direct" and x and not {"w_power", "x_columns"} & self.ref.keys()

    @property
    def in_turns(self) -> bool:
        """Whether a step loads the matrix after its rows are scaled, and the rows of the result are found at the end.

        Otherwise rows and matrix would both be in registers while columns are measured: 64 rows by 128 columns spilled.
        A loop does not wait for the later load, because the compiler's pipeline loads steps ahead. Where rows and
        matrix fit in registers together, products that load in turns take 3 to 6 % longer.
        """
        c, s = self.c, self.c.schedule
        # The sum, a step's product that is scaled before it is added, rows and matrix; the rest needs as much.
        numbers = 2 * c.block * s.block_n + s.block_k * (c.block + s.block_n)
        many = numbers > _NUMBERS_OF_A_THREAD * 32 * s.num_warps
        return self.measures_columns and c.arithmetic == "scaled" and c.k > s.block_k and many

    def in_n(self) -> jax.Array | None:
        """Which columns are in the result; None where all are."""
        return None if self.c.even_n else self.n < self.c.n

    def x_power(self, step: Any) -> jax.Array:
        """The powers of two of the rows, [block, 1], of the columns of a step over k."""
        c = self.c
        part = lax.div(self.heads * c.k + step * c.schedule.block_k, jnp.int32(self.x_part)) + jnp.zeros_like(self.row)
        return power(_triton.load(self.ref["x_exponent"], (self.row, part), self.row_valid).astype(jnp.int32))

    def out_columns(self) -> jax.Array:
        """The powers of two of the result's columns, [1, block_n]."""
        return _triton.load(self.ref["out_columns"], (self.heads * self.c.n + self.n,), self.in_n()).astype(jnp.float32)

    def head_of_n(self) -> tuple[jax.Array, jax.Array]:
        """The head of each column among the merged ones, and the column within it."""
        return divide(self.n, self.c.head_n) if self.c.merged > 1 else (jnp.zeros_like(self.n), self.n)


def _multiply_tile(ref: dict[str, Any], c: GemmPlan, number: Any, heads: Any, column_block: Any) -> None:
    tile = _located(ref, c, number, heads, column_block)
    out_row = None if tile.in_turns else _out_row(tile)
    y = _with_epilogue(tile, _product(tile, *_powers_of_all_steps(tile)))
    out_row = _out_row(tile) if tile.in_turns else out_row
    if out_row is None:
        out_row, valid = tile.position, tile.valid
    else:
        valid = within(out_row, ref["y"].shape[0], tile.valid)
    out_row = where(valid, out_row, ref["y"].shape[0])
    mask = valid[:, None] if c.even_n else valid[:, None] & (tile.n < c.n + tile.out_behind)
    if tile.out_behind:
        y = where(tile.n < c.n, y, 0.0)
    _store_rows(tile, y, out_row, valid, mask)
    if "dot_vector" in ref:
        _store_inner_products(tile, y, out_row, valid)


def _located(ref: dict[str, Any], c: GemmPlan, number: Any, heads: Any, column_block: Any) -> _Tile:
    """The rows, columns and type of tile `number`, and which of its rows exist and are in range."""
    last = None
    if c.schedule.tiles_per_program > 1:  # past the last tile a program has nothing to do
        tiles = ref["tile_type"].shape[0]
        last = number < tiles
        number = jnp.minimum(number, tiles - 1)
    t, start = ref["tile_type"][number], ref["tile_start"][number]
    end = ref["offsets"][t + 1]
    if last is not None:
        end = jnp.where(last, end, start)

    position = start + lanes(c.block, 0, 1)
    valid = position < end
    row = position
    if "x_index" in ref:
        # Masked by the number of positions and not by the group's end, for which the load would wait.
        row = _triton.load(ref["x_index"], (position,), position < c.positions)
        # An index out of range reads zeros, never other memory.
        row_valid = within(row, ref["x"].shape[0], valid)
    else:
        row_valid = valid & (row < ref["x"].shape[0])
    row, row_valid = row[:, None], row_valid[:, None]
    n = (column_block * c.schedule.block_n + lanes(c.schedule.block_n, 0, 1))[None, :]
    return _Tile(ref, c, t, start < end, heads, column_block, position, valid, row, row_valid, n)


def _out_row(tile: _Tile) -> jax.Array | None:
    """The row of the result of each position, [block]; None where it is the position."""
    if "out_index" not in tile.ref:
        return None
    return _triton.load(tile.ref["out_index"], (tile.position,), tile.position < tile.c.positions)


def _powers_of_all_steps(tile: _Tile) -> tuple[jax.Array | None, jax.Array | None]:
    """Powers of two of rows and of columns, each where it is known and the same in all steps over k.

    Where both are, they multiply the sum of all steps, and tensor cores add the products up by themselves. They are
    loaded together with the rows, because a load after the product would be waited for.
    """
    ref, c = tile.ref, tile.c
    row_power = column_power = None
    if "x_exponent" in ref and tile.x_part % c.k == 0:
        row_power = tile.x_power(0)
    if "w_power" in ref and len(ref["w_power"].shape) == 1:
        column_power = ref["w_power"][tile.type]
    elif "w_power" in ref:
        head, in_n = tile.head_of_n()
        column_power = _triton.load(ref["w_power"], (tile.type, tile.heads * c.merged + head, in_n), tile.in_n())
    return row_power, column_power


def _product(tile: _Tile, row_power: Any, column_power: Any) -> jax.Array:
    """The product of a tile's rows and the matrix of its type, float32[block, block_n]."""
    c, s = tile.c, tile.c.schedule

    def step(i: Any, total: jax.Array | None) -> jax.Array:
        product = _product_of_step(tile, i, row_power, column_power)
        return product if total is None else total + product

    if c.k <= s.block_k:
        y = step(0, None)
    else:
        zeros = jnp.zeros((c.block, s.block_n), jnp.float32)
        steps: Any = cdiv(c.k, s.block_k)
        if steps >= _LONG_LOOP:
            steps = tile.there.astype(jnp.int32) * jnp.int32(steps)
        y = _triton.fori_loop(0, steps, step, zeros)
    return y if row_power is None or column_power is None else y * row_power * column_power


def _product_of_step(tile: _Tile, i: Any, row_power: Any, column_power: Any) -> jax.Array:
    """The product of a tile's rows and the matrix over block `i` of the contracted axis, float32[block, block_n]."""
    ref, c = tile.ref, tile.c
    k = i * c.schedule.block_k + lanes(c.schedule.block_k, 0, 1)
    x_mask = tile.row_valid if c.even_k else tile.row_valid & (k < c.k + tile.x_behind)[None, :]
    x_at = (tile.row, (tile.heads * c.k + k)[None, :])
    columns = None
    if "x_columns" in ref:
        at = (tile.heads * c.k + k)[None, :]
        columns = _triton.load(ref["x_columns"], (at,), None if c.even_k else (k < c.k)[None, :]).astype(jnp.float32)
    # The matrix first, which waits for no index: it is scaled while the rows are on their way.
    w_at, w_mask = _place_in_w(tile, k[:, None])
    w = None if tile.in_turns else _triton.load(ref["w"], w_at, w_mask)
    x = _triton.load(ref["x"], x_at, x_mask)
    if tile.measures_columns:
        columns = relative_powers_of_columns(x)
    if columns is not None and "x_exponent" not in ref:
        x = x.astype(jnp.float32) * inverse_of(columns)
    x_power = row_power
    if w is None:
        x, x_power = _in_float16(x, 1)
        w = _triton.load(ref["w"], w_at, w_mask)
    if c.arithmetic != "direct" and column_power is None:
        w = w.astype(jnp.float32)
        w = w if columns is None else w * columns.reshape(-1, 1)
        if c.divided_w:
            w = w * inverse_of(tile.out_columns())
    if c.arithmetic == "exact":
        w_low = _triton.load(ref["w_low"], w_at, w_mask) if "w_low" in ref else None
        return _exact_product(x.astype(jnp.float32), w, w_low, column_power)
    if c.arithmetic == "direct":
        dtype = _triton.product_dtype(x.dtype, w.dtype, c.precision)
        return _triton.dot(x.astype(dtype), w.astype(dtype), c.precision)
    if row_power is not None and column_power is not None:  # they multiply the sum of all steps
        return _triton.dot(x, w, c.precision)
    if "x_exponent" in ref and x_power is None:
        x_power = tile.x_power(i)
    return _scaled_product(x, w, x_power, column_power, c.divided_w)


def _place_in_w(tile: _Tile, k: jax.Array) -> tuple[tuple[Any, ...], jax.Array | None]:
    """The indices into the matrices for rows `k`, [block_k, 1], and the tile's columns; and which of them to load."""
    c, n = tile.c, tile.n
    mask, whole = None, "w_power" in tile.ref and c.merged == 1  # matrices that are padded to whole tiles
    if not c.even_k and not whole:
        mask = k < c.k
    if not c.even_n and not whole:
        mask = n < c.n if mask is None else mask & (n < c.n)
    head, in_k, in_n = tile.heads, k, n
    if c.merged > 1:  # blocks on the diagonal
        (head_of_k, in_k), (head_of_n, in_n) = divide(k, c.head_k), divide(n, c.head_n)
        head, same = tile.heads * c.merged + head_of_n, head_of_k == head_of_n
        mask = same if mask is None else mask & same
    return ((tile.type, head, in_n, in_k) if c.transpose_w else (tile.type, head, in_k, in_n)), mask


def _scaled_product(x: jax.Array, w: jax.Array, x_power: Any, w_power: Any, by_type: bool) -> jax.Array:
    """The product of two tiles in float16; powers of two that are not given are found here.

    `x_power` are those of rows, [rows, 1], and `w_power` those of columns, [1, columns]. `by_type`: all columns of `w`
    have about one scale, and so one power.
    """
    if w_power is None:
        w, w_power = _in_float16(w, None if by_type else 0)
    if x_power is None:
        x, x_power = _in_float16(x, 1)
    # One after the other: the product of both powers may vanish where the result does not.
    return _triton.dot(x.astype(jnp.float16), w.astype(jnp.float16), "tf32") * x_power * w_power


def _in_float16(tile: jax.Array, axis: int | None) -> tuple[jax.Array, jax.Array]:
    """A tile in float16, and the powers of two that multiply it: along an axis one, or one of the whole tile."""
    exponent, inverse = raised_exponents(tile, axis)
    return (tile * inverse).astype(jnp.float16), power(exponent)


def _exact_product(x: jax.Array, w: jax.Array, w_low: jax.Array | None, w_power: Any) -> jax.Array:
    """The product of two tiles in float32; without `w_low` the powers of two of `w` are found here."""
    exponent, inverse = raised_exponents(x, 1)
    if w_low is None:
        w_exponent, w_inverse = raised_exponents(w, 0)
        w, w_low = two_parts(w * w_inverse)
        w_power = power(w_exponent)
    return _triton.exact_dot(two_parts(x * inverse), (w, w_low)) * power(exponent) * w_power


def _with_epilogue(tile: _Tile, y: jax.Array) -> jax.Array:
    ref, c, n = tile.ref, tile.c, tile.n
    if "bias" in ref:
        y = y + _triton.load(ref["bias"], (tile.type, tile.heads * c.n + n), tile.in_n()).astype(jnp.float32)
    return apply_activation(c.activation, y)


def _store_rows(tile: _Tile, y: jax.Array, out_row: jax.Array, valid: jax.Array, mask: jax.Array) -> None:
    ref, c, n = tile.ref, tile.c, tile.n
    stride = c.n + tile.out_behind
    if "y_exponent" not in ref:
        _triton.store(ref["y"], (out_row[:, None], tile.heads * stride + n), y, mask)
        return
    if "out_columns" in ref and not c.divided_w:
        y = y * inverse_of(tile.out_columns())
    exponent, inverse = raised_exponents(y, 1)
    _triton.store(ref["y"], (out_row[:, None], tile.heads * stride + n), y * inverse, mask)
    part = jnp.zeros_like(out_row) + (tile.heads * c.blocks_n + tile.column_block)
    _triton.store(ref["y_exponent"], (out_row, part), resized(exponent, out_row.shape), valid)


def _store_inner_products(tile: _Tile, y: jax.Array, out_row: jax.Array, valid: jax.Array) -> None:
    """Stores the inner product of each part of a row and the vector of its type."""
    ref, c, n = tile.ref, tile.c, tile.n
    vector = _triton.load(ref["dot_vector"], (tile.type, tile.heads, n), tile.in_n()).astype(jnp.float32)
    vector = vector * tile.out_columns() if c.divided_w else vector
    product = y * vector if c.even_n else where(n < c.n, y * vector, 0.0)
    dot_parts = ref["dot"].shape[1] // c.head_blocks
    if dot_parts == 1:
        _triton.store(ref["dot"], (out_row, tile.heads), lax.reduce_sum(product, (1,)), valid)
        return
    width = c.n // dot_parts
    parts_of_tile = c.schedule.block_n // width
    parts = lax.reduce_sum(lax.reshape(product, (c.block, parts_of_tile, width)), (2,))
    part = lanes(parts_of_tile, 1, 2)
    inside = valid[:, None] if c.even_n else valid[:, None] & (part < dot_parts)
    _triton.store(ref["dot"], (out_row[:, None], tile.heads * dot_parts + part), parts, inside)
