"""The tables of a `RelGraph`, made from its edges: one description, which numpy or XLA carries out.

The operations come from `sorting` (numpy, on the host, once for a graph: tables have their exact sizes) or from
`sorting_traced` (inside `jax.jit`). Inside jit sizes are static bounds that follow from the lengths of the arrays: as
many pairs as edges, `edges // (chunk + 1)` long segments, `entries // block + types` tiles. Unused entries point one
past the end and stand in no segment, so that kernels, which walk segments, never meet them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from dejax.rgnn.graphs.building import sorting, sorting_traced
from dejax.rgnn.graphs.segments import Grouping, Segments, bounded_segments, make_segments
from dejax.rgnn.graphs.spec import Edges, GraphSpec, add_relations


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
    # Copies: jax may alias a numpy array on the CPU, and these are the caller's.
    types = np.zeros(spec.num_nodes, np.int32) if node_type is None else node_type.astype(np.int32, copy=True)
    if node_mask is not None:
        types[~node_mask] = spec.num_node_types
        node_mask = None if node_mask.all() else node_mask.copy()
    found = _tables(sorting, edges, types, spec, nodes_sorted=False)
    mask = None if edges.mask is None else found["edge_type"] < spec.all_edge_types
    return {**found, "node_mask": node_mask, "edge_mask": mask}


@partial(jax.jit, static_argnames=("spec", "nodes_sorted"))
def build_traced(
    edges: Edges, node_type: Array | None, node_mask: Array | None, spec: GraphSpec, nodes_sorted: bool
) -> dict[str, Any]:
    """The fields of a `RelGraph` that are arrays, in the sizes of their static bounds.

    Args:
        edges: int32[edges] each, of checked shapes; the mask is bool[edges] or None.
        node_type: int32[nodes]; None: all 0.
        node_mask: bool[nodes], False for padding nodes; None where there is none.
        spec: counts, names and additions.
        nodes_sorted: whether nodes are known to be sorted by type.
    """
    xp = sorting_traced.xp
    # Values cannot be checked inside jit, but a read out of bounds must not follow from them: edges and nodes with ids
    # or types out of range are padding.
    valid = (edges.edge_type >= 0) & (edges.edge_type < spec.num_edge_types)
    for ends in (edges.senders, edges.receivers):
        valid &= (ends >= 0) & (ends < spec.num_nodes)
        if node_mask is not None and spec.num_nodes:
            valid &= node_mask[ends]
    if node_type is None:
        node_type = xp.zeros(spec.num_nodes, xp.int32)
    node_valid = (node_type >= 0) & (node_type < spec.num_node_types)
    if node_mask is not None:
        node_valid &= node_mask
    edges = edges._replace(mask=valid if edges.mask is None else edges.mask & valid)
    edges = add_relations(xp, edges, node_mask, spec)
    types = xp.where(node_valid, node_type, spec.num_node_types)
    found = _tables(sorting_traced, edges, types, spec, nodes_sorted)
    return {**found, "node_mask": node_mask, "edge_mask": found["edge_type"] < spec.all_edge_types}


def _tables(ops: ModuleType, edges: Edges, node_type: Any, spec: GraphSpec, nodes_sorted: bool) -> dict[str, Any]:
    """The fields of a `RelGraph` without its masks.

    Args:
        ops: `sorting` or `sorting_traced`.
        edges: added edges included.
        node_type: int32[nodes]; `num_node_types` for padding nodes.
        spec: counts, names and additions.
        nodes_sorted: whether nodes are known to be sorted by type.
    """
    canonical = _canonical(ops, edges, spec)
    by_node_type = _by_node_type(ops, node_type, spec, ops.known_ascending(node_type, nodes_sorted))
    return {
        "senders": canonical.senders,
        "receivers": canonical.receivers,
        "edge_type": canonical.edge_type,
        "edge_ids": canonical.edge_ids,
        "edge_positions": canonical.edge_positions,
        "node_type": node_type,
        **_segments(ops, canonical, by_node_type, spec),
    }


class _Sorted(NamedTuple):
    """Edges sorted by one of their ends, and by type where that is equal.

    Attributes:
        order: int32[edges], canonical positions in that order.
        node: int32[edges], the end by which edges are sorted, in that order.
        edge_type: int32[edges], the types in that order.
    """

    order: Any
    node: Any
    edge_type: Any


@dataclass(frozen=True, slots=True)
class _Canonical:
    """The edges in canonical order, and the other orders in which they are grouped.

    Attributes:
        senders: int32[edges], canonical, `num_nodes` for padding edges; so are the next two, with their bounds.
        receivers: int32[edges].
        edge_type: int32[edges].
        edge_ids: int32[edges], the user's edge at each canonical position.
        edge_positions: int32[edges], the inverse.
        source_order: canonical positions sorted by (type, sender, receiver).
        by_receiver: edges sorted by (receiver, type, sender); None where the order follows from that of pairs.
        by_sender: edges sorted by (sender, type, receiver), or None.
    """

    senders: Any
    receivers: Any
    edge_type: Any
    edge_ids: Any
    edge_positions: Any
    source_order: Any
    by_receiver: _Sorted | None = None
    by_sender: _Sorted | None = None


def _canonical(ops: ModuleType, edges: Edges, spec: GraphSpec) -> _Canonical:
    """Sorts the edges; padding edges come last, in the user's order.

    In exact sizes edges are sorted twice, by (type, receiver, sender) and by (type, sender): the orders by node follow
    from those of pairs, of which there are fewer than edges. Under static bounds there are as many pairs as edges. Then
    each order is a sort of another one by a single short key, which XLA does by radix.
    """
    node_bound, type_bound = spec.num_nodes + 1, spec.all_edge_types + 1
    senders, receivers, edge_type, mask = edges
    if mask is not None:
        senders = ops.xp.where(mask, senders, np.int32(spec.num_nodes))
        receivers = ops.xp.where(mask, receivers, np.int32(spec.num_nodes))
        edge_type = ops.xp.where(mask, edge_type, np.int32(spec.all_edge_types))
    if ops.EXACT:
        bounds = (type_bound, node_bound, node_bound)
        (edge_type,), edge_ids = ops.stable_sort((edge_type, receivers, senders), bounds, wanted=1)
        senders, receivers = ops.take(senders, edge_ids), ops.take(receivers, edge_ids)
        source_order = ops.stable_argsort((edge_type, senders), (type_bound, node_bound))
        return _Canonical(senders, receivers, edge_type, edge_ids, ops.inverse(edge_ids), source_order)
    bounds = (node_bound, type_bound, node_bound)
    (receiver_there, type_there), ids = ops.stable_sort((receivers, edge_type, senders), bounds, wanted=2)
    edge_type, edge_ids = ops.sort_pairs(type_there, type_bound, ids)
    edge_type = edge_type.astype(np.int32)
    senders, receivers = ops.take(senders, edge_ids), ops.take(receivers, edge_ids)
    edge_positions = ops.inverse(edge_ids)
    by_receiver = _Sorted(ops.take(edge_positions, ids), receiver_there, type_there)
    sender_there, sender_order = ops.sort_pairs(senders, node_bound)
    by_sender = _Sorted(sender_order, sender_there, ops.take(edge_type, sender_order))
    _, source_order = ops.sort_pairs(by_sender.edge_type, type_bound, sender_order)
    return _Canonical(senders, receivers, edge_type, edge_ids, edge_positions, source_order, by_receiver, by_sender)


def _by_node_type(ops: ModuleType, node_type: Any, spec: GraphSpec, is_sorted: bool) -> Grouping:
    order, sorted_type = None, node_type
    if not is_sorted:
        sorted_type, order = ops.sort_pairs(node_type, spec.num_node_types + 1)
    return node_type, order, ops.row_offsets(sorted_type.astype(np.int32), spec.num_node_types)


def _segments(
    ops: ModuleType, edges: _Canonical, by_node_type: Grouping, spec: GraphSpec
) -> dict[str, Segments | None]:
    """The groupings with their tables."""
    type_offsets = ops.row_offsets(edges.edge_type, spec.all_edge_types)
    ends = partial(_end_groupings, ops, edge_type=edges.edge_type, type_offsets=type_offsets, spec=spec)
    source = ends(edges.senders, order=edges.source_order, by_node=edges.by_sender)
    destination = ends(edges.receivers, order=None, by_node=edges.by_receiver)
    # Tables that different passes over a graph read are made apart: those of forward, of backward, of pairs.
    make = partial(make_segments if ops.EXACT else bounded_segments, long_segment_chunk=spec.long_segment_chunk)
    by_edge_type = (edges.edge_type, None, type_offsets)
    tables: dict[str, Segments | None] = {
        **make(
            {"by_receiver": destination.edges_by_node, "by_edge_type": by_edge_type, "by_node_type": by_node_type},
            typed=("by_edge_type", "by_node_type"),
        ),
        **make({"by_sender": source.edges_by_node}),
        **make(
            {
                "by_source_pair": source.edges_by_pair,
                "source_pair_by_node": source.pairs_by_node,
                "source_pair_by_type": source.pairs_by_type,
                "by_destination_pair": destination.edges_by_pair,
                "destination_pair_by_node": destination.pairs_by_node,
                "destination_pair_by_type": destination.pairs_by_type,
            },
            typed=("source_pair_by_type", "destination_pair_by_type"),
        ),
        "edge_type_by_source": None,
    }
    by_source = _edge_type_by_source(ops, by_node_type[0], source, spec)
    return tables if by_source is None else {**tables, **make({"edge_type_by_source": by_source})}


class Pairs(NamedTuple):
    """The pairs of one end of the edges and their type.

    Attributes:
        by_pair: canonical edges grouped by pair.
        node: int32[pairs], the node of each pair; that of padding edges where unused.
        edge_type: int32[pairs], likewise.
    """

    by_pair: Grouping
    node: Any
    edge_type: Any


def pairs_of(
    ops: ModuleType,
    sorted_node: Any,
    edge_type: Any,
    order: Any,
    before: Any,
    num_valid: Any,
    most: int,
    padding: tuple[int, int],
) -> Pairs:
    """The pairs of edges that are sorted by type and node.

    Args:
        ops: `sorting` or `sorting_traced`.
        sorted_node: int32[edges], the node of each edge in that order; edges from `num_valid` on are padding.
        edge_type: int32[edges], ascending.
        order: int32[edges], the canonical edges in that order; None where that is the canonical order.
        before: int32[edges + 1], how many pairs begin before each edge.
        num_valid: number of edges that are no padding.
        most: the most pairs that there can be.
        padding: the node and the type of padding edges.
    """
    xp, position = ops.xp, ops.xp.arange(sorted_node.shape[0], dtype=np.int32)
    valid = position < num_valid
    num_pairs = ops.rows_of(before[num_valid], most)
    pair = xp.where(valid, before[1:] - 1, np.int32(num_pairs))
    index = pair if order is None else ops.put(xp.zeros_like(pair), order, pair, unique=True)
    first = (before[1:] > before[:-1]) & valid
    offsets = ops.put_where(xp.full(num_pairs + 1, num_valid, np.int32), first, pair, position)
    # An unused pair begins at a padding edge, which has the right node and type, or past the end.
    node, types = (
        ops.take_or(column, offsets[:-1], fill) for column, fill in zip((sorted_node, edge_type), padding, strict=True)
    )
    return Pairs((index, order, offsets), node, types)


class _EndGroupings(NamedTuple):
    """The groupings by one end of the edges, sender or receiver, and by pair of that end and the type."""

    edges_by_node: Grouping
    edges_by_pair: Grouping
    pairs_by_node: Grouping
    pairs_by_type: Grouping


def _end_groupings(
    ops: ModuleType,
    node: Any,
    *,
    order: Any,
    by_node: _Sorted | None,
    edge_type: Any,
    type_offsets: Any,
    spec: GraphSpec,
) -> _EndGroupings:
    """Groups canonical edges by one of their ends.

    Unused pairs have the node `num_nodes`, the type `all_edge_types` and no edges.

    Args:
        ops: `sorting` or `sorting_traced`.
        node: int32[edges], that end of each edge; `num_nodes` for padding edges.
        order: int32[edges], sorts the edges by type and node; None where they are sorted so.
        by_node: the edges sorted by node; None where the order follows from that of the pairs.
        edge_type: int32[edges], the types of the edges, ascending.
        type_offsets: where the edges of each type begin.
        spec: counts.
    """
    size, num_valid = node.shape[0], type_offsets[-1]
    sorted_node = node if order is None else ops.take(node, order)
    begins = ops.begins_run(edge_type, sorted_node)
    if by_node is None:
        before = ops.count_before(begins)
    else:  # The sums of both orders are made together, as six kernels.
        before, before_by_node = ops.count_before(
            ops.xp.stack([begins, ops.begins_run(by_node.edge_type, by_node.node)])
        )
    pairs = pairs_of(ops, sorted_node, edge_type, order, before, num_valid, size, (spec.num_nodes, spec.all_edge_types))
    index, _, offsets = pairs.by_pair
    # Within a node, edges and pairs both ascend by type: each of the orders by node gives the other one.
    if by_node is None:
        pair_order = ops.stable_argsort([pairs.node], [spec.num_nodes])
        pair_offsets = ops.offsets_of(pairs.node, spec.num_nodes)
        node_order, begins = ops.expand(pair_order, offsets, size)
        if order is not None:
            node_order = ops.take(order, node_order)
        node_offsets = ops.take(begins, pair_offsets)
    else:
        node_order = by_node.order
        node_offsets = ops.row_offsets(by_node.node.astype(np.int32), spec.num_nodes)
        first = (before_by_node[1:] > before_by_node[:-1]) & (ops.xp.arange(size, dtype=np.int32) < num_valid)
        number = ops.xp.arange(pairs.node.shape[0], dtype=np.int32)
        pair_order = ops.put_where(number, first, before_by_node[:-1], ops.take(index, node_order))
        pair_offsets = ops.take(before_by_node, node_offsets)
    return _EndGroupings(
        edges_by_node=(node, node_order, node_offsets),
        edges_by_pair=pairs.by_pair,
        pairs_by_node=(pairs.node, pair_order, pair_offsets),
        pairs_by_type=(pairs.edge_type, None, ops.take(before, type_offsets)),
    )


def _edge_type_by_source(ops: ModuleType, node_type: Any, source: _EndGroupings, spec: GraphSpec) -> Grouping | None:
    """Edge types grouped by the node type of their sources.

    None where an edge type has sources of several node types, and under static bounds, where it is unknown whether one
    has, unless there is a single node type.
    """
    if spec.num_node_types <= 1:
        offsets = ops.xp.array([0, spec.all_edge_types][: spec.num_node_types + 1], np.int32)
        return ops.xp.zeros(spec.all_edge_types, np.int32), None, offsets
    if not ops.EXACT:
        return None
    (pair_node, _, _), (_, _, offsets) = source.pairs_by_node, source.pairs_by_type
    found = np.zeros(spec.all_edge_types, np.int32)  # type 0 for edge types without edges
    some = np.flatnonzero(offsets[1:] > offsets[:-1])
    if some.size:
        of_pair = node_type[pair_node]
        found[some] = np.minimum.reduceat(of_pair, offsets[some])
        if (np.maximum.reduceat(of_pair, offsets[some]) != found[some]).any():
            return None
    sorted_types, order = ops.sort_pairs(found, spec.num_node_types)
    return found, order, ops.row_offsets(sorted_types, spec.num_node_types)
