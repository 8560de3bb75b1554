"""The text of `RelGraph.summary`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

from dejax.rgnn.graphs.segments import Segments


def summary(graph: Any) -> str:
    """A small table of a `RelGraph`'s size; see `RelGraph.summary`."""
    traced = graph.is_traced

    def valid(total: int, offsets: Array) -> str:
        if traced or int(offsets[-1]) == total:
            return f"{total:,}"
        return f"{int(offsets[-1]):,} of {total:,}"

    def largest(segments: Segments) -> str:
        return "traced" if traced else f"{int(np.diff(np.asarray(segments.offsets)).max(initial=0)):,}"

    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(graph)}.values()
    rows = [
        ("nodes", valid(graph.num_nodes, graph.by_node_type.offsets)),
        ("node types", f"{graph.num_node_types:,}"),
        ("edges", valid(graph.num_edges, graph.by_edge_type.offsets)),
        ("edge types", f"{graph.num_edge_types:,}"),
        ("source pairs", valid(graph.num_source_pairs, graph.source_pair_by_node.offsets)),
        ("destination pairs", valid(graph.num_destination_pairs, graph.destination_pair_by_node.offsets)),
        ("largest in-degree", largest(graph.by_receiver)),
        ("largest out-degree", largest(graph.by_sender)),
        ("MiB", f"{sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 2**20:.1f}"),
    ]
    width = max(len(value) for _, value in rows)
    return "\n".join(f"{name:<19}{value:>{width}}" for name, value in rows)
