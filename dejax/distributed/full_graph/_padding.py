"""Pads the tables of a grouping to the sizes that the groupings of all parts have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dejax.pallas import LongSegmentTable
from dejax.rgnn.graphs.segments import Segments, near_split_table
from dejax.rgnn.graphs.tables import TileTable, TypeSplits, loop_long_segments

Sizes = dict[str, int]
"""Of the tables of a graph, by name; those of several graphs are joined by the maximum."""


def extended(values: Any, size: int, fill: int) -> Any:
    """`values` followed by `fill`, up to `size` elements."""
    out = np.full(size, fill, np.int32)
    out[: values.shape[0]] = values
    return out


def sizes_of_group(name: str, group: Segments, long_segment_chunk: int | None) -> Sizes:
    """The sizes of a grouping's tables, without padding.

    Args:
        name: the name of the grouping.
        group: without `loop`, `near_tiles` and `near_splits`.
        long_segment_chunk: the most entries of a chunk in `loop`; None where the grouping has no `loop`.
    """
    offsets = np.asarray(group.offsets)
    sizes = {f"{name}.tiles.{table.block}": table.start.shape[0] for table in group.tiles}
    sizes |= _sizes_of_long(f"{name}.long", group.long_segments)
    sizes[f"{name}.order"] = 0 if group.order is None else 1
    if group.splits is not None:
        sizes[f"{name}.splits"] = group.splits.start.shape[0]
        sizes[f"{name}.near_splits"] = near_split_table(offsets, group.num_entries).start.shape[0]
    if long_segment_chunk is not None and group.num_rows > 1 and group.num_entries:
        sizes |= _sizes_of_long(f"{name}.loop", loop_long_segments(offsets, group.num_entries, long_segment_chunk))
    return sizes


def padded_group(name: str, group: Segments, sizes: Sizes) -> Segments:
    """A grouping with its tables in the given sizes, before `loop`, `near_tiles` and `near_splits` are made."""
    valid = int(group.offsets[-1])
    tiles = tuple(
        TileTable(
            extended(table.row_type, sizes[f"{name}.tiles.{table.block}"], 0),
            extended(table.start, sizes[f"{name}.tiles.{table.block}"], valid),
            table.block,
        )
        for table in group.tiles
    )
    order: Any = group.order
    if order is None and sizes[f"{name}.order"]:
        order = np.arange(group.num_entries, dtype=np.int32)
    return dataclasses.replace(
        group,
        tiles=tiles,
        order=order,
        long_segments=_padded_long(f"{name}.long", group.long_segments, group.num_rows, sizes),
        splits=_padded_splits(group.splits, sizes.get(f"{name}.splits", 0), valid),
    )


def padded_loop(name: str, group: Segments, sizes: Sizes) -> Segments:
    """A grouping of `padded_group` with `loop` and `near_splits` in the given sizes; `near_tiles` have theirs."""
    loop = group.loop
    if loop is not None:
        long = _padded_long(f"{name}.loop", loop.long_segments, group.num_rows, sizes)
        loop = dataclasses.replace(loop, long_segments=long)
    near = _padded_splits(group.near_splits, sizes.get(f"{name}.near_splits", 0), int(group.offsets[-1]))
    return dataclasses.replace(group, loop=loop, near_splits=near)


def _sizes_of_long(name: str, table: LongSegmentTable | None) -> Sizes:
    return {} if table is None else {f"{name}.chunks": table.row.shape[0], f"{name}.chunk": table.chunk}


def _padded_long(name: str, table: LongSegmentTable | None, num_rows: int, sizes: Sizes) -> LongSegmentTable | None:
    """Chunks of the row `num_rows`, without entries, follow those of the table."""
    chunks = sizes.get(f"{name}.chunks", 0)
    if not chunks:
        return None
    if table is None:
        none = np.zeros(0, np.int32)
        table = LongSegmentTable(sizes[f"{name}.chunk"], none, none, none, none, none)
    padding = {"row": num_rows, "start": 0, "end": 0, "first": 0, "count": 0}
    columns = {field: extended(getattr(table, field), chunks, fill) for field, fill in padding.items()}
    return dataclasses.replace(table, **columns)


def _padded_splits(table: TypeSplits | None, size: int, valid: int) -> TypeSplits | None:
    """Splits without positions, of no type, follow those of the table."""
    if table is None:
        return None
    number = table.number
    if number is not None:
        number = np.concatenate([number, np.arange(number.shape[0], size)]).astype(np.int32)
    start, end = (extended(array, size, valid) for array in (table.start, table.end))
    return dataclasses.replace(table, start=start, end=end, first=np.array(table.first, np.int32), number=number)
