"""The traversal template: a loop over rows and the items of each, with a body, reductions and an epilogue."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas import _triton
from dejax.pallas._checks import as_index
from dejax.pallas._shapes import cdiv
from dejax.pallas.formats.half_rows import HalfRows
from dejax.pallas.traversal.accumulate import Reduction, check_reductions
from dejax.pallas.traversal.arrays import (
    MAX_WIDTH,
    check_half,
    check_operands,
    check_width,
    declared,
    encoded,
    exponents_of,
    flat,
    given_to_loop,
    in_half_rows,
    joined,
    not_empty,
    structs_of,
    zeros,
)
from dejax.pallas.traversal.kernels import FEW_CHUNKS, combine_kernel, map_kernel, row_kernel
from dejax.pallas.traversal.plan import BY_ROW, SHARED, Operand, Output, Plan
from dejax.pallas.traversal.schedule import TraversalSchedule, map_schedule, traversal_schedule
from dejax.pallas.tuned_tables import bucket, choose, traversal_candidates

__all__ = ["MAX_WIDTH", "Beside", "Operand", "Outputs", "Reduction", "Segments", "map_items", "traverse"]


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """Sums over other items of the rows of a traversal, made by the program that writes a row, before the epilogue.

    One program takes all of a row's items: they should be few. Fields are as in `traverse`, offsets and order by true
    row numbers; no operand is read by row.

    Attributes:
      body: from tiles to a value for each reduction.
      arrays: as in `traverse`.
      operands: how each array is read.
      offsets: int32[num_rows + 1].
      order: int32[num_items], or None.
      num_items: number of items.
      index_tables: int32[num_items] each.
      reductions: sums.
      factored: the body is given wide tiles as `Factored`.
    """

    body: Callable[..., Any]
    arrays: Sequence[Any]
    operands: Sequence[Operand]
    offsets: jax.Array
    order: jax.Array | None
    num_items: int
    index_tables: Sequence[jax.Array]
    reductions: Sequence[Reduction]
    factored: bool = False

    def planned(self, num_rows: int, items: int) -> tuple[Plan, list[jax.Array]]:
        """What its loop is, with `items` at a time, and the arrays that a kernel is given for it."""
        check_reductions(self.reductions)
        wrong = [
            f"operand {i} by row" for i, o in enumerate(self.operands) if o.access in BY_ROW and o.access != "late"
        ]
        wrong += [f"reduction {i}, a {r.kind}" for i, r in enumerate(self.reductions) if r.kind != "sum"]
        if wrong:
            raise ValueError(f"beside must have sums of what is read by item, got {', '.join(wrong)}")
        if self.offsets.shape != (num_rows + 1,):
            raise ValueError(f"beside.offsets must have {num_rows + 1} entries, got shape {self.offsets.shape}")
        tables = [as_index(t, f"beside.index_tables[{i}]", self.num_items) for i, t in enumerate(self.index_tables)]
        ready, features = check_operands(self.arrays, self.operands, tables, self.num_items, None)
        check_width([*features, *(r.shape for r in self.reductions)])
        plan = Plan(
            body=lambda *tiles: (tuple(self.body(*tiles)), ()),
            epilogue=None,
            operands=tuple(self.operands),
            features=features,
            lengths=_lengths(self.arrays, self.operands),
            reductions=tuple(self.reductions),
            item_outputs=(),
            row_outputs=(),
            num_items=self.num_items,
            num_rows=num_rows,
            rows=1,
            items=items,
            parts=exponents_of(ready),
            factored=self.factored,
            num_tables=len(tables),
            has_order=self.order is not None,
        )
        return plan, given_to_loop(flat(ready), tables, self.offsets, self.order, self.num_items, "beside.order")


def _lengths(arrays: Sequence[Any], operands: Sequence[Operand]) -> tuple[int, ...]:
    return tuple(1 if o.access in SHARED else a.shape[0] for a, o in zip(arrays, operands, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Which items belong to which row: the items of row r are `order[offsets[r]:offsets[r + 1]]`.

    Attributes:
      offsets: int32[num_rows + 1].
      num_items: number of items, those of no row included.
      num_rows: number of rows.
      order: int32[num_items], item ids in the order of rows; None where item ids are the positions.
      row_order: int32[num_rows], a permutation: then `offsets`, `order` and positions are of the rows in this order,
        row `row_order[0]` first. Chunks of long segments are in this order, too; their rows are true row numbers. Rows
        of about one length do not wait for each other when they are neighbours.
      hubs: the long segments, L of them, cut in C chunks; None if there is none. A tuple of
        - chunk: the most items of a chunk. Every row with more items must be among the long segments.
        - rows: int32[L], the row of each long segment; `num_rows` where unused.
        - offsets: int32[L + 1]; long segment i has the chunks `offsets[i]` to `offsets[i + 1]`.
        - chunk_row: int32[C], the row of each chunk; `num_rows` where unused.
        - chunk_start, chunk_end: int32[C], the positions of each chunk; none where unused.
        - chunk_hub, optional: int32[C], the long segment of each chunk; L where unused. With it, the program that
          finishes a long segment's last chunk merges the chunks; without it, a second kernel does.
    """

    offsets: jax.Array
    num_items: int
    num_rows: int
    order: jax.Array | None = None
    row_order: jax.Array | None = None
    hubs: tuple[Any, ...] | None = None

    @property
    def cut(self) -> tuple[Any, ...] | None:
        """`hubs`, where there is a chunk."""
        return self.hubs if self.hubs and self.hubs[1].shape[0] > 0 and self.hubs[3].shape[0] > 0 else None

    @property
    def counted(self) -> bool:
        """Whether the last chunk of a long segment to be done merges all of them."""
        return self.cut is not None and len(self.cut) > 6

    @property
    def degree(self) -> float:
        """Items of a row on average."""
        return self.num_items / self.num_rows

    def check(self, operands: Sequence[Operand], index_tables: Sequence[jax.Array]) -> list[jax.Array]:
        """The index tables as int32; raises ValueError where lengths do not fit."""
        if self.offsets.shape != (self.num_rows + 1,):
            raise ValueError(
                f"offsets must have num_rows + 1 = {self.num_rows + 1} entries, got shape {self.offsets.shape}"
            )
        by_row = {o.index for o in operands if o.access == "row_indexed"}
        lengths = (self.num_rows if i in by_row else self.num_items for i in range(len(index_tables)))
        return [
            as_index(t, f"index_tables[{i}]", n) for i, (t, n) in enumerate(zip(index_tables, lengths, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a traversal writes.

    Attributes:
      items: (feature shape, dtype) of each array to write at item ids.
      rows: (feature shape, dtype) of each array to write by row; may be () where there is no epilogue, for the
        reductions in float32.
      half: numbers of the row outputs, float32 each, that are to be returned as `HalfRows`.
      covers_all_items: the caller's word that every item belongs to a row, so that no item output need be set to zero.
    """

    items: Sequence[Output] = ()
    rows: Sequence[Output] = ()
    half: Sequence[int] = ()
    covers_all_items: bool = False

    def declared(self) -> Outputs:
        """With tuples of dtypes of NumPy; raises ValueError where an output of `half` is not float32."""
        rows = declared(self.rows)
        check_half(tuple(self.half), rows, "row output")
        return Outputs(declared(self.items), rows, tuple(self.half), self.covers_all_items)


def traverse(
    body: Callable[..., Any],
    epilogue: Callable[..., Any] | None,
    arrays: Sequence[Any],
    operands: Sequence[Operand],
    *,
    segments: Segments,
    index_tables: Sequence[jax.Array] = (),
    reductions: Sequence[Reduction] = (),
    outputs: Outputs = Outputs(),
    factored: bool = False,
    beside: Beside | None = None,
    schedule: TraversalSchedule | None = None,
    interpret: bool | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Reduces over the items of each row, computing on tiles in registers.

    The body sees several rows and several items of each at once: tiles of shape [rows, items, *features] for `item`,
    `indexed`, `position` and `positioned` operands, [rows, 1, *features] for `row` and `row_indexed`, [1, 1, *features]
    for `shared` ones (`Operand` has what else there is, and what comes as None), each feature axis padded to the next
    power of two with zeros (`feature_mask` tells which lanes are padding). Floating tiles are float32. The body must be
    elementwise over the two leading axes and may leave them at size 1. Results are the same in every run: there are no
    atomic additions. The contract test is `tests/pallas/test_traversal.py::test_traverse`.

    Args:
      body: from tiles, in the order of `operands`, to (a value for each reduction, a value for each item output). A
        tuple of tiles of one shape in place of an item output is stored side by side along the first feature axis.
      epilogue: from (results of the reductions, and then of those of `beside`, as a tuple of [rows, *features], tiles
        of the operands in `BY_ROW` as [rows or 1, *features]) to the row outputs; None: the row outputs are the
        reductions. A tuple of tiles of one shape in place of an output is stored side by side along the first feature
        axis.
      arrays: [length, *features] with at most two feature axes, or such `HalfRows`; [*features] for `shared`; [length,
        columns] for operands that name `columns`.
      operands: how each array is read.
      segments: the items of each row.
      index_tables: int32[num_items] each, by item id for `indexed` operands and by position for `positioned` ones, or
        int32[num_rows] for `row_indexed` ones; an index out of range reads as zeros.
      reductions: what is accumulated over the items of a row, in float32.
      outputs: what is written.
      factored: the body is given wide tiles of items as `Factored`, and may give such as values of the reductions.
      beside: sums over other items of the same rows.
      schedule: the tile; by default the tuned table's, else the heuristic's.
      interpret: run the kernels interpreted; by default where there is no GPU.

    Returns:
      The row outputs, [num_rows, *features] each, and the item outputs, [num_items, *features] each; items of no row
      are zeros. A reduction over no items is 0.

    Raises:
      NotImplementedError: a dtype or a feature shape that the kernel does not have.
      ValueError: arguments that do not fit each other.
    """
    reductions = tuple(reductions)
    check_reductions(reductions)
    if epilogue is None and not outputs.rows:
        sums = (*reductions, *(beside.reductions if beside else ()))
        outputs = replace(outputs, rows=tuple((r.shape, jnp.float32) for r in sums))
    outputs = outputs.declared()
    tables = segments.check(operands, index_tables)
    ready, features = check_operands(arrays, operands, tables, segments.num_items, segments.num_rows)
    written = [shape for shape, _ in (*outputs.items, *outputs.rows)]
    width = check_width([*features, *(r.shape for r in reductions), *written])
    item_structs = structs_of(outputs.items, segments.num_items)
    row_structs = structs_of(outputs.rows, segments.num_rows)
    if segments.num_rows == 0 or not (outputs.items or outputs.rows):
        return tuple(encoded(zeros(row_structs), outputs.half)), tuple(zeros(item_structs))
    again = functools.partial(
        traverse, epilogue=epilogue, arrays=arrays, operands=operands, segments=segments, index_tables=tables,
        reductions=reductions, factored=factored, beside=beside, interpret=interpret,
    )  # fmt: skip
    # An output without elements cannot be given to a kernel.
    if segments.num_items == 0 and outputs.items:
        rows, _ = again(lambda *tiles: (body(*tiles)[0], ()), outputs=replace(outputs, items=()), schedule=schedule)
        return rows, tuple(zeros(item_structs))
    if schedule is None:
        shapes = [(math.prod(f), isinstance(a, HalfRows)) for a, f in zip(ready, features, strict=True)]
        schedule = _chosen_schedule(
            width, segments, operands, shapes, reductions, outputs, beside is not None,
            _triton.use_interpreter(interpret), functools.partial(again, body, outputs=outputs),
        )  # fmt: skip
    other, given = (None, []) if beside is None else beside.planned(segments.num_rows, schedule.items_per_step)
    cut = segments.cut
    counted = segments.counted and bool(outputs.rows)
    slots = schedule.rows_per_program * schedule.items_per_step
    plan = Plan(
        body=body,
        epilogue=epilogue,
        operands=tuple(operands),
        features=features,
        lengths=_lengths(arrays, operands),
        reductions=reductions,
        item_outputs=tuple(outputs.items),
        row_outputs=tuple(outputs.rows),
        num_items=segments.num_items,
        num_rows=segments.num_rows,
        rows=schedule.rows_per_program,
        items=schedule.items_per_step,
        chunk=None if cut is None else int(cut[0]),
        num_chunks=0 if cut is None else cut[3].shape[0],
        num_counters=cut[1].shape[0] if cut is not None and counted else 0,
        combined=max(slots, min(FEW_CHUNKS if counted else 64, 4096 // width)),
        parts=exponents_of(ready),
        half=tuple(outputs.half),
        factored=factored,
        num_tables=len(tables),
        has_order=segments.order is not None,
        has_row_order=segments.row_order is not None,
        beside=other,
        warps=schedule.num_warps,
    )
    return _run(plan, segments, schedule, flat(ready), tables, given, outputs.covers_all_items, interpret)


def _chosen_schedule(
    width: int,
    segments: Segments,
    operands: Sequence[Operand],
    shapes: Sequence[tuple[int, bool]],
    reductions: Sequence[Reduction],
    outputs: Outputs,
    beside: bool,
    interpreted: bool,
    again: Callable[..., Any],
) -> TraversalSchedule:
    """The tuned table's schedule, else the heuristic's.

    `shapes` are the elements of a row of each array and whether it comes as `HalfRows`. `again` makes the call with the
    schedule that it is given.
    """
    counted = [
        (load, o.access in BY_ROW) for load, o in zip(shapes, operands, strict=True) if o.access not in SHARED[1:]
    ]
    heuristic = traversal_schedule(
        width,
        segments.degree,
        loads=[load for load, by_row in counted if not by_row],
        row_loads=[load for load, by_row in counted if by_row],
        writes_items=bool(outputs.items),
        num_items=segments.num_items,
        longest=16 if segments.hubs is None else int(segments.hubs[0]),
        beside=beside,
        interpret=interpreted,
    )
    loads = "+".join(sorted(f"{count}{'h' if in_half else ''}" for (count, in_half), _ in counted))
    sums = "+".join(sorted(str(math.prod(r.shape)) for r in reductions)) + ("b" if beside else "")
    fields = choose(
        "traversal",
        f"{loads}>{sums}-{bucket(segments.degree)}-{bucket(segments.num_items)}",
        asdict(heuristic),
        functools.partial(traversal_candidates, width),
        lambda fields: again(schedule=TraversalSchedule(**fields)),
    )
    return TraversalSchedule(**fields)


def _run(
    plan: Plan,
    segments: Segments,
    schedule: TraversalSchedule,
    arrays: list[jax.Array],
    tables: list[jax.Array],
    given: list[jax.Array],
    covers_all_items: bool,
    interpret: bool | None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The kernels of a plan: one program for some rows or for a chunk, and where chunks are not counted their merging.

    `given` are the arrays of the sums over other items of the rows.
    """
    shared = given_to_loop(arrays, tables, segments.offsets, segments.order, segments.num_items, "order")
    if segments.row_order is not None:
        shared.append(as_index(segments.row_order, "row_order", segments.num_rows))
    shared += given
    item_structs = structs_of(plan.item_outputs, plan.num_items)
    row_structs = in_half_rows(structs_of(plan.row_outputs, plan.num_rows), plan.half, plan.num_rows)
    partial_structs = []
    if segments.cut is not None:
        shared += segments.cut[3:6]
        partial_structs = structs_of([(r.shape, jnp.float32) for r in plan.reductions], plan.num_chunks)
    if segments.cut is not None and plan.num_counters:
        shared += [segments.cut[6], segments.cut[2]]
        partial_structs.append(jax.ShapeDtypeStruct((plan.num_counters,), jnp.dtype(jnp.float32)))
    structs = [*item_structs, *row_structs, *partial_structs]
    # What is not written as a whole, and what is counted up, is zero beforehand.
    zeroed = [*range(0 if covers_all_items else len(item_structs)), *([len(structs) - 1] if plan.num_counters else [])]
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
    n, end = len(item_structs), len(item_structs) + len(row_structs)
    rows, partials = list(found[n:end]), found[end:]
    if plan.num_chunks and rows and not plan.num_counters:
        rows = _merged(plan, segments, [*arrays, *map(not_empty, tables), *given, *partials], rows, interpret)
    return tuple(joined(rows, plan.half, plan.row_outputs)), tuple(found[:n])


def _merged(
    plan: Plan, segments: Segments, operands: Sequence[jax.Array], rows: Sequence[jax.Array], interpret: bool | None
) -> list[jax.Array]:
    """The row outputs with those of long segments, which a second kernel merges from their chunks."""
    assert segments.cut is not None
    operands = [segments.cut[1], segments.cut[2], *operands]
    return list(
        _triton.pallas_call(
            functools.partial(combine_kernel, plan=plan),
            name="traverse_hubs",
            num_programs=segments.cut[1].shape[0],
            out_shape=[jax.ShapeDtypeStruct(r.shape, r.dtype) for r in rows],
            aliases={len(operands) + i: i for i in range(len(rows))},
            num_warps=4,
            num_stages=1,
            interpret=_triton.use_interpreter(interpret),
        )(*operands, *rows)
    )


def map_items(
    body: Callable[..., Any],
    arrays: Sequence[Any],
    operands: Sequence[Operand],
    *,
    num_items: int,
    index_tables: Sequence[jax.Array] = (),
    outputs: Sequence[Output],
    half_outputs: Sequence[int] = (),
    schedule: TraversalSchedule | None = None,
    interpret: bool | None = None,
) -> tuple[Any, ...]:
    """Computes on the tiles of each item, without rows.

    Args:
      body: from tiles [1, items, *features] (`item`, `indexed`) and [1, 1, *features] (`shared`), padded and float32
        as in `traverse`, to a value for each output.
      arrays: [length, *features] with at most two feature axes; [*features] for `shared`; [length, columns] for
        operands that name `columns`.
      operands: how each array is read; `row` has no meaning here.
      num_items: number of items.
      index_tables: int32[num_items] each; an index out of range reads as zeros.
      outputs: (feature shape, dtype) of each result.
      half_outputs: numbers of the outputs, float32 each, that are to be returned as `HalfRows`.
      schedule: `items_per_step` times `rows_per_program` items a program; by default the heuristic's.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      [num_items, *features] for each output.

    Raises:
      NotImplementedError: a dtype or a feature shape that the kernel does not have.
      ValueError: arguments that do not fit each other.
    """
    outputs = declared(outputs)
    index_tables = [as_index(t, f"index_tables[{i}]", num_items) for i, t in enumerate(index_tables)]
    lengths = _lengths(arrays, operands)
    ready, features = check_operands(arrays, operands, index_tables, num_items, None)
    width = check_width([*features, *(s for s, _ in outputs)])
    half = tuple(half_outputs)
    check_half(half, outputs, "output")
    structs = structs_of(outputs, num_items)
    if num_items == 0 or not outputs:
        return tuple(encoded(zeros(structs), half))
    structs = in_half_rows(structs, half, num_items)
    interpreted = _triton.use_interpreter(interpret)
    narrows = bool(half) and not any(isinstance(a, HalfRows) for a in ready)
    schedule = schedule or map_schedule(width, narrows=narrows, interpret=interpreted)
    block = schedule.rows_per_program * schedule.items_per_step
    plan = Plan(
        body=lambda *tiles: ((), tuple(body(*tiles))),
        epilogue=None,
        operands=tuple(operands),
        features=features,
        lengths=lengths,
        reductions=(),
        item_outputs=outputs,
        row_outputs=(),
        num_items=num_items,
        num_rows=1,
        rows=1,
        items=block,
        parts=exponents_of(ready),
        half=half,
        num_tables=len(index_tables),
    )
    results = _triton.pallas_call(
        functools.partial(map_kernel, plan=plan),
        name="map_items",
        num_programs=cdiv(num_items, block),
        out_shape=structs,
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=interpreted,
    )(*flat(ready), *index_tables)
    return tuple(joined(results, half, outputs))
