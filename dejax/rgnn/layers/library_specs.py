"""Specifications of the layers in `library.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jax import Array
from jax.nn.initializers import ones

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers import dropout, library
from dejax.rgnn.layers.parameters import (
    GLOROT,
    PER_TYPE_HEADS,
    OneHotGlorot,
    ParamSpec,
    ParamSpecs,
    attention_vector,
)
from dejax.rgnn.layers.spec import LayerSpec, described, matrix, zeros_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RGCNSpec(LayerSpec):
    """Relational graph convolution, R-GCN (arXiv 1703.06103, equation 2), with a weight matrix for each edge type.

        y_i = sum over r, sum over j in N_r(i) of 1/c_ir  x_j W_r   +   x_i W_0   +   b

    N_r(i) are the sources of the edges of type r into node i, and c_ir is their number. `dejax.rgnn.library.rgcn` is
    the layer as a function of its parameters.

    Args:
      in_features: width k of the node features; None for nodes without features (one-hot input), see `featureless`.
      out_features: width n of the result.
      num_edge_types: number R of edge types of the graph.
      num_bases: number B of bases of the basis decomposition, W_r = sum over b of a_rb V_b; the parameters are `bases`
        V [B, k, n] and `coefficients` a [R, B]. None: no bases.
      num_blocks: number B of blocks of the block-diagonal decomposition; the parameter is `blocks` [R, B, k/B, n/B].
        Without bases and blocks the parameter is `weight` [R, k, n].
      normalization: `"mean"` divides by c_ir, `"sum"` does not.
      use_root: whether to add the node's own term x_i W_0; its parameter is `root` [k, n].
      use_bias: whether to add b, the parameter `bias` [n].
      num_nodes, num_source_pairs: counts of the graph, needed only with in_features=None. The parameters are then
        `weight` [num_source_pairs, n] or `bases` [num_nodes, B, n], and `root` [num_nodes, n].
      edge_dropout: share of the edges that training drops before it counts c_ir (the paper: 0.4).
      self_loop_dropout: share of the nodes whose own term training drops (the paper: 0.2).
    """

    name = "RGCNConv"
    program = library.rgcn
    passed = ("normalization",)
    in_features: int | None
    num_edge_types: int
    num_bases: int | None = None
    num_blocks: int | None = None
    normalization: Literal["mean", "sum", "none"] = "mean"
    use_root: bool = True
    use_bias: bool = True
    num_nodes: int | None = None
    num_source_pairs: int | None = None
    edge_dropout: float = 0.0
    self_loop_dropout: float = 0.0

    def __post_init__(self) -> None:
        LayerSpec.__post_init__(self)
        if self.num_bases is not None and self.num_blocks is not None:
            raise ValueError(
                f"RGCNConv: num_bases and num_blocks must not be given together, got {self.num_bases} and "
                f"{self.num_blocks}; give one of them"
            )
        if self.in_features is None:
            if self.num_blocks is not None:
                raise ValueError(
                    "RGCNConv: num_blocks must be None without node features (in_features=None), got "
                    f"{self.num_blocks}; use num_bases"
                )
            rows = self.num_source_pairs if self.num_bases is None else 1
            if self.num_nodes is None or rows is None:
                raise ValueError(
                    "RGCNConv: num_nodes and num_source_pairs must be given with in_features=None, got "
                    f"{self.num_nodes} and {self.num_source_pairs}; RGCNConv.featureless(graph, out_features, ...) "
                    "takes both from the graph"
                )
        elif self.num_nodes is not None or self.num_source_pairs is not None:
            raise ValueError(
                f"RGCNConv: num_nodes and num_source_pairs must be None with in_features={self.in_features}, got "
                f"{self.num_nodes} and {self.num_source_pairs}; leave them out"
            )
        elif self.num_blocks and (self.in_features % self.num_blocks or self.out_features % self.num_blocks):
            raise ValueError(
                f"RGCNConv: num_blocks must divide both widths, got num_blocks={self.num_blocks}, "
                f"in_features={self.in_features}, out_features={self.out_features}"
            )
        if self.self_loop_dropout and not self.use_root:
            raise ValueError(
                "RGCNConv: self_loop_dropout must be 0 with use_root=False, because it drops the root term, got "
                f"{self.self_loop_dropout}"
            )

    @property
    def graph_counts(self) -> dict[str, int]:
        """The counts that a graph must have; bases without features have a row for each node, not for each pair."""
        counts = {"num_edge_types": self.num_edge_types, "num_nodes": self.num_nodes}
        if self.num_bases is None:
            counts["num_source_pairs"] = self.num_source_pairs
        return {name: count for name, count in counts.items() if count is not None}

    def params(self) -> ParamSpecs:
        k, n, r, b = self.in_features, self.out_features, self.num_edge_types, self.num_bases
        specs: ParamSpecs = {}
        if k is None:
            nodes = self.num_nodes or 0
            one_hot = OneHotGlorot(nodes)
            if b is None:
                specs["weight"] = ParamSpec((self.num_source_pairs or 0, n), one_hot)
            else:
                specs["bases"] = ParamSpec((nodes, b, n), one_hot)
        elif self.num_blocks is not None:
            specs["blocks"] = matrix(r, self.num_blocks, k // self.num_blocks, n // self.num_blocks)
        elif b is not None:
            specs["bases"] = matrix(b, k, n)
        else:
            specs["weight"] = matrix(r, k, n)
        if b is not None:
            # Glorot over [R, B], as in the authors' code; the paper does not specify it.
            specs["coefficients"] = ParamSpec((r, b), GLOROT)
        if self.use_root:
            specs["root"] = ParamSpec((nodes, n), one_hot) if k is None else matrix(k, n)
        return specs | ({"bias": zeros_of(n)} if self.use_bias else {})

    def _nodes(self, graph: RelGraph, x: Any) -> tuple[Any, slice | None]:
        if self.in_features is not None:
            return LayerSpec._nodes(self, graph, x)
        if x is not None:
            raise ValueError(
                f"RGCNConv: x must be None with in_features=None, got {described(x)}; give the width of x as "
                "in_features"
            )
        return None, None

    def run_with_dropout(
        self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array], key: Array
    ) -> Any:
        """Edges are dropped before normalisation, root terms at their own rate."""
        rates = (self.edge_dropout, self.self_loop_dropout)
        return dropout.rgcn(graph, x, params, key, *rates, normalization=self.normalization, options=self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class RGATSpec(LayerSpec):
    """Relational graph attention, RGAT, with additive attention (arXiv 1904.05811, section 2.2).

        z_i^r = x_i W_r ;   e_ij^r = LeakyReLU(a_dst^r . z_i^r + a_src^r . z_j^r)
        y_i = sum over r, sum over j in N_r(i) of softmax(e)_ij^r  z_j^r   +   b

    This holds for each head; N_r(i) are the sources of the edges of type r into node i. `dejax.rgnn.library.rgat` is
    the layer as a function of its parameters.

    Args:
      in_features: width k of the node features.
      out_features: width d of each head; the result has H * d features, or d with concat_heads=False.
      num_edge_types: number R of edge types of the graph.
      num_heads: number H of heads; the parameters are `weight` [R, H, k, d], `attention_src` and `attention_dst` [R, H,
        d].
      softmax: over which edges the softmax goes: `"dst"`, all incoming edges of a node (the paper's ARGAT), or
        `"relation"`, the incoming edges of one type (WIRGAT).
      negative_slope: slope of the LeakyReLU for negative scores.
      concat_heads: whether heads are concatenated, [num_nodes, H * d], or averaged, [num_nodes, d].
      use_bias: whether to add b, the parameter `bias`, which is as wide as the result.
      attention_dropout: share of the attention coefficients that training drops after the softmax.
    """

    name = "RGATConv"
    program = library.rgat
    passed = ("softmax", "negative_slope", "concat_heads")
    in_features: int
    num_edge_types: int
    num_heads: int = 1
    softmax: Literal["dst", "relation"] = "dst"
    negative_slope: float = 0.2
    concat_heads: bool = True
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        r, h, k, d = self.num_edge_types, self.num_heads, self.in_features, self.out_features
        specs = {"weight": ParamSpec((r, h, k, d), PER_TYPE_HEADS)}
        specs |= {name: ParamSpec((r, h, d), attention_vector) for name in ("attention_src", "attention_dst")}
        return specs | ({"bias": zeros_of(h * d if self.concat_heads else d)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class HGTSpec(LayerSpec):
    """Heterogeneous graph transformer, HGT (arXiv 2003.01332, equations 3 to 5), without temporal encoding.

    For each head, with t(.) the type of a node and r the type of the edge from j to i:

        K_j = x_j Key_t(j) ;  Q_i = x_i Query_t(i) ;  V_j = x_j Value_t(j)
        score = (K_j A_r) . Q_i  mu_r / sqrt(d) ;   attention = softmax over all edges into i
        h_i = sum over edges into i of attention  (V_j M_r)
        y_i = gelu(h_i) Out_t(i)

    `dejax.rgnn.library.hgt` is the layer as a function of its parameters.

    Args:
      in_features: width k of the node features, the same for all node types.
      out_features: width n of the result.
      num_node_types, num_edge_types: numbers of types of the graph.
      num_heads: number H of heads.
      head_features: width d of a head; None means n / H.
      use_bias: whether key, query, value and output have biases.
      use_skip: whether a learned gate for each node type mixes y_i with x_i; the parameter is `skip`. None: if k == n.
      dropout: share of the elements of y_i that training drops before the skip connection.
    """

    name = "HGTConv"
    program = library.hgt
    in_features: int
    num_node_types: int
    num_edge_types: int
    num_heads: int = 1
    head_features: int | None = None
    use_bias: bool = True
    use_skip: bool | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        LayerSpec.__post_init__(self)
        if self.head_features is None and self.out_features % self.num_heads:
            raise ValueError(
                f"HGTConv: num_heads must divide out_features, got num_heads={self.num_heads}, "
                f"out_features={self.out_features}; or give head_features"
            )
        if self.use_skip and self.in_features != self.out_features:
            raise ValueError(
                f"HGTConv: in_features must equal out_features for the skip connection, got {self.in_features} and "
                f"{self.out_features}; use_skip=None has it only where they are equal"
            )

    @property
    def skip(self) -> bool:
        return self.in_features == self.out_features if self.use_skip is None else self.use_skip

    def params(self) -> ParamSpecs:
        t, r, h, k, n = self.num_node_types, self.num_edge_types, self.num_heads, self.in_features, self.out_features
        d = n // h if self.head_features is None else self.head_features
        specs: ParamSpecs = {}
        for name in ("key", "query", "value"):
            specs[name] = ParamSpec((t, h, k, d), PER_TYPE_HEADS)
            if self.use_bias:
                specs[f"{name}_bias"] = zeros_of(t, h, d)
        specs |= {name: matrix(r, h, d, d) for name in ("relation_attention", "relation_message")}
        specs |= {"prior": ParamSpec((r, h), ones), "out": matrix(t, h * d, n)}
        if self.use_bias:
            specs["out_bias"] = zeros_of(t, n)
        return specs | ({"skip": ParamSpec((t,), ones)} if self.skip else {})

    def run_with_dropout(
        self, graph: RelGraph, x: Any, params: dict[str, Array], edges: dict[str, Array], key: Array
    ) -> Any:
        """The transformed result is dropped before the skip connection."""
        return dropout.hgt(graph, x, params, key, self.dropout, options=self.options)
