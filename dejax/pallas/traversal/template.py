"""The traversal template: a loop over rows and the items of each, with a body, reductions and an epilogue."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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

__all__ = ["MAX_WIDTH", "Beside", "Operand", "Reduction", "map_items", "traverse"]


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


def traverse(
    body: Callable[..., Any],
    epilogue: Callable[..., Any] | None,
    arrays: Sequence[Any],
    operands: Sequence[Operand],
    *,
    offsets: jax.Array,
    order: jax.Array | None = None,
    num_items: int,
    num_rows: int,
    index_tables: Sequence[jax.Array] = (),
    reductions: Sequence[Reduction] = (),
    item_outputs: Sequence[Output] = (),
    row_outputs: Sequence[Output] = (),
    hubs: tuple[Any, ...] | None = None,
    row_order: jax.Array | None = None,
    half_outputs: Sequence[int] = (),
    covers_all_items: bool = False,
    factored: bool = False,
    beside: Beside | None = None,
    schedule: TraversalSchedule | None = None,
    interpret: bool | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Reduces over the items of each row, computing on tiles in registers.

    The items of row r are `order[offsets[r]:offsets[r + 1]]`. The body sees several rows and several items of each at
    once: tiles of shape [rows, items, *features] for `item`, `indexed`, `position` and `positioned` operands,
    [rows, 1, *features] for `row` and `row_indexed`, [1, 1, *features] for `shared` ones (`Operand` has what else there
    is, and what comes as None), each feature axis padded to
    the next power of two with zeros (`feature_mask` tells which lanes are padding). Floating tiles are float32. It must
    be elementwise over the two leading axes and may leave them at size 1. Results are the same in every run: there are
    no atomic additions.

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
      offsets: int32[num_rows + 1].
      order: int32[num_items], item ids in the order of rows; None where item ids are the positions.
      num_items: number of items, those of no row included.
      num_rows: number of rows.
      index_tables: int32[num_items] each, by item id for `indexed` operands and by position for `positioned` ones, or
        int32[num_rows] for `row_indexed` ones; an index out of range reads as zeros.
      reductions: what is accumulated over the items of a row, in float32.
      item_outputs: (feature shape, dtype) of each array to write at item ids.
      row_outputs: (feature shape, dtype) of each array to write by row; may be () where `epilogue` is None, for the
        reductions in float32.
      hubs: rows with more than `chunk` items, cut in chunks, or None where there is none: (chunk, rows int32[hubs],
        offsets int32[hubs + 1], chunk_row, chunk_start, chunk_end int32[chunks]), where hub h has the chunks
        `offsets[h]` to `offsets[h + 1]` and a chunk the positions `chunk_start` to `chunk_end` of the order; unused
        hubs and chunks have the row `num_rows` and no positions. Every row of more than `chunk` items must be there.
        With chunk_hub int32[chunks] besides, the hub of each chunk and the number of hubs for unused ones, the program
        of a hub's last chunk to be done merges them; without it, a kernel of its own.
      row_order: int32[num_rows], a permutation: then `offsets`, `order` and positions are of the rows in this order,
        row `row_order[0]` first, and so are the chunks of `hubs`, whose rows are true row numbers. Rows of like lengths
        side by side do not wait for each other.
      half_outputs: numbers of the row outputs, float32 each, that are to be returned as `HalfRows`.
      covers_all_items: the caller's word that every item belongs to a row, so that no item output need be set to zero.
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
    if epilogue is None and not row_outputs:
        row_outputs = tuple((r.shape, jnp.float32) for r in (*reductions, *(beside.reductions if beside else ())))
    item_outputs, row_outputs = declared(item_outputs), declared(row_outputs)
    if offsets.shape != (num_rows + 1,):
        raise ValueError(f"offsets must have num_rows + 1 = {num_rows + 1} entries, got shape {offsets.shape}")
    by_row = {o.index for o in operands if o.access == "row_indexed"}
    index_tables = [
        as_index(t, f"index_tables[{i}]", num_rows if i in by_row else num_items) for i, t in enumerate(index_tables)
    ]
    lengths = _lengths(arrays, operands)
    ready, features = check_operands(arrays, operands, index_tables, num_items, num_rows)
    width = check_width(
        [*features, *(r.shape for r in reductions), *(s for s, _ in item_outputs), *(s for s, _ in row_outputs)]
    )
    half = tuple(half_outputs)
    check_half(half, row_outputs, "row output")
    item_structs, row_structs = structs_of(item_outputs, num_items), structs_of(row_outputs, num_rows)
    if num_rows == 0 or not (item_outputs or row_outputs):
        return tuple(encoded(zeros(row_structs), half)), tuple(zeros(item_structs))
    row_structs = in_half_rows(row_structs, half, num_rows)

    interpreted = _triton.use_interpreter(interpret)
    if schedule is None:
        degree = num_items / num_rows
        counted_in = [o.access not in SHARED[1:] for o in operands]
        loads = [(math.prod(f), isinstance(a, HalfRows)) for a, f in zip(ready, features, strict=True)]
        loads = list(itertools.compress(loads, counted_in))
        for_row = list(itertools.compress([o.access in BY_ROW for o in operands], counted_in))
        heuristic = traversal_schedule(
            width, degree, loads=[n for n, once in zip(loads, for_row, strict=True) if not once],
            row_loads=list(itertools.compress(loads, for_row)), writes_items=bool(item_outputs), num_items=num_items,
            longest=16 if hubs is None else int(hubs[0]), beside=beside is not None, interpret=interpreted,
        )  # fmt: skip
        shapes = "+".join(sorted(f"{count}{'h' if in_half else ''}" for count, in_half in loads))
        sums = "+".join(sorted(str(math.prod(r.shape)) for r in reductions)) + ("b" if beside is not None else "")
        again = functools.partial(
            traverse, body, epilogue, arrays, operands, offsets=offsets, order=order, num_items=num_items,
            num_rows=num_rows, index_tables=index_tables, reductions=reductions, item_outputs=item_outputs,
            row_outputs=row_outputs, hubs=hubs, row_order=row_order, half_outputs=half_outputs,
            covers_all_items=covers_all_items, factored=factored, beside=beside, interpret=interpret,
        )  # fmt: skip
        fields = choose(
            "traversal",
            f"{shapes}>{sums}-{bucket(degree)}-{bucket(num_items)}",
            asdict(heuristic),
            functools.partial(traversal_candidates, width),
            lambda fields: again(schedule=TraversalSchedule(**fields)),
        )
        schedule = TraversalSchedule(**fields)
    other, given = (None, []) if beside is None else beside.planned(num_rows, schedule.items_per_step)
    has_hubs = hubs is not None and hubs[1].shape[0] > 0 and hubs[3].shape[0] > 0
    counted = hubs is not None and has_hubs and len(hubs) > 6 and bool(row_outputs)
    slots = schedule.rows_per_program * schedule.items_per_step
    plan = Plan(
        body=body,
        epilogue=epilogue,
        operands=tuple(operands),
        features=features,
        lengths=lengths,
        reductions=reductions,
        item_outputs=item_outputs,
        row_outputs=row_outputs,
        num_items=num_items,
        num_rows=num_rows,
        rows=schedule.rows_per_program,
        items=schedule.items_per_step,
        chunk=int(hubs[0]) if hubs is not None and has_hubs else None,
        num_chunks=hubs[3].shape[0] if hubs is not None and has_hubs else 0,
        num_counters=hubs[1].shape[0] if hubs is not None and counted else 0,
        combined=max(slots, min(FEW_CHUNKS if counted else 64, 4096 // width)),
        parts=exponents_of(ready),
        half=half,
        factored=factored,
        num_tables=len(index_tables),
        has_order=order is not None,
        has_row_order=row_order is not None,
        beside=other,
        warps=schedule.num_warps,
    )
    ready = flat(ready)
    shared = given_to_loop(ready, index_tables, offsets, order, num_items, "order")
    if row_order is not None:
        shared.append(as_index(row_order, "row_order", num_rows))
    shared += given
    call = functools.partial(
        _triton.pallas_call,
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=interpreted,
    )

    # Zero-sized outputs cannot be given to a kernel: items that are none get no buffer of theirs.
    if num_items == 0 and item_outputs:
        rows, _ = traverse(
            lambda *tiles: (body(*tiles)[0], ()),
            epilogue,
            arrays,
            operands,
            offsets=offsets,
            order=order,
            num_items=0,
            num_rows=num_rows,
            index_tables=index_tables,
            reductions=reductions,
            row_outputs=row_outputs,
            half_outputs=half,
            factored=factored,
            beside=beside,
            schedule=schedule,
            interpret=interpret,
        )
        return rows, tuple(zeros(item_structs))

    partial_structs = []
    if plan.num_chunks:
        assert hubs is not None
        shared += hubs[3:6]
        partial_structs = structs_of([(r.shape, jnp.float32) for r in reductions], plan.num_chunks)
        if counted:
            shared += [hubs[6], hubs[2]]
            partial_structs.append(jax.ShapeDtypeStruct((plan.num_counters,), jnp.dtype(jnp.float32)))
    structs = [*item_structs, *row_structs, *partial_structs]
    # What is not written as a whole, and what is counted up, is zero beforehand.
    zeroed = [*range(0 if covers_all_items else len(item_structs)), *([len(structs) - 1] if counted else [])]
    initial = zeros([structs[i] for i in zeroed])
    outputs = call(
        functools.partial(row_kernel, plan=plan, num_aliased=len(initial)),
        name="traverse",
        num_programs=plan.num_chunks + cdiv(num_rows, plan.rows),
        out_shape=structs,
        aliases={len(shared) + i: output for i, output in enumerate(zeroed)},
    )(*shared, *initial)
    n = len(item_structs)
    items, found = tuple(outputs[:n]), list(outputs[n:])
    results: list[Any] = found[: len(row_structs)]
    partials = found[len(row_structs) :]
    if plan.num_chunks and row_structs and not counted:
        assert hubs is not None
        operands_of_hubs = [hubs[1], hubs[2], *ready, *map(not_empty, index_tables), *given, *partials]
        results = list(
            _triton.pallas_call(
                functools.partial(combine_kernel, plan=plan),
                name="traverse_hubs",
                num_programs=hubs[1].shape[0],
                out_shape=row_structs,
                aliases={len(operands_of_hubs) + i: i for i in range(len(results))},
                num_warps=4,
                num_stages=1,
                interpret=interpreted,
            )(*operands_of_hubs, *results)
        )
    return tuple(joined(results, half, row_outputs)), items


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
