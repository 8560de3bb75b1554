"""Published layers and decoders as functions: the public path of `dejax.rgnn.layers.zoo`.

Each is an `rgnn.program`. Call a layer with a `RelGraph`, node features and a dict of parameters. Call a decoder
(`distmult`, `complex_`, `rotate`) with a graph of the triples, entity embeddings and one array of relation parameters;
it gives a score for each edge. `dejax.rgnn.nnx` and `dejax.rgnn.linen` have a module for each layer.
"""

from dejax.rgnn.layers.zoo.attention import gat, gatv2, graph_transformer
from dejax.rgnn.layers.zoo.convolutions import gated_gcn, gcn, gin, graphsage, pna
from dejax.rgnn.layers.zoo.decoders import complex_, distmult, rotate
from dejax.rgnn.layers.zoo.relational import compgcn, heat, rgat_shared, rggnn, simple_hgn

__all__ = [
    "compgcn",
    "complex_",
    "distmult",
    "gat",
    "gated_gcn",
    "gatv2",
    "gcn",
    "gin",
    "graph_transformer",
    "graphsage",
    "heat",
    "pna",
    "rgat_shared",
    "rggnn",
    "rotate",
    "simple_hgn",
]
