"""Segment reductions: sums, maxima and minima of the entries of each segment, for every dtype and width.

One program reduces some short segments side by side. Long segments are cut where a multiple of the chunk length lies
among the positions: the program of a chunk reduces the part of the long segment that ends or goes on there, and the
part of the one that begins there. A second kernel merges parts in their order. So there are no tables of long segments
to make, and nothing depends on the order in which programs run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import cdiv, lanes, next_power_of_two
from dejax.pallas._tiles import both, broadcast, steps, where, with_axes, within
from dejax.pallas.segments.segment_schedule import SegmentSchedule, chunk_of, segment_schedule

KINDS = ("sum", "max", "min")

# Parts of a long segment that are merged in a step, times their features.
_MERGED = 2048


@dataclass(frozen=True, slots=True, eq=False)
class SegmentBounds:
    """Sorted positions and their segments.

    Attributes:
      offsets: int32[segments + 1]: segment i has the positions `offsets[i]` to `offsets[i + 1]`.
      first: int32[chunks], the id at the first position of each chunk of `chunk_of(num_entries)` positions.
      last: int32[chunks], the id at the last position of each chunk. Ids outside of the segments are allowed.
      num_entries: number of positions.
    """

    offsets: jax.Array
    first: jax.Array
    last: jax.Array
    num_entries: int

    @property
    def num_segments(self) -> int:
        return self.offsets.shape[0] - 1


@dataclass(frozen=True, slots=True)
class _ReducePlan:
    """The static facts of a reduction; `names` are the first kernel's references in order."""

    kind: str
    num_entries: int
    width: int
    chunk: int
    accumulator: Any
    dtype: Any
    schedule: SegmentSchedule
    names: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        return cdiv(self.width, self.schedule.width)

    def nothing(self, shape: tuple[int, ...]) -> jax.Array:
        """A tile of neutral elements: combining it with another tile changes nothing."""
        # The bounds are those of the result's dtype, since the ends of a wider dtype are no numbers of it.
        value = np.asarray(identity(self.kind, self.dtype)).astype(self.accumulator)
        return lax.full(shape, value, self.accumulator)

    def combine(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return {"sum": lax.add, "max": _triton.maximum, "min": _triton.minimum}[self.kind](x, y)

    def merged(self, tile: jax.Array) -> jax.Array:
        """[rows, entries, width] reduced to [rows, width]."""
        if tile.shape[1] == 1:
            return lax.reshape(tile, (tile.shape[0], tile.shape[2]))
        if self.kind == "sum":
            return lax.reduce_sum(tile, (1,))
        return {"max": _triton.reduce_max, "min": _triton.reduce_min}[self.kind](tile, 1)


@dataclass(frozen=True, slots=True)
class _ReduceRefs:
    """The references of the kernel of rows and chunks; None for what a reduction has not."""

    data: Any
    offsets: Any
    out: Any
    rows: Any = None
    edges: Any = None
    scale: Any = None
    first: Any = None
    last: Any = None
    parts: Any = None

    @property
    def num_segments(self) -> int:
        return int(self.out.shape[0])


def identity(kind: str, dtype: Any) -> Any:
    """The value of an empty segment: 0, or the least or greatest number of the dtype."""
    dtype = jnp.dtype(dtype)
    if kind == "sum":
        return dtype.type(0)
    if jnp.issubdtype(dtype, jnp.integer):
        return dtype.type(jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max)
    return dtype.type(-np.inf if kind == "max" else np.inf)


def accumulator(dtype: Any) -> Any:
    """The dtype in which numbers are accumulated: at least 32 bits, of the same kind."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize >= 4:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)


def segment_reduce(
    kind: str,
    data: jax.Array,
    segments: SegmentBounds,
    *,
    rows: jax.Array | None = None,
    scale: jax.Array | None = None,
    edges: jax.Array | None = None,
    dtype: Any = None,
    schedule: SegmentSchedule | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """Reduces the entries of each segment, in a fixed order.

    Sixteen-bit floats are accumulated in float32 and rounded once; small integers in 32 bits, so that they wrap as in
    their own dtype.

    Args:
      kind: `sum`, `max` or `min`. NaNs propagate.
      data: [length, width], real numbers.
      segments: which positions belong to which segment.
      rows: int32[entries], the row of `data` at each position; entries with a row out of range are left out. None: row
        p at position p.
      scale: [edges, scales]: feature f of an entry is multiplied by scale `f // (width / scales)` first; `scales`
        divides `width`.
      edges: int32[entries], the row of `scale` at each position; None: row p at position p.
      dtype: the dtype of the result; None: that of `data`.
      schedule: tile sizes; None: the heuristic's.
      interpret: run the kernels interpreted; by default where there is no GPU.

    Returns:
      [segments, width]; an empty segment has the `identity`.

    Raises:
      ValueError: an unknown kind.
      NotImplementedError: a dtype that kernels do not have.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not (jnp.issubdtype(data.dtype, jnp.integer) or data.dtype in _FLOATS):
        raise NotImplementedError(f"data must be integers or floats of at least 16 bits, got {data.dtype}")
    out_dtype = jnp.dtype(data.dtype if dtype is None else dtype)
    if kind == "min" and data.dtype == jnp.uint64:
        # Constants of a kernel end at 2^63 - 1. The complement turns the order round.
        if scale is not None:
            raise NotImplementedError("no kernel computes minima of scaled uint64")
        found = segment_reduce("max", ~data, segments, rows=rows, schedule=schedule, interpret=interpret)
        return (~found).astype(out_dtype)
    count, width, entries = segments.num_segments, data.shape[1], segments.num_entries
    if count == 0 or width == 0 or entries == 0 or data.shape[0] == 0:
        return jnp.full((count, width), identity(kind, out_dtype), out_dtype)
    schedule = schedule or segment_schedule(width, entries / count, data.dtype.itemsize)
    plan = _ReducePlan(kind, entries, width, chunk_of(entries), accumulator(data.dtype), out_dtype, schedule)
    return _call(plan, segments, {"data": data, "rows": rows, "edges": edges, "scale": scale}, interpret)


_FLOATS = tuple(jnp.dtype(t) for t in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


def _call(
    plan: _ReducePlan, segments: SegmentBounds, given: dict[str, jax.Array | None], interpret: bool | None
) -> jax.Array:
    """The kernel of rows and chunks and, where segments may be long, the one that merges their parts."""
    result = jax.ShapeDtypeStruct((segments.num_segments, plan.width), plan.dtype)
    num_chunks = segments.first.shape[0] if plan.num_entries > plan.chunk else 0
    interpret = _triton.use_interpreter(interpret)
    settings: dict[str, Any] = {"num_warps": plan.schedule.num_warps, "num_stages": 1, "interpret": interpret}
    operands = {"data": given["data"], "offsets": segments.offsets, **given}
    outputs = {"out": result}
    if num_chunks:
        operands |= {"first": segments.first, "last": segments.last}
        outputs["parts"] = jax.ShapeDtypeStruct((2 * num_chunks, plan.width), plan.accumulator)
    operands = {name: array for name, array in operands.items() if array is not None}
    found = _triton.pallas_call(
        functools.partial(_reduce_kernel, plan=replace(plan, names=(*operands, *outputs))),
        name=f"segment_{plan.kind}",
        num_programs=(num_chunks + cdiv(segments.num_segments, plan.schedule.rows)) * plan.blocks,
        out_shape=[*outputs.values()],
        **settings,
    )(*operands.values())
    if not num_chunks:
        return found[0]
    (merged,) = _triton.pallas_call(
        functools.partial(_merge_kernel, plan=plan),
        name=f"segment_{plan.kind}_long",
        num_programs=num_chunks * plan.blocks,
        out_shape=[result],
        aliases={3: 0},
        **(settings | {"num_warps": 4}),
    )(segments.offsets, segments.last, found[1], found[0])
    return merged


def _reduce_kernel(*refs: Any, plan: _ReducePlan) -> None:
    """Chunks first, because they take longest; then `rows` segments a program."""
    r = _ReduceRefs(**dict(zip(plan.names, refs, strict=True)))
    program, block = _triton.program_ids(plan.blocks)
    if r.first is None:
        _reduce_rows(plan, r, program, block)
        return
    chunks = np.int32(r.first.shape[0])
    _triton.when(lax.lt(program, chunks), lambda: _reduce_chunk(plan, r, program, block))
    _triton.when(lax.ge(program, chunks), lambda: _reduce_rows(plan, r, lax.sub(program, chunks), block))


def _reduce_rows(plan: _ReducePlan, r: _ReduceRefs, program: jax.Array, block: jax.Array) -> None:
    rows = plan.schedule.rows
    row = lax.add(lax.mul(program, np.int32(rows)), lanes(rows, 0, 1))
    mask = lax.lt(row, np.int32(r.num_segments))
    start = _triton.load(r.offsets, (row,), mask)
    end = _triton.load(r.offsets, (lax.add(row, np.int32(1)),), mask)
    if r.first is not None:
        mask = both(mask, lax.le(lax.sub(end, start), np.int32(plan.chunk)))
        end = where(mask, end, start)
    found = _reduced(plan, r, start, end, plan.schedule.entries, block)
    _store(plan, r.out, where(mask, row, np.int32(r.num_segments)), mask, block, found)


def _long(plan: _ReducePlan, offsets: Any, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether the segment `row` ([1]) is long, where it begins and where it ends."""
    known = within(row, offsets.shape[0] - 1, lax.ge(row, np.int32(0)))
    start = _triton.load(offsets, (row,), known)
    end = _triton.load(offsets, (lax.add(row, np.int32(1)),), known)
    return both(known, lax.gt(lax.sub(end, start), np.int32(plan.chunk))), start, end


def _reduce_chunk(plan: _ReducePlan, r: _ReduceRefs, program: jax.Array, block: jax.Array) -> None:
    """Two parts: of the long segment that began before the chunk, and of the one that begins in it."""
    number = lax.broadcast(program, (1,))
    begin = lax.mul(number, np.int32(plan.chunk))
    end = lax.add(begin, lax.min(np.int32(plan.chunk), lax.sub(np.int32(plan.num_entries), begin)))
    for part, ids in enumerate((r.first, r.last)):
        is_long, start, stop = _long(plan, r.offsets, _triton.load(ids, (number,)))
        here = lax.ge(start, begin) if part else lax.lt(start, begin)
        mask = both(is_long, here)
        low = lax.max(start, begin)
        high = where(mask, lax.min(stop, end), low)
        found = _reduced(plan, r, low, high, plan.schedule.rows * plan.schedule.entries, block)
        row = lax.add(lax.mul(number, np.int32(2)), np.int32(part))
        _store(plan, r.parts, where(mask, row, np.int32(r.parts.shape[0])), mask, block, found)


def _merge_kernel(offsets: Any, last: Any, parts: Any, _: Any, out: Any, *, plan: _ReducePlan) -> None:
    """The long segment that begins in a chunk, if there is one: its parts, in their order."""
    program, block = _triton.program_ids(plan.blocks)
    number = lax.broadcast(program, (1,))
    row = _triton.load(last, (number,))
    is_long, start, stop = _long(plan, offsets, row)
    mask = both(is_long, lax.ge(start, lax.mul(number, np.int32(plan.chunk))))
    after = lax.add(lax.div(lax.sub(stop, np.int32(1)), np.int32(plan.chunk)), np.int32(1))
    count = where(mask, lax.sub(after, number), np.int32(0))
    together = max(1, _MERGED // plan.schedule.width)
    together = min(together, next_power_of_two(last.shape[0]))
    columns, inside = _columns(plan, block)

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        at = lax.add(lax.mul(i, np.int32(together)), lanes(together, 1, 2))
        valid = with_axes(lax.lt(at, broadcast(count[:, None], at.shape)), 1)
        part = lax.mul(lax.add(at, broadcast(number[:, None], at.shape)), np.int32(2))
        part = where(lax.eq(at, np.int32(0)), lax.add(part, np.int32(1)), part)
        tile = _triton.load(parts, (with_axes(part, 1), columns), _both(valid, inside))
        return plan.combine(total, _or_nothing(plan, valid, tile))

    total = plan.nothing((1, together, plan.schedule.width))
    total = _triton.fori_loop(np.int32(0), steps(count.reshape(()), together), step, total)
    _store(plan, out, where(mask, row, np.int32(out.shape[0])), mask, block, plan.merged(total))


def _both(mask: jax.Array, other: jax.Array | None) -> jax.Array:
    return mask if other is None else both(mask, other)


def _or_nothing(plan: _ReducePlan, valid: jax.Array, tile: jax.Array) -> jax.Array:
    return where(valid, tile, plan.nothing(tile.shape))


def _columns(plan: _ReducePlan, block: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The features of a program, [1, 1, width], and which of them exist; None where all do."""
    size = plan.schedule.width
    columns = lanes(size, 2, 3)
    if plan.blocks > 1:
        columns = lax.add(columns, broadcast(lax.mul(block, np.int32(size)).reshape(1, 1, 1), columns.shape))
    return columns, None if plan.width % size == 0 else lax.lt(columns, np.int32(plan.width))


def _reduced(
    plan: _ReducePlan, r: _ReduceRefs, start: jax.Array, end: jax.Array, entries: int, block: jax.Array
) -> jax.Array:
    """[rows, width]: positions `start` to `end` of each row, `entries` at a time.

    Indices of the next step are loaded before rows of this one are used: the two wait for memory together.
    """
    rows = start.shape[0]
    columns, inside = _columns(plan, block)
    count = lax.sub(end, start)
    longest = lax.reduce_max(count, (0,)) if rows > 1 else count.reshape(())
    here = lax.add(broadcast(start[:, None], (rows, entries)), broadcast(lanes(entries, 1, 2), (rows, entries)))
    end = broadcast(end[:, None], (rows, entries))

    def indices(position: jax.Array) -> tuple[jax.Array, ...]:
        mask = lax.lt(position, end)
        return tuple(_triton.load(ref, (position,), mask) for ref in (r.rows, r.edges) if ref is not None)

    def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        total, found = carry
        position = lax.add(here, lax.mul(i, np.int32(entries)))
        ahead = indices(lax.add(position, np.int32(entries)))
        mask = lax.lt(position, end)
        row = position if r.rows is None else found[0]
        edge = position if r.edges is None else found[-1]
        valid = with_axes(mask if r.rows is None else within(row, r.data.shape[0], mask), 1)
        tile = _triton.load(r.data, (with_axes(row, 1), columns), _both(valid, inside)).astype(plan.accumulator)
        if r.scale is not None:
            tile = lax.mul(tile, broadcast(_scales(plan, r, edge, columns, valid, inside), tile.shape))
        if plan.kind != "sum" or r.scale is not None:
            tile = _or_nothing(plan, valid, tile)
        return plan.combine(total, tile), ahead

    total = plan.nothing((rows, entries, plan.schedule.width))
    total, _ = _triton.fori_loop(np.int32(0), steps(longest, entries), step, (total, indices(here)))
    return plan.merged(total)


def _scales(
    plan: _ReducePlan, r: _ReduceRefs, edge: jax.Array, columns: jax.Array, valid: jax.Array, inside: jax.Array | None
) -> jax.Array:
    """The scales of entries: [rows, entries, 1] or one for each feature."""
    edge = with_axes(edge, 1)
    scales = r.scale.shape[1]
    if scales == 1:
        return _triton.load(r.scale, (edge, lax.full((1, 1, 1), np.int32(0))), valid).astype(plan.accumulator)
    if scales < plan.width:
        columns = lax.div(columns, np.int32(plan.width // scales))
    return _triton.load(r.scale, (edge, columns), _both(valid, inside)).astype(plan.accumulator)


def _store(plan: _ReducePlan, ref: Any, row: jax.Array, mask: jax.Array, block: jax.Array, value: jax.Array) -> None:
    """Stores [rows, width] to rows of an array; masked ones name the row past its end."""
    columns, inside = _columns(plan, block)
    columns, mask = lax.reshape(columns, (1, plan.schedule.width)), mask[:, None]
    if inside is not None:
        mask = both(mask, lax.reshape(inside, (1, plan.schedule.width)))
    shape = value.shape
    _triton.store(ref, (broadcast(row[:, None], shape), broadcast(columns, shape)), value, broadcast(mask, shape))
