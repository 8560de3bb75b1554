"""The jax.numpy builder of `RelGraph`, for use inside `jax.jit`: sizes are static bounds, and padding has no effect.

It makes the same tables as `build`, with the same values on the valid part. Every bound follows from the arrays'
lengths: as many pairs as edges, `edges // (chunk + 1)` long segments, `entries // block + types` tiles. Unused entries
point one past the end and stand in no segment, so kernels that walk segments never meet them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dejax.rgnn.graphs.segments import Segments, bounded_segments
from dejax.rgnn.graphs.sorting_traced import (
    begins_run,
    count_before,
    inverse,
    put_where,
    row_offsets,
    sort_pairs,
    stable_sort,
)
from dejax.rgnn.graphs.spec import Edges, GraphSpec, add_relations

_Grouping = tuple[Array, Array | None, Array]
"""Index, order and offsets of a `Segments`."""


@partial(jax.jit, static_argnames=("spec", "nodes_sorted"))
def build(
    edges: Edges, node_type: Array | None, node_mask: Array | None, spec: GraphSpec, nodes_sorted: bool
) -> dict[str, Any]:
    """The fields of a `RelGraph` that are arrays.

    Args:
        edges: int32[edges] each, of checked shapes; the mask is bool[edges] or None.
        node_type: int32[nodes]; None: all 0.
        node_mask: bool[nodes], False for padding nodes; None where there is none.
        spec: counts, names and additions.
        nodes_sorted: whether nodes are known to be sorted by type.
    """
    edges, node_type = _mark_padding(edges, node_type, node_mask, spec)
    canonical = _canonical(add_relations(jnp, edges, node_mask, spec), spec)
    return {
        "senders": canonical.senders,
        "receivers": canonical.receivers,
        "edge_type": canonical.edge_type,
        "edge_ids": canonical.edge_ids,
        "edge_positions": canonical.edge_positions,
        "node_type": node_type,
        "node_mask": node_mask,
        "edge_mask": canonical.edge_type < spec.all_edge_types,
        **_segments(canonical, _by_node_type(node_type, spec, nodes_sorted), spec),
    }


def _mark_padding(
    edges: Edges, node_type: Array | None, node_mask: Array | None, spec: GraphSpec
) -> tuple[Edges, Array]:
    """Masks the edges whose ids or types are out of range, and gives padding nodes the type `num_node_types`.

    Values cannot be checked inside jit, but a read out of bounds must not follow from them.
    """
    valid = (edges.edge_type >= 0) & (edges.edge_type < spec.num_edge_types)
    for ends in (edges.senders, edges.receivers):
        valid &= (ends >= 0) & (ends < spec.num_nodes)
        if node_mask is not None and spec.num_nodes:
            valid &= node_mask[ends]
    if node_type is None:
        node_type = jnp.zeros(spec.num_nodes, jnp.int32)
    node_valid = (node_type >= 0) & (node_type < spec.num_node_types)
    if node_mask is not None:
        node_valid &= node_mask
    mask = valid if edges.mask is None else edges.mask & valid
    return edges._replace(mask=mask), jnp.where(node_valid, node_type, spec.num_node_types)


@dataclass(frozen=True, slots=True)
class _Canonical:
    """The edges in canonical order, and the other orders in which they are grouped.

    Attributes:
        senders: int32[edges], canonical, `num_nodes` for padding edges; so are the next two, with their bounds.
        receivers: int32[edges].
        edge_type: int32[edges].
        edge_ids: int32[edges], the user's edge at each canonical position.
        edge_positions: int32[edges], the inverse.
        receiver_order: canonical positions sorted by (receiver, type, sender).
        by_receiver: receivers and types in that order.
        sender_order: canonical positions sorted by (sender, type, receiver).
        by_sender: senders and types in that order.
        source_order: canonical positions sorted by (type, sender, receiver).
    """

    senders: Array
    receivers: Array
    edge_type: Array
    edge_ids: Array
    edge_positions: Array
    receiver_order: Array
    by_receiver: tuple[Array, Array]
    sender_order: Array
    by_sender: tuple[Array, Array]
    source_order: Array


def _canonical(edges: Edges, spec: GraphSpec) -> _Canonical:
    """Sorts the edges. Each order is a sort of another one by a single key."""
    num_edges = edges.senders.shape[0]
    node_bound, type_bound = spec.num_nodes + 1, spec.all_edge_types + 1
    senders = jnp.where(edges.mask, edges.senders, spec.num_nodes)
    receivers = jnp.where(edges.mask, edges.receivers, spec.num_nodes)
    edge_type = jnp.where(edges.mask, edges.edge_type, spec.all_edge_types)
    (receiver_there, type_there, _), ids = stable_sort(
        (receivers, edge_type, senders), (node_bound, type_bound, node_bound)
    )
    edge_type, edge_ids = sort_pairs(type_there, type_bound, ids)
    edge_type = edge_type.astype(jnp.int32)
    senders, receivers = senders[edge_ids], receivers[edge_ids]
    edge_positions = inverse(edge_ids)
    sender_there, sender_order = sort_pairs(senders, node_bound, jnp.arange(num_edges, dtype=jnp.int32))
    sender_type_there = edge_type[sender_order]
    _, source_order = sort_pairs(sender_type_there, type_bound, sender_order)
    return _Canonical(
        senders,
        receivers,
        edge_type,
        edge_ids,
        edge_positions,
        receiver_order=edge_positions[ids],
        by_receiver=(receiver_there, type_there),
        sender_order=sender_order,
        by_sender=(sender_there, sender_type_there),
        source_order=source_order,
    )


def _by_node_type(node_type: Array, spec: GraphSpec, is_sorted: bool) -> _Grouping:
    order, sorted_type = None, node_type
    if not is_sorted:
        position = jnp.arange(spec.num_nodes, dtype=jnp.int32)
        sorted_type, order = sort_pairs(node_type, spec.num_node_types + 1, position)
    return node_type, order, row_offsets(sorted_type.astype(jnp.int32), spec.num_node_types)


def _segments(edges: _Canonical, by_node_type: _Grouping, spec: GraphSpec) -> dict[str, Segments | None]:
    """The groupings with their tables."""
    type_offsets = row_offsets(edges.edge_type, spec.all_edge_types)
    sender_offsets = row_offsets(edges.by_sender[0].astype(jnp.int32), spec.num_nodes)
    by_sender = (edges.senders, edges.sender_order, sender_offsets)
    by_receiver = (edges.receivers, edges.receiver_order, row_offsets(edges.by_receiver[0], spec.num_nodes))
    pairs = partial(_pair_groupings, edge_type=edges.edge_type, type_offsets=type_offsets, spec=spec)
    sorted_senders = edges.senders[edges.source_order]
    # The two sums of one end are made together, as six kernels. The ends stay apart: many programs read receivers only.
    begins = begins_run(edges.edge_type, sorted_senders), begins_run(*edges.by_sender)
    source = pairs(sorted_senders, order=edges.source_order, by_node=by_sender, before=count_before(jnp.stack(begins)))
    begins = begins_run(edges.edge_type, edges.receivers), begins_run(*edges.by_receiver)
    destination = pairs(edges.receivers, order=None, by_node=by_receiver, before=count_before(jnp.stack(begins)))
    # Tables that different passes over a graph read are made apart: those of forward, of backward, of pairs.
    make = partial(bounded_segments, long_segment_chunk=spec.long_segment_chunk)
    by_edge_type = (edges.edge_type, None, type_offsets)
    tables: dict[str, Segments | None] = {
        **make(
            {"by_receiver": by_receiver, "by_edge_type": by_edge_type, "by_node_type": by_node_type},
            typed=("by_edge_type", "by_node_type"),
        ),
        **make({"by_sender": by_sender}),
        **make(
            {
                "by_source_pair": source[0],
                "source_pair_by_node": source[1],
                "source_pair_by_type": source[2],
                "by_destination_pair": destination[0],
                "destination_pair_by_node": destination[1],
                "destination_pair_by_type": destination[2],
            },
            typed=("source_pair_by_type", "destination_pair_by_type"),
        ),
        "edge_type_by_source": None,
    }
    if spec.num_node_types <= 1:
        offsets = jnp.array([0, spec.all_edge_types], jnp.int32)
        tables |= make({"edge_type_by_source": (jnp.zeros(spec.all_edge_types, jnp.int32), None, offsets)})
    return tables


def _pair_groupings(
    sorted_node: Array,
    edge_type: Array,
    order: Array | None,
    *,
    by_node: _Grouping,
    before: Array,
    type_offsets: Array,
    spec: GraphSpec,
) -> tuple[_Grouping, _Grouping, _Grouping]:
    """Canonical edges by pair (of one end and the type), pairs by node, pairs by type.

    Unused pairs have the node `num_nodes`, the type `all_edge_types` and no edges.

    Args:
        sorted_node: one end of the edges, sorted by type and node; `num_nodes` for padding edges.
        edge_type: the edge types, ascending.
        order: sorts canonical edges by type and node; None where they are sorted.
        by_node: canonical edges by node, sorted by type within a node.
        before: int32[2, edges + 1], how many pairs begin before each edge, and in all. Row 0: edges sorted by type and
            node. Row 1: edges sorted by node and type.
        type_offsets: where the edges of each type begin.
        spec: counts.
    """
    size = sorted_node.shape[0]
    position = jnp.arange(size, dtype=jnp.int32)
    num_valid = type_offsets[-1]
    valid = position < num_valid
    pairs_before, pairs_before_by_node = before
    pair = jnp.where(valid, pairs_before[1:] - 1, size)
    index = pair if order is None else jnp.zeros_like(pair).at[order].set(pair, unique_indices=True)
    first = pairs_before[1:] > pairs_before[:-1]
    offsets = put_where(jnp.full(size + 1, num_valid, jnp.int32), first & valid, pair, position)
    # An unused pair begins at a padding edge, which has the right node and type, or past the end.
    pair_node = sorted_node.at[offsets[:-1]].get(mode="fill", fill_value=spec.num_nodes)
    pair_type = edge_type.at[offsets[:-1]].get(mode="fill", fill_value=spec.all_edge_types)
    # Within a node, edges and pairs both ascend by type: pairs by node are in the order of their first edges.
    _, node_order, node_offsets = by_node
    first = pairs_before_by_node[1:] > pairs_before_by_node[:-1]
    pair_order = put_where(position, first & valid, pairs_before_by_node[:-1], index[node_order])
    return (
        (index, order, offsets),
        (pair_node, pair_order, pairs_before_by_node[node_offsets]),
        (pair_type, None, pairs_before[type_offsets]),
    )
