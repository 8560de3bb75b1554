"""Layers as Flax nnx modules: `RGCNConv`, `RGATConv`, `HGTConv`, those of `dejax.rgnn.zoo`, and `ProgramModule`.

    from flax import nnx
    from dejax.rgnn.nnx import RGCNConv

    layer = RGCNConv(64, 32, graph.num_edge_types, num_bases=8, rngs=nnx.Rngs(0))
    y = layer(graph, x)

Parameters are attributes with the names of `dejax.rgnn.library` and `dejax.rgnn.zoo`; `params_to_linen` and
`params_from_linen` convert them to those of `dejax.rgnn.linen`. Dropout is as in `nnx.Dropout`.
"""

from __future__ import annotations

from typing import Any

from dejax.rgnn._nnx_layer import NnxLayer, ProgramModule, nnx
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers import specs
from dejax.rgnn.layers.parameters import params_from_linen, params_to_linen
from dejax.rgnn.layers.pyg import from_pyg as layer_from_pyg
from dejax.rgnn.options import Options

__all__ = [
    "CompGCNConv",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GatedGCNConv",
    "HEATConv",
    "HGTConv",
    "PNAConv",
    "ProgramModule",
    "RGATConv",
    "RGCNConv",
    "RGGNNConv",
    "SAGEConv",
    "SharedRGATConv",
    "SimpleHGNConv",
    "TransformerConv",
    "from_pyg",
    "params_from_linen",
    "params_to_linen",
]

# Arguments and documentation are the specification's; for editors, nnx.pyi has the signatures.


class RGCNConv(NnxLayer, kind=specs.RGCNSpec):
    @classmethod
    def featureless(cls, graph: RelGraph, out_features: int, *, rngs: nnx.Rngs, **keywords: Any) -> RGCNConv:
        """Makes a layer for nodes without features, with the sizes of `graph`. Call it as `layer(graph)`.

        Args:
          graph: a graph with the numbers of nodes, of edge types and of source pairs.
          out_features: width of the result.
          rngs: random streams; `params` initialises the parameters.
          keywords: further arguments of `RGCNConv`, such as `num_bases`.
        """
        return cls(
            None,
            out_features,
            graph.num_edge_types,
            num_nodes=graph.num_nodes,
            num_source_pairs=graph.num_source_pairs,
            rngs=rngs,
            **keywords,
        )


class RGATConv(NnxLayer, kind=specs.RGATSpec): ...


class HGTConv(NnxLayer, kind=specs.HGTSpec): ...


class GCNConv(NnxLayer, kind=specs.GCNSpec): ...


class SAGEConv(NnxLayer, kind=specs.SAGESpec): ...


class GINConv(NnxLayer, kind=specs.GINSpec): ...


class GatedGCNConv(NnxLayer, kind=specs.GatedGCNSpec): ...


class PNAConv(NnxLayer, kind=specs.PNASpec): ...


class GATConv(NnxLayer, kind=specs.GATSpec): ...


class GATv2Conv(NnxLayer, kind=specs.GATv2Spec): ...


class TransformerConv(NnxLayer, kind=specs.TransformerSpec): ...


class RGGNNConv(NnxLayer, kind=specs.RGGNNSpec): ...


class CompGCNConv(NnxLayer, kind=specs.CompGCNSpec): ...


class SimpleHGNConv(NnxLayer, kind=specs.SimpleHGNSpec): ...


class SharedRGATConv(NnxLayer, kind=specs.SharedRGATSpec): ...


class HEATConv(NnxLayer, kind=specs.HEATSpec): ...


def from_pyg(
    layer: Any, *, graph_has_self_loops: bool = False, options: Options | None = None, rngs: nnx.Rngs | None = None
) -> Any:
    """Converts a layer of PyTorch Geometric into the nnx module with the same settings and weights.

    `dejax.rgnn.interop.from_pyg` lists the supported layers and the errors.

    Args:
      layer: a layer with its weights, such as a `torch_geometric.nn.SAGEConv`.
      graph_has_self_loops: as in `dejax.rgnn.interop.from_pyg`.
      options: compiler options of the module.
      rngs: its `dropout` stream becomes the module's; None means `nnx.Rngs(0)`.
    """
    found = layer_from_pyg(layer, graph_has_self_loops=graph_has_self_loops, options=options)
    values = {name: lambda key, shape, dtype, value=value: value for name, value in found.params.items()}
    settings = {name: value for name, value in found.settings.items() if name != "dtype"}
    return globals()[found.name](**settings, initializers=values, rngs=nnx.Rngs(0) if rngs is None else rngs)
