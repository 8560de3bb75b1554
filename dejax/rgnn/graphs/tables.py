"""The tables of a grouping that kernels read: tiles of types, long segments in chunks, and the order of rows.

They are made with numpy in exact sizes or, inside `jax.jit`, in static upper bounds, whose unused entries cover
nothing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._pytrees import pytree
from dejax.pallas import LongSegmentTable
from dejax.pallas.products.product_schedule import rows_per_split
from dejax.rgnn.graphs.building.pieces_traced import chunk_length, tile_arrays
from dejax.rgnn.graphs.building.sorting import expand, stable_argsort
from dejax.rgnn.graphs.checks import is_traced

# Softmax-weighted sums on biokg took 0.37 ms on an H200 with chunks of 128 entries, and 0.59 ms with 1,024.
LONG_SEGMENT_CHUNK = 128
"""Segments with more entries than this are split in chunks of this many entries."""

_STATIC: dict[str, Any] = {"static": True}


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Tiles of up to `block` positions of one type each, as a grouped GEMM takes them.

    A tile covers positions `start` to `min(start + block, offsets[row_type + 1])` of the grouped order, where `offsets`
    belong to the `Segments` with this table. There are O(entries / block + types) tiles.

    Attributes:
        row_type: int32[tiles], the type of each tile; 0 for unused tiles.
        start: int32[tiles], the first position of each tile. Unused tiles start at the number of valid entries, so that
            none of their positions is in range.
        block: positions per tile (static).
    """

    row_type: Array
    start: Array
    block: int = field(metadata=_STATIC)


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class TypeSplits:
    """Each type's entries in splits, each summed by one program (`dejax.pallas.products.weight_gradient.split_table`).

    Attributes:
        start: int32[splits], the first position of each split.
        end: int32[splits], the position after its last one.
        first: int32[types + 1]; type `t` has the splits numbered `first[t]` to `first[t + 1]`.
        rows_per_split: the maximum number of positions of a split (static).
        number: int32[splits], the number of each split; None where splits are stored by number.
    """

    start: Any
    end: Any
    first: Any
    rows_per_split: int = field(metadata=_STATIC)
    number: Any = None

    @property
    def tables(self) -> tuple[Array, Array, Array, Array | None]:
        return self.start, self.end, self.first, self.number


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class LoopOrder:
    """The rows of a grouping in the order in which kernels take them: by the length of their segments.

    Attributes:
        rows: int32[rows], a permutation.
        offsets: int32[rows + 1]; the entries of row `rows[i]` are `order[offsets[i]:offsets[i + 1]]`.
        order: int32[entries], entry ids in that order.
        long_segments: the long segments; its rows are row ids, its positions are those in that order.
    """

    rows: Any
    offsets: Any
    order: Any
    long_segments: LongSegmentTable | None


# Rows are sorted by length within blocks of this many rows, so that neighbours in memory stay close. A reduction over
# 2.5 M rows took 1.36 ms, 1.50 ms with all rows sorted by length and 1.42 ms unsorted.
_SORTED_BLOCK = 4096
# Up to this many entries, which fit in the cache, all rows are sorted by length: a reduction over 0.67 M entries took
# 51 us instead of 77 us, but one over 4.8 M entries 622 us instead of 544 us.
_SORTED_THROUGHOUT = 1 << 20


def long_segment_chunk_of(num_entries: int, num_rows: int) -> int:
    """A chunk size that gives the machine enough programs and leaves most segments uncut."""
    # On a small graph RGAT's training step took 119 us with chunks of 24, and 121 us to 131 us with 16, 32 and 48.
    least = LONG_SEGMENT_CHUNK if num_entries > 2_000_000 else 64 if num_entries > 400_000 else 24
    # Segments of about average length stay uncut: with 43 entries on average, RGAT's forward pass took 91 us with
    # chunks of 96 instead of 95 us with 64.
    several = 32 * math.ceil(2 * num_entries / (32 * num_rows))
    return least if several <= 32 else min(LONG_SEGMENT_CHUNK, max(least, several))


def type_chunk_of(num_entries: int) -> int:
    """The chunk size where rows are types and `long_segment_chunk` has its default."""
    # Types are few and large: with chunks of 128 the second reduction would read as much as the first. On small graphs
    # the longest chunk decides the time.
    return 2048 if num_entries > 2_000_000 else 512 if num_entries > 400_000 else 256


def loop_order(
    offsets: np.ndarray,
    order: np.ndarray,
    long_segment_chunk: int,
    first: int | None = None,
) -> LoopOrder | None:
    """The order in which kernels take rows, made with numpy; None where there are fewer than two rows or no entries.

    Args:
        offsets: int32[rows + 1].
        order: int32[entries].
        long_segment_chunk: the maximum number of entries of a chunk.
        first: the number of rows that come before all others.
    """
    num_rows, num_entries = offsets.shape[0] - 1, order.shape[0]
    if num_rows < 2 or num_entries == 0:
        return None
    counts = np.diff(offsets)
    longest = int(counts.max())
    keys, bounds = [longest - counts], [longest + 1]
    if num_entries > _SORTED_THROUGHOUT:
        keys.insert(0, np.arange(num_rows, dtype=np.int32) // _SORTED_BLOCK)
        bounds.insert(0, num_rows // _SORTED_BLOCK + 1)
    if first is not None and first < num_rows:
        keys, bounds = [(np.arange(num_rows) >= first).astype(np.int32), *keys], [2, *bounds]
    rows = stable_argsort(keys, bounds)
    positions, begins = expand(rows, offsets)
    entries = order[positions]
    if entries.shape[0] < num_entries:  # padding entries stay last
        entries = np.concatenate([entries, order[entries.shape[0] :]])
    table = loop_long_segments(begins, num_entries, long_segment_chunk)
    if table is not None:
        table = dataclasses.replace(table, row=rows[table.row])
    return LoopOrder(rows, begins, entries, table)


def loop_long_segments(offsets: np.ndarray, num_entries: int, long_segment_chunk: int) -> LongSegmentTable | None:
    """The long segments of a `LoopOrder`, by the positions of rows in it; its size is that of any order of rows.

    Args:
        offsets: int32[rows + 1].
        num_entries: number of entries, padding included.
        long_segment_chunk: the maximum number of entries of a chunk.
    """
    chunk = min(long_segment_chunk, long_segment_chunk_of(num_entries, offsets.shape[0] - 1))
    return long_segment_table(offsets, chunk)


def _cut(counts: np.ndarray, size: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranges of `counts` entries, each cut in pieces of `size`, of one or of its own.

    Returns:
        The first piece of each range, int32[ranges + 1]; for each piece its range, and where it begins in the range.
    """
    first = np.concatenate([np.zeros(1, np.int32), np.cumsum(-(-counts // size), dtype=np.int32)])
    piece = np.arange(first[-1], dtype=np.int32)
    own = np.searchsorted(first, piece, side="right") - 1
    return first, own, (piece - first[own]) * np.broadcast_to(size, counts.shape)[own]


def tile_table(offsets: Any, block: int, num_entries: int) -> TileTable:
    """Cuts each type's positions in tiles of `block`.

    Args:
        offsets: int32[types + 1], where the positions of each type begin; numpy, jax.Array or tracer.
        block: positions per tile, at least 1.
        num_entries: number of positions, padding included; bounds the table where `offsets` is a tracer.

    Returns:
        The table: `sum(ceil(count / block))` tiles or, of a tracer, `num_entries // block + types` tiles, unused tiles
        last.

    Raises:
        ValueError: `block` is less than 1.

    >>> table = tile_table(np.array([0, 3, 3, 8]), 4, 8)
    >>> table.row_type, table.start
    (array([0, 2, 2], dtype=int32), array([0, 3, 7], dtype=int32))
    """
    if block < 1:
        raise ValueError(f"block must be at least 1 position per tile, got {block}")
    if is_traced(offsets):
        tiles = tile_arrays([(offsets, num_entries)], [[block]])
        return TileTable(tiles.row_type[0, 0], tiles.start[0, 0], block)
    made: Any = np.asarray if isinstance(offsets, np.ndarray) else jnp.asarray
    off = np.asarray(offsets)
    _, row, begin = _cut(off[1:] - off[:-1], block)
    return TileTable(made(row, np.int32), made(off[row] + begin, np.int32), block)


def long_segment_table(offsets: np.ndarray, chunk: int) -> LongSegmentTable | None:
    """The chunks of the rows with more than `chunk` entries, made with numpy; None where there is no such row.

    Args:
        offsets: int32[rows + 1], where the entries of each row begin.
        chunk: the maximum number of entries of a row that is not cut, at least 1.

    Raises:
        ValueError: `chunk` is less than 1.
    """
    if chunk < 1:
        raise ValueError(f"long_segment_chunk must be at least 1 entry per chunk, got {chunk}")
    rows = np.flatnonzero(offsets[1:] - offsets[:-1] > chunk)
    if rows.shape[0] == 0:
        return None
    counts = offsets[rows + 1] - offsets[rows]
    length = chunk_length(np, counts, chunk)
    first, own, begin = _cut(counts, length)
    start = offsets[rows][own] + begin
    end = np.minimum(start + length[own], offsets[rows + 1][own])
    columns = (rows[own], start, end, first[own], (first[1:] - first[:-1])[own])
    return LongSegmentTable(chunk, *(column.astype(np.int32) for column in columns))


def chunk_of(long_segment_chunk: int, num_entries: int, typed: bool) -> int:
    """The chunk size of a grouping: `long_segment_chunk`, unless rows are types and it has its default."""
    return type_chunk_of(num_entries) if typed and long_segment_chunk == LONG_SEGMENT_CHUNK else long_segment_chunk


def split_table(offsets: np.ndarray, num_entries: int, limit: int | None = None) -> TypeSplits:
    """Splits of the size that `rows_per_split` gives, or of at most `limit` positions."""
    types = offsets.shape[0] - 1
    size = rows_per_split(num_entries)
    size = size if limit is None else min(size, limit)
    if size >= num_entries:  # one split per type
        return TypeSplits(offsets[:-1], offsets[1:], np.arange(types + 1, dtype=np.int32), size)
    tiles = tile_table(offsets, size, num_entries)
    start, row = np.asarray(tiles.start), np.asarray(tiles.row_type)
    first = np.searchsorted(row, np.arange(types + 1)).astype(np.int32)
    return TypeSplits(start, np.minimum(start + size, offsets[row + 1]).astype(np.int32), first, size)
