"""Long segments cut in chunks, and types in tiles, inside `jax.jit`: tables with static bounds.

The tables of several groupings are made together, so that they share ten to twenty kernels of 2 us on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.rgnn.graphs.sorting_traced import begins_run, count_before, put_where, row_of_positions, take

LongSegmentArrays = tuple[Array, Array, Array, Array, Array]
"""The arrays of a `LongSegmentTable`, in their order."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A grouping whose long segments are to be cut.

    Attributes:
        offsets: int32[rows + 1], where the entries of each row begin.
        num_entries: number of entries, padding included.
        chunk: the maximum number of entries of a chunk and of an uncut segment.
        row_at: gives the row of each position in an array (the number of rows for padding), where that is faster than a
            search in `offsets`.
    """

    offsets: Array
    num_entries: int
    chunk: int
    row_at: Callable[[Array], Array] | None = None

    @property
    def num_rows(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def most_long_segments(self) -> int:
        return min(self.num_rows, self.num_entries // (self.chunk + 1))

    @property
    def most_chunks(self) -> int:
        return self.num_entries // self.chunk + self.most_long_segments

    def candidates(self) -> Array:
        """int32[candidates], ascending: rows that include all with long segments, some of them several times."""
        # A segment with more than `chunk` entries covers a multiple of `chunk + 1`: only those positions are looked at.
        positions = np.arange(0, self.num_entries, self.chunk + 1, dtype=np.int32)
        if self.num_rows <= positions.shape[0]:
            return jnp.arange(self.num_rows, dtype=jnp.int32)
        if self.row_at is not None:
            return self.row_at(jnp.asarray(positions))
        found = jnp.searchsorted(self.offsets, positions, side="right", method="scan_unrolled")
        return found.astype(jnp.int32) - 1


def long_segment_arrays(groupings: Sequence[Rows]) -> list[LongSegmentArrays | None]:
    """The arrays of each grouping's `LongSegmentTable`; None where it can have no long segment."""
    if not any(rows.most_long_segments for rows in groupings):
        return [None] * len(groupings)
    candidates = [rows.candidates() for rows in groupings]
    size = max(row.shape[0] for row in candidates)
    candidates = [
        jnp.pad(row, (0, size - row.shape[0]), constant_values=rows.num_rows)
        for rows, row in zip(groupings, candidates, strict=True)
    ]
    starts = [take(r.offsets, row) for r, row in zip(groupings, candidates, strict=True)]
    ends = [
        take(r.offsets, jax.lax.min(row + 1, np.int32(r.num_rows)))
        for r, row in zip(groupings, candidates, strict=True)
    ]
    placed = jax.vmap(
        partial(
            _place_long_segments,
            max_long_segments=max(r.most_long_segments for r in groupings),
            max_chunks=max(r.most_chunks for r in groupings),
        )
    )(
        jnp.stack(candidates),
        jnp.stack(ends) - jnp.stack(starts),
        jnp.array([rows.chunk for rows in groupings], jnp.int32),
        jnp.array([rows.num_rows for rows in groupings], jnp.int32),
    )
    return [
        _long_segment_arrays(grouping, candidates[i], starts[i], ends[i], *(array[i] for array in placed))
        if grouping.most_long_segments
        else None
        for i, grouping in enumerate(groupings)
    ]


def _place_long_segments(
    rows: Array, counts: Array, chunk: Array, num_rows: Array, *, max_long_segments: int, max_chunks: int
) -> tuple[Array, Array, Array, Array]:
    """Finds the long segments among candidate `rows`, whose segments have `counts` entries.

    Returns:
        int32[max_long_segments + 1], the row of each long segment, `num_rows` where unused.
        int32[max_long_segments + 1], the first chunk of each long segment, the number of chunks where unused.
        int32[max_chunks], the candidate that each chunk belongs to.
        int32[candidates], the first chunk of each candidate.
    """
    is_long = (counts > chunk) & begins_run(rows)
    pieces = jnp.where(is_long, (counts + chunk - 1) // chunk, 0)
    counted = jnp.stack([is_long.astype(jnp.int32), pieces])
    last = jnp.cumsum(counted, axis=1, dtype=jnp.int32)
    (segment, first_chunk), total = last - counted, last[1, -1]
    position = jnp.arange(rows.shape[0], dtype=jnp.int32)
    # Read by gathers, not sliced: XLA (of jax 0.11 and 0.12) fails on a scatter that is read only by two slices of
    # different lengths.
    of_long_segment = put_where(jnp.full(max_long_segments + 1, -1, jnp.int32), is_long, segment, position)
    there = jax.lax.max(of_long_segment, np.int32(0))
    long_segment_rows = jnp.where(of_long_segment >= 0, take(rows, there), num_rows)
    long_segment_offsets = jnp.where(of_long_segment >= 0, take(first_chunk, there), total)
    # A chunk belongs to the last long segment that begins at or before it.
    of_chunk = jax.lax.cummax(put_where(jnp.zeros(max_chunks, jnp.int32), is_long, first_chunk, position))
    return long_segment_rows, long_segment_offsets, of_chunk, first_chunk


def _long_segment_arrays(
    grouping: Rows,
    rows: Array,
    starts: Array,
    ends: Array,
    long_segment_rows: Array,
    long_segment_offsets: Array,
    of_chunk: Array,
    first_chunk: Array,
) -> LongSegmentArrays:
    """The table of one grouping: `rows`, `starts`, `ends` of candidates, and what `_place_long_segments` returns."""
    long_segments, chunks = grouping.most_long_segments, grouping.most_chunks
    long_segment_offsets, of_chunk = long_segment_offsets[: long_segments + 1], of_chunk[:chunks]
    number = jnp.arange(chunks, dtype=jnp.int32)
    used = number < long_segment_offsets[-1]
    num_valid = grouping.offsets[-1]
    start = jnp.where(used, take(starts, of_chunk) + (number - take(first_chunk, of_chunk)) * grouping.chunk, num_valid)
    end = jnp.where(used, jnp.minimum(start + grouping.chunk, take(ends, of_chunk)), num_valid)
    chunk_row = jnp.where(used, take(rows, of_chunk), grouping.num_rows)
    return long_segment_rows[:long_segments], long_segment_offsets, chunk_row, start, end


@dataclass(frozen=True, slots=True)
class Tiles:
    """The types of several groupings in tiles, as in `TileTable`, for several sizes of a tile.

    Attributes:
        row_type: int32[groupings, sizes, tiles], the type of each tile; 0 where unused.
        start: int32[groupings, sizes, tiles], its first position; where unused, the number of valid entries.
        end: int32[groupings, sizes, tiles], the position after its last one; that of `start` where unused.
        first: int32[groupings, sizes, types + 1], the first tile of each type.
        counts: for each grouping and size the number of tiles, unused ones included (static); `row_type`, `start` and
            `end` may be longer.
        num_types: for each grouping (static); `first` may be longer.
    """

    row_type: Array
    start: Array
    end: Array
    first: Array
    counts: list[list[int]]
    num_types: list[int]


def tile_arrays(groupings: Sequence[tuple[Array, int]], blocks: Sequence[Sequence[int]], multiple: int = 1) -> Tiles:
    """The tiles of each grouping in each of its sizes, all made together.

    Args:
        groupings: offsets (int32[types + 1]) and number of entries, padding included.
        blocks: positions per tile, as many sizes for each grouping.
        multiple: the last axes of all arrays are multiples of it.
    """
    num_types = [offsets.shape[0] - 1 for offsets, _ in groupings]
    most_types = -(-(max(num_types) + 1) // multiple) * multiple
    # Offsets are padded to one length: types that a grouping lacks begin at its end.
    stacked = jnp.stack([jnp.pad(offsets, (0, most_types - offsets.shape[0]), mode="edge") for offsets, _ in groupings])
    counts = [
        [entries // block + types for block in own]
        for (_, entries), types, own in zip(groupings, num_types, blocks, strict=True)
    ]
    size = -(-max(max(some) for some in counts) // multiple) * multiple
    of_block = jax.vmap(partial(_tiles_of, size=size), (None, 0))
    return Tiles(*jax.vmap(of_block)(stacked, jnp.array(blocks, jnp.int32)), counts, num_types)


def _tiles_of(offsets: Array, block: Array, *, size: int) -> tuple[Array, Array, Array, Array]:
    counts = offsets[1:] - offsets[:-1]
    first_tile = count_before((counts + block - 1) // block)
    tile = jnp.arange(size, dtype=jnp.int32)
    row = row_of_positions(first_tile, size)
    used = tile < first_tile[-1]
    row = jnp.where(used, row, 0)
    start = jnp.where(used, take(offsets, row) + (tile - take(first_tile, row)) * block, offsets[-1])
    end = jnp.where(used, jax.lax.min(start + block, take(offsets, row + 1)), start)
    return row, start, end, first_tile
