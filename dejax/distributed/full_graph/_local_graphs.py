"""The graphs of all devices, with tables of the same sizes: what `shard_map` needs to run one program on each.

A table is made by numpy in its exact size, and then padded to the largest of all parts (`_padding.py`). Padding has the
form that the tables of `RelGraph.build_traced` have: unused pairs have no edges, the node `num_nodes` and the type
`num_edge_types`. With loop tables a part has all tables that a graph of one device has for its kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dejax.distributed.full_graph._padding import Sizes, extended, padded_group, padded_loop, sizes_of_group
from dejax.rgnn.graphs.building import build
from dejax.rgnn.graphs.loop_tables import LOOPS, loop_groupings, loop_tables_of, with_packed
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments, make_segments
from dejax.rgnn.graphs.spec import Edges, GraphSpec

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
        sizes |= sizes_of_group(name, group, spec.long_segment_chunk if name in LOOPS else None)
    return sizes


def largest(many: Sequence[Sizes]) -> Sizes:
    """The sizes that hold the tables of all graphs."""
    names = dict.fromkeys(name for sizes in many for name in sizes)
    return {name: max(sizes.get(name, 0) for sizes in many) for name in names}


def padded_graph(
    tables: Mapping[str, Any],
    sizes: Sizes,
    spec: GraphSpec,
    source_types: np.ndarray | None,
    *,
    destinations: int,
    loop_tables: bool,
) -> RelGraph:
    """The graph with tables of the given sizes, as numpy arrays.

    Args:
        tables: the graph's own.
        sizes: at least as large as the graph's, from `largest`.
        spec: counts and names.
        source_types: int[edge types], the node type of the sources of each; None where there is no single one.
        destinations: nodes before this number may have incoming edges.
        loop_tables: whether to make the tables that GPU kernels read, as `RelGraph.with_loop_tables` does.
    """
    fields = dict(tables)
    for name, group in _regrouped(tables, sizes, spec).items():
        fields[name] = padded_group(name, group, sizes)
    num_edges = tables["senders"].shape[0]
    valid = int(tables["by_edge_type"].offsets[-1])
    fields["edge_mask"] = np.arange(num_edges) < valid
    fields["node_mask"] = np.asarray(tables["node_type"]) < spec.num_node_types
    fields["edge_type_by_source"] = _by_source(source_types, spec)
    graph = dataclasses.replace(RelGraph._made(fields, spec), num_destinations=destinations)
    if not loop_tables:
        return graph
    groups = loop_groupings(graph, spec.long_segment_chunk)
    graph = with_packed(graph, {name: padded_loop(name, group, sizes) for name, group in groups.items()})
    return dataclasses.replace(graph, loop_tables=loop_tables_of(graph, np) if num_edges else {})


def _by_source(source_types: np.ndarray | None, spec: GraphSpec) -> Segments | None:
    if source_types is None:
        return None
    order = np.argsort(source_types, kind="stable").astype(np.int32)
    offsets = np.searchsorted(source_types[order], np.arange(spec.num_node_types + 1)).astype(np.int32)
    by_source = {"by_source": (source_types.astype(np.int32), order, offsets)}
    return make_segments(by_source, long_segment_chunk=spec.long_segment_chunk)["by_source"]


def _regrouped(tables: Mapping[str, Any], sizes: Sizes, spec: GraphSpec) -> dict[str, Segments]:
    """The groupings with as many pairs as `sizes` says, and tables of their exact sizes."""
    arrays = {name: (tables[name].index, tables[name].order, tables[name].offsets) for name in _GROUPINGS}
    for by_pair, by_node, by_type in _PAIRS:
        size, have = sizes[by_pair], tables[by_pair].num_rows
        index, order, offsets = arrays[by_pair]
        index = np.where(index >= have, size, index).astype(np.int32)
        arrays[by_pair] = index, order, extended(offsets, size + 1, int(offsets[-1]))
        index, order, offsets = arrays[by_node]
        extra = np.arange(have, size, dtype=np.int32)
        arrays[by_node] = extended(index, size, spec.num_nodes), np.concatenate([order, extra]), offsets
        index, order, offsets = arrays[by_type]
        arrays[by_type] = extended(index, size, spec.all_edge_types), order, offsets
    return make_segments(arrays, long_segment_chunk=spec.long_segment_chunk, typed=_TYPED)
