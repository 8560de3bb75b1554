"""What a stack of layers needs of a list of blocks or of a full graph, without Flax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array

from dejax.minibatch.sampling.blocks import Block, join_nodes
from dejax.rgnn import RelGraph

Graphs: TypeAlias = Sequence[Block] | RelGraph
"""One block for each layer, or a full graph of `RelGraph.from_relations`, which all layers use."""


def stages(graphs: Graphs, layers: Sequence[Any]) -> list[tuple[RelGraph, int | None]]:
    """For each layer its graph, and how many rows of its result are kept (None: all).

    Layers with a true attribute `returns_destinations` get the bipartite graph of their block, and so return a row for
    each destination.
    """
    num_layers = len(layers)
    if isinstance(graphs, RelGraph):
        return [(graphs, None)] * num_layers
    blocks = [graphs] if isinstance(graphs, Block) else list(graphs)
    if not all(isinstance(block, Block) for block in blocks):
        raise TypeError(
            f"`graphs` must be the blocks of make_blocks(sample) or a RelGraph, got {type(graphs).__name__}"
        )
    if len(blocks) != num_layers:
        raise ValueError(
            f"`graphs` must have one block for each of the {num_layers} layers, got {len(blocks)}; sample with as many "
            "`fan_outs` as there are layers"
        )
    return [
        (block.bipartite, None)
        if getattr(layer, "returns_destinations", False)
        else (block.graph, block.num_destinations)
        for block, layer in zip(blocks, layers, strict=True)
    ]


def join(graphs: Graphs, x: Mapping[str, Array]) -> Array:
    """Values of the first layer's nodes, [nodes, n], from those by node type."""
    if not isinstance(graphs, RelGraph):
        first = graphs if isinstance(graphs, Block) else graphs[0]
        return join_nodes(first.layout, x, first.hops + 1)
    names, counts = _counts(graphs)
    for name, count in zip(names, counts, strict=True):
        if count and (name not in x or x[name].shape[0] != count):
            given = "none" if name not in x else x[name].shape[0]
            raise ValueError(f"`x[{name!r}]` must have {count} rows, one for each node of the graph, got {given}")
    if unknown := set(x) - set(names):
        raise ValueError(f"node type must be one of {list(names)}, got {sorted(unknown)[0]!r}")
    return jnp.concatenate([x[name] for name, count in zip(names, counts, strict=True) if count])


def split(graphs: Graphs, x: Array) -> dict[str, Array]:
    """The last layer's result by node type."""
    if not isinstance(graphs, RelGraph):
        return (graphs if isinstance(graphs, Block) else graphs[-1]).split(x)
    return {name: x[graphs.node_slice(name)] for name in _counts(graphs)[0]}


def _counts(graph: RelGraph) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if graph.node_type_names is None or graph.node_type_counts is None:
        raise ValueError(
            "`graphs` must be a graph of RelGraph.from_relations, whose nodes are numbered type after type, got one of "
            "another constructor"
        )
    return graph.node_type_names, graph.node_type_counts


def check_types(x: Mapping[str, Array], in_features: Mapping[str, int]) -> None:
    """Raises ValueError where a type was not declared or has another width."""
    for name, rows in x.items():
        if name not in in_features:
            raise ValueError(f"node type must be one of {list(in_features)}, for which widths were given, got {name!r}")
        if rows.ndim != 2 or rows.shape[1] != in_features[name]:
            raise ValueError(f"`x[{name!r}]` must have shape [nodes, {in_features[name]}], got {rows.shape}")
