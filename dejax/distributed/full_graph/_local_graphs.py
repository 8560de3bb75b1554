"""The graphs of all devices, with tables of the same sizes: what `shard_map` needs to run one program on each.

A table is made by numpy in its exact size, and then padded to the largest of all parts. Padding has the form that the
tables of `RelGraph.build_traced` have: unused pairs have no edges, the node `num_nodes` and the type `num_edge_types`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dejax.rgnn.graphs import build
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments, make_segments
from dejax.rgnn.graphs.spec import Edges, GraphSpec
from dejax.rgnn.graphs.tables import LongSegmentTable, TileTable

# The groupings by type, which have tiles.
_TYPED = ("by_edge_type", "source_pair_by_type", "destination_pair_by_type", "by_node_type")
_GROUPINGS = (
    "by_sender",
    "by_receiver",
    "by_source_pair",
    "by_destination_pair",
    "by_edge_type",
    "source_pair_by_node",
    "destination_pair_by_node",
    "source_pair_by_type",
    "destination_pair_by_type",
    "by_node_type",
)
# The pairs of each end: edges by pair, pairs by node, pairs by type.
_PAIRS = (
    ("by_source_pair", "source_pair_by_node", "source_pair_by_type"),
    ("by_destination_pair", "destination_pair_by_node", "destination_pair_by_type"),
)

Sizes = dict[str, int]
"""Of the tables of a graph, by name; those of several graphs are joined by the maximum."""


def tables_of(edges: Edges, node_type: np.ndarray, spec: GraphSpec) -> dict[str, Any]:
    """The fields of a `RelGraph`, as numpy arrays of exact sizes; padding edges and nodes count as in `spec`.

    Args:
        edges: int32[edges] each, and a mask.
        node_type: int32[nodes]; `num_node_types` for padding nodes.
        spec: counts and names.
    """
    return build.build(edges, node_type, node_type < spec.num_node_types, spec)


def pair_sizes(tables: Mapping[str, Any]) -> Sizes:
    """How many pairs a graph has."""
    return {by_pair: tables[by_pair].num_rows for by_pair, *_ in _PAIRS}


def table_sizes(tables: Mapping[str, Any], pairs: Sizes, spec: GraphSpec) -> Sizes:
    """The sizes of a graph's tables with `pairs` pairs, from `largest`; they follow from the number of entries."""
    sizes = dict(pairs)
    for name, group in _regrouped(tables, pairs, spec).items():
        sizes |= _table_sizes(name, group)
    return sizes


def largest(many: Sequence[Sizes]) -> Sizes:
    """The sizes that hold the tables of all graphs."""
    names = dict.fromkeys(name for sizes in many for name in sizes)
    return {name: max(sizes.get(name, 0) for sizes in many) for name in names}


def padded_graph(tables: Mapping[str, Any], sizes: Sizes, spec: GraphSpec, source_types: np.ndarray | None) -> RelGraph:
    """The graph with tables of the given sizes, as numpy arrays.

    Args:
        tables: the graph's own.
        sizes: at least as large as the graph's, from `largest`.
        spec: counts and names.
        source_types: int[edge types], the node type of the sources of each; None where there is no single one.
    """
    fields = dict(tables)
    for name, group in _regrouped(tables, sizes, spec).items():
        fields[name] = _padded_group(name, group, sizes)
    num_edges = tables["senders"].shape[0]
    valid = int(tables["by_edge_type"].offsets[-1])
    fields["edge_mask"] = np.arange(num_edges) < valid
    fields["node_mask"] = np.asarray(tables["node_type"]) < spec.num_node_types
    fields["edge_type_by_source"] = _by_source(source_types, spec)
    return RelGraph._made(fields, spec)


def _by_source(source_types: np.ndarray | None, spec: GraphSpec) -> Segments | None:
    if source_types is None:
        return None
    order = np.argsort(source_types, kind="stable").astype(np.int32)
    offsets = np.searchsorted(source_types[order], np.arange(spec.num_node_types + 1)).astype(np.int32)
    return make_segments(source_types.astype(np.int32), order, offsets, long_segment_chunk=spec.long_segment_chunk)


def _regrouped(tables: Mapping[str, Any], sizes: Sizes, spec: GraphSpec) -> dict[str, Segments]:
    """The groupings with as many pairs as `sizes` says, and tables of their exact sizes."""
    arrays = {name: (tables[name].index, tables[name].order, tables[name].offsets) for name in _GROUPINGS}
    for by_pair, by_node, by_type in _PAIRS:
        size, have = sizes[by_pair], tables[by_pair].num_rows
        index, order, offsets = arrays[by_pair]
        index = np.where(index >= have, size, index).astype(np.int32)
        arrays[by_pair] = index, order, _extended(offsets, size + 1, int(offsets[-1]))
        index, order, offsets = arrays[by_node]
        extra = np.arange(have, size, dtype=np.int32)
        arrays[by_node] = _extended(index, size, spec.num_nodes), np.concatenate([order, extra]), offsets
        index, order, offsets = arrays[by_type]
        arrays[by_type] = _extended(index, size, spec.all_edge_types), order, offsets
    return {
        name: dataclasses.replace(
            make_segments(*some, long_segment_chunk=spec.long_segment_chunk, typed=name in _TYPED), splits=None
        )
        for name, some in arrays.items()
    }


def _table_sizes(name: str, group: Segments) -> Sizes:
    sizes = {f"{name}.tiles.{table.block}": table.start.shape[0] for table in group.tiles}
    long = group.long_segments
    sizes[f"{name}.long_rows"] = 0 if long is None else long.rows.shape[0]
    sizes[f"{name}.chunks"] = 0 if long is None else long.chunk_row.shape[0]
    sizes[f"{name}.chunk_size"] = 0 if long is None else long.chunk
    sizes[f"{name}.order"] = 0 if group.order is None else 1
    return sizes


def _padded_group(name: str, group: Segments, sizes: Sizes) -> Segments:
    valid = int(group.offsets[-1])
    tiles = tuple(
        TileTable(
            _extended(table.row_type, sizes[f"{name}.tiles.{table.block}"], 0),
            _extended(table.start, sizes[f"{name}.tiles.{table.block}"], valid),
            table.block,
        )
        for table in group.tiles
    )
    order: Any = group.order
    if order is None and sizes[f"{name}.order"]:
        order = np.arange(group.num_entries, dtype=np.int32)
    return dataclasses.replace(group, tiles=tiles, order=order, long_segments=_padded_long(name, group, sizes))


def _padded_long(name: str, group: Segments, sizes: Sizes) -> LongSegmentTable | None:
    rows, chunks, table = sizes[f"{name}.long_rows"], sizes[f"{name}.chunks"], group.long_segments
    if not rows:
        return None
    none: Any = np.zeros(0, np.int32)
    if table is None:
        table = LongSegmentTable(none, _extended(none, 1, 0), none, none, none, sizes[f"{name}.chunk_size"])
    return LongSegmentTable(
        rows=_extended(table.rows, rows, group.num_rows),
        offsets=_extended(table.offsets, rows + 1, int(table.offsets[-1])),
        chunk_row=_extended(table.chunk_row, chunks, group.num_rows),
        chunk_start=_extended(table.chunk_start, chunks, 0),
        chunk_end=_extended(table.chunk_end, chunks, 0),
        chunk=table.chunk,
    )


def _extended(values: Any, size: int, fill: int) -> Any:
    """`values` followed by `fill`, up to `size` elements."""
    out = np.full(size, fill, np.int32)
    out[: values.shape[0]] = values
    return out
