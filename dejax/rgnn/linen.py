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
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dejax._optional import optional
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers import parameters, specs
from dejax.rgnn.layers.parameters import Initializer
from dejax.rgnn.layers.pyg import from_pyg as layer_from_pyg
from dejax.rgnn.layers.specs import LayerSpec, Normalization
from dejax.rgnn.layers.zoo import modules
from dejax.rgnn.layers.zoo import specs as zoo
from dejax.rgnn.layers.zoo.spec import ZooSpec
from dejax.rgnn.options import Options

with optional("flax", of="dejax.rgnn.linen"):
    from flax import linen as nn

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


class _Layer(nn.Module):
    """Makes a spec from the module's attributes and the first call, makes its parameters and calls it."""

    returns_destinations: ClassVar[bool] = True  # on `Block.bipartite`
    deterministic: bool | None = dataclasses.field(default=None, kw_only=True)

    def run(
        self, kind: type[LayerSpec | ZooSpec], graph: RelGraph, x: Any, deterministic: bool | None, *more: Any
    ) -> Any:
        own: Any = self  # subclasses have the fields of their specification, and those of `_COMMON`
        pair = isinstance(x, tuple | list)
        found = {
            "in_features": None if x is None else tuple(part.shape[-1] for part in x) if pair else x.shape[-1],
            "out_features": own.features,
            "num_edge_types": graph.num_edge_types,
            "num_node_types": graph.num_node_types,
            "num_nodes": graph.num_nodes if x is None else None,
            "num_source_pairs": graph.num_source_pairs if x is None else None,
            "edge_features": None if not more or more[0] is None else more[0].shape[-1],
            "options": parameters.resolve_options(own.backend, own.precision, own.options),
        }
        names = [field.name for field in dataclasses.fields(kind)]
        spec = kind(**{name: found[name] if name in found else getattr(self, name) for name in names})
        params = {
            name: self.param(name, parameter.init, parameter.shape, own.param_dtype)
            for name, parameter in parameters.with_initializers(spec.params(), own.initializers).items()
        }
        key = None
        if spec.stochastic and not self.is_initializing():
            if not nn.merge_param("deterministic", self.deterministic, deterministic):
                key = self.make_rng("dropout")
        return spec(graph, x, params, key, *more)


class RGCNConv(_Layer):
    """R-GCN layer (arXiv 1703.06103); the equations are in `dejax.rgnn.library.rgcn`.

    Attributes:
      features: width n of the result.
      num_bases: basis decomposition; parameters `bases` [B, k, n] and `coefficients` [R, B].
      num_blocks: block-diagonal decomposition; parameter `blocks` [R, B, k/B, n/B]. With neither, `weight` [R, k, n].
      normalization: `"mean"` over a node's incoming edges of each type (the paper's c), or `"sum"`.
      use_root, use_bias: `root` [k, n] and `bias` [n].
      edge_dropout, self_loop_dropout: shares of the edges, and of the nodes' root terms, dropped while training.
      deterministic: True disables dropout; may be given to the call instead.
      dtype, param_dtype: of the computation (None: promoted) and of the parameters.
      backend, precision, options: of the compiler; `options` in place of the other two.
      initializers: by parameter name, `init(key, shape, dtype)`; the defaults are those of the nnx modules.
    """

    features: int
    num_bases: int | None = None
    num_blocks: int | None = None
    normalization: Normalization = "mean"
    use_root: bool = True
    use_bias: bool = True
    edge_dropout: float = 0.0
    self_loop_dropout: float = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    backend: str = "auto"
    precision: str | None = None
    options: Options | None = None
    initializers: Mapping[str, Initializer] | None = None

    @nn.compact
    def __call__(self, graph: RelGraph, x: Array | None = None, *, deterministic: bool | None = None) -> Array:
        """[num_nodes, features] from x [num_nodes, k], or from nodes without features where x is None.

        Raises:
          ValueError: sizes that do not fit each other, or x of another shape.
        """
        return self.run(specs.RGCNSpec, graph, x, deterministic)


class RGATConv(_Layer):
    """RGAT layer (arXiv 1904.05811), additive attention; the equations are in `dejax.rgnn.library.rgat`.

    Attributes:
      features: width d of each head.
      num_heads: heads H; parameters `weight` [R, H, k, d], `attention_src` and `attention_dst` [R, H, d].
      softmax: `"dst"`, over all incoming edges of a node, or `"relation"`, over those of each type.
      negative_slope: of the leaky ReLU on scores.
      concat_heads: the result is [num_nodes, H * d]; False averages the heads, [num_nodes, d].
      use_bias: adds `bias`, as wide as the result.
      attention_dropout: share of the attention coefficients dropped after the softmax while training.
      deterministic, dtype, param_dtype, backend, precision, options, initializers: as in `RGCNConv`.
    """

    features: int
    num_heads: int = 1
    softmax: Literal["dst", "relation"] = "dst"
    negative_slope: float = 0.2
    concat_heads: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    backend: str = "auto"
    precision: str | None = None
    options: Options | None = None
    initializers: Mapping[str, Initializer] | None = None

    @nn.compact
    def __call__(self, graph: RelGraph, x: Array, *, deterministic: bool | None = None) -> Array:
        """[num_nodes, H * features] (or [num_nodes, features]) from x [num_nodes, k].

        Raises:
          ValueError: sizes that do not fit each other, or x of another shape.
        """
        return self.run(specs.RGATSpec, graph, x, deterministic)


class HGTConv(_Layer):
    """HGT layer (arXiv 2003.01332) without temporal encoding; the equations are in `dejax.rgnn.library.hgt`.

    Attributes:
      features: width n of the result.
      num_heads: heads H.
      head_features: width d of a head; None for n / H.
      use_bias: biases of key, query, value and output.
      use_skip: the gated skip connection, parameter `skip` [T]; None takes it where k == n.
      dropout: share of the transformed result dropped before the skip connection while training.
      deterministic, dtype, param_dtype, backend, precision, options, initializers: as in `RGCNConv`.

    >>> import jax, jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [1, 2], num_nodes=3)
    >>> y, variables = rgnn.linen.HGTConv(8, num_heads=2).init_with_output(jax.random.key(0), graph, jnp.ones((3, 4)))
    >>> y.shape
    (3, 8)
    """

    features: int
    num_heads: int = 1
    head_features: int | None = None
    use_bias: bool = True
    use_skip: bool | None = None
    dropout: float = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    backend: str = "auto"
    precision: str | None = None
    options: Options | None = None
    initializers: Mapping[str, Initializer] | None = None

    @nn.compact
    def __call__(self, graph: RelGraph, x: Array, *, deterministic: bool | None = None) -> Array:
        """[num_nodes, features] from x [num_nodes, k].

        Raises:
          ValueError: sizes that do not fit each other, or x of another shape.
        """
        return self.run(specs.HGTSpec, graph, x, deterministic)


class _ZooLayer(_Layer):
    """A layer of `dejax.rgnn.zoo`; its attributes and its documentation are those of its specification."""

    kind: ClassVar[type[ZooSpec]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        own = modules.attributes(cls.kind)
        cls.__annotations__ = {
            **{name: type_ for name, (type_, _) in own.items()},
            **{name: type_ for name, (type_, _) in _COMMON.items()},
        }
        for name, (_, default) in (own | _COMMON).items():
            if default is not dataclasses.MISSING:
                setattr(cls, name, default)
        cls.__doc__ = modules.documentation(cls.kind, of_linen=True)
        super().__init_subclass__(**keywords)

    @nn.compact
    def __call__(
        self,
        graph: RelGraph,
        x: Any,
        edge_features: Array | None = None,
        *,
        deterministic: bool | None = None,
    ) -> Any:
        """The layer's new node values, [num_nodes, out]; the arguments are those of the nnx module.

        Raises:
          ValueError: sizes that do not fit each other, or x or edge_features of another shape.
        """
        return self.run(self.kind, graph, x, deterministic, edge_features)


_COMMON: dict[str, tuple[Any, Any]] = {
    "dtype": (DTypeLike | None, None),
    "param_dtype": (DTypeLike, jnp.float32),
    "backend": (str, "auto"),
    "precision": (str | None, None),
    "options": (Options | None, None),
    "initializers": (Mapping[str, Initializer] | None, None),
}


class GCNConv(_ZooLayer):
    """Graph convolution; the equations are in `dejax.rgnn.zoo.gcn`."""

    kind = zoo.GCNSpec


class SAGEConv(_ZooLayer):
    """GraphSAGE; the equations are in `dejax.rgnn.zoo.graphsage`."""

    kind = zoo.SAGESpec


class GINConv(_ZooLayer):
    """GIN and GINE; the equations are in `dejax.rgnn.zoo.gin`."""

    kind = zoo.GINSpec


class GatedGCNConv(_ZooLayer):
    """Residual gated graph convolution; the equations are in `dejax.rgnn.zoo.gated_gcn`."""

    kind = zoo.GatedGCNSpec


class PNAConv(_ZooLayer):
    """Principal neighbourhood aggregation; the equations are in `dejax.rgnn.zoo.pna`."""

    kind = zoo.PNASpec


class GATConv(_ZooLayer):
    """Graph attention; the equations are in `dejax.rgnn.zoo.gat`."""

    kind = zoo.GATSpec


class GATv2Conv(_ZooLayer):
    """GATv2; the equations are in `dejax.rgnn.zoo.gatv2`."""

    kind = zoo.GATv2Spec


class TransformerConv(_ZooLayer):
    """Graph transformer; the equations are in `dejax.rgnn.zoo.graph_transformer`."""

    kind = zoo.TransformerSpec


class RGGNNConv(_ZooLayer):
    """Gated graph network with edge types; the equations are in `dejax.rgnn.zoo.rggnn`."""

    kind = zoo.RGGNNSpec


class CompGCNConv(_ZooLayer):
    """CompGCN; the equations are in `dejax.rgnn.zoo.compgcn`."""

    kind = zoo.CompGCNSpec


class SimpleHGNConv(_ZooLayer):
    """SimpleHGN; the equations are in `dejax.rgnn.zoo.simple_hgn`."""

    kind = zoo.SimpleHGNSpec


class SharedRGATConv(_ZooLayer):
    """RGAT with query and key shared by all relations; the equations are in `dejax.rgnn.zoo.rgat_shared`."""

    kind = zoo.SharedRGATSpec


class HEATConv(_ZooLayer):
    """Heterogeneous edge-enhanced attention; the equations are in `dejax.rgnn.zoo.heat`."""

    kind = zoo.HEATSpec


class ProgramModule(nn.Module):
    """Any relational program as a module that owns some of its arguments.

    Attributes:
      program: what `@rgnn.program` made; called as `program(graph, *inputs, **parameters)`.
      params: parameter name (a name of the program's signature) -> (shape, initialiser).
      dtype, param_dtype, backend, precision, options: as in `RGCNConv`.
    """

    returns_destinations: ClassVar[bool] = True

    program: Callable[..., Any]
    params: Mapping[str, tuple[tuple[int, ...], Initializer]]
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    backend: str = "auto"
    precision: str | None = None
    options: Options | None = None

    @nn.compact
    def __call__(self, graph: RelGraph, *inputs: Any) -> Any:
        """What the program gives for `inputs`, its arguments that are no parameters, in order."""
        choices = (self.backend, self.precision, self.options)
        spec = parameters.ProgramSpec.make(self.program, self.params, self.dtype, *choices)
        params = {n: self.param(n, p.init, p.shape, self.param_dtype) for n, p in spec.params.items()}
        return spec(graph, inputs, params)


def from_pyg(
    layer: Any, *, graph_has_self_loops: bool = False, options: Options | None = None
) -> tuple[Any, dict[str, dict[str, Array]]]:
    """The module and the variables that have the settings and weights of a layer of PyTorch Geometric.

    Which layers: see `dejax.rgnn.interop.from_pyg`, which has the same arguments and errors.

    Returns:
      (module, variables), for `module.apply(variables, graph, x)`.
    """
    found = layer_from_pyg(layer, graph_has_self_loops=graph_has_self_loops, options=options)
    module = globals()[found.name]
    own = {field.name for field in dataclasses.fields(module)}
    settings = {"features" if name == "out_features" else name: value for name, value in found.settings.items()}
    return module(**{name: value for name, value in settings.items() if name in own}), {"params": found.params}
