"""Samples of all relations together: a fan-out counts the edges of a node, whatever their relations."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dejax._dtypes import broadcasting
from dejax.host_gather._ids import checked_ids
from dejax.minibatch.sampling._layout import SampleLayout
from dejax.minibatch.sampling.blocks import Block
from dejax.minibatch.sampling.sample import SampledBlocks, edge_ids
from dejax.minibatch.topology.hetero_topology import HeteroTopology
from dejax.rgnn import RelGraph

__all__ = ["make_typed_blocks"]


@broadcasting
def make_typed_blocks(
    topology: HeteroTopology,
    sample: SampledBlocks,
    edge_type: ArrayLike,
    num_edge_types: int,
    *,
    add_self_loops: bool = False,
) -> list[Block]:
    """Makes the graph of each layer from a sample of a topology whose one relation holds the edges of all relations.

    Use it for graphs of many relations, such as knowledge graphs. There `sample_blocks` with a fan-out for each
    relation would reserve `fan_out` slots in each of hundreds of relations, most of them empty. Instead, make a
    topology with one relation that has all edges, sample it, and call `make_typed_blocks`, which reads the relation of
    each sampled edge. A node then has `fan_out` slots in all. It works inside of `jax.jit`.

    Args:
        topology: a topology with one relation within one node type, which keeps the ids of its edges.
        sample: the result of `sample_blocks` on this topology.
        edge_type: int[edges], the relation of each edge, in the order of the edge list that the topology was made from.
        num_edge_types: number of relations.
        add_self_loops: whether to add an edge from each destination to itself, of an additional relation with the
            number `num_edge_types`.

    Returns:
        A block for each layer, like `make_blocks`; the edge types of their graphs are the relations.

    Raises:
        ValueError: the topology has several relations or node types, or `edge_type` has not one entry for each edge.
        TypeError: the edge types are not integers.

    >>> import jax
    >>> from dejax.minibatch import HeteroTopology, sample_blocks
    >>> relation = ("node", "edge", "node")
    >>> topology = HeteroTopology.from_edges({relation: ([1, 2, 2], [0, 0, 1])}, {"node": 3})
    >>> sample = sample_blocks(jax.random.key(0), topology, ("node", jnp.array([0])), [2])
    >>> (block,) = make_typed_blocks(topology, sample, jnp.array([5, 6, 7]), 8)
    >>> block.graph.num_edge_types, sorted(block.graph.edge_type[block.graph.edge_mask].tolist())
    (8, [5, 6])
    """
    if len(topology.relations) != 1 or len(topology.node_types) != 1:
        raise ValueError(
            f"make_typed_blocks: `topology` must have one relation within one node type, got {topology.edge_types}; "
            "use make_blocks"
        )
    count = topology.relations[0].num_edges
    edge_type = checked_ids("make_typed_blocks", edge_type, num_edge_types, "edge_type")
    if edge_type.shape != (count,):
        raise ValueError(
            f"make_typed_blocks: `edge_type` must be int[{count}], one for each edge, got {edge_type.shape}"
        )
    layout, blocks = sample.layout, []
    numbers = layout.by_piece(sample.slots)
    kinds = [edge_type.at[jnp.maximum(own, 0)].get(mode="clip") for own in edge_ids(topology, sample)]
    for hops in reversed(range(sample.num_layers)):
        own = [n for n, piece in enumerate(layout.pieces) if piece.hop <= hops]
        none = jnp.zeros(0, jnp.int32)
        senders = jnp.concatenate([none, *(numbers[n].reshape(-1) for n in own)])
        receivers = jnp.concatenate([none, *(_receivers(layout, n) for n in own)])
        types = jnp.concatenate([none, *(kinds[n].reshape(-1).astype(jnp.int32) for n in own)])
        slots = None
        if layout.edges is not None and layout.edges[hops] < senders.shape[0]:
            slots = _first_valid(senders >= 0, layout.edges[hops])
            senders, receivers, types = (some[slots] for some in (senders, receivers, types))
            # The first slot stands for edges that are not there.
            senders = jnp.where(jnp.arange(senders.shape[0]) < sample.edges_found[hops], senders, -1)
        if add_self_loops:  # of destinations: other nodes have no incoming edges
            nodes = jnp.arange(layout.count(hops), dtype=jnp.int32)
            loops = (
                jnp.where(sample.nodes[: nodes.shape[0]] >= 0, nodes, -1),
                nodes,
                jnp.full_like(nodes, num_edge_types),
            )
            senders, receivers, types = (
                jnp.concatenate(both) for both in zip((senders, receivers, types), loops, strict=True)
            )
        graph = RelGraph.build_traced(
            jnp.maximum(senders, 0),
            receivers,
            types,
            num_nodes=layout.count(hops + 1),
            num_edge_types=num_edge_types + add_self_loops,
            edge_mask=senders >= 0,
            node_mask=sample.nodes[: layout.count(hops + 1)] >= 0,
        )
        graph = dataclasses.replace(graph, num_destinations=layout.count(hops))
        blocks.append(Block(graph, slots, hops, layout))
    return blocks


def _first_valid(there: Array, count: int) -> Array:
    """int32[count], the places of the first True entries; 0 behind the last of them."""
    rank = jnp.cumsum(there, dtype=jnp.int32) - 1
    place = jnp.where(there & (rank < count), rank, count)
    return jnp.zeros(count, jnp.int32).at[place].set(jnp.arange(there.shape[0], dtype=jnp.int32), mode="drop")


def _receivers(layout: SampleLayout, number: int) -> Array:
    """The receiver of each slot of a piece, as a number among all nodes."""
    piece = layout.pieces[number]
    first = layout.first_of_all(piece.hop, piece.target)
    return jnp.repeat(jnp.arange(first, first + layout.receivers(piece), dtype=jnp.int32), piece.fan_out)
