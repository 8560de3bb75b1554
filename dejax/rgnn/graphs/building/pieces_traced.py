"""Long segments cut in chunks, and types in tiles, inside `jax.jit`: tables with static bounds.

The tables of several groupings are made together, so that they share ten to twenty kernels of 2 us on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.pallas import LongSegmentTable
from dejax.rgnn.graphs.building.sorting_traced import (
    begins_run,
    count_before,
    cumulative_sum,
    put_where,
    row_of_positions,
    take,
)

# Traversals merge a segment's chunks in groups of 32 and then these groups, each by one program. Four times as many
# chunks of a node with 44 % of 3 M edges, in groups of 64, take 0.98 to 1.00 times as long.
_MOST_CHUNKS = 1024


def chunk_length(xp: ModuleType, counts: Any, chunk: Any) -> Any:
    """The entries of each chunk of long segments with `counts` entries: `chunk`, and more where they have very many."""
    return xp.maximum(chunk, -(-counts // _MOST_CHUNKS)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """A grouping whose long segments are to be cut.

    Attributes:
        offsets: int32[rows + 1], where the entries of each row begin.
        num_entries: number of entries, padding included.
        chunk: the most entries of a row that is not cut.
        row_at: gives the row of each position in an array; the number of rows for padding.
    """

    offsets: Array
    num_entries: int
    chunk: int
    row_at: Callable[[Array], Array]

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
        return self.row_at(jnp.asarray(positions))


def long_segment_tables(groupings: Sequence[Rows]) -> list[LongSegmentTable | None]:
    """The long segments of each grouping; None where it can have none."""
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
    made = jax.vmap(partial(_chunks, size=max(r.most_chunks for r in groupings)))(
        jnp.stack(candidates),
        jnp.stack(starts),
        jnp.stack(ends),
        jnp.array([rows.chunk for rows in groupings], jnp.int32),
        jnp.array([rows.num_rows for rows in groupings], jnp.int32),
        jnp.stack([rows.offsets[-1] for rows in groupings]),
    )
    return [
        LongSegmentTable(rows.chunk, *(array[i, : rows.most_chunks] for array in made))
        if rows.most_long_segments
        else None
        for i, rows in enumerate(groupings)
    ]


def _chunks(
    rows: Array, starts: Array, ends: Array, chunk: Array, num_rows: Array, num_valid: Array, *, size: int
) -> tuple[Array, Array, Array, Array, Array]:
    """The arrays of a `LongSegmentTable` with `size` chunks, from candidate rows and where their entries are."""
    counts = ends - starts
    is_long = (counts > chunk) & begins_run(rows)
    length = chunk_length(jnp, counts, chunk)
    pieces = jnp.where(is_long, (counts + length - 1) // length, 0)
    after = cumulative_sum(pieces)
    first = after - pieces
    # A chunk belongs to the last long segment that begins at or before it.
    position = jnp.arange(rows.shape[0], dtype=jnp.int32)
    of = jax.lax.cummax(put_where(jnp.zeros(size, jnp.int32), is_long, first, position))
    number = jnp.arange(size, dtype=jnp.int32)
    used, first, length = number < after[-1], take(first, of), take(length, of)
    start = jnp.where(used, take(starts, of) + (number - first) * length, num_valid)
    end = jnp.where(used, jnp.minimum(start + length, take(ends, of)), num_valid)
    row = jnp.where(used, take(rows, of), num_rows)
    return row, start, end, jnp.where(used, first, 0), jnp.where(used, take(pieces, of), 0)


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
    first_tile = count_before(jax.lax.div(counts + block - 1, jnp.broadcast_to(block, counts.shape)))
    tile = jnp.arange(size, dtype=jnp.int32)
    row = row_of_positions(first_tile, size)
    used = tile < first_tile[-1]
    row = jnp.where(used, row, 0)
    start = jnp.where(used, take(offsets, row) + (tile - take(first_tile, row)) * block, offsets[-1])
    end = jnp.where(used, jax.lax.min(start + block, take(offsets, row + 1)), start)
    return row, start, end, first_tile
