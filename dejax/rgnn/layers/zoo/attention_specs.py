"""Specifications of the layers in `attention.py`."""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.layers.parameters import ParamSpec, ParamSpecs, attention_vector
from dejax.rgnn.layers.spec import LayerSpec, heads_of, matrix, zeros_of
from dejax.rgnn.layers.zoo import attention


@dataclass(frozen=True, kw_only=True, slots=True)
class GATSpec(LayerSpec):
    """Graph attention network, GAT (arXiv 1710.10903, equations 3 to 6).

        z_i = x_i W
        e_ij = LeakyReLU(a_dst . z_i + a_src . z_j + a_edge . (f_ij W_edge))
        y_i = sum over edges j -> i of softmax(e)_ij z_j   (+ x_i R)   + b

    This holds for each head. The paper's neighbourhood includes the node itself: make the graph with
    `add_self_loops=True`. `dejax.rgnn.zoo.gat` is the layer as a function of its parameters.

    Args:
      num_heads: number H of heads.
      edge_features: width of the edge features f that scores read; None: the layer has none.
      negative_slope: slope of the LeakyReLU for negative scores.
      concat_heads: whether heads are concatenated, [nodes, H * d], or averaged, [nodes, d].
      use_residual, use_bias: whether to add x_i R, and b.
      attention_dropout: share of the attention coefficients that training drops after the softmax.
    """

    name = "GATConv"
    program = attention.gat
    passed = ("negative_slope", "concat_heads")
    edge_argument = "edge_features"
    in_features: int | tuple[int, int]
    num_heads: int = 1
    edge_features: int | None = None
    negative_slope: float = 0.2
    concat_heads: bool = True
    use_residual: bool = False
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        (k, m), d, h, c = self.widths, self.out_features, self.num_heads, self.edge_features
        specs = {"weight": heads_of(h, k, d)}
        if isinstance(self.in_features, tuple):
            specs["weight_dst"] = heads_of(h, m, d)
        vectors: tuple[str, ...] = ("attention_src", "attention_dst")
        if c is not None:
            specs["weight_edge"] = heads_of(h, c, d)
            vectors = (*vectors, "attention_edge")
        specs |= {name: ParamSpec((h, d), attention_vector) for name in vectors}
        n = h * d if self.concat_heads else d
        if self.use_residual:
            specs["residual"] = matrix(m, n)
        return specs | ({"bias": zeros_of(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class GATv2Spec(LayerSpec):
    """Graph attention, second version, GATv2 (arXiv 2105.14491, equation 7).

        e_ij = a . LeakyReLU(x_i W_dst + x_j W_src + f_ij W_edge)
        y_i = sum over edges j -> i of softmax(e)_ij (x_j W_src)   (+ x_i R)   + b

    This holds for each head. The paper's neighbourhood includes the node itself: make the graph with
    `add_self_loops=True`. `dejax.rgnn.zoo.gatv2` is the layer as a function of its parameters.

    Args:
      num_heads, edge_features, negative_slope, concat_heads, use_residual, attention_dropout: as in `GATConv`.
      share_weights: whether W_dst is W_src.
      use_bias: whether both projections and the result have biases.
    """

    name = "GATv2Conv"
    program = attention.gatv2
    passed = ("negative_slope", "concat_heads")
    edge_argument = "edge_features"
    in_features: int | tuple[int, int]
    num_heads: int = 1
    edge_features: int | None = None
    negative_slope: float = 0.2
    concat_heads: bool = True
    share_weights: bool = False
    use_residual: bool = False
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        (k, m), d, h, c = self.widths, self.out_features, self.num_heads, self.edge_features
        if self.share_weights and k != m:
            raise ValueError(
                "GATv2Conv: share_weights must be False for sources and destinations of different widths, got widths "
                f"{k} and {m}"
            )
        specs = {"weight_src": heads_of(h, k, d), "attention": ParamSpec((h, d), attention_vector)}
        if not self.share_weights:
            specs["weight_dst"] = heads_of(h, m, d)
        if c is not None:
            specs["weight_edge"] = heads_of(h, c, d)
        n = h * d if self.concat_heads else d
        if self.use_residual:
            specs["residual"] = matrix(m, n)
        if self.use_bias:
            specs |= {"bias_src": zeros_of(h, d), "bias": zeros_of(n)}
            if not self.share_weights:
                specs["bias_dst"] = zeros_of(h, d)
        return specs


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSpec(LayerSpec):
    """Graph transformer, also known as UniMP (arXiv 2009.03509, equations 3 to 5).

        q_i = x_i Q ;  k_ij = x_j K + f_ij E ;  v_ij = x_j V + f_ij E
        o_i = sum over edges j -> i of softmax(q_i . k_ij / sqrt(d)) v_ij
        y_i = o_i + r_i ,  r_i = x_i R + r

    This holds for each head; f_ij are the edge features, without which the terms with E are left out.
    `dejax.rgnn.zoo.graph_transformer` is the layer as a function of its parameters.

    Args:
      num_heads, edge_features, concat_heads, attention_dropout: as in `GATConv`.
      use_root: whether to add the node's own term r_i.
      use_gate: whether a learned gate beta weighs the two terms: y_i = beta r_i + (1 - beta) o_i.
      use_bias: whether query, key, value and the node's own term have biases.
    """

    name = "TransformerConv"
    program = attention.graph_transformer
    passed = ("concat_heads",)
    edge_argument = "edge_features"
    in_features: int | tuple[int, int]
    num_heads: int = 1
    edge_features: int | None = None
    concat_heads: bool = True
    use_root: bool = True
    use_gate: bool = False
    use_bias: bool = True
    attention_dropout: float = 0.0

    def params(self) -> ParamSpecs:
        (k, m), d, h, c = self.widths, self.out_features, self.num_heads, self.edge_features
        if self.use_gate and not self.use_root:
            raise ValueError(
                "TransformerConv: use_gate must be False with use_root=False, because the gate weighs the result "
                "against the root term, got True"
            )
        specs = {"query": heads_of(h, m, d), "key": heads_of(h, k, d), "value": heads_of(h, k, d)}
        if self.use_bias:
            specs |= {f"{name}_bias": zeros_of(h, d) for name in ("query", "key", "value")}
        if c is not None:
            specs["edge"] = heads_of(h, c, d)
        n = h * d if self.concat_heads else d
        if self.use_root:
            specs["root"] = matrix(m, n)
            if self.use_bias:
                specs["root_bias"] = zeros_of(n)
        return specs | ({"gate": ParamSpec((3, n), attention_vector)} if self.use_gate else {})
