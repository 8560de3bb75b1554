"""Segments (CSR): entries grouped by a row of a coarser space, with the tables that kernels read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jax import Array

from dejax._pytrees import pytree
from dejax.pallas import LongSegmentTable
from dejax.pallas.products.product_schedule import TILE_BLOCKS
from dejax.rgnn.graphs.building.pieces_traced import Rows, long_segment_tables, tile_arrays
from dejax.rgnn.graphs.building.sorting_traced import take
from dejax.rgnn.graphs.tables import (
    LONG_SEGMENT_CHUNK,
    LoopOrder,
    TileTable,
    TypeSplits,
    chunk_of,
    long_segment_table,
    loop_order,
    split_table,
    tile_table,
)

_STATIC: dict[str, Any] = {"static": True}
Key = TypeVar("Key", bound=Hashable)
Grouping = tuple[Any, Any, Any]
"""Index, order (or None) and offsets of a `Segments`."""
# The maximum number of positions of a split in `near_splits`. There must be several times as many splits as programs
# that run at once: RGCN's weight gradient on 12.7 M pairs took 1.29 ms by type, 1.10 ms with 2,048, 1.18 ms with 1,024.
_NEAR_SPLIT = 2048


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Entries (edges, pairs or nodes) grouped by a row of a coarser space (nodes, pairs or types), as in CSR.

    The segment of row `r` has the entries `order[offsets[r]:offsets[r + 1]]`, in ascending order. Where `order` is None
    it has the entries `offsets[r]` to `offsets[r + 1]`. Padding entries belong to no segment.

    Attributes:
        index: int32[entries], the row of each entry; `num_rows` for padding entries.
        order: int32[entries], entry ids sorted stably by row, padding last; None where entries are sorted by row.
        offsets: int32[rows + 1]; `offsets[rows]` is the number of valid entries.
        long_segments: the long segments; None where the sizes alone exclude any.
        tiles: where the rows are types, one table for each of `TILE_BLOCKS`; otherwise empty.
        splits: where the rows are types, how sums over the entries of a type are split; otherwise None.
        loop: the order in which kernels take the rows; None unless `RelGraph.with_loop_tables` was called.
        near_tiles: for grouped GEMMs that gather rows of nodes, the tiles ordered by the node that their first position
            reads; empty unless `RelGraph.with_loop_tables` was called.
        near_splits: the splits in the same order; None unless `RelGraph.with_loop_tables` was called.
        num_rows: number of rows (static).
        num_entries: number of entries, padding included (static).
    """

    index: Array
    order: Array | None
    offsets: Array
    long_segments: LongSegmentTable | None
    tiles: tuple[TileTable, ...]
    num_rows: int = field(metadata=_STATIC)
    num_entries: int = field(metadata=_STATIC)
    splits: TypeSplits | None = None
    loop: LoopOrder | None = None
    near_tiles: tuple[TileTable, ...] = ()
    near_splits: TypeSplits | None = None

    def counts(self) -> Array:
        """Number of entries of each row: int32[rows]."""
        return self.offsets[1:] - self.offsets[:-1]

    def with_loop(self, long_segment_chunk: int = LONG_SEGMENT_CHUNK, first: int | None = None) -> Segments:
        """The same grouping with `loop`. Where entries are sorted by row, kernels need none: reads are contiguous.

        Args:
            long_segment_chunk: the maximum number of entries of a chunk.
            first: the number of rows that come before all others.
        """
        if self.order is None or self.loop is not None:
            return self
        loop = loop_order(np.asarray(self.offsets), np.asarray(self.order), long_segment_chunk, first)
        return dataclasses.replace(self, loop=loop)

    def with_near_tiles(self, node: Any) -> Segments:
        """The same grouping with `near_tiles` and `near_splits`, for positions that are sorted by type and node.

        Programs run in the order of the tables. In order of nodes, tiles of different types that read the same nodes
        run at about the same time and find them in the cache. In order of types, each type would read them again.

        Args:
            node: int32[entries], the node that each position reads.
        """
        if self.near_tiles or not any(table.start.shape[0] for table in self.tiles):
            return self
        nodes, last = np.asarray(node), max(int(self.offsets[-1]) - 1, 0)

        def order(start: Any) -> np.ndarray:
            read = nodes[np.minimum(start, last)]  # unused tiles start past the last position
            return np.argsort(read, kind="stable").astype(np.int32)

        tiles = []
        for table in self.tiles:
            row_type, start = np.asarray(table.row_type), np.asarray(table.start)
            by_node = order(start)
            tiles.append(TileTable(row_type[by_node], start[by_node], table.block))
        splits = near_split_table(np.asarray(self.offsets), self.num_entries)
        number = order(splits.start)
        splits = dataclasses.replace(splits, start=splits.start[number], end=splits.end[number], number=number)
        return dataclasses.replace(self, near_tiles=tuple(tiles), near_splits=splits)

    def tiles_for(self, block: int, near: bool = False) -> TileTable:
        """The table of tiles with `block` positions, stored or made now; with `near`, `near_tiles` where stored."""
        for table in (*(self.near_tiles if near else ()), *self.tiles):
            if table.block == block:
                return table
        return tile_table(self.offsets, block, self.num_entries)


def near_split_table(offsets: np.ndarray, num_entries: int) -> TypeSplits:
    """The splits of `near_splits`, in order of types."""
    return split_table(offsets, num_entries, _NEAR_SPLIT)


def make_segments(
    groupings: Mapping[Key, Grouping], *, long_segment_chunk: int, typed: Collection[Key] = ()
) -> dict[Key, Segments]:
    """Groupings of numpy arrays with their long segments and, where their rows are types, their tiles and splits.

    Args:
        groupings: index, order (or None) and offsets of each grouping.
        long_segment_chunk: the maximum number of entries of a chunk.
        typed: the groupings whose rows are types.
    """
    found = {}
    for name, (index, order, offsets) in groupings.items():
        entries, rows_are_types = index.shape[0], name in typed
        chunk = chunk_of(long_segment_chunk, entries, rows_are_types)
        found[name] = Segments(
            index=index,
            order=order,
            offsets=offsets,
            long_segments=long_segment_table(offsets, chunk),
            tiles=tuple(tile_table(offsets, block, entries) for block in TILE_BLOCKS) if rows_are_types else (),
            splits=split_table(offsets, entries) if rows_are_types else None,
            num_rows=offsets.shape[0] - 1,
            num_entries=entries,
        )
    return found


def bounded_segments(
    groupings: Mapping[Key, Grouping],
    *,
    long_segment_chunk: int,
    typed: Collection[Key] = (),
    tiled: bool = True,
) -> dict[Key, Segments]:
    """As `make_segments`, inside jit: tables have static bounds, and those of all groupings are made together.

    Args:
        groupings: index, order (or None) and offsets of each grouping.
        long_segment_chunk: the maximum number of entries of a chunk.
        typed: the groupings whose rows are types.
        tiled: whether these have their tiles; otherwise `packed_tiles` makes them.
    """

    def row_at(index: Array, order: Array | None, positions: Array) -> Array:
        return take(index, positions if order is None else take(order, positions))

    rows = {}
    for name, (index, order, offsets) in groupings.items():
        chunk = chunk_of(long_segment_chunk, index.shape[0], name in typed)
        rows[name] = Rows(offsets, index.shape[0], chunk, partial(row_at, index, order))
    long_segments = dict(zip(rows, long_segment_tables(list(rows.values())), strict=True))
    tiles = _bounded_tiles({name: rows[name] for name in typed}) if tiled else {}
    return {
        name: Segments(
            index=index,
            order=order,
            offsets=offsets,
            long_segments=long_segments[name],
            tiles=tiles.get(name, ()),
            num_rows=rows[name].num_rows,
            num_entries=rows[name].num_entries,
        )
        for name, (index, order, offsets) in groupings.items()
    }


def _bounded_tiles(typed: Mapping[Key, Rows]) -> dict[Key, tuple[TileTable, ...]]:
    """The tiles of groupings whose rows are types."""
    if not typed:
        return {}
    made = tile_arrays([(rows.offsets, rows.num_entries) for rows in typed.values()], [TILE_BLOCKS] * len(typed))
    found = {}
    for i, name in enumerate(typed):
        sizes = enumerate(zip(made.counts[i], TILE_BLOCKS, strict=True))
        found[name] = tuple(
            TileTable(made.row_type[i, b, :size], made.start[i, b, :size], block) for b, (size, block) in sizes
        )
    return found
