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
    """Gated graph neural network with a weight matrix for each edge type (arXiv 1511.05493, equations 2 to 6).

        repeated `steps` times:
        m_i = sum over edges j -> i of (h_j W_r + w_r) ,    h_i = GRU(m_i, h_i)

    The first h is x, padded with zeros to out_features as in the paper. `dejax.rgnn.zoo.rggnn` is the layer as a
    function of its parameters, and has the equations of the GRU.

    Args:
      num_edge_types: number of edge types of the graph; 1 for a graph without types.
      steps: number of times that the layer is applied, with the same parameters.
      use_bias: whether messages and gates have biases.
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
    """CompGCN (arXiv 1911.03082, equations 2 to 4): messages combine a neighbour with its edge type's embedding.

        y_i = sum over edges j -> i of phi(x_j, z_r) W_direction(r)   (+ phi(x_i, z_loop) W_loop)   + b

    z_r is the embedding of edge type r. `dejax.rgnn.zoo.compgcn` is the layer as a function of its parameters.

    Args:
      num_edge_types: number R of edge types of the graph.
      directions: for each edge type the number of its matrix W; None: one matrix for all types. For a graph of r
        relations made with add_reverse=True, the paper has `(0,) * r + (1,) * r`.
      composition: phi: `"subtract"`, `"multiply"` or `"correlate"` (circular correlation).
      aggregation: `"sum"` or `"mean"`.
      use_loop, use_bias: whether to add the node's own term with z_loop, and b.
      update_relation: whether a call also computes new embeddings of the edge types and returns a pair (node features,
        embeddings [R, out_features]).
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
    """SimpleHGN (arXiv 2112.14936, section 5): GAT whose scores also read an embedding r_t of the edge's type t.

        z_i = x_i W
        e_ij = LeakyReLU(a_dst . z_i + a_src . z_j + a_edge . (r_t W_edge))
        y_i = sum over edges j -> i of softmax(e)_ij z_j   (+ x_i R)   + b

    This holds for each head. The paper also mixes in the attention of the previous layer; for that, call
    `dejax.rgnn.zoo.simple_hgn`, the layer as a function of its parameters, with `previous_attention`.

    Args:
      num_edge_types: number of edge types of the graph.
      num_heads, negative_slope, concat_heads, attention_dropout: as in `GATConv`.
      relation_features: width of the embeddings of the edge types.
      normalize: whether each row of the result is divided by its Euclidean norm.
      use_residual, use_bias: whether to add x_i R, and b.
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
    """RGAT (arXiv 1904.05811) in the form of PyTorch Geometric: all edge types share the query and key matrices.

        z_i^r = x_i W_r ;  q = z_i^r Q ;  k = z_j^r K
        additive: s_ij = LeakyReLU(q + k) ;  multiplicative: s_ij = q * k
        y_i = sum over edges j -> i of softmax(s)_ij z_j^r   + b

    With edge features e, f = (e_ij W_edge) F is one more term of the sum, or one more factor of the product. `RGATConv`
    is the paper's form. `dejax.rgnn.zoo.rgat_shared` is the layer as a function of its parameters.

    Args:
      num_edge_types: number of edge types of the graph.
      num_heads, edge_features, negative_slope, concat_heads, use_bias, attention_dropout: as in `GATConv`.
      softmax: over which edges the softmax goes: `"dst"`, all incoming edges of a node, or `"relation"`, the incoming
        edges of one type.
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
    """HEAT, heterogeneous edge-enhanced attention (arXiv 2106.07161, equations 4 to 8).

        z_i = x_i W_t(i) + w_t(i) ;  f_ij = LeakyReLU(e_ij E) ;  u_r = LeakyReLU(t_r)
        s_ij = LeakyReLU(z_i . a_dst + z_j . a_src + u_r . a_type + f_ij . a_edge)
        y_i = sum over edges j -> i of softmax(s)_ij (z_j V + f_ij V_edge + v)   (+ z_i with `add_root`)

    This holds for each head, with t(i) the type of a node and r the type of an edge. `dejax.rgnn.zoo.heat` is the layer
    as a function of its parameters.

    Args:
      num_node_types, num_edge_types: numbers of types of the graph.
      edge_features: width of the edge features e.
      num_heads, negative_slope, concat_heads, attention_dropout: as in `GATConv`.
      edge_embedding_features, relation_features: widths of f (embedded edge features) and of u (embedded edge types).
      add_root: whether to add each node's projection z_i to its result.
      use_bias: whether to add w and v.
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
