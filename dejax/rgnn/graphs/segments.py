"""Items grouped by row: the offset, hub and tile tables that every kernel of the compiler walks.

The tables are made once for each graph. The same code makes them with numpy (exact sizes) and, inside `jax.jit`, with
jax.numpy (static upper bounds, whose unused entries cover no item).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.pallas.products.schedule import rows_per_split
from dejax.rgnn.graphs.checks import is_traced
from dejax.rgnn.graphs.pieces_traced import Rows, hub_arrays, tile_arrays
from dejax.rgnn.graphs.sorting import expand, stable_argsort

TILE_BLOCKS = (32, 64, 128)
"""Rows a tile for which type segments keep a stored `TileTable`."""

# 128: softmax-weighted sums on biokg took 0.37 ms on an H200, with chunks of 1,024 items 0.59.
HUB_CHUNK = 128
"""Rows with more items than this are split in chunks of this many items."""

_STATIC: dict[str, Any] = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Tiles of up to `block` positions, none of which crosses from one type to the next.

    A tile covers positions `start` to `min(start + block, offsets[row_type + 1])` of the grouped order, where `offsets`
    are those of the `Segments` that the table belongs to. Their number is O(items / block + types).

    Attributes:
        row_type: int32[tiles], the type of each tile; 0 for unused tiles.
        start: int32[tiles], the first position of each tile; the number of valid items for unused tiles, so that no
            position of an unused tile is in range.
        block: positions a tile (static).
    """

    row_type: Array
    start: Array
    block: int = field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, eq=False)
class HubTable:
    """The rows with more than `chunk` items, cut in chunks of at most `chunk` items.

    Attributes:
        rows: int32[hubs], ascending ids of the hub rows; the number of rows where unused.
        offsets: int32[hubs + 1]; hub `h` has the chunks `offsets[h]` to `offsets[h + 1]`.
        chunk_row: int32[chunks], the row of each chunk; the number of rows where unused.
        chunk_start: int32[chunks], the first position (in the grouped order) of each chunk.
        chunk_end: int32[chunks], the position after the last one; equal to `chunk_start` where unused.
        chunk: the most items that a chunk, or a row that is no hub, has (static).
        chunk_hub: int32[chunks], the hub of each chunk, where the last chunk of a hub is to merge them; else None, and
            a kernel of its own does.
    """

    rows: Array
    offsets: Array
    chunk_row: Array
    chunk_start: Array
    chunk_end: Array
    chunk: int = field(metadata=_STATIC)
    chunk_hub: Any = None

    @property
    def tables(self) -> tuple[Any, ...]:
        """As `dejax.pallas.traverse` takes them."""
        found = (self.chunk, self.rows, self.offsets, self.chunk_row, self.chunk_start, self.chunk_end)
        return found if self.chunk_hub is None else (*found, self.chunk_hub)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """Each type's items in splits that programs sum one by one (`dejax.pallas.products.weight_gradient.split_table`).

    Attributes:
        start: int32[splits], the first position of each split.
        end: int32[splits], the position after its last one.
        first: int32[types + 1]; type `t` has the splits `first[t]` to `first[t + 1]` by number.
        rows_per_split: positions a split at most (static).
        number: int32[splits], the number of each split; None where that is its place.
    """

    start: Any
    end: Any
    first: Any
    rows_per_split: int = field(metadata=_STATIC)
    number: Any = None

    @property
    def tables(self) -> tuple[Array, Array, Array, Array | None]:
        return self.start, self.end, self.first, self.number


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, eq=False)
class LoopOrder:
    """The rows of a grouping in the order in which kernels take them: rows with many items side by side.

    Attributes:
        rows: int32[rows], a permutation.
        offsets: int32[rows + 1]; the items of row `rows[i]` are `order[offsets[i]:offsets[i + 1]]`.
        order: int32[items], item ids in that order.
        hubs: hub rows by number, their chunks by positions in that order.
    """

    rows: Any
    offsets: Any
    order: Any
    hubs: HubTable | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Items (edges, pairs or nodes) grouped by the row of a coarser space (nodes, pairs or types).

    The items of row `r` are `order[offsets[r]:offsets[r + 1]]`, ascending within a row; where `order` is None they are
    `offsets[r]` to `offsets[r + 1]` themselves. Padding items belong to no row.

    Attributes:
        index: int32[items], the row of each item in the items' own order; `num_rows` for padding items.
        order: int32[items], item ids sorted stably by row with padding last; None where the items already are.
        offsets: int32[rows + 1]; `offsets[rows]` is the number of valid items.
        hubs: the rows that a kernel should split, or None when it is statically known that there is none.
        tiles: where the rows are types, one table for each of `TILE_BLOCKS`; otherwise empty.
        splits: where the rows are types, how sums over the items of a type are split; None where it was traced.
        loop: the rows as kernels take them; None where `RelGraph.with_loop_tables` was not called.
        near_tiles: the tiles for products that gather rows of nodes, by the node that their first position reads; empty
            where `RelGraph.with_loop_tables` was not called.
        near_splits: the splits likewise.
        num_rows: number of rows (static).
        num_items: number of items, padding included (static).
    """

    index: Array
    order: Array | None
    offsets: Array
    hubs: HubTable | None
    tiles: tuple[TileTable, ...]
    num_rows: int = field(metadata=_STATIC)
    num_items: int = field(metadata=_STATIC)
    splits: SplitTable | None = None
    loop: LoopOrder | None = None
    near_tiles: tuple[TileTable, ...] = ()
    near_splits: SplitTable | None = None

    def counts(self) -> Array:
        """Number of items of each row: int32[rows]."""
        return self.offsets[1:] - self.offsets[:-1]

    def with_loop(self, hub_chunk: int = HUB_CHUNK, beside: Segments | None = None) -> Segments:
        """The same with `loop`; without where items are sorted by row, whose tables are read in order as they are.

        `beside` groups other items by the same rows: rows of as many items are sorted by how many of those they have,
        because a loop may take both.
        """
        if self.order is None or self.loop is not None:
            return self
        others = None if beside is None else np.asarray(beside.counts())
        loop = loop_order(np.asarray(self.offsets), np.asarray(self.order), hub_chunk, others)
        return dataclasses.replace(self, loop=loop)

    def with_near_tiles(self, node: Any) -> Segments:
        """The same with `near_tiles` and `near_splits`, for positions that are sorted by type and node.

        Programs run in the order of the tables. Tiles of all types that read nodes of one neighbourhood run together
        and find each other's rows in the cache; type after type, every type would fetch them anew.

        Args:
            node: int32[items], the node that each position reads.
        """
        if self.near_tiles or (valid := int(self.offsets[-1])) == 0:
            return self
        nodes = np.asarray(node)

        def order(start: Any) -> np.ndarray:
            read = nodes[np.minimum(start, valid - 1)]  # unused tiles start past the last position
            return np.argsort(read, kind="stable").astype(np.int32)

        tiles = []
        for table in self.tiles:
            row_type, start = np.asarray(table.row_type), np.asarray(table.start)
            by_node = order(start)
            tiles.append(TileTable(row_type[by_node], start[by_node], table.block))
        splits = _split_table(np.asarray(self.offsets), self.num_items, _NEAR_SPLIT)
        number = order(splits.start)
        splits = dataclasses.replace(splits, start=splits.start[number], end=splits.end[number], number=number)
        return dataclasses.replace(self, near_tiles=tuple(tiles), near_splits=splits)

    def tiles_for(self, block: int, near: bool = False) -> TileTable:
        """The tile table for `block` positions a tile: the stored one, or one made now; `near` where there is one."""
        for table in (*(self.near_tiles if near else ()), *self.tiles):
            if table.block == block:
                return table
        return tile_table(self.offsets, block, self.num_items)


# Positions of a split that gathers rows of nodes, at most. Several times as many programs as run at once: RGCN's weight
# gradient on 12.7 M pairs of 2.5 M nodes took 1.29 ms by type, 1.10 with this and 1.18 with 1,024.
_NEAR_SPLIT = 2048

# Rows are sorted by length within blocks of this many, so that what they read and write stays close together: on
# 2.5 M rows of 6.4 items on average 1.36 ms, sorted throughout 1.50, unsorted 1.42.
_SORTED_BLOCK = 4096
# Up to so many items the cache holds that, and rows are sorted throughout. RGAT's backward loop on 0.67 M items 77 ->
# 51 us, RGCN's loop on 0.62 M 36 -> 33; on 4.8 M items HGT's 544 -> 622.
_SORTED_THROUGHOUT = 1 << 20


# Up to so many items loops merge a hub's chunks as the last of them is done, a launch less: two forward loops of bgs
# 35.7 -> 33.0 us and 47.3 -> 39.4. Loops of larger graphs lose more than the launch: am's 766 + 5 -> 884, biokg's 335 +
# 13 -> 384.
_COUNTED_ITEMS = 1 << 20


def hub_chunk_of(num_items: int, num_rows: int) -> int:
    """Items of a chunk that leave enough programs for the whole machine, and most rows in one piece."""
    # mutag's RGAT training 119 us, with chunks of 32 122, of 16 121 and of 48 131; bgs' 276 and, of 96, 293.
    least = HUB_CHUNK if num_items > 2_000_000 else 64 if num_items > 400_000 else 24
    # Rows of fb15k have 43 items on average: RGAT's forward 95 us with chunks of 64, 91 with 96. Its nodes have 24
    # pairs: their sums 26 us with 32, 30 with 24.
    several = 32 * math.ceil(2 * num_items / (32 * num_rows))
    return least if several <= 32 else min(HUB_CHUNK, max(least, several))


def type_chunk_of(num_items: int) -> int:
    """The same where rows are types, and `hub_chunk` is left at its default."""
    # Types are few and large: with chunks of 128 the second reduction would have as much to do as the first. On small
    # graphs the longest chunk decides: aifb's edges summed by type in chunks of up to 2,048 took 91 us.
    return 2048 if num_items > 2_000_000 else 512 if num_items > 400_000 else 256


def loop_order(
    offsets: np.ndarray, order: np.ndarray, hub_chunk: int, others: np.ndarray | None = None
) -> LoopOrder | None:
    """The order in which kernels take rows, by numpy; None where there are too few rows or items for one.

    `others` are counts by which rows of as many items are sorted.
    """
    num_rows, num_items = offsets.shape[0] - 1, order.shape[0]
    if num_rows < 2 or num_items == 0:
        return None
    counts = np.diff(offsets)
    longest = int(counts.max())
    keys, bounds = [longest - counts], [longest + 1]
    if num_items > _SORTED_THROUGHOUT:
        keys.insert(0, np.arange(num_rows, dtype=np.int32) // _SORTED_BLOCK)
        bounds.insert(0, num_rows // _SORTED_BLOCK + 1)
    if others is not None:
        most = int(others.max())
        keys, bounds = [*keys, most - others], [*bounds, most + 1]
    rows = stable_argsort(keys, bounds)
    positions, begins = expand(rows, offsets)
    items = order[positions]
    if items.shape[0] < num_items:  # padding items stay last
        items = np.concatenate([items, order[items.shape[0] :]])
    chunk = min(hub_chunk, hub_chunk_of(num_items, num_rows))
    hubs = hub_table(begins, chunk, num_items, counted=num_items <= _COUNTED_ITEMS)
    if hubs is not None:
        hubs = dataclasses.replace(hubs, rows=rows[hubs.rows], chunk_row=rows[hubs.chunk_row])
    return LoopOrder(rows, begins, items, hubs)


def _exactly(offsets: Any, exact: bool | None) -> tuple[Any, bool]:
    """Offsets as an array of numpy where the table is to be exact, of jax otherwise, and which of the two."""
    exact = not is_traced(offsets) if exact is None else exact
    return (np.asarray(offsets), True) if exact else (jnp.asarray(offsets), False)


def _like(offsets: Any, array: Any) -> Any:
    """`array` as int32, as numpy where `offsets` is numpy and as a jax.Array otherwise."""
    return array.astype(np.int32) if isinstance(offsets, np.ndarray) else jnp.asarray(array, jnp.int32)


def _exclusive_sum(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])


def tile_table(offsets: Any, block: int, num_items: int, *, exact: bool | None = None) -> TileTable:
    """Cuts each type's positions in tiles of `block`.

    Args:
        offsets: int32[types + 1], where the positions of each type begin; numpy, jax.Array or tracer.
        block: positions a tile, at least 1.
        num_items: number of positions, padding included; bounds the table where it is not exact.
        exact: whether to size the table by the numbers in `offsets` or by a static bound; None: exact unless traced.

    Returns:
        The table: `sum(ceil(count / block))` tiles where exact, otherwise `num_items // block + types` tiles, unused
        ones last.

    Raises:
        ValueError: if `block` is less than 1.

    >>> table = tile_table(np.array([0, 3, 3, 8]), 4, 8)
    >>> table.row_type, table.start
    (array([0, 2, 2], dtype=int32), array([0, 3, 7], dtype=int32))
    """
    if block < 1:
        raise ValueError(f"block must be at least 1 position a tile, got {block}")
    off, exact = _exactly(offsets, exact)
    if not exact:
        return TileTable(*tile_arrays([(off, num_items)], [block])[0][0], block)
    first_tile = _exclusive_sum(-(-(off[1:] - off[:-1]) // block))
    tile = np.arange(first_tile[-1], dtype=np.int32)
    row = np.searchsorted(first_tile, tile, side="right") - 1
    start = off[row] + (tile - first_tile[row]) * block
    return TileTable(_like(offsets, row), _like(offsets, start), block)


def hub_table(
    offsets: Any, chunk: int, num_items: int, *, exact: bool | None = None, counted: bool = False
) -> HubTable | None:
    """Lists the rows with more than `chunk` items, in chunks of `chunk` items.

    Args:
        offsets: int32[rows + 1], where the items of each row begin; numpy, jax.Array or tracer.
        chunk: the most items that a row may have without being a hub, at least 1.
        num_items: number of items, padding included; bounds the table where it is not exact.
        exact: whether to size the table by the numbers in `offsets` or by a static bound; None: exact unless traced.
        counted: whether an exact table says the hub of each chunk.

    Returns:
        None where no row can be a hub; otherwise the exact table, or one with room for
        `h = min(rows, num_items // (chunk + 1))` hubs and `num_items // chunk + h` chunks.

    Raises:
        ValueError: if `chunk` is less than 1.
    """
    if chunk < 1:
        raise ValueError(f"hub_chunk must be at least 1 item a chunk, got {chunk}")
    off, exact = _exactly(offsets, exact)
    if not exact:
        arrays = hub_arrays([Rows(off, num_items, chunk)])[0]
        return None if arrays is None else HubTable(*arrays, chunk)
    rows = np.flatnonzero(off[1:] - off[:-1] > chunk).astype(np.int32)
    if rows.shape[0] == 0:
        return None
    first_chunk = _exclusive_sum(-(-(off[rows + 1] - off[rows]) // chunk))
    ids = np.arange(first_chunk[-1], dtype=np.int32)
    hub = np.searchsorted(first_chunk, ids, side="right") - 1
    row = rows[hub]
    start = off[row] + (ids - first_chunk[hub]) * chunk
    end = np.minimum(start + chunk, off[row + 1])
    rows, first_chunk, row, start, end = (_like(offsets, array) for array in (rows, first_chunk, row, start, end))
    return HubTable(rows, first_chunk, row, start, end, chunk, _like(offsets, hub) if counted else None)


def make_segments(index: Any, order: Any, offsets: Any, *, hub_chunk: int, typed: bool = False) -> Segments:
    """A `Segments` of numpy arrays with its hub table and, where its rows are types (`typed`), its tile tables."""
    num_items = index.shape[0]
    chunk = _chunk_of(hub_chunk, num_items, typed)
    return Segments(
        index=index,
        order=order,
        offsets=offsets,
        hubs=hub_table(offsets, chunk, num_items),
        tiles=tuple(tile_table(offsets, block, num_items) for block in TILE_BLOCKS) if typed else (),
        splits=_split_table(offsets, num_items) if typed else None,
        num_rows=offsets.shape[0] - 1,
        num_items=num_items,
    )


def bounded_segments(
    groupings: Mapping[str, tuple[Array, Array | None, Array]], *, hub_chunk: int, typed: Collection[str] = ()
) -> dict[str, Segments]:
    """As `make_segments`, inside jit: tables are sized by static bounds, and made for all of the groupings at once.

    Args:
        groupings: index, order (or None) and offsets of each.
        hub_chunk: the hub chunk.
        typed: the groupings whose rows are types.
    """

    def row_at(index: Array, order: Array | None, positions: Array) -> Array:
        return index[positions if order is None else order[positions]]

    rows, tiles = {}, {}
    for name, (index, order, offsets) in groupings.items():
        chunk = _chunk_of(hub_chunk, index.shape[0], name in typed)
        rows[name] = Rows(offsets, index.shape[0], chunk, partial(row_at, index, order))
    hubs = dict(zip(rows, hub_arrays(list(rows.values())), strict=True))
    if typed:
        arrays = tile_arrays([(rows[name].offsets, rows[name].num_items) for name in typed], TILE_BLOCKS)
        for name, tables in zip(typed, arrays, strict=True):
            tiles[name] = tuple(TileTable(*t, block) for t, block in zip(tables, TILE_BLOCKS, strict=True))
    return {
        name: Segments(
            index=index,
            order=order,
            offsets=offsets,
            hubs=None if (table := hubs[name]) is None else HubTable(*table, rows[name].chunk),
            tiles=tiles.get(name, ()),
            num_rows=rows[name].num_rows,
            num_items=rows[name].num_items,
        )
        for name, (index, order, offsets) in groupings.items()
    }


def _chunk_of(hub_chunk: int, num_items: int, typed: bool) -> int:
    return type_chunk_of(num_items) if typed and hub_chunk == HUB_CHUNK else hub_chunk


def _split_table(offsets: np.ndarray, num_items: int, limit: int | None = None) -> SplitTable:
    """Splits of the usual size, or of at most `limit` positions."""
    types = offsets.shape[0] - 1
    size = rows_per_split(num_items, types)
    size = size if limit is None else min(size, limit)
    if size >= num_items:  # one split a type
        return SplitTable(offsets[:-1], offsets[1:], np.arange(types + 1, dtype=np.int32), size)
    tiles = tile_table(offsets, size, num_items, exact=True)
    start, row = np.asarray(tiles.start), np.asarray(tiles.row_type)
    first = np.searchsorted(row, np.arange(types + 1)).astype(np.int32)
    return SplitTable(start, np.minimum(start + size, offsets[row + 1]).astype(np.int32), first, size)
