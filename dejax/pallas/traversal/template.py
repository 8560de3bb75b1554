"""The traversal template: a segment reduction over the entries of each row, with a body, reductions and an epilogue."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas import _triton
from dejax.pallas._checks import as_index
from dejax.pallas._shapes import cdiv
from dejax.pallas.formats.row_scaled import RowScaled
from dejax.pallas.traversal.accumulate import Reduction, check_reductions
from dejax.pallas.traversal.arrays import (
    MAX_WIDTH,
    check_operands,
    check_row_scaled,
    check_width,
    declared,
    encoded,
    exponents_of,
    flat,
    joined,
    row_scaled_structs,
    structs_of,
    traversal_inputs,
    zeros,
)
from dejax.pallas.traversal.kernels import map_kernel, row_kernel
from dejax.pallas.traversal.plan import BY_ROW, SHARED, LoopPlan, Output, TileOperand
from dejax.pallas.traversal.request import LongSegmentTable, Outputs, RowSegments, lengths_of
from dejax.pallas.traversal.traversal_schedule import (
    TraversalSchedule,
    map_schedule,
    traversal_candidates,
    traversal_schedule,
)
from dejax.pallas.tuning import bucket, choose

__all__ = [
    "MAX_WIDTH",
    "LongSegmentTable",
    "TileOperand",
    "Outputs",
    "Reduction",
    "RowSegments",
    "map_entries",
    "traverse",
]

# Chunks of a long segment that are merged in a step.
_MERGED_CHUNKS = 8


def traverse(
    body: Callable[..., Any],
    epilogue: Callable[..., Any] | None,
    arrays: Sequence[Any],
    operands: Sequence[TileOperand],
    *,
    segments: RowSegments,
    index_tables: Sequence[jax.Array] = (),
    reductions: Sequence[Reduction] = (),
    outputs: Outputs = Outputs(),
    factored: bool = False,
    schedule: TraversalSchedule | None = None,
    interpret: bool | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Reduces over the entries of each row, computing on tiles in registers.

    The body sees several rows and several entries of each at once: tiles of shape [rows, entries, *features] for
    `entry`, `indexed`, `position` and `positioned` operands, [rows, 1, *features] for `row` and `row_indexed`, [1, 1,
    *features] for `shared` ones (`TileOperand` has what else there is and what comes as None), each feature axis padded
    to the next power of two with zeros (`feature_mask` tells which lanes are padding). Floating tiles are float32. The
    body must be elementwise over the two leading axes and may leave them at size 1. Results are the same in every run:
    only the number of chunks that are done is added up atomically. The contract test is
    `tests/pallas/test_contract.py::test_traverse`.

    Args:
      body: from tiles, in the order of `operands`, to (a value for each reduction, a value for each entry output). A
        tuple of tiles of one shape in place of an entry output is stored side by side along the first feature axis.
      epilogue: from (results of the reductions as a tuple of [rows, *features], tiles of the operands in `BY_ROW` as
        [rows or 1, *features]) to the row outputs; None: the row outputs are the reductions. A tuple of tiles of one
        shape in place of an output is stored side by side along the first feature axis.
      arrays: [length, *features] with at most two feature axes, or such `RowScaled`; [*features] for `shared`; [length,
        columns] for operands that name `columns`.
      operands: how each array is read.
      segments: the entries of each row.
      index_tables: int32[num_entries] each, by entry id for `indexed` operands and by position for `positioned` ones,
        or int32[num_rows] for `row_indexed` ones; an index out of range reads as zeros.
      reductions: what is accumulated over the entries of a row, in float32.
      outputs: what is written.
      factored: the body is given wide tiles of entries as `Factored`, and may give such as values of the reductions.
      schedule: the tile; by default the tuned table's, else the heuristic's.
      interpret: run the kernels interpreted; by default where there is no GPU.

    Returns:
      The row outputs, [num_rows, *features] each, and the entry outputs, [num_entries, *features] each; entries of no
      row are zeros. A reduction over no entries is 0.

    Raises:
      NotImplementedError: a dtype or a feature shape that the kernel does not have.
      ValueError: arguments that do not fit each other.
    """
    reductions = tuple(reductions)
    check_reductions(reductions)
    if epilogue is None and not outputs.rows:
        outputs = replace(outputs, rows=tuple((r.shape, jnp.float32) for r in reductions))
    outputs = outputs.declared()
    tables = segments.check(operands, index_tables)
    ready, features = check_operands(arrays, operands, tables, segments.num_entries, segments.num_rows)
    written = [shape for shape, _ in (*outputs.entries, *outputs.rows)]
    width = check_width([*features, *(r.shape for r in reductions), *written])
    entry_structs = structs_of(outputs.entries, segments.num_entries)
    row_structs = structs_of(outputs.rows, segments.num_rows)
    if segments.num_rows == 0 or not (outputs.entries or outputs.rows):
        return tuple(encoded(zeros(row_structs), outputs.row_scaled)), tuple(zeros(entry_structs))
    again = functools.partial(
        traverse, epilogue=epilogue, arrays=arrays, operands=operands, segments=segments, index_tables=tables,
        reductions=reductions, factored=factored, interpret=interpret,
    )  # fmt: skip
    # An output without elements cannot be given to a kernel.
    if segments.num_entries == 0 and outputs.entries:
        rows, _ = again(lambda *tiles: (body(*tiles)[0], ()), outputs=replace(outputs, entries=()), schedule=schedule)
        return rows, tuple(zeros(entry_structs))
    if schedule is None:
        shapes = [(math.prod(f), isinstance(a, RowScaled)) for a, f in zip(ready, features, strict=True)]
        schedule = _chosen_schedule(
            width, segments, operands, shapes, reductions, outputs,
            _triton.use_interpreter(interpret), functools.partial(again, body, outputs=outputs),
        )  # fmt: skip
    plan = LoopPlan(
        body=body,
        epilogue=epilogue,
        operands=tuple(operands),
        features=features,
        lengths=lengths_of(arrays, operands),
        reductions=reductions,
        entry_outputs=tuple(outputs.entries),
        row_outputs=tuple(outputs.rows),
        parts=exponents_of(ready),
        row_scaled=tuple(outputs.row_scaled),
        factored=factored,
        num_tables=len(tables),
        **_extents(segments, schedule, width),
    )
    return _run(plan, segments, schedule, flat(ready), tables, outputs.covers_all_entries, interpret)


def _extents(segments: RowSegments, schedule: TraversalSchedule, width: int) -> dict[str, Any]:
    """The fields of a plan that say how many rows, entries and chunks there are, and how many a program takes."""
    long = segments.chunks
    slots = schedule.rows_per_program * schedule.entries_per_step
    return {
        "num_entries": segments.num_entries,
        "num_rows": segments.num_rows,
        "rows": schedule.rows_per_program,
        "entries": schedule.entries_per_step,
        "chunk": None if long is None else long.chunk,
        "num_chunks": 0 if long is None else long.row.shape[0],
        # More of them at once would take registers from the program of rows, which is the same kernel.
        "merged_chunks": max(slots, min(_MERGED_CHUNKS, 4096 // width)),
        "has_order": segments.order is not None,
        "has_row_order": segments.row_order is not None,
        "warps": schedule.num_warps,
    }


def _chosen_schedule(
    width: int,
    segments: RowSegments,
    operands: Sequence[TileOperand],
    shapes: Sequence[tuple[int, bool]],
    reductions: Sequence[Reduction],
    outputs: Outputs,
    interpreted: bool,
    again: Callable[..., Any],
) -> TraversalSchedule:
    """The tuned table's schedule, else the heuristic's.

    `shapes` are the elements of a row of each array and whether it comes as `RowScaled`. `again` makes the call with
    the schedule that it is given.
    """
    counted = [
        (load, o.access in BY_ROW) for load, o in zip(shapes, operands, strict=True) if o.access not in SHARED[1:]
    ]
    heuristic = traversal_schedule(
        width,
        segments.degree,
        loads=[load for load, by_row in counted if not by_row],
        row_loads=[load for load, by_row in counted if by_row],
        writes_entries=bool(outputs.entries),
        num_entries=segments.num_entries,
        longest=16 if segments.long_segments is None else segments.long_segments.chunk,
        interpret=interpreted,
    )
    loads = "+".join(sorted(f"{count}{'h' if in_16_bits else ''}" for (count, in_16_bits), _ in counted))
    sums = "+".join(sorted(str(math.prod(r.shape)) for r in reductions))
    fields = choose(
        "traversal",
        f"{loads}>{sums}-{bucket(segments.degree)}-{bucket(segments.num_entries)}",
        asdict(heuristic),
        functools.partial(traversal_candidates, width),
        lambda fields: again(schedule=TraversalSchedule(**fields)),
    )
    return TraversalSchedule(**fields)


def _run(
    plan: LoopPlan,
    segments: RowSegments,
    schedule: TraversalSchedule,
    arrays: list[jax.Array],
    tables: list[jax.Array],
    covers_all_entries: bool,
    interpret: bool | None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The kernel of a plan: a program for some rows or for a chunk of a long segment."""
    shared = traversal_inputs(arrays, tables, segments.offsets, segments.order, segments.num_entries)
    if segments.row_order is not None:
        shared.append(as_index(segments.row_order, "row_order", segments.num_rows))
    entry_structs = structs_of(plan.entry_outputs, plan.num_entries)
    row_structs = row_scaled_structs(structs_of(plan.row_outputs, plan.num_rows), plan.row_scaled, plan.num_rows)
    structs = [*entry_structs, *row_structs]
    # What is not written as a whole, and what is counted up, is zero beforehand.
    zeroed = [] if covers_all_entries else [*range(len(entry_structs))]
    if segments.chunks is not None:
        shared += segments.chunks.arrays
        if plan.row_outputs:
            partials = [(r.shape, jnp.float32) for r in plan.reductions]
            structs += structs_of([*partials, ((), jnp.float32)], plan.num_chunks)
            zeroed.append(len(structs) - 1)
    initial = zeros([structs[i] for i in zeroed])
    found = _triton.pallas_call(
        functools.partial(row_kernel, plan=plan, num_aliased=len(initial)),
        name="traverse",
        num_programs=plan.num_chunks + cdiv(plan.num_rows, plan.rows),
        out_shape=structs,
        aliases={len(shared) + i: output for i, output in enumerate(zeroed)},
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=_triton.use_interpreter(interpret),
    )(*shared, *initial)
    n, end = len(entry_structs), len(entry_structs) + len(row_structs)
    return tuple(joined(found[n:end], plan.row_scaled, plan.row_outputs)), tuple(found[:n])


def map_entries(
    body: Callable[..., Any],
    arrays: Sequence[Any],
    operands: Sequence[TileOperand],
    *,
    num_entries: int,
    index_tables: Sequence[jax.Array] = (),
    outputs: Sequence[Output],
    row_scaled_outputs: Sequence[int] = (),
    schedule: TraversalSchedule | None = None,
    interpret: bool | None = None,
) -> tuple[Any, ...]:
    """Computes on the tiles of each entry, without rows.

    Args:
      body: from tiles [1, entries, *features] (`entry`, `indexed`) and [1, 1, *features] (`shared`), padded and float32
        as in `traverse`, to a value for each output.
      arrays: [length, *features] with at most two feature axes; [*features] for `shared`; [length, columns] for
        operands that name `columns`.
      operands: how each array is read; `row` has no meaning here.
      num_entries: number of entries.
      index_tables: int32[num_entries] each; an index out of range reads as zeros.
      outputs: (feature shape, dtype) of each result.
      row_scaled_outputs: positions of the outputs, float32 each, that are to be returned as `RowScaled`.
      schedule: `entries_per_step` times `rows_per_program` entries a program; by default the heuristic's.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      [num_entries, *features] for each output.

    Raises:
      NotImplementedError: a dtype or a feature shape that the kernel does not have.
      ValueError: arguments that do not fit each other.
    """
    outputs = declared(outputs)
    index_tables = [as_index(t, f"index_tables[{i}]", num_entries) for i, t in enumerate(index_tables)]
    lengths = lengths_of(arrays, operands)
    ready, features = check_operands(arrays, operands, index_tables, num_entries, None)
    width = check_width([*features, *(s for s, _ in outputs)])
    row_scaled = tuple(row_scaled_outputs)
    check_row_scaled(row_scaled, outputs, "output")
    structs = structs_of(outputs, num_entries)
    if num_entries == 0 or not outputs:
        return tuple(encoded(zeros(structs), row_scaled))
    structs = row_scaled_structs(structs, row_scaled, num_entries)
    interpreted = _triton.use_interpreter(interpret)
    narrows = bool(row_scaled) and not any(isinstance(a, RowScaled) for a in ready)
    schedule = schedule or map_schedule(width, narrows=narrows, interpret=interpreted)
    block = schedule.rows_per_program * schedule.entries_per_step
    plan = LoopPlan(
        body=lambda *tiles: ((), tuple(body(*tiles))),
        epilogue=None,
        operands=tuple(operands),
        features=features,
        lengths=lengths,
        reductions=(),
        entry_outputs=outputs,
        row_outputs=(),
        num_entries=num_entries,
        num_rows=1,
        rows=1,
        entries=block,
        parts=exponents_of(ready),
        row_scaled=row_scaled,
        num_tables=len(index_tables),
    )
    results = _triton.pallas_call(
        functools.partial(map_kernel, plan=plan),
        name="map_entries",
        num_programs=cdiv(num_entries, block),
        out_shape=structs,
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=interpreted,
    )(*flat(ready), *index_tables)
    return tuple(joined(results, row_scaled, outputs))
