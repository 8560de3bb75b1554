"""Layers as Flax nnx modules: `RGCNConv`, `RGATConv`, `HGTConv`, those of `dejax.rgnn.zoo`, and `ProgramModule`.

    from flax import nnx
    from dejax.rgnn.nnx import RGCNConv

    layer = RGCNConv(64, 32, graph.num_edge_types, num_bases=8, rngs=nnx.Rngs(0))
    y = layer(graph, x)

Parameters are attributes with the names of `dejax.rgnn.library` and `dejax.rgnn.zoo`; `params_to_linen` and
`params_from_linen` convert them to those of `dejax.rgnn.linen`. Dropout is as in `nnx.Dropout`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from dejax._optional import optional
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers import parameters, specs
from dejax.rgnn.layers.parameters import Initializer, params_from_linen, params_to_linen
from dejax.rgnn.layers.pyg import from_pyg as layer_from_pyg
from dejax.rgnn.layers.specs import LayerSpec, Normalization
from dejax.rgnn.layers.zoo import modules
from dejax.rgnn.layers.zoo import specs as zoo
from dejax.rgnn.layers.zoo.spec import ZooSpec
from dejax.rgnn.options import Options

with optional("flax", of="dejax.rgnn.nnx"):
    from flax import nnx

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


class _Layer(nnx.Module):
    """A specification, its parameters as attributes, and a stream of keys where it has dropout."""

    returns_destinations = True  # on `Block.bipartite`

    def __init__(
        self,
        spec: LayerSpec | ZooSpec,
        initializers: Mapping[str, Initializer] | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.spec = spec
        for name, parameter in parameters.with_initializers(spec.params(), initializers).items():
            setattr(self, name, nnx.Param(parameter.init(rngs.params(), parameter.shape, param_dtype)))
        self.deterministic = False
        self.rngs = rngs["dropout"].fork() if spec.stochastic else nnx.data(None)

    def __call__(
        self,
        graph: RelGraph,
        x: Array | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """The layer's new node values.

        Args:
          graph: a graph with the counts that the layer was made for.
          x: node features [num_nodes, in_features]; None for R-GCN without features.
          deterministic: True disables dropout; None follows `train()` and `eval()`.
          rngs: its `dropout` stream gives the dropout key, instead of the module's own stream.

        Returns:
          [num_nodes, out]; with `graph.only_destinations` [num_destinations, out].

        Raises:
          ValueError: the graph's counts or the shape of x do not fit the layer.
        """
        return self.spec(graph, x, *self._drawn(deterministic, rngs))

    def _drawn(self, deterministic: bool | None, rngs: nnx.Rngs | None) -> tuple[dict[str, Array], Array | None]:
        """The parameters, and the dropout key where there is dropout."""
        params = {name: getattr(self, name)[...] for name in self.spec.params()}
        if not self.spec.stochastic or (self.deterministic if deterministic is None else deterministic):
            return params, None
        return params, self.rngs() if rngs is None else rngs["dropout"]()


class RGCNConv(_Layer):
    """R-GCN layer (arXiv 1703.06103); the equations are in `dejax.rgnn.library.rgcn`.

    Args:
      in_features: width k of the node features; None for nodes without features (one-hot input), see `featureless`.
      out_features: width n of the result.
      num_edge_types: edge types R of the graph.
      num_bases: basis decomposition with this many bases; parameters `bases` [B, k, n] and `coefficients` [R, B].
      num_blocks: block-diagonal decomposition; parameter `blocks` [R, B, k/B, n/B]. With neither, `weight` [R, k, n].
      normalization: `"mean"` over a node's incoming edges of each type (the paper's c), or `"sum"`.
      use_root: adds `x @ root` (the paper's self-loop weight), parameter `root` [k, n].
      use_bias: adds `bias` [n].
      num_nodes, num_source_pairs: of the graph, with in_features=None only; parameters `weight` [num_source_pairs, n]
        or `bases` [num_nodes, B, n], and `root` [num_nodes, n].
      edge_dropout: share of the edges dropped before normalisation while training (the paper's 0.4).
      self_loop_dropout: share of the nodes whose root term is dropped while training (the paper's 0.2).
      dtype: dtype of the computation; None: the dtype to which x and the parameters promote.
      param_dtype: dtype of the parameters.
      backend: `"auto"`, `"pallas"` or `"xla"`.
      precision: of products of float32: `"f32"`, `"tf32"`, `"bf16"`, or None (see `Options`).
      options: all compiler options, in place of backend and precision.
      initializers: by parameter name; `init(key, shape, dtype)`. Default: Glorot uniform for the matrix of each
        relation (or block or basis), zeros for the bias.
      rngs: streams `params` and, with dropout, `dropout`.

    Raises:
      ValueError: sizes that do not fit each other.
    """

    def __init__(
        self,
        in_features: int | None,
        out_features: int,
        num_edge_types: int,
        *,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        normalization: Normalization = "mean",
        use_root: bool = True,
        use_bias: bool = True,
        num_nodes: int | None = None,
        num_source_pairs: int | None = None,
        edge_dropout: float = 0.0,
        self_loop_dropout: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        precision: str | None = None,
        options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        spec = specs.RGCNSpec(
            in_features=in_features,
            out_features=out_features,
            num_edge_types=num_edge_types,
            num_bases=num_bases,
            num_blocks=num_blocks,
            normalization=normalization,
            use_root=use_root,
            use_bias=use_bias,
            num_nodes=num_nodes,
            num_source_pairs=num_source_pairs,
            edge_dropout=edge_dropout,
            self_loop_dropout=self_loop_dropout,
            dtype=dtype,
            options=parameters.resolve_options(backend, precision, options),
        )
        super().__init__(spec, initializers, param_dtype, rngs)

    @classmethod
    def featureless(cls, graph: RelGraph, out_features: int, *, rngs: nnx.Rngs, **keywords: Any) -> RGCNConv:
        """A layer for nodes without features, with the counts of `graph`; called as `layer(graph)`."""
        return cls(
            None,
            out_features,
            graph.num_edge_types,
            num_nodes=graph.num_nodes,
            num_source_pairs=graph.num_source_pairs,
            rngs=rngs,
            **keywords,
        )


class RGATConv(_Layer):
    """RGAT layer (arXiv 1904.05811), additive attention; the equations are in `dejax.rgnn.library.rgat`.

    Args:
      in_features: width k of the node features.
      out_features: width d of each head.
      num_edge_types: edge types R of the graph.
      num_heads: heads H; parameters `weight` [R, H, k, d], `attention_src` and `attention_dst` [R, H, d].
      softmax: `"dst"`, over all incoming edges of a node (the paper's ARGAT), or `"relation"`, over those of each type
        (WIRGAT).
      negative_slope: of the leaky ReLU on scores.
      concat_heads: the result is [num_nodes, H * d]; False averages the heads, [num_nodes, d].
      use_bias: adds `bias`, as wide as the result.
      attention_dropout: share of the attention coefficients dropped after the softmax while training.
      dtype, param_dtype, backend, precision, options, initializers, rngs: as in `RGCNConv`. Default initialisers:
        Glorot uniform for each relation's k x (H d) matrix and each head's vectors.

    Raises:
      ValueError: sizes that do not fit each other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_edge_types: int,
        *,
        num_heads: int = 1,
        softmax: Literal["dst", "relation"] = "dst",
        negative_slope: float = 0.2,
        concat_heads: bool = True,
        use_bias: bool = True,
        attention_dropout: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        precision: str | None = None,
        options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        spec = specs.RGATSpec(
            in_features=in_features,
            out_features=out_features,
            num_edge_types=num_edge_types,
            num_heads=num_heads,
            softmax=softmax,
            negative_slope=negative_slope,
            concat_heads=concat_heads,
            use_bias=use_bias,
            attention_dropout=attention_dropout,
            dtype=dtype,
            options=parameters.resolve_options(backend, precision, options),
        )
        super().__init__(spec, initializers, param_dtype, rngs)


class HGTConv(_Layer):
    """HGT layer (arXiv 2003.01332) without temporal encoding; the equations are in `dejax.rgnn.library.hgt`.

    Args:
      in_features: width k of the node features, the same for all node types.
      out_features: width n of the result.
      num_node_types, num_edge_types: T and R of the graph.
      num_heads: heads H.
      head_features: width d of a head; None for n / H.
      use_bias: biases of key, query, value and output.
      use_skip: the gated skip connection, parameter `skip` [T]; None has it where k == n.
      dropout: share of the transformed result dropped before the skip connection while training.
      dtype, param_dtype, backend, precision, options, initializers, rngs: as in `RGCNConv`. Default initialisers:
        Glorot uniform for each type's matrices, ones for `prior` and `skip`.

    Raises:
      ValueError: sizes that do not fit each other.

    >>> import jax.numpy as jnp, flax.nnx as nnx
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [1, 2], num_nodes=3)
    >>> rgnn.nnx.HGTConv(4, 8, 1, 1, rngs=nnx.Rngs(0))(graph, jnp.ones((3, 4))).shape
    (3, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_node_types: int,
        num_edge_types: int,
        *,
        num_heads: int = 1,
        head_features: int | None = None,
        use_bias: bool = True,
        use_skip: bool | None = None,
        dropout: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        precision: str | None = None,
        options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        spec = specs.HGTSpec(
            in_features=in_features,
            out_features=out_features,
            num_node_types=num_node_types,
            num_edge_types=num_edge_types,
            num_heads=num_heads,
            head_features=head_features,
            use_bias=use_bias,
            use_skip=use_skip,
            dropout=dropout,
            dtype=dtype,
            options=parameters.resolve_options(backend, precision, options),
        )
        super().__init__(spec, initializers, param_dtype, rngs)


class _ZooLayer(_Layer):
    """A layer of `dejax.rgnn.zoo`; its arguments and its documentation are those of its specification."""

    kind: ClassVar[type[ZooSpec]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.__signature__ = modules.signature(cls.kind, inspect.signature(_ZooLayer.__init__))
        cls.__doc__ = modules.documentation(cls.kind, of_linen=False)

    def __init__(
        self,
        *sizes: Any,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        precision: str | None = None,
        options: Options | None = None,
        initializers: Mapping[str, Initializer] | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        given = inspect.signature(type(self)).bind(*sizes, rngs=rngs, **settings).arguments
        del given["rngs"]
        spec = self.kind(**given, dtype=dtype, options=parameters.resolve_options(backend, precision, options))
        super().__init__(spec, initializers, param_dtype, rngs)

    def __call__(
        self,
        graph: RelGraph,
        x: Any = None,
        edge_features: Array | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Any:
        """The layer's new node values.

        Args:
          graph: a graph; where the layer reads types, with the counts that it was made for.
          x: node features [num_nodes, in_features], or a pair (sources, destinations) where the layer takes one.
          edge_features: [num_edges, width] in the user's order of edges, where the layer was made with a width; for
            `GCNConv` weights [num_edges].
          deterministic, rngs: as in `RGCNConv`.

        Returns:
          [num_nodes, out]; [destinations, out] where x has one row for each source and each destination.

        Raises:
          ValueError: the graph's counts or the shapes of x and edge_features do not fit the layer.
        """
        spec: Any = self.spec
        return spec(graph, x, *self._drawn(deterministic, rngs), edge_features)


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


class ProgramModule(nnx.Module):
    """Any relational program as a module with some of its arguments as parameters.

    Args:
      program: made by `@rgnn.program`; called as `program(graph, *inputs, **parameters)`.
      params: parameter name (a name of the program's signature) -> (shape, initialiser).
      dtype, param_dtype, backend, precision, options, rngs: as in `RGCNConv`.

    Raises:
      ValueError: a parameter has the name of an attribute of the module.
    """

    returns_destinations = True

    def __init__(
        self,
        program: Any,
        params: Mapping[str, tuple[tuple[int, ...], Initializer]],
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        backend: str = "auto",
        precision: str | None = None,
        options: Options | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        spec = parameters.ProgramSpec.make(program, params, dtype, backend, precision, options)
        self.spec = spec.drawn()
        for name, parameter in spec.params.items():
            if hasattr(self, name):
                raise ValueError(f"ProgramModule: {name!r} is an attribute of the module already; rename the parameter")
            setattr(self, name, nnx.Param(parameter.init(rngs.params(), parameter.shape, param_dtype)))

    def __call__(self, graph: RelGraph, *inputs: Any) -> Any:
        """The program's result for `inputs`, its arguments that are not parameters, in order."""
        return self.spec(graph, inputs, {name: getattr(self, name)[...] for name in self.spec.params})


def from_pyg(
    layer: Any, *, graph_has_self_loops: bool = False, options: Options | None = None, rngs: nnx.Rngs | None = None
) -> Any:
    """The module of this file with the settings and weights of a layer of PyTorch Geometric, to call or train further.

    Which layers: see `dejax.rgnn.interop.from_pyg`, which has the same arguments and errors.

    Args:
      layer: such as a `torch_geometric.nn.SAGEConv`.
      graph_has_self_loops: see there.
      options: compiler options of the module.
      rngs: its `dropout` stream is the module's; None: `nnx.Rngs(0)`.
    """
    found = layer_from_pyg(layer, graph_has_self_loops=graph_has_self_loops, options=options)
    values = {name: lambda key, shape, dtype, value=value: value for name, value in found.params.items()}
    settings = {name: value for name, value in found.settings.items() if name != "dtype"}
    return globals()[found.name](**settings, initializers=values, rngs=nnx.Rngs(0) if rngs is None else rngs)
