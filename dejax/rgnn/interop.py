"""Conversions of `RelGraph` from and to jraph: the public path of `dejax.rgnn.graphs.interop`."""

from dejax.rgnn.graphs.interop import (
    EDGE_TYPE_KEY,
    NODE_TYPE_KEY,
    from_graphs_tuple,
    from_relations,
    to_graphs_tuple,
    to_relations,
)

__all__ = [
    "EDGE_TYPE_KEY",
    "NODE_TYPE_KEY",
    "from_graphs_tuple",
    "from_relations",
    "to_graphs_tuple",
    "to_relations",
]
