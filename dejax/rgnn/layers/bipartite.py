"""Pairs of features (sources, destinations): one row for each node of a side, brought to one row for each node."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.relations import SIDES


def sides(graph: RelGraph) -> tuple[slice, slice] | None:
    """The rows of a graph's sources and destinations; None where it is not known to be bipartite.

    Known are graphs of `RelGraph.from_bipartite`, and of `RelGraph.from_relations` where all relations lead from one
    node type to one other.
    """
    if graph.node_type_names is None or graph.node_type_counts is None:
        return None
    if graph.edge_type_names is None:
        source, destination = SIDES
        return None if graph.node_type_names != SIDES else (graph.node_slice(source), graph.node_slice(destination))
    named = {tuple(name.split("/")[:: max(name.count("/"), 1)]) for name in graph.edge_type_names}
    if len(named) != 1:
        return None
    ends = named.pop()
    if len(ends) != 2 or ends[0] == ends[1]:
        return None
    return graph.node_slice(ends[0]), graph.node_slice(ends[1])


def spread(owner: str, graph: RelGraph, x: Any, widths: tuple[int, int]) -> tuple[tuple[Array, Array], slice]:
    """A pair of features with one row for each node of the graph, zero on the other side, and the rows of the result.

    Args:
      owner: who asks, for the error.
      graph: the graph.
      x: a pair (sources, destinations): one row for each node of a side of a bipartite graph, or both [num_nodes, k].
      widths: the widths of sources and destinations.

    Raises:
      ValueError: other shapes.
    """
    found = sides(graph)
    shapes = [getattr(part, "shape", None) for part in x]
    if shapes == [(graph.num_nodes, width) for width in widths]:
        return (x[0], x[1]), slice(None)
    if found is None:
        raise ValueError(
            f"{owner}: x must be a pair of shapes {[(graph.num_nodes, width) for width in widths]}, got {shapes}; for "
            "one row per source and per destination make the graph with RelGraph.from_bipartite"
        )
    wanted = [(rows.stop - rows.start, width) for rows, width in zip(found, widths, strict=True)]
    if shapes != wanted:
        raise ValueError(f"{owner}: x must be a pair of shapes {wanted} (sources, destinations), got {shapes}")
    pads = [(rows.start, graph.num_nodes - rows.stop) for rows in found]
    source, destination = (jnp.pad(part, (pad, (0, 0))) for part, pad in zip(x, pads, strict=True))
    return (source, destination), found[1]
