"""The kernels of the traversal template: rows, chunks of hub rows, their combination, and items without rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import lanes
from dejax.pallas._tiles import both, steps, stretched, where
from dejax.pallas.traversal.accumulate import initial, merge, update
from dejax.pallas.traversal.plan import Array, Plan, Refs, beside_refs, operand_refs, unpack
from dejax.pallas.traversal.rows import (
    WIDE,
    beside_bounds,
    evaluate,
    indices_at,
    load,
    loop,
    store,
    store_outputs,
    sums_beside,
    tiles_of_rows,
    write_rows,
)

# Chunks of a hub that are merged at once where they are fewer than `Plan.combined`.
FEW_CHUNKS = 8


def row_kernel(*refs: Any, plan: Plan, num_aliased: int) -> None:
    """Chunks of hub rows, one a program and first, because they take longest; then `plan.rows` rows side by side."""
    r = unpack(refs, plan, num_aliased)
    (program,) = _triton.program_ids()
    num_outputs = len(plan.row_outputs) + len(plan.half)
    if not plan.num_chunks:
        _rows(plan, r, program, r.outputs)
        return
    row_refs, partials = r.outputs[:num_outputs], r.outputs[num_outputs:]
    _triton.when(program < plan.num_chunks, lambda: _chunk(plan, r, program, partials, row_refs))
    _triton.when(program >= plan.num_chunks, lambda: _rows(plan, r, program - plan.num_chunks, row_refs))


def _rows(plan: Plan, r: Refs, program: jax.Array, outputs: Sequence[Any]) -> None:
    row = program * plan.rows + lanes(plan.rows, 0, 1)
    mask = row < plan.num_rows
    start, end = _triton.load(r.offsets, (row,), mask), _triton.load(r.offsets, (row + 1,), mask)
    if r.row_order is not None:
        row = _triton.load(r.row_order, (row,), mask)
    if plan.chunk is not None:
        mask = mask & (end - start <= plan.chunk)
        end = where(mask, end, start)
    tiles = tiles_of_rows(plan, r.arrays, r.tables, row, mask)
    bounds = beside_bounds(r.beside, row, mask)
    merged = loop(plan, r, tiles, start, end, plan.items)
    write_rows(plan, outputs, merged, tiles, row, mask, sums_beside(plan, r.beside, bounds), r.arrays)


def _chunk(plan: Plan, r: Refs, program: jax.Array, partials: Sequence[Any], row_refs: Sequence[Any]) -> None:
    """One chunk of a hub row: its partial accumulators, maxima of nothing as -inf; and its item outputs.

    The program's rows take the chunk's items in turns. With counters the last chunk of a hub to get here merges all.
    """
    chunk = lax.broadcast(program, (plan.rows,))
    row, start, end = (_triton.load(b, (chunk,)) for b in r.bounds[:3])
    # Loaded again: with `start` and `end` made of single numbers RGAT's loops take 70 registers a thread and not 64.
    count = r.bounds[2][program] - r.bounds[1][program]
    tiles = tiles_of_rows(plan, r.arrays, r.tables, row, row < plan.num_rows)
    if plan.num_counters:  # loaded before the loop, on which it does not depend
        *partials, counters = partials
        hubs, offsets = r.bounds[3:]
        hub, the_row = hubs[program], r.bounds[0][program]
        used = hub < plan.num_counters
        hub = lax.min(hub, jnp.int32(plan.num_counters - 1))
        first, last = offsets[hub], offsets[hub + 1]
    accs = loop(plan, r, tiles, start, end, plan.items, count)
    _store_partials(plan, partials, program, accs)
    if not plan.num_counters:
        return

    def merge_if_last() -> None:
        is_last = _triton.arrive(counters, hub) == (last - first - 1).astype(jnp.float32)
        only, arrays = lanes(1, 0, 1), [Array(p) for p in partials]
        merge_all = functools.partial(_merge_hub, plan, r, arrays, row_refs, the_row + only, first + only, last + only)
        _triton.when(is_last, merge_all)

    _triton.when(used, merge_if_last)


def _store_partials(plan: Plan, partials: Sequence[Any], program: jax.Array, accs: Sequence[jax.Array]) -> None:
    """Stores a chunk's accumulators: those of the program's rows, [rows, *padded], merged."""
    merged = merge(plan.reductions, tuple(a[None] for a in accs))
    for ref, reduction, value in zip(partials, plan.reductions, merged, strict=True):
        # From a tile of all rows, and items where rows are few: see `store_outputs`.
        items = 1 if plan.rows >= 4 or math.prod(reduction.shape) < WIDE else plan.items
        sides = (1, plan.rows, items)
        first = both(lanes(plan.rows, 1, 3) == 0, lanes(items, 2, 3) == 0)
        spread = stretched(value[:, None, None], (*sides, *value.shape[1:]))
        store(ref, lax.broadcast(program, sides), first, reduction.shape, plan.num_chunks, spread)


def combine_kernel(*refs: Any, plan: Plan) -> None:
    """The chunks of one hub row merged, and the row's epilogue."""
    (hub_rows, hub_offsets), refs = refs[:2], refs[2:]
    arrays, rest = operand_refs(plan, refs)
    tables, rest = rest[: plan.num_tables], rest[plan.num_tables :]
    beside, rest = beside_refs(plan, rest)
    partials = [Array(p) for p in rest[: len(plan.reductions)]]
    outputs = rest[len(plan.reductions) + len(plan.row_outputs) + len(plan.half) :]
    (program,) = _triton.program_ids()
    hub = program + lanes(1, 0, 1)
    row = _triton.load(hub_rows, (hub,))
    start, end = _triton.load(hub_offsets, (hub,)), _triton.load(hub_offsets, (hub + 1,))
    _merge_hub(plan, Refs(arrays, tables, None, None, beside=beside), partials, outputs, row, start, end)


def _merge_hub(
    plan: Plan,
    r: Refs,
    partials: Sequence[Array],
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
    tiles = tiles_of_rows(plan, r.arrays, r.tables, row, mask)
    bounds = beside_bounds(r.beside, row, mask)

    def combined(accs: tuple[jax.Array, ...], items: int, first: jax.Array, last: jax.Array) -> tuple[jax.Array, ...]:
        """The accumulators after the chunks from `first` to `last`, `items` at a time."""

        def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            chunk = first[:, None] + (i * items + lanes(items, 1, 2))
            valid = chunk < last[:, None]
            shapes = (reduction.shape for reduction in plan.reductions)
            values = tuple(load(p, chunk, valid, shape) for p, shape in zip(partials, shapes, strict=True))
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
    write_rows(
        plan, outputs, merge(plan.reductions, accs), tiles, row, mask, sums_beside(plan, r.beside, bounds), r.arrays
    )


def map_kernel(*refs: Any, plan: Plan) -> None:
    """`plan.items` items side by side; the axis of rows has size 1."""
    arrays, rest = operand_refs(plan, refs)
    tables, outputs = rest[: plan.num_tables], rest[plan.num_tables :]
    (program,) = _triton.program_ids()
    item = program * plan.items + lanes(plan.items, 1, 2)
    mask = item < plan.num_items
    no_row = jnp.zeros((1,), jnp.int32)
    tiles = tiles_of_rows(plan, arrays, tables, no_row, no_row == 0)
    _, stored = evaluate(plan, arrays, tiles, item, indices_at(plan, tables, None, item, mask), mask)
    store_outputs(plan.half, plan.item_outputs, outputs, item, mask, plan.num_items, stored)
