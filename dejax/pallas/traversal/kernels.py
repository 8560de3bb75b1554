"""The kernels of the traversal template: rows, chunks of long segments and their merging, and entries without rows."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import lanes
from dejax.pallas._tiles import both, broadcast, steps, where
from dejax.pallas.traversal.accumulate import initial, merge, update
from dejax.pallas.traversal.plan import LoopPlan, Refs
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

GROUP = 32
"""Chunks of a long segment that one program merges: the square root of the most that a graph cuts a segment into."""


def row_kernel(*refs: Any, plan: LoopPlan) -> None:
    """Chunks of long segments, one a program, first: they take longest. Then `plan.rows` rows side by side."""
    r, (program,) = Refs.of(plan, refs), _triton.program_ids()
    if not r.chunks:
        _rows(plan, r, program)
        return
    _triton.when(program < r.num_chunks, lambda: _chunk(plan, r, program))
    _triton.when(program >= r.num_chunks, lambda: _rows(plan, r, program - r.num_chunks))


def _rows(plan: LoopPlan, r: Refs, program: jax.Array) -> None:
    row = program * plan.rows + lanes(plan.rows, 0, 1)
    mask = row < r.num_rows
    start, end = _triton.load(r.offsets[0], (row,), mask), _triton.load(r.offsets[0], (row + 1,), mask)
    if r.row_order:
        row = _triton.load(r.row_order[0], (row,), mask)
    if plan.chunk is not None:
        mask = mask & (end - start <= plan.chunk)
        end = where(mask, end, start)
    tiles = tiles_of_rows(plan, r, row, mask)
    merged = reduce_entries(plan, r, tiles, start, end)
    write_rows(plan, r, merged, tiles, row, mask)


def _chunk(plan: LoopPlan, r: Refs, program: jax.Array) -> None:
    """One chunk of a long segment: its partial accumulators, maxima of nothing as -inf; and its entry outputs.

    The program's rows take the chunk's entries in turns. The program that finishes the last chunk of a long segment
    merges the segment's chunks.
    """
    chunk = lax.broadcast(program, (plan.rows,))
    row, start, end = (_triton.load(r.chunks[i], (chunk,)) for i in range(3))
    # Loaded again: with `start` and `end` made of scalars RGAT's traversals take 70 registers a thread and not 64.
    entries = r.chunks[2][program] - r.chunks[1][program]
    tiles = tiles_of_rows(plan, r, row, row < r.num_rows)
    # Loaded before the loop, on which they do not depend.
    the_row, first, count = (r.chunks[i][program] for i in (0, 3, 4))
    accs = reduce_entries(plan, r, tiles, start, end, entries)
    if not plan.outputs.rows:
        return
    _store_partials(plan, r, program, merge(plan.reductions, tuple(a[None] for a in accs)))
    _triton.when(count > 0, lambda: _merge_if_last(plan, r, program, the_row, first, count))


def _store_partials(plan: LoopPlan, r: Refs, chunk: jax.Array, merged: tuple[jax.Array, ...]) -> None:
    """Stores accumulators [1, *padded] as those of a chunk."""
    for number, (reduction, value) in enumerate(zip(plan.reductions, merged, strict=True)):
        # From a tile of all rows, and entries where rows are few: see `store_outputs`.
        entries = 1 if plan.rows >= 4 or math.prod(reduction.shape) < WIDE else plan.entries
        sides = (1, plan.rows, entries)
        first = both(lanes(plan.rows, 1, 3) == 0, lanes(entries, 2, 3) == 0)
        spread = broadcast(value[:, None, None], (*sides, *value.shape[1:]))
        store(r.partials[number], lax.broadcast(chunk, sides), first, reduction.shape, spread)


def _merge_if_last(
    plan: LoopPlan, r: Refs, chunk: jax.Array, row: jax.Array, first: jax.Array, count: jax.Array
) -> None:
    """Merges chunks of a long segment if this program, whose chunk is `chunk`, is the last one that they wait for.

    The `count` chunks from `first` on are merged in two steps if they are many: groups of neighbours first, into the
    place of the first of each, and then the groups. `counters` has for each first chunk of a group how many of the
    group's chunks are done, and behind these for each first chunk of a segment how many groups are merged.
    """
    in_groups = count > GROUP

    def group_is_merged() -> jax.Array:
        begin = first + lax.div(chunk - first, np.int32(GROUP)) * GROUP
        own = lax.min(np.int32(GROUP), first + count - begin)
        is_last = _triton.arrive(r.counters[0], begin) == (own - 1).astype(jnp.float32)
        _triton.when(is_last, lambda: _store_partials(plan, r, begin, _merged(plan, r, begin, own, 1)))
        return is_last

    def merge_groups() -> None:
        stride = where(in_groups, np.int32(GROUP), np.int32(1))
        groups = lax.div(count + stride - 1, stride)
        is_last = _triton.arrive(r.counters[0], r.num_chunks + first) == (groups - 1).astype(jnp.float32)
        _triton.when(is_last, lambda: _write_merged(plan, r, row, first, groups, stride))

    _triton.when(_triton.either(in_groups, group_is_merged, lambda: count > 0), merge_groups)


def _merged(plan: LoopPlan, r: Refs, first: jax.Array, count: jax.Array, stride: Any) -> tuple[jax.Array, ...]:
    """The accumulators of `count` chunks, every `stride`-th from `first` on, merged in this order: [1, *padded] each.

    A step takes as many chunks as the loop over entries has slots: that loop is in the same kernel, and more at once
    would take registers from it.
    """
    slots = plan.rows * plan.entries

    def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        place = i * slots + lanes(slots, 1, 2)
        chunk, valid = first + place * stride, place < count
        values = tuple(load(r.partials[n], None, chunk, valid, a.shape) for n, a in enumerate(plan.reductions))
        return update(plan.reductions, accs, values, valid)

    accs = initial(plan.reductions, 1, slots)
    accs = _triton.fori_loop(0, steps(count, slots), step, accs)
    return merge(plan.reductions, accs)


def _write_merged(
    plan: LoopPlan, r: Refs, row: jax.Array, first: jax.Array, count: jax.Array, stride: jax.Array
) -> None:
    """Writes the row of the chunks that `_merged` merges."""
    row = lax.broadcast(row, (1,))
    mask = row < r.num_rows
    tiles = tiles_of_rows(plan, r, row, mask)  # loaded while chunks are merged
    write_rows(plan, r, _merged(plan, r, first, count, stride), tiles, row, mask)


def map_kernel(*refs: Any, plan: LoopPlan) -> None:
    """`plan.entries` entries side by side; the axis of rows has size 1."""
    r, (program,) = Refs.of(plan, refs), _triton.program_ids()
    entry = program * plan.entries + lanes(plan.entries, 1, 2)
    mask = entry < r.entries[0].shape[0]
    no_row = jnp.zeros((1,), jnp.int32)
    tiles = tiles_of_rows(plan, r, no_row, no_row == 0)
    _, stored = evaluate(plan, r, tiles, entry, indices_at(plan, r, entry, mask), mask)
    store_outputs(plan.outputs.entries, r.entries, r.row_exponents, entry, mask, stored)
