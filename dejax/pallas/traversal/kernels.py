"""The kernels of the traversal template: rows, chunks of long segments and their merging, and entries without rows."""

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
from dejax.pallas._tiles import both, broadcast, steps, where
from dejax.pallas.traversal.accumulate import initial, merge, update
from dejax.pallas.traversal.plan import Array, LoopPlan, Refs, operand_refs, unpack
from dejax.pallas.traversal.rows import (
    WIDE,
    evaluate,
    indices_at,
    load,
    reduce_entries,
    store,
    store_outputs,
    tiles_of_rows,
    write_rows,
)


def row_kernel(*refs: Any, plan: LoopPlan, num_aliased: int) -> None:
    """Chunks of long segments, one a program, first: they take longest. Then `plan.rows` rows side by side."""
    r = unpack(refs, plan, num_aliased)
    (program,) = _triton.program_ids()
    num_outputs = len(plan.row_outputs) + len(plan.row_scaled)
    if not plan.num_chunks:
        _rows(plan, r, program, r.outputs)
        return
    row_refs, partials = r.outputs[:num_outputs], r.outputs[num_outputs:]
    _triton.when(program < plan.num_chunks, lambda: _chunk(plan, r, program, partials, row_refs))
    _triton.when(program >= plan.num_chunks, lambda: _rows(plan, r, program - plan.num_chunks, row_refs))


def _rows(plan: LoopPlan, r: Refs, program: jax.Array, outputs: Sequence[Any]) -> None:
    row = program * plan.rows + lanes(plan.rows, 0, 1)
    mask = row < plan.num_rows
    start, end = _triton.load(r.offsets, (row,), mask), _triton.load(r.offsets, (row + 1,), mask)
    if r.row_order is not None:
        row = _triton.load(r.row_order, (row,), mask)
    if plan.chunk is not None:
        mask = mask & (end - start <= plan.chunk)
        end = where(mask, end, start)
    tiles = tiles_of_rows(plan, r.arrays, r.tables, row, mask)
    merged = reduce_entries(plan, r, tiles, start, end, plan.entries)
    write_rows(plan, outputs, merged, tiles, row, mask, r.arrays)


def _chunk(plan: LoopPlan, r: Refs, program: jax.Array, partials: Sequence[Any], row_refs: Sequence[Any]) -> None:
    """One chunk of a long segment: its partial accumulators, maxima of nothing as -inf; and its entry outputs.

    The program's rows take the chunk's entries in turns. The last chunk of a long segment to get here merges all of its
    chunks, which the last of `partials` counts.
    """
    chunk = lax.broadcast(program, (plan.rows,))
    row, start, end = (_triton.load(b, (chunk,)) for b in r.bounds[:3])
    # Loaded again: with `start` and `end` made of scalars RGAT's traversals take 70 registers a thread and not 64.
    entries = r.bounds[2][program] - r.bounds[1][program]
    tiles = tiles_of_rows(plan, r.arrays, r.tables, row, row < plan.num_rows)
    # Loaded before the loop, on which they do not depend.
    the_row, first, count = (r.bounds[i][program] for i in (0, 3, 4))
    accs = reduce_entries(plan, r, tiles, start, end, plan.entries, entries)
    if not plan.row_outputs:
        return
    *partials, counters = partials
    _store_partials(plan, partials, program, accs)

    def merge_if_last() -> None:
        is_last = _triton.arrive(counters, first) == (count - 1).astype(jnp.float32)
        only, arrays = lanes(1, 0, 1), [Array(p) for p in partials]
        bounds = the_row + only, first + only, first + count + only
        _triton.when(is_last, functools.partial(_merge_chunks, plan, r, arrays, row_refs, *bounds))

    _triton.when(count > 0, merge_if_last)


def _store_partials(plan: LoopPlan, partials: Sequence[Any], program: jax.Array, accs: Sequence[jax.Array]) -> None:
    """Stores a chunk's accumulators: those of the program's rows, [rows, *padded], merged."""
    merged = merge(plan.reductions, tuple(a[None] for a in accs))
    for ref, reduction, value in zip(partials, plan.reductions, merged, strict=True):
        # From a tile of all rows, and entries where rows are few: see `store_outputs`.
        entries = 1 if plan.rows >= 4 or math.prod(reduction.shape) < WIDE else plan.entries
        sides = (1, plan.rows, entries)
        first = both(lanes(plan.rows, 1, 3) == 0, lanes(entries, 2, 3) == 0)
        spread = broadcast(value[:, None, None], (*sides, *value.shape[1:]))
        store(ref, lax.broadcast(program, sides), first, reduction.shape, plan.num_chunks, spread)


def _merge_chunks(
    plan: LoopPlan,
    r: Refs,
    partials: Sequence[Array],
    outputs: Sequence[Any],
    row: jax.Array,
    start: jax.Array,
    end: jax.Array,
) -> None:
    """Merges the chunks from `start` to `end` of one long segment in their order, and writes the row."""
    # What the epilogue reads comes while chunks are merged.
    mask = row < plan.num_rows
    tiles = tiles_of_rows(plan, r.arrays, r.tables, row, mask)
    shapes = [reduction.shape for reduction in plan.reductions]

    def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        chunk = start[:, None] + (i * plan.merged_chunks + lanes(plan.merged_chunks, 1, 2))
        valid = chunk < end[:, None]
        values = tuple(load(p, chunk, valid, shape) for p, shape in zip(partials, shapes, strict=True))
        return update(plan.reductions, accs, values, valid)

    accs = initial(plan.reductions, 1, plan.merged_chunks)
    accs = _triton.fori_loop(0, steps((end - start).reshape(()), plan.merged_chunks), step, accs)
    write_rows(plan, outputs, merge(plan.reductions, accs), tiles, row, mask, r.arrays)


def map_kernel(*refs: Any, plan: LoopPlan) -> None:
    """`plan.entries` entries side by side; the axis of rows has size 1."""
    arrays, tables, outputs = operand_refs(plan, refs)
    (program,) = _triton.program_ids()
    entry = program * plan.entries + lanes(plan.entries, 1, 2)
    mask = entry < plan.num_entries
    no_row = jnp.zeros((1,), jnp.int32)
    tiles = tiles_of_rows(plan, arrays, tables, no_row, no_row == 0)
    _, stored = evaluate(plan, arrays, tiles, entry, indices_at(plan, tables, None, entry, mask), mask)
    store_outputs(plan.row_scaled, plan.entry_outputs, outputs, entry, mask, plan.num_entries, stored)
