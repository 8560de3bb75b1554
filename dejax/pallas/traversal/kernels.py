"""The kernels of the traversal template: rows, chunks of long segments, their combination, and entries without rows."""

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

# Chunks of a long segment that are merged at once where they are fewer than `LoopPlan.combined`.
FEW_CHUNKS = 8


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

    The program's rows take the chunk's entries in turns. With counters, the last chunk of a long segment to get here
    merges all of its chunks.
    """
    chunk = lax.broadcast(program, (plan.rows,))
    row, start, end = (_triton.load(b, (chunk,)) for b in r.bounds[:3])
    # Loaded again: with `start` and `end` made of scalars RGAT's traversals take 70 registers a thread and not 64.
    count = r.bounds[2][program] - r.bounds[1][program]
    tiles = tiles_of_rows(plan, r.arrays, r.tables, row, row < plan.num_rows)
    if plan.num_counters:  # loaded before the loop, on which it does not depend
        *partials, counters = partials
        segments, offsets = r.bounds[3:]
        segment, the_row = segments[program], r.bounds[0][program]
        used = segment < plan.num_counters
        segment = lax.min(segment, jnp.int32(plan.num_counters - 1))
        first, last = offsets[segment], offsets[segment + 1]
    accs = reduce_entries(plan, r, tiles, start, end, plan.entries, count)
    _store_partials(plan, partials, program, accs)
    if not plan.num_counters:
        return

    def merge_if_last() -> None:
        is_last = _triton.arrive(counters, segment) == (last - first - 1).astype(jnp.float32)
        only, arrays = lanes(1, 0, 1), [Array(p) for p in partials]
        bounds = the_row + only, first + only, last + only
        merge_all = functools.partial(_merge_chunks, plan, r, arrays, row_refs, *bounds)
        _triton.when(is_last, merge_all)

    _triton.when(used, merge_if_last)


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


def combine_kernel(*refs: Any, plan: LoopPlan) -> None:
    """The chunks of one long segment merged, and the row's epilogue."""
    (segment_rows, segment_offsets), refs = refs[:2], refs[2:]
    arrays, tables, rest = operand_refs(plan, refs)
    partials = [Array(p) for p in rest[: len(plan.reductions)]]
    outputs = rest[len(plan.reductions) + len(plan.row_outputs) + len(plan.row_scaled) :]
    (program,) = _triton.program_ids()
    segment = program + lanes(1, 0, 1)
    row = _triton.load(segment_rows, (segment,))
    start, end = _triton.load(segment_offsets, (segment,)), _triton.load(segment_offsets, (segment + 1,))
    _merge_chunks(plan, Refs(arrays, tables, None, None), partials, outputs, row, start, end)


def _merge_chunks(
    plan: LoopPlan,
    r: Refs,
    partials: Sequence[Array],
    outputs: Sequence[Any],
    row: jax.Array,
    start: jax.Array,
    end: jax.Array,
) -> None:
    """Merges the chunks from `start` to `end` of one long segment in their order, and writes the row.

    Most long segments have a few chunks and some have hundreds: large tiles first, then what is left where a small one
    holds it. A step waits for memory: of 149 chunks two large steps and three small ones would take longer than three
    large ones.
    """
    # What the epilogue reads comes while chunks are merged.
    mask = row < plan.num_rows
    tiles = tiles_of_rows(plan, r.arrays, r.tables, row, mask)
    merged = _merged_chunks(plan, partials, start, end)
    write_rows(plan, outputs, merged, tiles, row, mask, r.arrays)


def _merged_chunks(
    plan: LoopPlan, partials: Sequence[Array], start: jax.Array, end: jax.Array
) -> tuple[jax.Array, ...]:
    """The accumulators of the chunks from `start` to `end`, merged in their order: [1, *padded shape] each."""

    def combined(accs: tuple[jax.Array, ...], entries: int, first: jax.Array, last: jax.Array) -> tuple[jax.Array, ...]:
        """The accumulators after the chunks from `first` to `last`, `entries` at a time."""

        def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            chunk = first[:, None] + (i * entries + lanes(entries, 1, 2))
            valid = chunk < last[:, None]
            shapes = (reduction.shape for reduction in plan.reductions)
            values = tuple(load(p, chunk, valid, shape) for p, shape in zip(partials, shapes, strict=True))
            return update(plan.reductions, accs, values, valid)

        return _triton.fori_loop(0, steps((last - first).reshape(()), entries), step, accs)

    few = min(plan.combined, FEW_CHUNKS)
    accs = initial(plan.reductions, 1, few)
    if few < plan.combined:
        large = lax.div(end - start + (plan.combined - few - 1), jnp.int32(plan.combined))
        many = lax.min(start + large * plan.combined, end)
        found = combined(initial(plan.reductions, 1, plan.combined), plan.combined, start, many)
        start = many
        merged = merge(plan.reductions, found)
        whole = tuple(broadcast(m[:, None], a.shape) for m, a in zip(merged, accs, strict=True))
        accs = update(plan.reductions, accs, whole, lanes(few, 1, 2) == 0)
    accs = combined(accs, few, start, end)
    return merge(plan.reductions, accs)


def group_kernel(*refs: Any, plan: LoopPlan) -> None:
    """The accumulators of one group of chunks, which are stored as those of a chunk."""
    groups, rest = refs[0], refs[1:]
    partials, outputs = rest[: len(plan.reductions)], rest[len(plan.reductions) :]
    (program,) = _triton.program_ids()
    group = program + lanes(1, 0, 1)
    start, end = _triton.load(groups, (group,)), _triton.load(groups, (group + 1,))
    _store_partials(plan, outputs, program, _merged_chunks(plan, [Array(p) for p in partials], start, end))


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
