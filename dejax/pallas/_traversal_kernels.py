"""The kernels of the traversal template: rows, chunks of hub rows, their combination, and items without rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._accumulate import Reduction, initial, merge, results, update
from dejax.pallas._shapes import divide, feature_indices, feature_mask, lanes, padded
from dejax.pallas._tiles import both, resized, steps, stretched, where, with_axes, within
from dejax.pallas.factored import Factored
from dejax.pallas.half_rows import exponents, inverse_power, power, without_padding

Output = tuple[tuple[int, ...], Any]
# Accesses by which an operand is read once for all items of a row.
BY_ROW = ("row", "row_indexed", "shared")
# Features from which on a tile comes as `Factored`.
_WIDE = 16
# Chunks of a hub that are merged at once where they are fewer than `Plan.combined`.
FEW_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Operand:
    """How a traversal reads an array.

    Attributes:
      access: `item`, row i of the array for item i; `indexed`, row `index_tables[index][i]`; `positioned`, row
        `index_tables[index][p]` for position p of the order, which saves a load where the table could be permuted
        beforehand; `position`, row p for position p; `row`, the row of the loop; `row_indexed`, row
        `index_tables[index][r]` for row r of the loop; `shared`, an array without a leading axis, the same everywhere.
      index: which index table, for `indexed`, `positioned` and `row_indexed`.
      columns: the operand is a part of each row of an array [length, columns]: (first column, feature shape of at most
        one axis). Narrow values that are read at the same rows share an array, and with it a memory sector; not for
        what is read by row.
      part: the operand is a part of an array [length, m, n]: (first, count) on the axis of m.
      when: for `item`, the number of an operand before this one, a number an item: where that is 0 the row is not read,
        and is zeros.
    """

    access: str
    index: int | None = None
    columns: tuple[int, tuple[int, ...]] | None = None
    part: tuple[int, int] | None = None
    when: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Static facts of one traversal. Arrays have a leading axis here, of size 1 where they are shared."""

    body: Callable[..., Any]
    epilogue: Callable[..., Any] | None
    operands: tuple[Operand, ...]
    features: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    reductions: tuple[Reduction, ...]
    item_outputs: tuple[Output, ...]
    row_outputs: tuple[Output, ...]
    num_items: int
    num_rows: int
    rows: int
    items: int
    chunk: int | None = None
    num_chunks: int = 0
    num_counters: int = 0  # hubs, where the last of a hub's chunks merges them all
    combined: int = 1  # chunks of a hub that are merged in a step
    warps: int = 1
    parts: tuple[int, ...] = ()  # exponents a row of operands that come as `HalfRows`, 0 for the others
    half: tuple[int, ...] = ()  # numbers of the row outputs, or a map's outputs, that are written as `HalfRows`
    factored: bool = False  # the body takes wide tiles of items as `Factored`
    num_tables: int = 0
    has_order: bool = False
    has_row_order: bool = False
    beside: Plan | None = None  # of the sums over other items of the same rows

    @property
    def needs_items(self) -> bool:
        """Whether anything is read or written by item id, so that the order must be read."""
        return bool(self.item_outputs) or any(o.access in ("item", "indexed") for o in self.operands)

    @property
    def per_row(self) -> tuple[int, ...]:
        """Which operands have one tile for all items of a row."""
        return tuple(i for i, o in enumerate(self.operands) if o.access in BY_ROW)


@dataclass(frozen=True, slots=True)
class _Array:
    """An operand's references: the rows, and the exponents of `HalfRows`."""

    rows: Any
    exponent: Any = None
    parts: int = 0


def _load(
    array: _Array,
    index: jax.Array,
    mask: jax.Array | None,
    shape: tuple[int, ...],
    column: int | None = None,
    first: int = 0,
    factored: bool = False,
) -> Any:
    """The tile [*index.shape, *padded shape] of rows `index`, floats as float32, zeros where masked and in padding.

    With `factored`, a wide tile of floats comes as `Factored`.

    With `column`, the features start there in each row of a two-dimensional array; they start at `first` on their
    first axis.
    """
    ref = array.rows
    lead = index.ndim
    inside = feature_mask(shape, lead=lead)
    if mask is not None:
        wide = with_axes(mask, len(shape))
        inside = wide if inside is None else both(wide, inside)
    features = feature_indices(shape, lead, first)
    if column is not None:
        features = (features[0] + column,) if shape else (jnp.full(index.shape, column, jnp.int32),)
    row = with_axes(index, len(shape))
    tile = _triton.load(ref, (row, *features), inside)
    tile = tile.astype(jnp.float32) if jnp.issubdtype(tile.dtype, jnp.floating) else tile
    factored = factored and math.prod(shape) >= _WIDE and tile.dtype == jnp.float32
    if array.exponent is None:
        return Factored(tile, None, True) if factored else tile
    if array.parts == 1:
        exponent = _triton.load(array.exponent, (index, jnp.zeros_like(index)), mask)
        product = Factored(tile, with_axes(power(exponent.astype(jnp.int32)), len(shape)), True)
        return product if factored else product.whole()
    flat = jnp.zeros((), jnp.int32)
    for size, feature in zip(shape, features, strict=True):
        flat = flat * size + feature
    part, _ = divide(flat, math.prod(ref.shape[1:]) // array.parts)
    # Lanes in the features' padding may point past the last part.
    exponent = _triton.load(array.exponent, (row, part), inside)
    return tile * power(exponent.astype(jnp.int32))


def _tile(
    plan: Plan, arrays: Sequence[_Array], i: int, index: jax.Array, mask: jax.Array | None, factored: bool = False
) -> Any:
    """Operand `i` at rows `index` of its array."""
    operand = plan.operands[i]
    column = None if operand.columns is None else operand.columns[0]
    first = 0 if operand.part is None else operand.part[0]
    return _load(arrays[i], index, mask, plan.features[i], column, first, factored)


def _store(
    ref: Any, index: jax.Array, mask: jax.Array, shape: tuple[int, ...], past: int, tile: jax.Array, first: int = 0
) -> None:
    """Stores the tile to rows `index`, from `first` on of their first feature axis.

    `past` is the row past the end, which masked lanes name.
    """
    lead = index.ndim
    index = with_axes(where(mask, index, past), len(shape))
    inside = feature_mask(shape, lead=lead)
    wide = with_axes(mask, len(shape))
    inside = wide if inside is None else both(wide, inside)
    tile = jnp.broadcast_to(tile, (*mask.shape, *padded(shape)))
    _triton.store(ref, (index, *feature_indices(shape, lead, first)), tile, inside)


def _row_tiles(
    plan: Plan, arrays: Sequence[Any], tables: Sequence[Any], row: jax.Array, mask: jax.Array
) -> dict[int, jax.Array]:
    """[rows, 1, *padded] or, for shared operands, [1, 1, *padded] tiles; by operand number."""
    tiles = {}
    for i in plan.per_row:
        if plan.operands[i].access == "row":
            tiles[i] = _tile(plan, arrays, i, row[:, None], mask[:, None])
        elif plan.operands[i].access == "row_indexed":
            number = plan.operands[i].index
            assert number is not None
            index = _triton.load(tables[number], (row,), mask)
            inside = within(index, plan.lengths[i], mask)
            tiles[i] = _tile(plan, arrays, i, index[:, None], inside[:, None])
        else:
            tiles[i] = _load(arrays[i], jnp.zeros((1, 1), jnp.int32), None, plan.features[i])
    return tiles


def _needed_tables(plan: Plan) -> tuple[tuple[int, str], ...]:
    """Which index tables the body reads, and whether by position or by item."""
    found = ((o.index, o.access) for o in plan.operands if o.access in ("indexed", "positioned"))
    return tuple(dict.fromkeys((index, access) for index, access in found if index is not None))


def _indices(
    plan: Plan, tables: Sequence[Any], order: Any, position: jax.Array, mask: jax.Array
) -> tuple[jax.Array, ...]:
    """Item ids, then the entries of `_needed_tables`, at [rows, items] positions."""
    item = position if order is None or not plan.needs_items else _triton.load(order, (position,), mask)
    read = {"positioned": position, "indexed": item}
    return (item, *(_triton.load(tables[i], (read[access],), mask) for i, access in _needed_tables(plan)))


def _evaluate(
    plan: Plan,
    arrays: Sequence[_Array],
    row_tiles: dict[int, jax.Array],
    position: jax.Array,
    indices: Sequence[jax.Array],
    mask: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The body's reduction values and item outputs for [rows, items] items, broadcast to full tiles."""
    item = indices[0]
    by_table = dict(zip(_needed_tables(plan), indices[1:], strict=True))
    tiles = []
    for i, operand in enumerate(plan.operands):
        if i in row_tiles:
            tiles.append(row_tiles[i])
        elif operand.access == "item":
            read = mask if operand.when is None else both(mask, tiles[operand.when] != 0)
            tiles.append(_tile(plan, arrays, i, item, read, plan.factored))
        elif operand.access == "position":
            tiles.append(_tile(plan, arrays, i, position, mask, plan.factored))
        else:
            assert operand.index is not None
            index = by_table[operand.index, operand.access]
            # An index out of range (a padding item's) reads zeros, never other memory.
            inside = within(index, plan.lengths[i], mask)
            tiles.append(_tile(plan, arrays, i, index, inside, plan.factored))
    values, outputs = plan.body(*tiles)
    if len(values) != len(plan.reductions) or len(outputs) != len(plan.item_outputs):
        raise ValueError(
            f"body must return {len(plan.reductions)} reduction values and {len(plan.item_outputs)} item outputs, "
            f"got {len(values)} and {len(outputs)}"
        )
    full = lambda v, shape: jnp.broadcast_to(v, (*item.shape, *padded(shape)))  # noqa: E731

    def output(v: Any, shape: tuple[int, ...]) -> Any:
        return tuple(full(part, _part(shape, v)) for part in v) if isinstance(v, tuple) else full(v, shape)

    def value(v: Any, shape: tuple[int, ...]) -> Any:
        if isinstance(v, Factored):
            return Factored(full(v.tile, shape), v.factor, v.zeros)
        return full(v.astype(jnp.float32), shape)

    found = tuple(value(v, r.shape) for v, r in zip(values, plan.reductions, strict=True))
    return found, tuple(output(o, shape) for o, (shape, _) in zip(outputs, plan.item_outputs, strict=True))


def _part(whole: tuple[int, ...], parts: Any) -> tuple[int, ...]:
    """The feature shape of each of the tiles that are stored side by side in place of one."""
    return (whole[0] // len(parts), *whole[1:]) if isinstance(parts, tuple) and len(parts) > 1 else whole


def _store_parts(ref: Any, index: jax.Array, mask: jax.Array, whole: tuple[int, ...], past: int, value: Any) -> None:
    """Stores a tile to rows `index`, or a tuple of them side by side along the first feature axis."""
    shape = _part(whole, value)
    for number, part in enumerate(value if isinstance(value, tuple) else (value,)):
        _store(ref, index, mask, shape, past, part, number * shape[0] if number else 0)


def _loop(
    plan: Plan,
    refs: _Refs,
    row_tiles: dict[int, jax.Array],
    start: jax.Array,
    end: jax.Array,
    items: int,
    longest: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Accumulators [rows, *padded] over positions `start` to `end` of each row; stores item outputs on the way.

    With `longest` all rows are one, of so many items, and take `items` of them in turns.

    The indices of the next step are loaded before the rows of this one are used: the two wait for memory together.
    """
    rows = start.shape[0]
    count = lax.sub(end, start)
    here = start[:, None] + lanes(items, 1, 2)
    stride = items
    if longest is not None:
        here = here + items * lanes(rows, 0, 2)
        stride = rows * items
    else:
        longest = lax.reduce_max(count, (0,)) if rows > 1 else count.reshape(())
    end = end[:, None]

    def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        accs, indices = carry
        position = here + i * stride
        mask = position < end
        following = position + stride
        ahead = _indices(plan, refs.tables, refs.order, following, following < end)
        values, stored = _evaluate(plan, refs.arrays, row_tiles, position, indices, mask)
        for ref, (shape, _), value in zip(refs.item_outputs, plan.item_outputs, stored, strict=True):
            _store_parts(ref, indices[0], mask, shape, plan.num_items, value)
        return update(plan.reductions, accs, values, mask), ahead

    first = _indices(plan, refs.tables, refs.order, here, here < end)
    accs, _ = _triton.fori_loop(0, steps(longest, stride), step, (initial(plan.reductions, rows, items), first))
    return merge(plan.reductions, accs)


def _write_rows(
    plan: Plan,
    outputs: Sequence[Any],
    merged: Sequence[jax.Array],
    row_tiles: dict[int, jax.Array],
    row: jax.Array,
    mask: jax.Array,
    beside: tuple[jax.Array, ...],
) -> None:
    """Runs the epilogue on accumulators [rows, *padded] and stores what it gives; tuples side by side in each row.

    `outputs` are the row outputs, then the exponents of those in `plan.half`; `beside` what `_beside` gave.
    """
    values: Sequence[Any] = (*results(plan.reductions, merged), *beside)
    if plan.epilogue is not None:
        tiles = tuple(resized(t, (t.shape[0], *t.shape[2:])) for t in row_tiles.values())
        values = plan.epilogue(values, tiles)
    if len(values) != len(plan.row_outputs):
        raise ValueError(f"epilogue must return {len(plan.row_outputs)} row outputs, got {len(values)}")
    items = plan.items if plan.warps == 1 and row.shape[0] == plan.rows else 1
    _store_outputs(plan.half, plan.row_outputs, outputs, row, mask, plan.num_rows, values, items)


def _store_outputs(
    half: Sequence[int],
    declared: Sequence[Output],
    refs: Sequence[Any],
    index: jax.Array,
    mask: jax.Array,
    past: int,
    values: Sequence[Any],
    items: int = 1,
) -> None:
    """Stores all outputs; `refs` are theirs, then those of the exponents of the outputs `half`.

    With `items`, from tiles [*index.shape, items, *padded shape] of which the first item is stored. Threads of all
    items have what was reduced over them, and what several threads have goes through shared memory to where it is
    stored; what each has for itself is shuffled. Loops whose programs take any shared memory are slower, presumably
    for what the L1 has less: one of biokg's took 544 us with it and 396 without.
    """
    exponent_refs = dict(zip(half, refs[len(declared) :], strict=True))
    for i, ((whole, _), value) in enumerate(zip(declared, values, strict=True)):
        if i in exponent_refs:
            value = _scaled(exponent_refs[i], index, mask, whole, past, value)
        if items == 1 or math.prod(whole) < _WIDE:
            _store_parts(refs[i], index, mask, whole, past, value)
            continue
        shape = (*index.shape, items)
        features = padded(_part(whole, value))
        parts = [
            jnp.broadcast_to(p, (*index.shape, *features)) for p in (value if isinstance(value, tuple) else (value,))
        ]
        spread = tuple(stretched(jnp.expand_dims(p, index.ndim), (*shape, *features)) for p in parts)
        first = both(with_axes(mask, 1), lanes(items, index.ndim, index.ndim + 1) == 0)
        _store_parts(refs[i], stretched(with_axes(index, 1), shape), first, whole, past, spread)


def _scaled(
    exponent_ref: Any, index: jax.Array, mask: jax.Array, whole: tuple[int, ...], past: int, value: Any
) -> tuple[jax.Array, ...]:
    """Tiles that are stored side by side, below 2 in magnitude; the exponents of their rows are stored."""
    parts: tuple[jax.Array, ...] = value if isinstance(value, tuple) else (value,)
    shape = _part(whole, value)
    lead = mask.ndim
    parts = tuple(jnp.broadcast_to(part, (*mask.shape, *padded(shape))) for part in parts)
    parts = tuple(without_padding(part, shape) for part in parts)
    axes = tuple(range(lead, lead + len(shape)))
    exponent = functools.reduce(lax.max, (exponents(part, axes)[0] for part in parts))
    inverse = inverse_power(exponent)
    at = where(mask, index, past)
    _triton.store(exponent_ref, (at, jnp.zeros_like(at)), resized(exponent, mask.shape), mask)
    return tuple(part * inverse for part in parts)


def _beside_bounds(refs: _Refs | None, row: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Where the other items of each row begin and end: loaded before the loop that `_beside` comes after."""
    if refs is None:
        return ()
    return _triton.load(refs.offsets, (row,), mask), _triton.load(refs.offsets, (row + 1,), mask)


def _beside(plan: Plan, refs: _Refs | None, bounds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The sums over the other items of each row: [rows, *padded] each."""
    if plan.beside is None or refs is None:
        return ()
    start, end = bounds
    # A hub has the lanes of its program to itself.
    items = plan.beside.items * plan.rows // start.shape[0]
    return tuple(results(plan.beside.reductions, _loop(plan.beside, refs, {}, start, end, items)))


@dataclass(frozen=True, slots=True)
class _Refs:
    """A kernel's references by what they are."""

    arrays: Sequence[_Array]
    tables: Sequence[Any]
    offsets: Any
    order: Any
    row_order: Any = None
    beside: _Refs | None = None
    bounds: Sequence[Any] = ()
    item_outputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


def _arrays(plan: Plan, refs: Sequence[Any]) -> tuple[list[_Array], Sequence[Any]]:
    """The operands, whose exponents follow them, and the references after those."""
    n = len(plan.operands)
    exponent_refs = iter(refs[n:])
    parts = plan.parts or (0,) * n
    arrays = [_Array(r, next(exponent_refs) if p else None, p) for r, p in zip(refs[:n], parts, strict=True)]
    return arrays, refs[n + sum(p > 0 for p in parts) :]


def _unpack(refs: Sequence[Any], plan: Plan, num_aliased: int) -> _Refs:
    """The references in the order in which `traverse` passes them."""
    read, rest = _read_refs(plan, refs)
    row_order, rest = (rest[0], rest[1:]) if plan.has_row_order else (None, rest)
    beside, rest = _beside_refs(plan, rest)
    bounds, rest = _bounds(plan, rest)
    outputs = rest[num_aliased:]
    n = len(plan.item_outputs)
    return replace(
        read, row_order=row_order, beside=beside, bounds=bounds, item_outputs=outputs[:n], outputs=outputs[n:]
    )


def _bounds(plan: Plan, refs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Row, start and end of each chunk and, where they are counted, its hub and the chunks of each hub."""
    size = (5 if plan.num_counters else 3) if plan.num_chunks else 0
    return refs[:size], refs[size:]


def _read_refs(plan: Plan, refs: Sequence[Any]) -> tuple[_Refs, Sequence[Any]]:
    """What a loop over items reads, and the references after it."""
    arrays, rest = _arrays(plan, refs)
    tables, rest = rest[: plan.num_tables], rest[plan.num_tables :]
    offsets, rest = rest[0], rest[1:]
    order, rest = (rest[0], rest[1:]) if plan.has_order else (None, rest)
    return _Refs(arrays, tables, offsets, order), rest


def _beside_refs(plan: Plan, refs: Sequence[Any]) -> tuple[_Refs | None, Sequence[Any]]:
    return (None, refs) if plan.beside is None else _read_refs(plan.beside, refs)


def row_kernel(*refs: Any, plan: Plan, num_aliased: int) -> None:
    """Chunks of hub rows, one a program and first, because they take longest; then `plan.rows` rows side by side."""
    r = _unpack(refs, plan, num_aliased)
    (program,) = _triton.program_ids()
    num_outputs = len(plan.row_outputs) + len(plan.half)
    if not plan.num_chunks:
        _rows(plan, r, program, r.outputs)
        return
    row_refs, partials = r.outputs[:num_outputs], r.outputs[num_outputs:]
    _triton.when(program < plan.num_chunks, lambda: _chunk(plan, r, program, partials, row_refs))
    _triton.when(program >= plan.num_chunks, lambda: _rows(plan, r, program - plan.num_chunks, row_refs))


def _rows(plan: Plan, r: _Refs, program: jax.Array, outputs: Sequence[Any]) -> None:
    row = program * plan.rows + lanes(plan.rows, 0, 1)
    mask = row < plan.num_rows
    start, end = _triton.load(r.offsets, (row,), mask), _triton.load(r.offsets, (row + 1,), mask)
    if r.row_order is not None:
        row = _triton.load(r.row_order, (row,), mask)
    if plan.chunk is not None:
        mask = mask & (end - start <= plan.chunk)
        end = where(mask, end, start)
    tiles = _row_tiles(plan, r.arrays, r.tables, row, mask)
    bounds = _beside_bounds(r.beside, row, mask)
    merged = _loop(plan, r, tiles, start, end, plan.items)
    _write_rows(plan, outputs, merged, tiles, row, mask, _beside(plan, r.beside, bounds))


def _chunk(plan: Plan, r: _Refs, program: jax.Array, partials: Sequence[Any], row_refs: Sequence[Any]) -> None:
    """One chunk of a hub row: its partial accumulators, maxima of nothing as -inf; and its item outputs.

    The program's rows take the chunk's items in turns. With counters the last chunk of a hub to get here merges all.
    """
    chunk = lax.broadcast(program, (plan.rows,))
    row, start, end = (_triton.load(b, (chunk,)) for b in r.bounds[:3])
    count = r.bounds[2][program] - r.bounds[1][program]
    tiles = _row_tiles(plan, r.arrays, r.tables, row, row < plan.num_rows)
    if plan.num_counters:  # loaded before the loop, on which it does not depend
        *partials, counters = partials
        hubs, offsets = r.bounds[3:]
        hub, the_row = hubs[program], r.bounds[0][program]
        used = hub < plan.num_counters
        hub = lax.min(hub, jnp.int32(plan.num_counters - 1))
        first, last = offsets[hub], offsets[hub + 1]
    accs = _loop(plan, r, tiles, start, end, plan.items, count)
    _store_partials(plan, partials, program, accs)
    if not plan.num_counters:
        return

    def merge_if_last() -> None:
        is_last = _triton.arrive(counters, hub) == (last - first - 1).astype(jnp.float32)
        only, arrays = lanes(1, 0, 1), [_Array(p) for p in partials]
        merge_all = functools.partial(_merge_hub, plan, r, arrays, row_refs, the_row + only, first + only, last + only)
        _triton.when(is_last, merge_all)

    _triton.when(used, merge_if_last)


def _store_partials(plan: Plan, partials: Sequence[Any], program: jax.Array, accs: Sequence[jax.Array]) -> None:
    """Stores a chunk's accumulators: those of the program's rows, [rows, *padded], merged."""
    merged = merge(plan.reductions, tuple(a[None] for a in accs))
    for ref, reduction, value in zip(partials, plan.reductions, merged, strict=True):
        # From a tile of all rows, and items where rows are few: see `_store_outputs`.
        items = 1 if plan.rows >= 4 or math.prod(reduction.shape) < _WIDE else plan.items
        sides = (1, plan.rows, items)
        first = both(lanes(plan.rows, 1, 3) == 0, lanes(items, 2, 3) == 0)
        spread = stretched(value[:, None, None], (*sides, *value.shape[1:]))
        _store(ref, lax.broadcast(program, sides), first, reduction.shape, plan.num_chunks, spread)


def combine_kernel(*refs: Any, plan: Plan) -> None:
    """The chunks of one hub row merged, and the row's epilogue."""
    (hub_rows, hub_offsets), refs = refs[:2], refs[2:]
    arrays, rest = _arrays(plan, refs)
    tables, rest = rest[: plan.num_tables], rest[plan.num_tables :]
    beside, rest = _beside_refs(plan, rest)
    partials = [_Array(p) for p in rest[: len(plan.reductions)]]
    outputs = rest[len(plan.reductions) + len(plan.row_outputs) + len(plan.half) :]
    (program,) = _triton.program_ids()
    hub = program + lanes(1, 0, 1)
    row = _triton.load(hub_rows, (hub,))
    start, end = _triton.load(hub_offsets, (hub,)), _triton.load(hub_offsets, (hub + 1,))
    _merge_hub(plan, _Refs(arrays, tables, None, None, beside=beside), partials, outputs, row, start, end)


def _merge_hub(
    plan: Plan,
    r: _Refs,
    partials: Sequence[_Array],
    outputs: Sequence[Any],
    row: jax.Array,
    start: jax.Array,
    end: jax.Array,
) -> None:
    """Merges the chunks from `start` to `end` of one hub row in their order, and writes the row.

    Most hubs have a few chunks and some have hundreds: large tiles first, then what is left where a small one holds it.
    A step waits for memory: of 149 chunks two large steps and three small ones would take longer than three large ones.
    """
    # What the epilogue reads comes while chunks are merged.
    mask = row < plan.num_rows
    tiles = _row_tiles(plan, r.arrays, r.tables, row, mask)
    bounds = _beside_bounds(r.beside, row, mask)

    def combined(accs: tuple[jax.Array, ...], items: int, first: jax.Array, last: jax.Array) -> tuple[jax.Array, ...]:
        """The accumulators after the chunks from `first` to `last`, `items` at a time."""

        def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            chunk = first[:, None] + (i * items + lanes(items, 1, 2))
            valid = chunk < last[:, None]
            shapes = (reduction.shape for reduction in plan.reductions)
            values = tuple(_load(p, chunk, valid, shape) for p, shape in zip(partials, shapes, strict=True))
            return update(plan.reductions, accs, values, valid)

        return _triton.fori_loop(0, steps((last - first).reshape(()), items), step, accs)

    few = min(plan.combined, FEW_CHUNKS)
    accs = initial(plan.reductions, 1, few)
    if few < plan.combined:
        large = lax.div(end - start + (plan.combined - few - 1), jnp.int32(plan.combined))
        many = lax.min(start + large * plan.combined, end)
        found = combined(initial(plan.reductions, 1, plan.combined), plan.combined, start, many)
        start = many
        merged = merge(plan.reductions, found)
        whole = tuple(stretched(m[:, None], a.shape) for m, a in zip(merged, accs, strict=True))
        accs = update(plan.reductions, accs, whole, lanes(few, 1, 2) == 0)
    accs = combined(accs, few, start, end)
    _write_rows(plan, outputs, merge(plan.reductions, accs), tiles, row, mask, _beside(plan, r.beside, bounds))


def map_kernel(*refs: Any, plan: Plan) -> None:
    """`plan.items` items side by side; the axis of rows has size 1."""
    arrays, rest = _arrays(plan, refs)
    tables, outputs = rest[: plan.num_tables], rest[plan.num_tables :]
    (program,) = _triton.program_ids()
    item = program * plan.items + lanes(plan.items, 1, 2)
    mask = item < plan.num_items
    no_row = jnp.zeros((1,), jnp.int32)
    tiles = _row_tiles(plan, arrays, tables, no_row, no_row == 0)
    _, stored = _evaluate(plan, arrays, tiles, item, _indices(plan, tables, None, item, mask), mask)
    _store_outputs(plan.half, plan.item_outputs, outputs, item, mask, plan.num_items, stored)
