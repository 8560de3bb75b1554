"""The jax.numpy builder of `RelGraph`, for use inside `jax.jit`: sizes are static bounds, padding has no effect.

Same tables as `build`, whose numbers it reproduces on the valid part. Every bound follows from the arrays' lengths: as
many pairs as edges, `edges // (chunk + 1)` hubs, `items // block + types` tiles. What is unused points one past the end
and stands in no row, so kernels that walk rows never meet it.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from dejax.rgnn.graphs.build import add_relations
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import bounded_segments
from dejax.rgnn.graphs.sorting_traced import (
    begins_run,
    count_before,
    inverse,
    put_where,
    row_offsets,
    sort_pairs,
    stable_sort,
)

_Grouping = tuple[Array, Array | None, Array]
"""Index, order and offsets of a `Segments`."""


def _pair_groupings(
    sorted_node: Array,
    edge_type: Array,
    order: Array | None,
    *,
    by_node: _Grouping,
    before: Array,
    type_offsets: Array,
    num_nodes: int,
    num_edge_types: int,
) -> tuple[_Grouping, _Grouping, _Grouping]:
    """Canonical edges by pair (of one end and the type), pairs by node, pairs by type.

    Pairs that do not occur have the node `num_nodes`, the type `num_edge_types` and no edges.

    Args:
        sorted_node: that end of the edges sorted by type and node, `num_nodes` for padding edges.
        edge_type: the type of the edges so sorted, and of canonical ones.
        order: sorts canonical edges by type and node; None where they are.
        by_node: canonical edges by node and type.
        before: int32[2, edges + 1], how many pairs begin before each edge and in all: of edges sorted by type and node,
            and of edges sorted by node and type.
        type_offsets: where the edges of each type begin.
        num_nodes: number of nodes.
        num_edge_types: number of edge types.
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
    # The edges of a pair that does not occur begin at the padding, whose node and type are right, or past the end.
    pair_node = sorted_node.at[offsets[:-1]].get(mode="fill", fill_value=num_nodes)
    pair_type = edge_type.at[offsets[:-1]].get(mode="fill", fill_value=num_edge_types)
    # Edges by node ascend by type within a node, and so do pairs: pairs by node are in the order of their first edges.
    _, node_order, node_offsets = by_node
    first = pairs_before_by_node[1:] > pairs_before_by_node[:-1]
    pair_order = put_where(position, first & valid, pairs_before_by_node[:-1], index[node_order])
    return (
        (index, order, offsets),
        (pair_node, pair_order, pairs_before_by_node[node_offsets]),
        (pair_type, None, pairs_before[type_offsets]),
    )


@partial(
    jax.jit,
    static_argnames=(
        "num_nodes",
        "num_edge_types",
        "num_node_types",
        "add_reverse",
        "add_self_loops",
        "edge_type_names",
        "node_type_names",
        "nodes_sorted",
        "hub_chunk",
    ),
)
def build(
    senders: Array,
    receivers: Array,
    edge_type: Array,
    *,
    num_nodes: int,
    num_edge_types: int,
    node_type: Array | None,
    num_node_types: int,
    edge_mask: Array | None,
    node_mask: Array | None,
    add_reverse: bool,
    add_self_loops: bool,
    edge_type_names: tuple[str, ...] | None,
    node_type_names: tuple[str, ...] | None,
    nodes_sorted: bool,
    hub_chunk: int,
) -> RelGraph:
    """Builds the graph from int32 arrays of checked form; `nodes_sorted`: nodes are known to be sorted by type."""
    in_range = (edge_type >= 0) & (edge_type < num_edge_types)
    for ends in (senders, receivers):
        in_range &= (ends >= 0) & (ends < num_nodes)
        if node_mask is not None and num_nodes:
            in_range &= node_mask[ends]
    # Numbers cannot be checked here, but a wild read must not follow from them: such edges count as padding.
    edge_mask = in_range if edge_mask is None else edge_mask & in_range
    if node_type is None:
        node_type = jnp.zeros(num_nodes, jnp.int32)
    node_valid = (node_type >= 0) & (node_type < num_node_types)
    if node_mask is not None:
        node_valid &= node_mask
    node_type = jnp.where(node_valid, node_type, num_node_types)

    senders, receivers, edge_type, edge_mask, num_edge_types = add_relations(
        jnp,
        senders,
        receivers,
        edge_type,
        edge_mask,
        node_mask,
        num_nodes=num_nodes,
        num_edge_types=num_edge_types,
        add_reverse=add_reverse,
        add_self_loops=add_self_loops,
    )
    num_edges = senders.shape[0]
    senders = jnp.where(edge_mask, senders, num_nodes)
    receivers = jnp.where(edge_mask, receivers, num_nodes)
    edge_type = jnp.where(edge_mask, edge_type, num_edge_types)

    # Each order is a sort of another one by a single key: by receiver (receiver, type, sender), canonical (type,
    # receiver, sender), by sender (sender, type, receiver), by source pair (type, sender, receiver).
    node_bound, type_bound = num_nodes + 1, num_edge_types + 1
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

    type_offsets = row_offsets(edge_type, num_edge_types)
    by_sender = (senders, sender_order, row_offsets(sender_there.astype(jnp.int32), num_nodes))
    by_receiver = (receivers, edge_positions[ids], row_offsets(receiver_there, num_nodes))
    by_edge_type = (edge_type, None, type_offsets)
    pairs = partial(
        _pair_groupings,
        edge_type=edge_type,
        type_offsets=type_offsets,
        num_nodes=num_nodes,
        num_edge_types=num_edge_types,
    )
    sorted_senders = senders[source_order]
    # Both sums of an end at once, as six kernels, but not those of both ends: many programs read the receivers alone.
    begins = begins_run(edge_type, sorted_senders), begins_run(sender_there, sender_type_there)
    source = pairs(sorted_senders, order=source_order, by_node=by_sender, before=count_before(jnp.stack(begins)))
    begins = begins_run(edge_type, receivers), begins_run(receiver_there, type_there)
    destination = pairs(receivers, order=None, by_node=by_receiver, before=count_before(jnp.stack(begins)))

    node_order, sorted_node_type = None, node_type
    if not nodes_sorted:
        node_position = jnp.arange(num_nodes, dtype=jnp.int32)
        sorted_node_type, node_order = sort_pairs(node_type, num_node_types + 1, node_position)
    by_node_type = (node_type, node_order, row_offsets(sorted_node_type.astype(jnp.int32), num_node_types))
    segments = partial(bounded_segments, hub_chunk=hub_chunk)
    # What one pass over a graph reads is made apart from what it does not read: forward, then backward too, then pairs.
    tables = segments(
        {"by_receiver": by_receiver, "by_edge_type": by_edge_type, "by_node_type": by_node_type},
        typed=("by_edge_type", "by_node_type"),
    )
    tables |= segments({"by_sender": by_sender})
    tables |= segments(
        {
            "by_source_pair": source[0],
            "source_pair_by_node": source[1],
            "source_pair_by_type": source[2],
            "by_destination_pair": destination[0],
            "destination_pair_by_node": destination[1],
            "destination_pair_by_type": destination[2],
        },
        typed=("source_pair_by_type", "destination_pair_by_type"),
    )
    all_types = jnp.array([0, num_edge_types], jnp.int32)
    by_source = (jnp.zeros(num_edge_types, jnp.int32), None, all_types)
    return RelGraph(
        senders=senders,
        receivers=receivers,
        edge_type=edge_type,
        edge_ids=edge_ids,
        edge_positions=edge_positions,
        node_type=node_type,
        by_sender=tables["by_sender"],
        by_receiver=tables["by_receiver"],
        by_source_pair=tables["by_source_pair"],
        by_destination_pair=tables["by_destination_pair"],
        by_edge_type=tables["by_edge_type"],
        source_pair_by_node=tables["source_pair_by_node"],
        destination_pair_by_node=tables["destination_pair_by_node"],
        source_pair_by_type=tables["source_pair_by_type"],
        destination_pair_by_type=tables["destination_pair_by_type"],
        by_node_type=tables["by_node_type"],
        edge_type_by_source=None if num_node_types > 1 else segments({"by_source": by_source})["by_source"],
        node_mask=node_mask,
        edge_mask=edge_type < num_edge_types,
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_edge_types=num_edge_types,
        num_node_types=num_node_types,
        num_source_pairs=num_edges,
        num_destination_pairs=num_edges,
        edge_type_names=edge_type_names,
        node_type_names=node_type_names,
    )
