"""Specifications of the layers in `relational.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers.parameters import ParamSpec, ParamSpecs, attention_vector
from dejax.rgnn.layers.spec import LayerSpec, heads_of, matrix, zeros_of
from dejax.rgnn.layers.zoo import relational


@dataclass(frozen=True, kw_only=True, slots=True)
class RGGNNSpec(LayerSpec):
    """Gated graph network with edge types (arXiv 1511.05493); the equations are in `dejax.rgnn.zoo.rggnn`.

    Features narrower than out_features are padded with zeros, as in the paper.

    Args:
      num_edge_types: edge types R; 1 for graphs without types.
      steps: how often the layer is applied.
      use_bias: biases of messages and gates.
    """

    name = "RGGNNConv"
    program = relational.rggnn
    passed = ("steps",)
    in_features: int
    num_edge_types: int
    steps: int = 1
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        n, r = self.out_features, self.num_edge_types
        if self.in_features > n:
            raise ValueError(f"RGGNNConv: in_features must be at most out_features, got {self.in_features} and {n}")
        specs = {"weight": matrix(r, n, n), "input": matrix(3, n, n), "hidden": matrix(3, n, n)}
        if self.use_bias:
            specs |= {"edge_bias": zeros_of(r, n), "input_bias": zeros_of(3, n), "hidden_bias": zeros_of(3, n)}
        return specs

    def run(self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array]) -> Any:
        wide = jnp.pad(x, ((0, 0), (0, self.out_features - x.shape[1])))
        return relational.rggnn(graph, wide, params, steps=self.steps, options=self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompGCNSpec(LayerSpec):
    """CompGCN (arXiv 1911.03082); the equations are in `dejax.rgnn.zoo.compgcn`.

    Args:
      num_edge_types: edge types R.
      directions: for each edge type the number of its weight; None: one weight for all. For a graph of r relations made
        with add_reverse=True, the paper has `(0,) * r + (1,) * r`.
      composition: `"subtract"`, `"multiply"` or `"correlate"`.
      aggregation: `"sum"` or `"mean"`.
      use_loop, use_bias: the term of the node itself, and `bias` [n].
      update_relation: whether a call gives a pair (nodes, relations [R, n]).
    """

    name = "CompGCNConv"
    program = relational.compgcn
    passed = ("directions", "composition", "aggregation")
    in_features: int
    num_edge_types: int
    directions: tuple[int, ...] | None = None
    composition: Literal["subtract", "multiply", "correlate"] = "multiply"
    aggregation: Literal["sum", "mean"] = "sum"
    use_loop: bool = True
    use_bias: bool = True
    update_relation: bool = False

    def params(self) -> ParamSpecs:
        k, n, r = self.in_features, self.out_features, self.num_edge_types
        count = 1 if self.directions is None else max(self.directions, default=0) + 1
        specs = {"relation": matrix(r, k), "weight": matrix(count, k, n)}
        if self.use_loop:
            specs |= {"loop": ParamSpec((k,), attention_vector), "weight_loop": matrix(k, n)}
        if self.update_relation:
            specs["relation_update"] = matrix(k, n)
        return specs | ({"bias": zeros_of(n)} if self.use_bias else {})

    def run(self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array]) -> Any:
        keywords = {name: getattr(self, name) for name in self.passed}
        return relational.compgcn(
            graph, x, params, **keywords, return_relation=self.update_relation, options=self.options
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleHGNSpec(LayerSpec):
    """SimpleHGN (arXiv 2112.14936); the equations are in `dejax.rgnn.zoo.simple_hgn`.

    The attention of the layer before is an argument of the function, not of the module.

    Args:
      num_edge_types: edge types R.
      num_heads, negative_slope, concat_heads, attention_dropout: as in `GATConv`.
      relation_features: width of the edge types' embeddings.
      normalize: whether rows of the result get norm 1.
      use_residual, use_bias: adds `x @ residual`, and `bias`.
    """

    name = "SimpleHGNConv"
    program = relational.simple_hgn
    passed = ("negative_slope", "normalize", "concat_heads")
    in_features: int
    num_edge_types: int
    num_heads: int = 1
    relation_features: int = 64
    negative_slope: float = 0.2
    normalize: bool = False
    concat_heads: bool = True
    use_residual: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        k, d, h, u = self.in_features, self.out_features, self.num_heads, self.relation_features
        specs = {
            "weight": heads_of(h, k, d),
            "edge_embedding": matrix(self.num_edge_types, u),
            "weight_edge": heads_of(h, u, u),
        }
        specs |= {name: ParamSpec((h, d), attention_vector) for name in ("attention_src", "attention_dst")}
        specs["attention_edge"] = ParamSpec((h, u), attention_vector)
        n = h * d if self.concat_heads else d
        if self.use_residual:
            specs["residual"] = matrix(k, n)
        return specs | ({"bias": zeros_of(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRGATSpec(LayerSpec):
    """RGAT as PyTorch Geometric has it, query and key shared by all relations; see `dejax.rgnn.zoo.rgat_shared`.

    Args:
      num_edge_types: edge types R.
      num_heads, edge_features, negative_slope, concat_heads, use_bias, attention_dropout: as in `GATConv`.
      softmax: `"dst"`, across relations, or `"relation"`, within each.
      mode: `"additive"` or `"multiplicative"`.
    """

    name = "SharedRGATConv"
    program = relational.rgat_shared
    passed = ("softmax", "mode", "negative_slope", "concat_heads")
    edge_argument = "edge_features"
    in_features: int
    num_edge_types: int
    num_heads: int = 1
    edge_features: int | None = None
    softmax: Literal["dst", "relation"] = "dst"
    mode: Literal["additive", "multiplicative"] = "additive"
    negative_slope: float = 0.2
    concat_heads: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        k, h, n = self.in_features, self.num_heads, self.num_heads * self.out_features
        specs = {"weight": matrix(self.num_edge_types, k, n), "query": matrix(n, h), "key": matrix(n, h)}
        if self.edge_features is not None:
            specs |= {"weight_edge": matrix(self.edge_features, n), "attention_edge": matrix(n, h)}
        return specs | ({"bias": zeros_of(n if self.concat_heads else self.out_features)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class HEATSpec(LayerSpec):
    """HEAT (arXiv 2106.07161); the equations are in `dejax.rgnn.zoo.heat`.

    Args:
      num_node_types, num_edge_types: T and R.
      edge_features: width of the edge features.
      num_heads, negative_slope, concat_heads, attention_dropout: as in `GATConv`.
      edge_embedding_features, relation_features: widths of the embeddings of edge features and of edge types.
      add_root: adds each node's projection to its result.
      use_bias: biases of projection and value.
    """

    name = "HEATConv"
    program = relational.heat
    passed = ("negative_slope", "concat_heads", "add_root")
    edge_argument = "edge_features"
    in_features: int
    num_node_types: int
    num_edge_types: int
    edge_features: int
    num_heads: int = 1
    edge_embedding_features: int = 16
    relation_features: int = 16
    negative_slope: float = 0.2
    concat_heads: bool = True
    add_root: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        k, n, h, t = self.in_features, self.out_features, self.num_heads, self.num_node_types
        p, u = self.edge_embedding_features, self.relation_features
        if self.edge_features is None:
            raise ValueError("HEATConv: edge_features must be given, [num_edges, width], got None")
        specs = {
            "weight": matrix(t, k, n),
            "edge_embedding": matrix(self.num_edge_types, u),
            "weight_edge": matrix(self.edge_features, p),
            "attention_dst": matrix(n, h),
            "attention_src": matrix(n, h),
            "attention_type": matrix(u, h),
            "attention_edge": matrix(p, h),
            "value": matrix(n, n),
            "value_edge": matrix(p, n),
        }
        if self.use_bias:
            specs |= {"node_bias": zeros_of(t, n), "value_bias": zeros_of(n)}
        return specs
