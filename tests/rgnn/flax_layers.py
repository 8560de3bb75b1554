"""Shared by the tests of the Flax and jraph bindings: a graph, and a program that is not in the library."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dejax import rgnn
from dejax.rgnn import RelGraph


def typed_graph(seed: int = 0, nodes: int = 12, edges: int = 40, types: int = 3, node_types: int = 2) -> RelGraph:
    """Random edges, with an empty edge type where there are at least three, and a node without incoming edges."""
    rng = np.random.default_rng(seed)
    edge_type = rng.integers(0, types, edges)
    edge_type[edge_type == 2] = 0
    return RelGraph.from_edges(
        rng.integers(0, nodes, edges),
        rng.integers(1, nodes, edges),
        edge_type,
        num_nodes=nodes,
        num_edge_types=types,
        node_type=rng.integers(0, node_types, nodes),
        num_node_types=node_types,
    )


def features(graph: RelGraph, width: int, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (graph.num_nodes, width))


def without_edges(graph: RelGraph, kept: np.ndarray) -> RelGraph:
    """The same graph with only some of its edges; `kept` is in the user's order."""
    edges = [np.asarray(array)[kept] for array in graph.to_edges()]
    return RelGraph.from_edges(
        *edges,
        num_nodes=graph.num_nodes,
        num_edge_types=graph.num_edge_types,
        node_type=np.asarray(graph.node_type),
        num_node_types=graph.num_node_types,
    )


@rgnn.program
def gated(g: Any, x: Any, strength: Any, weight: Any, gate: Any) -> Any:
    """A program that is not in the library: an edge input, a weight per edge type and a shared weight."""
    message = g.src(x) @ g.per_edge_type(weight)
    return rgnn.tanh(g.sum_to_dst(message * g.edge(strength))) * rgnn.sigmoid(g.node(x) @ g.shared(gate))
