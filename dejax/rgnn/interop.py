"""Graphs from and to jraph, and layers of PyTorch Geometric: the public path of their modules."""

from dejax.rgnn.graphs.interop import (
    EDGE_TYPE_KEY,
    NODE_TYPE_KEY,
    from_graphs_tuple,
    from_relations,
    to_graphs_tuple,
    to_relations,
)
from dejax.rgnn.layers.pyg import ConvertedLayer, from_pyg

__all__ = [
    "EDGE_TYPE_KEY",
    "NODE_TYPE_KEY",
    "ConvertedLayer",
    "from_graphs_tuple",
    "from_pyg",
    "from_relations",
    "to_graphs_tuple",
    "to_relations",
]
