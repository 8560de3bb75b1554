"""What the kernels of the traversal template do with tiles: loads, the reduction over entries, and stores."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import divide, feature_indices, feature_mask, lanes, next_power_of_two, padded
from dejax.pallas._tiles import as_integers, both, broadcast, resized, steps, where, with_axes, within
from dejax.pallas.formats.row_scaled import exponents, inverse_power, power, raised, without_padding
from dejax.pallas.traversal.accumulate import initial, merge, results, update
from dejax.pallas.traversal.factored import Factored
from dejax.pallas.traversal.plan import LoopPlan, Refs
from dejax.pallas.traversal.request import Output

# Number of features from which on a tile is loaded as `Factored`, and stored by the threads of one entry.
WIDE = 16


def load(
    ref: Any,
    exponents: Any,
    index: jax.Array,
    mask: jax.Array | None,
    shape: tuple[int, ...],
    column: int | None = None,
    first: int = 0,
    factored: bool = False,
) -> Any:
    """The tile [*index.shape, *padded shape] of rows `index`, floats as float32, zeros where masked and in padding.

    `exponents` is the reference to the exponents if the array is a `RowScaled`, else None. With `factored`, a wide tile
    of floats is returned as `Factored`.

    With `column`, the features start there in each row of a two-dimensional array; they start at `first` on their
    first axis.
    """
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
    factored = factored and math.prod(shape) >= WIDE and tile.dtype == jnp.float32
    if exponents is None:
        return Factored(tile, None, True) if factored else tile
    if exponents.shape[1] == 1:
        exponent = _triton.load(exponents, (index, jnp.zeros_like(index)), mask)
        product = Factored(tile, with_axes(power(exponent.astype(jnp.int32)), len(shape)), True)
        return product if factored else product.whole()
    flat = jnp.zeros((), jnp.int32)
    for size, feature in zip(shape, features, strict=True):
        flat = flat * size + feature
    part, _ = divide(flat, math.prod(ref.shape[1:]) // exponents.shape[1])
    # Lanes in the features' padding may point past the last part.
    exponent = _triton.load(exponents, (row, part), inside)
    return tile * power(exponent.astype(jnp.int32))


def _tile(plan: LoopPlan, r: Refs, i: int, index: jax.Array, mask: jax.Array | None, factored: bool = False) -> Any:
    """TileOperand `i` at rows `index` of its array."""
    operand, ref = plan.operands[i], r.arrays[i]
    column = None if operand.columns is None else operand.columns[0]
    first = 0 if operand.part is None else operand.part[0]
    return load(ref, r.exponents.get(i), index, mask, operand.features(ref.shape), column, first, factored)


def store(ref: Any, index: jax.Array, mask: jax.Array, shape: tuple[int, ...], tile: jax.Array, first: int = 0) -> None:
    """Stores the tile to rows `index`, from `first` on of their first feature axis.

    Masked lanes name the row past the end.
    """
    lead = index.ndim
    index = with_axes(where(mask, index, ref.shape[0]), len(shape))
    inside = feature_mask(shape, lead=lead)
    wide = with_axes(mask, len(shape))
    inside = wide if inside is None else both(wide, inside)
    tile = jnp.broadcast_to(tile, (*mask.shape, *padded(shape)))
    _triton.store(ref, (index, *feature_indices(shape, lead, first)), tile, inside)


def tiles_of_rows(plan: LoopPlan, r: Refs, row: jax.Array, mask: jax.Array) -> dict[int, jax.Array]:
    """[rows, 1, *padded] or, for shared operands, [1, 1, *padded] tiles; by operand number."""
    tiles = {}
    for i in plan.per_row:
        if plan.operands[i].access == "row":
            tiles[i] = _tile(plan, r, i, row[:, None], mask[:, None])
        elif plan.operands[i].access == "row_indexed":
            number = plan.operands[i].index
            assert number is not None
            index = _triton.load(r.tables[number], (row,), mask)
            inside = within(index, r.arrays[i].shape[0], mask)
            tiles[i] = _tile(plan, r, i, index[:, None], inside[:, None])
        elif plan.operands[i].access == "shared":
            tiles[i] = _tile(plan, r, i, jnp.zeros((1, 1), jnp.int32), None)
        elif plan.operands[i].access == "slots":
            tiles[i] = _spread(plan, r, i, row.shape[0], plan.entries)
        elif plan.operands[i].access == "times_row":
            of = plan.operands[i].index
            assert of is not None
            tiles[i] = lax.mul(tiles[of], _spread(plan, r, i, row.shape[0], 1))
    return tiles


def _spread(plan: LoopPlan, r: Refs, i: int, rows: int, entries: int) -> jax.Array:
    """An array without a leading axis as the tile [rows, entries, *padded], each slot loaded by its own threads."""
    index = lanes(rows, 0, 2) * 0 + lanes(entries, 1, 2) * 0
    return _tile(plan, r, i, index, None)


def _needed_tables(plan: LoopPlan) -> tuple[tuple[int, str], ...]:
    """Which index tables the body reads, and whether by position or by entry."""
    found = ((o.index, o.access) for o in plan.operands if o.access in ("indexed", "positioned"))
    return tuple(dict.fromkeys((index, access) for index, access in found if index is not None))


def indices_at(plan: LoopPlan, r: Refs, position: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Entry ids, then the entries of `_needed_tables`, at [rows, entries] positions."""
    entry = _triton.load(r.order[0], (position,), mask) if r.order and plan.needs_entries else position
    read = {"positioned": position, "indexed": entry}
    return (entry, *(_triton.load(r.tables[i], (read[access],), mask) for i, access in _needed_tables(plan)))


def evaluate(
    plan: LoopPlan,
    r: Refs,
    row_tiles: dict[int, jax.Array],
    position: jax.Array,
    indices: Sequence[jax.Array],
    mask: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The body's reduction values and entry outputs for [rows, entries] entries, broadcast to full tiles."""
    entry = indices[0]
    by_table = dict(zip(_needed_tables(plan), indices[1:], strict=True))
    tiles: list[Any] = []
    for i, operand in enumerate(plan.operands):
        if i in row_tiles:
            tiles.append(row_tiles[i])
        elif operand.access == "epilogue":
            tiles.append(None)
        elif operand.access == "entry":
            tiles.append(_tile(plan, r, i, entry, mask, plan.factored))
        elif operand.access == "position":
            tiles.append(_tile(plan, r, i, position, mask, plan.factored))
        else:
            assert operand.index is not None
            index = by_table[operand.index, operand.access]
            # An index out of range (a padding entry's) reads zeros, never other memory.
            inside = within(index, r.arrays[i].shape[0], mask)
            tiles.append(_tile(plan, r, i, index, inside, plan.factored))
    values, outputs = plan.body(*tiles)
    declared = plan.outputs.entries
    if len(values) != len(plan.reductions) or len(outputs) != len(declared):
        raise ValueError(
            f"body must return {len(plan.reductions)} reduction values and {len(declared)} entry outputs, "
            f"got {len(values)} and {len(outputs)}"
        )
    full = lambda v, shape: jnp.broadcast_to(v, (*entry.shape, *padded(shape)))  # noqa: E731

    def output(v: Any, shape: tuple[int, ...]) -> Any:
        return tuple(full(part, _part(shape, v)) for part in v) if isinstance(v, tuple) else full(v, shape)

    def value(v: Any, shape: tuple[int, ...]) -> Any:
        if isinstance(v, Factored):
            return Factored(full(v.tile, shape), v.factor, v.zeros)
        return full(v.astype(jnp.float32), shape)

    found = tuple(value(v, a.shape) for v, a in zip(values, plan.reductions, strict=True))
    return found, tuple(output(o, shape) for o, (shape, _) in zip(outputs, declared, strict=True))


def _part(whole: tuple[int, ...], parts: Any) -> tuple[int, ...]:
    """The feature shape of one of several tiles that are stored side by side in one output."""
    return (whole[0] // len(parts), *whole[1:]) if isinstance(parts, tuple) and len(parts) > 1 else whole


def _store_parts(ref: Any, index: jax.Array, mask: jax.Array, whole: tuple[int, ...], value: Any) -> None:
    """Stores a tile to rows `index`, or a tuple of them side by side along the first feature axis.

    Where rows are longer than `whole` zeros follow: those of the last tile's padding, where it has as many.
    """
    shape = _part(whole, value)
    parts = value if isinstance(value, tuple) else (value,)
    behind = ref.shape[-1] - whole[-1] if whole else 0
    if len(whole) > 1:  # not the axis of what is side by side
        shape, behind = (*shape[:-1], shape[-1] + behind), 0
    within = behind == 0 or shape[0] + behind <= next_power_of_two(shape[0])
    for number, part in enumerate(parts):
        last = number == len(parts) - 1 and behind and within
        wide = (shape[0] + behind,) if last else shape
        store(ref, index, mask, wide, part, number * shape[0] if number else 0)
    if not within:
        store(ref, index, mask, (behind,), jnp.zeros((1,) * (index.ndim + 1), jnp.float32), whole[0])


def reduce_entries(
    plan: LoopPlan,
    r: Refs,
    row_tiles: dict[int, jax.Array],
    start: jax.Array,
    end: jax.Array,
    longest: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Accumulators [rows, *padded] over positions `start` to `end` of each row; stores entry outputs on the way.

    With `longest`, the rows of the program are parts of one row with that many entries: in each step every part takes
    the next `plan.entries` entries.

    The indices of the next step are loaded before the rows of this one are used: the two wait for memory together.
    """
    rows, entries = start.shape[0], plan.entries
    count = lax.sub(end, start)
    here = start[:, None] + lanes(entries, 1, 2)
    stride = entries
    if longest is not None:
        here = here + entries * lanes(rows, 0, 2)
        stride = rows * entries
    else:
        longest = lax.reduce_max(count, (0,)) if rows > 1 else count.reshape(())
    end = end[:, None]

    def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        accs, indices = carry
        position = here + i * stride
        mask = position < end
        following = position + stride
        ahead = indices_at(plan, r, following, following < end)
        values, stored = evaluate(plan, r, row_tiles, position, indices, mask)
        for ref, (shape, _), value in zip(r.entries.values(), plan.outputs.entries, stored, strict=True):
            _store_parts(ref, indices[0], mask, shape, value)
        return update(plan.reductions, accs, values, mask), ahead

    first = indices_at(plan, r, here, here < end)
    accs, _ = _triton.fori_loop(0, steps(longest, stride), step, (initial(plan.reductions, rows, entries), first))
    # Powers of columns are multiplied before the entries of a row are merged: each thread multiplies its own elements.
    found = tuple(
        a if of.factor is None else lax.mul(a, _spread(plan, r, of.factor, rows, entries))
        for a, of in zip(accs, plan.reductions, strict=True)
    )
    return merge(plan.reductions, found)


def write_rows(
    plan: LoopPlan,
    r: Refs,
    merged: Sequence[jax.Array],
    row_tiles: dict[int, jax.Array],
    row: jax.Array,
    mask: jax.Array,
) -> None:
    """Runs the epilogue on accumulators [rows, *padded] and stores what it gives; tuples side by side in each row."""
    values: Sequence[Any] = results(plan.reductions, merged)
    if plan.epilogue is not None:
        factors = {of.factor for of in plan.reductions}
        own = [i for i in plan.per_row if plan.operands[i].access == "epilogue" and i not in factors]
        loaded = row_tiles | {i: _spread(plan, r, i, row.shape[0], plan.entries) for i in own}
        tiles = tuple(None if i in factors else _of_rows(loaded[i]) for i in plan.per_row)
        values = plan.epilogue(values, tiles)
    if len(values) != len(plan.outputs.rows):
        raise ValueError(f"epilogue must return {len(plan.outputs.rows)} row outputs, got {len(values)}")
    entries = plan.entries if plan.schedule.num_warps == 1 and row.shape[0] == plan.rows else 1
    store_outputs(plan.outputs.rows, r.rows, r.row_exponents, row, mask, values, entries)


def _of_rows(tile: jax.Array) -> jax.Array:
    """A tile [rows, entries, *padded], all of whose entries are equal, as [rows, *padded]."""
    if tile.shape[1] > 1:
        return as_integers(lambda bits: lax.reduce_max(bits, (1,)), tile)
    return resized(tile, (tile.shape[0], *tile.shape[2:]))


def store_outputs(
    declared: Sequence[Output],
    refs: Mapping[int, Any],
    exponents: Mapping[int, Any],
    index: jax.Array,
    mask: jax.Array,
    values: Sequence[Any],
    entries: int = 1,
) -> None:
    """Stores all outputs, those with `exponents` as `RowScaled`.

    With `entries`, from tiles [*index.shape, entries, *padded shape] of which the first entry is stored. Threads of all
    entries have what was reduced over them, and what several threads have goes through shared memory to where it is
    stored; what each has for itself is shuffled. Traversals whose programs take any shared memory are slower,
    presumably for what the L1 has less: one of biokg's took 544 us with it and 396 without.
    """
    for i, ((whole, _), value) in enumerate(zip(declared, values, strict=True)):
        if i in exponents:
            value = _scaled(exponents[i], index, mask, whole, value)
        if entries == 1 or math.prod(whole) < WIDE:
            _store_parts(refs[i], index, mask, whole, value)
            continue
        shape = (*index.shape, entries)
        features = padded(_part(whole, value))
        parts = [
            jnp.broadcast_to(p, (*index.shape, *features)) for p in (value if isinstance(value, tuple) else (value,))
        ]
        spread = tuple(broadcast(jnp.expand_dims(p, index.ndim), (*shape, *features)) for p in parts)
        first = both(with_axes(mask, 1), lanes(entries, index.ndim, index.ndim + 1) == 0)
        _store_parts(refs[i], broadcast(with_axes(index, 1), shape), first, whole, spread)


def _scaled(
    exponent_ref: Any, index: jax.Array, mask: jax.Array, whole: tuple[int, ...], value: Any
) -> tuple[jax.Array, ...]:
    """Tiles that are stored side by side, below 2^15 in magnitude; the exponents of their rows are stored."""
    parts: tuple[jax.Array, ...] = value if isinstance(value, tuple) else (value,)
    shape = _part(whole, value)
    lead = mask.ndim
    parts = tuple(jnp.broadcast_to(part, (*mask.shape, *padded(shape))) for part in parts)
    parts = tuple(without_padding(part, shape) for part in parts)
    axes = tuple(range(lead, lead + len(shape)))
    exponent = raised(functools.reduce(lax.max, (exponents(part, axes)[0] for part in parts)))
    inverse = inverse_power(exponent)
    at = where(mask, index, exponent_ref.shape[0])
    _triton.store(exponent_ref, (at, jnp.zeros_like(at)), resized(exponent, mask.shape), mask)
    return tuple(part * inverse for part in parts)
