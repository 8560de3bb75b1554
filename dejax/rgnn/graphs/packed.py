"""The tables of a graph that only kernels read, packed into one array.

A graph has some 120 of them: long segments, tiles and splits of each grouping, and the orders in which kernels take
rows. A call of a compiled step costs about a microsecond per argument array, so the tables are one array, of which
kernels read slices (`TableSlice`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax._pytrees import pytree
from dejax.pallas import TableSlice
from dejax.pallas.products.product_schedule import TILE_BLOCKS, rows_per_split
from dejax.rgnn.graphs.building.pieces_traced import tile_arrays
from dejax.rgnn.graphs.segments import Segments
from dejax.rgnn.graphs.tables import TileTable, TypeSplits

# Slices begin at multiples of this many elements, 256 bytes, as arrays do: kernels load several elements at once.
_ALIGNED = 64
# The fields of a grouping that are packed, and their values in the grouping that is left.
_FIELDS: dict[str, Any] = {"long_segments": None, "tiles": (), "splits": None, "near_tiles": (), "near_splits": None}
# Up to this many entries `loop` is packed, too. On more entries a call takes longer than passing its arguments.
_SMALL = 1 << 22


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tables of a grouping are.

    Attributes:
        places: first element and size of each table.
        tree: the pytree structure of the tables.
    """

    places: tuple[tuple[int, int], ...]
    tree: Any


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class PackedTables:
    """Tables of several groupings.

    Attributes:
        numbers: int32[elements], all tables one after the other.
        layouts: name and layout of each grouping (static).
    """

    numbers: Any
    layouts: tuple[tuple[str, Layout], ...] = field(metadata={"static": True})

    def onto(self, name: str, group: Segments) -> Segments:
        """The grouping with its tables, as `TableSlice`s."""
        layout = dict(self.layouts).get(name)
        if layout is None:
            return group
        slices = [TableSlice(self.numbers, *place) for place in layout.places]
        tables = jax.tree_util.tree_unflatten(layout.tree, slices)
        if group.loop is not None:  # of a large grouping: only its long segments are packed
            tables["loop"] = dataclasses.replace(group.loop, long_segments=tables["loop"].long_segments)
        return dataclasses.replace(group, **tables)


def pack(groups: Mapping[str, Segments]) -> tuple[dict[str, Any], PackedTables]:
    """Moves the tables of groupings into one array.

    Args:
        groups: groupings of numpy arrays by name.

    Returns:
        The groupings without these tables, and the packed tables; a table in two groupings is packed once.
    """
    parts: list[np.ndarray] = []
    places: dict[int, tuple[int, int]] = {}
    layouts, rest = [], {}
    size = 0
    for name, group in groups.items():
        tables, left = {key: getattr(group, key) for key in _FIELDS}, dict(_FIELDS)
        tables["loop"], left["loop"] = group.loop, None
        if group.loop is not None and group.num_entries > _SMALL:
            tables["loop"] = dataclasses.replace(group.loop, rows=None, offsets=None, order=None)
            left["loop"] = dataclasses.replace(group.loop, long_segments=None)
        leaves, tree = jax.tree_util.tree_flatten(tables)
        for leaf in leaves:
            if id(leaf) not in places:
                numbers = np.asarray(leaf, np.int32)
                padding = -numbers.shape[0] % _ALIGNED
                places[id(leaf)] = size, numbers.shape[0]
                parts += [numbers, np.zeros(padding, np.int32)]
                size += numbers.shape[0] + padding
        layouts.append((name, Layout(tuple(places[id(leaf)] for leaf in leaves), tree)))
        rest[name] = dataclasses.replace(group, **left)
    numbers = np.concatenate(parts) if parts else np.zeros(1, np.int32)
    return rest, PackedTables(numbers, tuple(layouts))


def packed_tiles(groups: Mapping[tuple[int, str], Segments], graphs: int) -> list[PackedTables]:
    """The tiles and splits of groupings of several graphs, inside jit, in one array, of which XLA copies no part.

    Splits are tiles of another size. They are left out where each type is one split.

    Args:
        groups: groupings by type, by number of their graph and name.
        graphs: how many graphs there are.
    """
    entries = [(group.offsets, group.num_entries) for group in groups.values()]
    sizes = [rows_per_split(count) for _, count in entries]
    made = tile_arrays(entries, [(*TILE_BLOCKS, size) for size in sizes], _ALIGNED)
    parts = made.row_type, made.start, made.end, made.first
    numbers = jnp.concatenate([part.reshape(-1) for part in parts])
    begins = dict(
        zip(("row_type", "start", "end", "first"), np.cumsum([0, *(part.size for part in parts)]), strict=False)
    )

    def place(part: str, grouping: int, size: int, length: int) -> Any:
        width = (made.first if part == "first" else made.start).shape[-1]
        return TableSlice(None, int(begins[part]) + (grouping * (len(TILE_BLOCKS) + 1) + size) * width, length)

    layouts: list[list[tuple[str, Layout]]] = [[] for _ in range(graphs)]
    for i, ((graph, name), group) in enumerate(groups.items()):
        counts = made.counts[i]
        tiles = tuple(
            TileTable(place("row_type", i, b, counts[b]), place("start", i, b, counts[b]), block)
            for b, block in enumerate(TILE_BLOCKS)
        )
        tables: dict[str, Any] = {"tiles": tiles}
        last = len(TILE_BLOCKS)
        if sizes[i] < group.num_entries:
            start, end = (place(part, i, last, counts[last]) for part in ("start", "end"))
            tables["splits"] = TypeSplits(start, end, place("first", i, last, made.num_types[i] + 1), sizes[i])
        leaves, tree = jax.tree_util.tree_flatten(tables)
        layouts[graph].append((name, Layout(tuple((leaf.start, leaf.length) for leaf in leaves), tree)))
    return [PackedTables(numbers, tuple(own)) for own in layouts]
