"""The jax.numpy builder of `RelGraph`, for use inside `jax.jit`: sizes are static bounds, padding has no effect.

Same tables as `_build`, whose numbers it reproduces on the valid part. Every bound follows from the arrays' lengths: as
many pairs as edges, `edges // (chunk + 1)` hubs, `items // block + types` tiles. What is unused points one past the end
and stands in no row, so kernels that walk rows never meet it.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from dejax.rgnn._build import add_relations
from dejax.rgnn._segments import Segments, make_segments
from dejax.rgnn.graph import RelGraph


def _offsets(index: Array, num_rows: int) -> Array:
    """int32[rows + 1]: where each row begins once items are sorted by `index`; rows of `num_rows` are padding."""
    counts = jnp.zeros(num_rows + 1, jnp.int32).at[index + 1].add(1, mode="drop")
    return jnp.cumsum(counts, dtype=jnp.int32)


def _argsort(*keys: Array) -> Array:
    """The stable order by `keys`, the most significant first: int32[items]."""
    position = jnp.arange(keys[0].shape[0], dtype=jnp.int32)
    return jax.lax.sort((*keys, position), num_keys=len(keys), is_stable=True)[-1]


def _take(values: Array, order: Array | None) -> Array:
    return values if order is None else values[order]


def _pair_tables(
    node: Array, edge_type: Array, valid: Array, order: Array | None, *, num_nodes: int, num_edge_types: int, chunk: int
) -> tuple[Segments, Segments, Segments]:
    """Edges by pair, pairs by node, pairs by type; `order` (None: as they are) sorts edges by type and node.

    Padding edges come last in that order. Pairs that do not occur have the node `num_nodes`, the type
    `num_edge_types` and no edges.
    """
    size = node.shape[0]
    sorted_node, sorted_type = _take(node, order), _take(edge_type, order)
    differs = (sorted_node[1:] != sorted_node[:-1]) | (sorted_type[1:] != sorted_type[:-1])
    # Padding is last whatever the order, so that `valid` serves for both; the pair that it would begin is dropped.
    new = jnp.concatenate([jnp.ones(min(size, 1), bool), differs])
    run = jnp.where(valid, jnp.cumsum(new, dtype=jnp.int32) - 1, size)
    index = run if order is None else jnp.zeros(size, jnp.int32).at[order].set(run, unique_indices=True)
    # One edge a pair writes (its first), so that the scatter has no duplicates beside those that it drops.
    target = jnp.where(new, run, size)
    pair_node = jnp.full(size, num_nodes, jnp.int32).at[target].set(sorted_node, mode="drop")
    pair_type = jnp.full(size, num_edge_types, jnp.int32).at[target].set(sorted_type, mode="drop")
    make = partial(make_segments, hub_chunk=chunk, exact=False)
    return (
        make(index, order, _offsets(index, size)),
        make(pair_node, _argsort(pair_node), _offsets(pair_node, num_nodes)),
        make(pair_type, None, _offsets(pair_type, num_edge_types), typed=True),
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

    position = jnp.arange(num_edges, dtype=jnp.int32)
    edge_type, receivers, senders, edge_ids = jax.lax.sort(
        (edge_type, receivers, senders, position), num_keys=3, is_stable=True
    )
    edge_positions = jnp.zeros(num_edges, jnp.int32).at[edge_ids].set(position, unique_indices=True)
    valid = edge_type < num_edge_types

    tables = partial(_pair_tables, num_nodes=num_nodes, num_edge_types=num_edge_types, chunk=hub_chunk)
    by_source_pair, source_pair_by_node, source_pair_by_type = tables(
        senders, edge_type, valid, _argsort(edge_type, senders)
    )
    by_destination_pair, destination_pair_by_node, destination_pair_by_type = tables(receivers, edge_type, valid, None)
    make = partial(make_segments, hub_chunk=hub_chunk, exact=False)
    return RelGraph(
        senders=senders,
        receivers=receivers,
        edge_type=edge_type,
        edge_ids=edge_ids,
        edge_positions=edge_positions,
        node_type=node_type,
        by_sender=make(senders, _argsort(senders), _offsets(senders, num_nodes)),
        by_receiver=make(receivers, _argsort(receivers), _offsets(receivers, num_nodes)),
        by_source_pair=by_source_pair,
        by_destination_pair=by_destination_pair,
        by_edge_type=make(edge_type, None, _offsets(edge_type, num_edge_types), typed=True),
        source_pair_by_node=source_pair_by_node,
        destination_pair_by_node=destination_pair_by_node,
        source_pair_by_type=source_pair_by_type,
        destination_pair_by_type=destination_pair_by_type,
        by_node_type=make(
            node_type,
            None if nodes_sorted else _argsort(node_type),
            _offsets(node_type, num_node_types),
            typed=True,
        ),
        edge_type_by_source=None
        if num_node_types > 1
        else make(jnp.zeros(num_edge_types, jnp.int32), None, jnp.array([0, num_edge_types], jnp.int32)),
        node_mask=node_mask,
        edge_mask=valid,
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_edge_types=num_edge_types,
        num_node_types=num_node_types,
        num_source_pairs=num_edges,
        num_destination_pairs=num_edges,
        edge_type_names=edge_type_names,
        node_type_names=node_type_names,
    )
