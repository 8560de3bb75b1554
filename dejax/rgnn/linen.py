"""Layers as Flax linen modules: `RGCNConv`, `RGATConv`, `HGTConv`, those of `dejax.rgnn.zoo`, and `ProgramModule`.

    from dejax.rgnn.linen import RGCNConv

    layer = RGCNConv(32, num_bases=8)
    variables = layer.init(jax.random.key(0), graph, x)
    y = layer.apply(variables, graph, x)

The first call determines the width of x and the graph's counts, as in linen modules. Parameters have the names and
shapes of the nnx modules (`dejax.rgnn.nnx`), and the same parameters give the same values. Dropout takes a key named
`dropout`; `deterministic`, True while evaluating, is given to the module or to the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from dejax.rgnn._linen_layer import LinenLayer, ProgramModule
from dejax.rgnn.layers import specs
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
]

# Attributes and documentation are the specification's; for editors, linen.pyi has the signatures.


class RGCNConv(LinenLayer, kind=specs.RGCNSpec): ...


class RGATConv(LinenLayer, kind=specs.RGATSpec): ...


class HGTConv(LinenLayer, kind=specs.HGTSpec): ...


class GCNConv(LinenLayer, kind=specs.GCNSpec): ...


class SAGEConv(LinenLayer, kind=specs.SAGESpec): ...


class GINConv(LinenLayer, kind=specs.GINSpec): ...


class GatedGCNConv(LinenLayer, kind=specs.GatedGCNSpec): ...


class PNAConv(LinenLayer, kind=specs.PNASpec): ...


class GATConv(LinenLayer, kind=specs.GATSpec): ...


class GATv2Conv(LinenLayer, kind=specs.GATv2Spec): ...


class TransformerConv(LinenLayer, kind=specs.TransformerSpec): ...


class RGGNNConv(LinenLayer, kind=specs.RGGNNSpec): ...


class CompGCNConv(LinenLayer, kind=specs.CompGCNSpec): ...


class SimpleHGNConv(LinenLayer, kind=specs.SimpleHGNSpec): ...


class SharedRGATConv(LinenLayer, kind=specs.SharedRGATSpec): ...


class HEATConv(LinenLayer, kind=specs.HEATSpec): ...


def from_pyg(
    layer: Any, *, graph_has_self_loops: bool = False, options: Options | None = None
) -> tuple[Any, dict[str, dict[str, Array]]]:
    """Converts a layer of PyTorch Geometric into a linen module and variables with the same weights.

    `dejax.rgnn.interop.from_pyg` has the arguments, the supported layers and the errors.

    Returns:
      A pair (module, variables), for `module.apply(variables, graph, x)`.
    """
    found = layer_from_pyg(layer, graph_has_self_loops=graph_has_self_loops, options=options)
    module = globals()[found.name]
    own = {field.name for field in dataclasses.fields(module)}
    settings = {"features" if name == "out_features" else name: value for name, value in found.settings.items()}
    return module(**{name: value for name, value in settings.items() if name in own}), {"params": found.params}
