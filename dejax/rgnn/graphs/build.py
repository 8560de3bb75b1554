"""The numpy builder of `RelGraph`: every table of a full graph, made once on the host.

No step loops over edges or types in Python, and none makes a nodes-by-types table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dejax.rgnn.graphs.segments import Segments, make_segments
from dejax.rgnn.graphs.sorting import expand, offsets_of, offsets_of_sorted, runs_of, stable_argsort
from dejax.rgnn.graphs.spec import Edges, GraphSpec, add_relations


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    """`values` as int32, followed by `fill` up to `size` elements."""
    if values.shape[0] == size:
        return values.astype(np.int32, copy=False)
    out = np.full(size, fill, np.int32)
    out[: values.shape[0]] = values
    return out


def _padded_order(order: np.ndarray, size: int) -> np.ndarray:
    """`order` of the valid elements, followed by the padding elements up to `size`."""
    if order.shape[0] == size:
        return order
    return np.concatenate([order, np.arange(order.shape[0], size, dtype=np.int32)])


@dataclass(frozen=True, slots=True)
class _EndTables:
    """The groupings by one end of the edges, sender or receiver."""

    edges_by_node: Segments
    edges_by_pair: Segments
    pairs_by_node: Segments
    pairs_by_type: Segments


def _end_tables(node: np.ndarray, edge_type: np.ndarray, order: np.ndarray | None, spec: GraphSpec) -> _EndTables:
    """Groups canonical edges by node and by unique (edge type, node) pair.

    Args:
        node: int32[edges], one end of each edge; `num_nodes` for padding edges, which come last.
        edge_type: int32[valid edges], ascending.
        order: int32[valid edges], sorts them by type and node; None where they are sorted.
        spec: counts.
    """
    num_nodes, num_edge_types = spec.num_nodes, spec.all_edge_types
    size, valid = node.shape[0], edge_type.shape[0]
    sorted_node = node[:valid] if order is None else node[order]
    run, starts = runs_of(edge_type, sorted_node)  # `order` keeps edges sorted by type
    index = run
    if order is not None:
        index = np.empty(valid, np.int32)
        index[order] = run
    num_pairs = starts.shape[0]
    offsets = np.append(starts, np.int32(valid)).astype(np.int32)
    pair_node, pair_type = sorted_node[starts], edge_type[starts]
    pair_order = stable_argsort([pair_node], [num_nodes])
    pair_offsets = offsets_of(pair_node, num_nodes)
    # Within a node, pairs and canonical edges both ascend by type, so joining the edges of its pairs gives its edges.
    # This saves a second sort of all edges.
    edges_by_node, begins = expand(pair_order, offsets)
    if order is not None:
        edges_by_node = order[edges_by_node]
    make = partial(make_segments, long_segment_chunk=spec.long_segment_chunk)
    return _EndTables(
        edges_by_node=make(node, _padded_order(edges_by_node, size), begins[pair_offsets]),
        edges_by_pair=make(
            _padded(index, size, num_pairs), None if order is None else _padded_order(order, size), offsets
        ),
        pairs_by_node=make(pair_node, pair_order, pair_offsets),
        pairs_by_type=make(pair_type, None, offsets_of_sorted(pair_type, num_edge_types), typed=True),
    )


@dataclass(frozen=True, slots=True)
class _Canonical:
    """The edges in canonical order.

    Attributes:
        senders: int32[edges], `num_nodes` for padding edges.
        receivers: int32[edges], `num_nodes` for padding edges.
        edge_ids: int32[edges], the user's edge at each position; padding edges last.
        types: int32[valid edges], ascending.
    """

    senders: np.ndarray
    receivers: np.ndarray
    edge_ids: np.ndarray
    types: np.ndarray


def _canonical(edges: Edges, spec: GraphSpec) -> _Canonical:
    """Sorts the valid edges by (type, receiver, sender); padding edges follow in the user's order."""
    keys = [edges.edge_type, edges.receivers, edges.senders]
    bounds = [spec.all_edge_types, spec.num_nodes, spec.num_nodes]
    if edges.mask is None:
        edge_ids = order = stable_argsort(keys, bounds)
        edge_type = edges.edge_type
    else:
        valid_ids = np.flatnonzero(edges.mask).astype(np.int32)
        order = valid_ids[stable_argsort([key[valid_ids] for key in keys], bounds)]
        edge_ids = np.concatenate([order, np.flatnonzero(~edges.mask).astype(np.int32)])
        edge_type = edges.edge_type[order]
    senders, receivers = edges.senders[edge_ids], edges.receivers[edge_ids]
    senders[order.shape[0] :] = receivers[order.shape[0] :] = spec.num_nodes
    counts = np.bincount(edge_type, minlength=spec.all_edge_types)
    return _Canonical(senders, receivers, edge_ids, np.repeat(np.arange(spec.all_edge_types, dtype=np.int32), counts))


def _node_types(node_type: np.ndarray | None, node_mask: np.ndarray | None, spec: GraphSpec) -> np.ndarray:
    """int32[nodes]: the type of each node; `num_node_types` for padding nodes."""
    # A copy: jax may alias a numpy array on the CPU, and this one is the caller's.
    types = np.zeros(spec.num_nodes, np.int32) if node_type is None else node_type.astype(np.int32, copy=True)
    if node_mask is not None:
        types[~node_mask] = spec.num_node_types
    return types


def _by_node_type(node_type: np.ndarray, spec: GraphSpec) -> Segments:
    """Nodes grouped by type."""
    is_sorted = bool((node_type[1:] >= node_type[:-1]).all())
    order = None if is_sorted else stable_argsort([node_type], [spec.num_node_types + 1])
    offsets = offsets_of(node_type, spec.num_node_types)
    return make_segments(node_type, order, offsets, long_segment_chunk=spec.long_segment_chunk, typed=True)


def build(edges: Edges, node_type: np.ndarray | None, node_mask: np.ndarray | None, spec: GraphSpec) -> dict[str, Any]:
    """The fields of a `RelGraph` that are arrays, as numpy arrays.

    Args:
        edges: int32[edges] each, checked; the mask is bool[edges].
        node_type: int[nodes]; None: all 0.
        node_mask: bool[nodes], False for padding nodes; None where there is none.
        spec: counts, names and additions.
    """
    edges = add_relations(np, edges, node_mask, spec)
    if edges.mask is not None and edges.mask.all():
        edges = edges._replace(mask=None)
    if node_mask is not None and node_mask.all():
        node_mask = None
    canonical = _canonical(edges, spec)
    num_edges, types = canonical.edge_ids.shape[0], canonical.types
    edge_positions = np.empty(num_edges, np.int32)
    edge_positions[canonical.edge_ids] = np.arange(num_edges, dtype=np.int32)
    edge_type = _padded(types, num_edges, spec.all_edge_types)
    by_source = stable_argsort([types, canonical.senders[: types.shape[0]]], [spec.all_edge_types, spec.num_nodes])
    source = _end_tables(canonical.senders, types, by_source, spec)
    destination = _end_tables(canonical.receivers, types, None, spec)
    node_type = _node_types(node_type, node_mask, spec)
    type_offsets = offsets_of_sorted(types, spec.all_edge_types)
    return {
        "senders": canonical.senders,
        "receivers": canonical.receivers,
        "edge_type": edge_type,
        "edge_ids": canonical.edge_ids,
        "edge_positions": edge_positions,
        "node_type": node_type,
        "node_mask": None if node_mask is None else node_mask.copy(),
        "edge_mask": None if edges.mask is None else np.arange(num_edges) < types.shape[0],
        "by_sender": source.edges_by_node,
        "by_receiver": destination.edges_by_node,
        "by_source_pair": source.edges_by_pair,
        "by_destination_pair": destination.edges_by_pair,
        "by_edge_type": make_segments(
            edge_type, None, type_offsets, long_segment_chunk=spec.long_segment_chunk, typed=True
        ),
        "source_pair_by_node": source.pairs_by_node,
        "destination_pair_by_node": destination.pairs_by_node,
        "source_pair_by_type": source.pairs_by_type,
        "destination_pair_by_type": destination.pairs_by_type,
        "by_node_type": _by_node_type(node_type, spec),
        "edge_type_by_source": _edge_type_by_source(node_type, source.pairs_by_node, source.pairs_by_type, spec),
    }


def _edge_type_by_source(
    node_type: np.ndarray, pairs_by_node: Segments, pairs_by_type: Segments, spec: GraphSpec
) -> Segments | None:
    """Edge types grouped by the node type of their sources; None where one has sources of several node types."""
    found = np.zeros(spec.all_edge_types, np.int32)  # type 0 for edge types without edges
    if spec.num_node_types > 1:
        offsets = pairs_by_type.offsets
        some = np.flatnonzero(offsets[1:] > offsets[:-1])
        of_pair = node_type[pairs_by_node.index]
        if some.size:
            found[some] = np.minimum.reduceat(of_pair, offsets[some])
            if (np.maximum.reduceat(of_pair, offsets[some]) != found[some]).any():
                return None
    order = stable_argsort([found], [max(spec.num_node_types, 1)])
    return make_segments(
        found, order, offsets_of(found, spec.num_node_types), long_segment_chunk=spec.long_segment_chunk
    )
