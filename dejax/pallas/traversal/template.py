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
from dejax.pallas.traversal.arrays import check_operands, check_width, named, not_empty, nothing, results, written
from dejax.pallas.traversal.kernels import map_kernel, row_kernel
from dejax.pallas.traversal.plan import LoopPlan, Name
from dejax.pallas.traversal.request import BY_ROW, SHARED, Output, Outputs, RowSegments, TileOperand
from dejax.pallas.traversal.traversal_schedule import (
    TraversalSchedule,
    map_schedule,
    traversal_candidates,
    traversal_schedule,
)
from dejax.pallas.tuning import bucket, choose


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
      body: a function from tiles, in the order of `operands`, to (a value for each reduction, a value for each entry
        output). A tuple of tiles of one shape in place of an entry output is stored side by side along the first
        feature axis.
      epilogue: a function from (results of the reductions as a tuple of [rows, *features], tiles of the operands in
        `BY_ROW` as [rows or 1, *features]) to the row outputs; None: the row outputs are the reductions. A tuple of
        tiles of one shape in place of an output is stored side by side along the first feature axis.
      arrays: [length, *features] with at most two feature axes, or such `RowScaled`; [*features] for `shared`; [length,
        columns] for operands that name `columns`.
      operands: how each array is read.
      segments: the entries of each row.
      index_tables: int32[num_entries] each, by entry id for `indexed` operands and by position for `positioned` ones,
        or int32[num_rows] for `row_indexed` ones; an index out of range reads as zeros.
      reductions: what is accumulated over the entries of a row, in float32.
      outputs: what is written.
      factored: the body is given wide tiles of entries as `Factored`, and may give such as values of the reductions.
      schedule: the sizes of the tile. None: those of the tuned table if it has this shape, otherwise those that a
        heuristic chooses.
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
    shapes_out = (shape for shape, _ in (*outputs.entries, *outputs.rows))
    width = check_width([*features, *(r.shape for r in reductions), *shapes_out])
    if segments.num_rows == 0 or not (outputs.entries or outputs.rows):
        no_rows = nothing(outputs.rows, segments.num_rows, outputs.row_scaled)
        return no_rows, nothing(outputs.entries, segments.num_entries)
    call = functools.partial(
        traverse, epilogue=epilogue, arrays=arrays, operands=operands, segments=segments, index_tables=tables,
        reductions=reductions, factored=factored, interpret=interpret,
    )  # fmt: skip
    # An output without elements cannot be given to a kernel.
    if segments.num_entries == 0 and outputs.entries:
        rows, _ = call(lambda *tiles: (body(*tiles)[0], ()), outputs=replace(outputs, entries=()), schedule=schedule)
        return rows, nothing(outputs.entries, 0)
    if schedule is None:
        shapes = [(math.prod(f), isinstance(a, RowScaled)) for a, f in zip(ready, features, strict=True)]
        schedule = _chosen_schedule(
            width, segments, operands, shapes, reductions, outputs,
            _triton.use_interpreter(interpret), functools.partial(call, body, outputs=outputs),
        )  # fmt: skip
    plan = LoopPlan(
        body=body,
        epilogue=epilogue,
        operands=tuple(operands),
        reductions=reductions,
        outputs=outputs,
        schedule=schedule,
        factored=factored,
        chunk=None if segments.chunks is None else segments.chunks.chunk,
    )
    return _run(plan, named(ready, tables), segments, interpret)


def _chosen_schedule(
    width: int,
    segments: RowSegments,
    operands: Sequence[TileOperand],
    shapes: Sequence[tuple[int, bool]],
    reductions: Sequence[Reduction],
    outputs: Outputs,
    interpreted: bool,
    call: Callable[..., Any],
) -> TraversalSchedule:
    """The tuned table's schedule, else the heuristic's.

    `shapes` are the elements of a row of each array and whether it comes as `RowScaled`. `call` makes the call with
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
        lambda fields: call(schedule=TraversalSchedule(**fields)),
    )
    return TraversalSchedule(**fields)


def _run(
    plan: LoopPlan, given: dict[Name, jax.Array], segments: RowSegments, interpret: bool | None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The kernel of a plan on arrays and index tables: a program for some rows or for a chunk of a long segment."""
    outputs, schedule = plan.outputs, plan.schedule
    given["offsets", 0] = segments.offsets.astype(jnp.int32)
    if segments.order is not None:
        given["order", 0] = not_empty(as_index(segments.order, "order", segments.num_entries))
    if segments.row_order is not None:
        given["row_order", 0] = as_index(segments.row_order, "row_order", segments.num_rows)
    made = written("entries", outputs.entries, segments.num_entries)
    # Outputs that are not written as a whole, and counters, are set to zero beforehand.
    zeroed = [] if outputs.covers_all_entries else [*made]
    made |= written("rows", outputs.rows, segments.num_rows, outputs.row_scaled)
    num_chunks = 0
    if segments.chunks is not None:
        given |= {("chunks", i): array for i, array in enumerate(segments.chunks.arrays)}
        num_chunks = segments.chunks.row.shape[0]
        if outputs.rows:
            made |= written("partials", [(r.shape, jnp.float32) for r in plan.reductions], num_chunks)
            made["counters", 0] = jax.ShapeDtypeStruct((2 * num_chunks,), jnp.float32)
            zeroed.append(("counters", 0))
    aliases = {len(given) + i: [*made].index(name) for i, name in enumerate(zeroed)}
    given |= {("zeros", i): jnp.zeros(made[name].shape, made[name].dtype) for i, name in enumerate(zeroed)}
    found = _triton.pallas_call(
        functools.partial(row_kernel, plan=replace(plan, names=(*given, *made))),
        name="traverse",
        num_programs=num_chunks + cdiv(segments.num_rows, plan.rows),
        out_shape=[*made.values()],
        aliases=aliases,
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=_triton.use_interpreter(interpret),
    )(*given.values())
    arrays = dict(zip(made, found, strict=True))
    return results(arrays, "rows", outputs.rows, outputs.row_scaled), results(arrays, "entries", outputs.entries)


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
      body: a function from tiles [1, entries, *features] (`entry`, `indexed`) and [1, 1, *features] (`shared`), padded
        and float32 as in `traverse`, to a value for each output.
      arrays: [length, *features] with at most two feature axes; [*features] for `shared`; [length, columns] for
        operands that name `columns`.
      operands: how each array is read; `row` has no meaning here.
      num_entries: number of entries; arrays that are read by entry may be longer.
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
    declared = Outputs(rows=outputs, row_scaled=tuple(row_scaled_outputs)).declared()
    written_to = Outputs(entries=declared.rows, row_scaled=declared.row_scaled)
    tables = [as_index(t, f"index_tables[{i}]", num_entries) for i, t in enumerate(index_tables)]
    ready, features = check_operands(arrays, operands, tables, num_entries, None)
    width = check_width([*features, *(s for s, _ in written_to.entries)])
    if num_entries == 0 or not outputs:
        return nothing(written_to.entries, num_entries, written_to.row_scaled)
    interpreted = _triton.use_interpreter(interpret)
    narrows = bool(written_to.row_scaled) and not any(isinstance(a, RowScaled) for a in ready)
    schedule = schedule or map_schedule(width, narrows=narrows, interpret=interpreted)
    block = schedule.rows_per_program * schedule.entries_per_step
    given, made = named(ready, tables), written("entries", written_to.entries, num_entries, written_to.row_scaled)
    plan = LoopPlan(
        body=lambda *tiles: ((), tuple(body(*tiles))),
        epilogue=None,
        operands=tuple(operands),
        reductions=(),
        outputs=written_to,
        schedule=replace(schedule, rows_per_program=1, entries_per_step=block),
        names=(*given, *made),
    )
    found = _triton.pallas_call(
        functools.partial(map_kernel, plan=plan),
        name="map_entries",
        num_programs=cdiv(num_entries, block),
        out_shape=[*made.values()],
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=interpreted,
    )(*given.values())
    return results(dict(zip(made, found, strict=True)), "entries", written_to.entries, written_to.row_scaled)
