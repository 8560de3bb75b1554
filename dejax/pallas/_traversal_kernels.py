"""The kernels of the traversal template: rows, chunks of hub rows, their combination, and items without rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._accumulate import Reduction, initial, merge, results, update
from dejax.pallas._shapes import feature_indices, feature_mask, lanes, padded

Output = tuple[tuple[int, ...], Any]


@dataclass(frozen=True, slots=True)
class Operand:
    """How a traversal reads an array.

    Attributes:
      access: `item`, row i of the array for item i; `indexed`, row `index_tables[index][i]`; `positioned`, row
        `index_tables[index][p]` for position p of the order, which saves a load where the table could be permuted
        beforehand; `row`, the row of the loop; `shared`, an array without a leading axis, the same everywhere.
      index: which index table, for `indexed` and `positioned`.
      columns: the operand is a part of each row of an array [length, columns]: (first column, feature shape of at most
        one
        axis). Narrow values that are read at the same rows share an array, and with it a memory sector.
    """

    access: str
    index: int | None = None
    columns: tuple[int, tuple[int, ...]] | None = None


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
    chunk: int | None

    @property
    def needs_items(self) -> bool:
        """Whether anything is read or written by item id, so that the order must be read."""
        return bool(self.item_outputs) or any(o.access in ("item", "indexed") for o in self.operands)

    @property
    def per_row(self) -> tuple[int, ...]:
        """Which operands have one tile for all items of a row."""
        return tuple(i for i, o in enumerate(self.operands) if o.access in ("row", "shared"))


def _load(
    ref: Any, index: jax.Array, mask: jax.Array | None, shape: tuple[int, ...], column: int | None = None
) -> jax.Array:
    """The tile [*index.shape, *padded shape] of rows `index`, floats as float32, zeros where masked and in padding.

    With `column`, the features start there in each row of a two-dimensional array.
    """
    lead = index.ndim
    ones = (1,) * len(shape)
    inside = feature_mask(shape, lead=lead)
    if mask is not None:
        wide = mask.reshape(*mask.shape, *ones)
        inside = wide if inside is None else wide & inside
    features = feature_indices(shape, lead)
    if column is not None:
        features = (features[0] + column,) if shape else (jnp.full(index.shape, column, jnp.int32),)
    tile = _triton.load(ref, (index.reshape(*index.shape, *ones), *features), inside)
    return tile.astype(jnp.float32) if jnp.issubdtype(tile.dtype, jnp.floating) else tile


def _store(ref: Any, index: jax.Array, mask: jax.Array, shape: tuple[int, ...], past: int, tile: jax.Array) -> None:
    """Stores the tile to rows `index`; `past` is the row past the end, which masked lanes name."""
    lead = index.ndim
    ones = (1,) * len(shape)
    index = jnp.where(mask, index, past).reshape(*index.shape, *ones)
    inside = feature_mask(shape, lead=lead)
    wide = mask.reshape(*mask.shape, *ones)
    inside = wide if inside is None else wide & inside
    tile = jnp.broadcast_to(tile, (*mask.shape, *padded(shape)))
    _triton.store(ref, (index, *feature_indices(shape, lead)), tile, inside)


def _row_tiles(plan: Plan, arrays: Sequence[Any], row: jax.Array, mask: jax.Array) -> dict[int, jax.Array]:
    """[rows, 1, *padded] or, for shared operands, [1, 1, *padded] tiles; by operand number."""
    tiles = {}
    for i in plan.per_row:
        if plan.operands[i].access == "row":
            tiles[i] = _load(arrays[i], row[:, None], mask[:, None], plan.features[i])
        else:
            tiles[i] = _load(arrays[i], jnp.zeros((1, 1), jnp.int32), None, plan.features[i])
    return tiles


def _evaluate(
    plan: Plan,
    arrays: Sequence[Any],
    tables: Sequence[Any],
    row_tiles: dict[int, jax.Array],
    position: jax.Array,
    item: jax.Array,
    mask: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The body's reduction values and item outputs for [rows, items] item ids, broadcast to full tiles."""
    indices: dict[tuple[int, str], jax.Array] = {}
    tiles = []
    for i, operand in enumerate(plan.operands):
        if i in row_tiles:
            tiles.append(row_tiles[i])
        elif operand.access == "item":
            tiles.append(_load(arrays[i], item, mask, plan.features[i]))
        else:
            assert operand.index is not None
            key = (operand.index, operand.access)
            if key not in indices:
                at = position if operand.access == "positioned" else item
                indices[key] = _triton.load(tables[operand.index], (at,), mask)
            index = indices[key]
            # An index out of range (a padding item's) reads zeros, never other memory.
            inside = mask & (index >= 0) & (index < plan.lengths[i])
            column = None if operand.columns is None else operand.columns[0]
            tiles.append(_load(arrays[i], index, inside, plan.features[i], column))
    values, outputs = plan.body(*tiles)
    if len(values) != len(plan.reductions) or len(outputs) != len(plan.item_outputs):
        raise ValueError(
            f"body must return {len(plan.reductions)} reduction values and {len(plan.item_outputs)} item outputs, "
            f"got {len(values)} and {len(outputs)}"
        )
    wide = lambda v, shape: jnp.broadcast_to(v, (*item.shape, *padded(shape)))  # noqa: E731
    values = tuple(wide(v.astype(jnp.float32), r.shape) for v, r in zip(values, plan.reductions, strict=True))
    return values, tuple(wide(o, shape) for o, (shape, _) in zip(outputs, plan.item_outputs, strict=True))


def _loop(
    plan: Plan,
    arrays: Sequence[Any],
    tables: Sequence[Any],
    order: Any,
    outputs: Sequence[Any],
    row_tiles: dict[int, jax.Array],
    start: jax.Array,
    end: jax.Array,
    items: int,
) -> tuple[jax.Array, ...]:
    """Accumulators [rows, *padded] over positions `start` to `end` of each row; stores item outputs on the way."""
    rows = start.shape[0]
    longest = jnp.max(end - start) if rows > 1 else (end - start).reshape(())
    steps = lax.div(longest + jnp.int32(items - 1), jnp.int32(items))

    def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        position = start[:, None] + (i * items + lanes(items, 1, 2))
        mask = position < end[:, None]
        item = position if order is None or not plan.needs_items else _triton.load(order, (position,), mask)
        values, stored = _evaluate(plan, arrays, tables, row_tiles, position, item, mask)
        for ref, (shape, _), value in zip(outputs, plan.item_outputs, stored, strict=True):
            _store(ref, item, mask, shape, plan.num_items, value)
        return update(plan.reductions, accs, values, mask)

    accs = lax.fori_loop(0, steps, step, initial(plan.reductions, rows, items))
    return merge(plan.reductions, accs)


def _write_rows(
    plan: Plan,
    outputs: Sequence[Any],
    merged: Sequence[jax.Array],
    row_tiles: dict[int, jax.Array],
    row: jax.Array,
    mask: jax.Array,
) -> None:
    """Runs the epilogue on accumulators [rows, *padded] and stores what it gives."""
    values: Sequence[jax.Array] = results(plan.reductions, merged)
    if plan.epilogue is not None:
        tiles = tuple(t.reshape(t.shape[0], *t.shape[2:]) for t in row_tiles.values())
        values = plan.epilogue(values, tiles)
    if len(values) != len(plan.row_outputs):
        raise ValueError(f"epilogue must return {len(plan.row_outputs)} row outputs, got {len(values)}")
    for ref, (shape, _), value in zip(outputs, plan.row_outputs, values, strict=True):
        _store(ref, row, mask, shape, plan.num_rows, value)


def _row_range(offsets: Any, row: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _triton.load(offsets, (row,), mask), _triton.load(offsets, (row + 1,), mask)


def row_kernel(*refs: Any, plan: Plan, num_tables: int, has_order: bool, num_aliased: int) -> None:
    """`plan.rows` rows side by side; hub rows are left to the other kernels."""
    arrays, tables, offsets, order, outputs = _unpack(refs, plan, num_tables, has_order, num_aliased)
    item_refs, row_refs = outputs[: len(plan.item_outputs)], outputs[len(plan.item_outputs) :]
    (program,) = _triton.program_ids()
    row = program * plan.rows + lanes(plan.rows, 0, 1)
    mask = row < plan.num_rows
    start, end = _row_range(offsets, row, mask)
    if plan.chunk is not None:
        mask = mask & (end - start <= plan.chunk)
        end = jnp.where(mask, end, start)
    tiles = _row_tiles(plan, arrays, row, mask)
    merged = _loop(plan, arrays, tables, order, item_refs, tiles, start, end, plan.items)
    _write_rows(plan, row_refs, merged, tiles, row, mask)


def _unpack(
    refs: Sequence[Any], plan: Plan, num_tables: int, has_order: bool, num_aliased: int
) -> tuple[Sequence[Any], Sequence[Any], Any, Any, Sequence[Any]]:
    """Arrays, index tables, offsets, order and outputs, in the order in which `traverse` passes them."""
    n = len(plan.operands)
    arrays, rest = refs[:n], refs[n:]
    tables, rest = rest[:num_tables], rest[num_tables:]
    offsets, rest = rest[0], rest[1:]
    order = rest[0] if has_order else None
    return arrays, tables, offsets, order, rest[has_order + num_aliased :]


def chunk_kernel(*refs: Any, plan: Plan, num_tables: int, has_order: bool, num_aliased: int) -> None:
    """One chunk of a hub row: its partial accumulators, maxima of nothing as -inf; and its item outputs."""
    bounds, refs = refs[:3], refs[3:]
    arrays, tables, _, order, outputs = _unpack((*refs,), plan, num_tables, has_order, num_aliased)
    item_refs, partials = outputs[: len(plan.item_outputs)], outputs[len(plan.item_outputs) :]
    (program,) = _triton.program_ids()
    chunk = program + lanes(1, 0, 1)
    row, start, end = (_triton.load(b, (chunk,)) for b in bounds)
    tiles = _row_tiles(plan, arrays, row, row < plan.num_rows)
    merged = _loop(plan, arrays, tables, order, item_refs, tiles, start, end, plan.rows * plan.items)
    for ref, reduction, value in zip(partials, plan.reductions, merged, strict=True):
        _store(ref, chunk, chunk >= 0, reduction.shape, 0, value)


def combine_kernel(*refs: Any, plan: Plan) -> None:
    """The chunks of one hub row merged in their order, and the row's epilogue."""
    (hub_rows, hub_offsets), refs = refs[:2], refs[2:]
    arrays, refs = refs[: len(plan.operands)], refs[len(plan.operands) :]
    partials = refs[: len(plan.reductions)]
    outputs = refs[len(plan.reductions) + len(plan.row_outputs) :]
    (program,) = _triton.program_ids()
    hub = program + lanes(1, 0, 1)
    row = _triton.load(hub_rows, (hub,))
    start, end = _triton.load(hub_offsets, (hub,)), _triton.load(hub_offsets, (hub + 1,))
    items = plan.rows * plan.items
    steps = lax.div((end - start).reshape(()) + jnp.int32(items - 1), jnp.int32(items))

    def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        chunk = start[:, None] + (i * items + lanes(items, 1, 2))
        mask = chunk < end[:, None]
        values = tuple(_load(p, chunk, mask, r.shape) for p, r in zip(partials, plan.reductions, strict=True))
        return update(plan.reductions, accs, values, mask)

    accs = lax.fori_loop(0, steps, step, initial(plan.reductions, 1, items))
    tiles = _row_tiles(plan, arrays, row, row < plan.num_rows)
    _write_rows(plan, outputs, merge(plan.reductions, accs), tiles, row, row < plan.num_rows)


def map_kernel(*refs: Any, plan: Plan, num_tables: int) -> None:
    """`plan.items` items side by side; the axis of rows has size 1."""
    n = len(plan.operands)
    arrays, tables, outputs = refs[:n], refs[n : n + num_tables], refs[n + num_tables :]
    (program,) = _triton.program_ids()
    item = program * plan.items + lanes(plan.items, 1, 2)
    mask = item < plan.num_items
    no_row = jnp.zeros((1,), jnp.int32)
    tiles = _row_tiles(plan, arrays, no_row, no_row == 0)
    _, stored = _evaluate(plan, arrays, tables, tiles, item, item, mask)
    for ref, (shape, _), value in zip(outputs, plan.item_outputs, stored, strict=True):
        _store(ref, item, mask, shape, plan.num_items, value)
