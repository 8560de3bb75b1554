"""The kernels of the traversal template: rows, chunks of long segments and their merging, and entries without rows."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
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

    The program's rows take the chunk's entries in turns. The last chunk of a long segment to get here merges all of its
    chunks, which `counters` counts.
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
    _store_partials(plan, r, program, accs)

    def merge_if_last() -> None:
        is_last = _triton.arrive(r.counters[0], first) == (count - 1).astype(jnp.float32)
        only = lanes(1, 0, 1)
        bounds = the_row + only, first + only, first + count + only
        _triton.when(is_last, functools.partial(_merge_chunks, plan, r, *bounds))

    _triton.when(count > 0, merge_if_last)


def _store_partials(plan: LoopPlan, r: Refs, program: jax.Array, accs: tuple[jax.Array, ...]) -> None:
    """Stores a chunk's accumulators: those of the program's rows, [rows, *padded], merged."""
    merged = merge(plan.reductions, tuple(a[None] for a in accs))
    for number, (reduction, value) in enumerate(zip(plan.reductions, merged, strict=True)):
        # From a tile of all rows, and entries where rows are few: see `store_outputs`.
        entries = 1 if plan.rows >= 4 or math.prod(reduction.shape) < WIDE else plan.entries
        sides = (1, plan.rows, entries)
        first = both(lanes(plan.rows, 1, 3) == 0, lanes(entries, 2, 3) == 0)
        spread = broadcast(value[:, None, None], (*sides, *value.shape[1:]))
        store(r.partials[number], lax.broadcast(program, sides), first, reduction.shape, spread)


def _merge_chunks(plan: LoopPlan, r: Refs, row: jax.Array, start: jax.Array, end: jax.Array) -> None:
    """Merges the chunks from `start` to `end` of one long segment in their order, and writes the row."""
    # The operands of the epilogue are loaded while chunks are merged.
    mask = row < r.num_rows
    tiles = tiles_of_rows(plan, r, row, mask)

    def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        chunk = start[:, None] + (i * plan.merged_chunks + lanes(plan.merged_chunks, 1, 2))
        valid = chunk < end[:, None]
        values = tuple(load(r.partials[n], None, chunk, valid, a.shape) for n, a in enumerate(plan.reductions))
        return update(plan.reductions, accs, values, valid)

    accs = initial(plan.reductions, 1, plan.merged_chunks)
    accs = _triton.fori_loop(0, steps((end - start).reshape(()), plan.merged_chunks), step, accs)
    write_rows(plan, r, merge(plan.reductions, accs), tiles, row, mask)


def map_kernel(*refs: Any, plan: LoopPlan) -> None:
    """`plan.entries` entries side by side; the axis of rows has size 1."""
    r, (program,) = Refs.of(plan, refs), _triton.program_ids()
    entry = program * plan.entries + lanes(plan.entries, 1, 2)
    mask = entry < r.entries[0].shape[0]
    no_row = jnp.zeros((1,), jnp.int32)
    tiles = tiles_of_rows(plan, r, no_row, no_row == 0)
    _, stored = evaluate(plan, r, tiles, entry, indices_at(plan, r, entry, mask), mask)
    store_outputs(plan.outputs.entries, r.entries, r.row_exponents, entry, mask, stored)
