"""Specifications of the layers in `attention.py`."""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.layers.parameters import ParamSpec, ParamSpecs, attention_vector
from dejax.rgnn.layers.spec import LayerSpec, heads_of, matrix, zeros_of
from dejax.rgnn.layers.zoo import attention


@dataclass(frozen=True, kw_only=True, slots=True)
class GATSpec(LayerSpec):
    """GAT (arXiv 1710.10903); the equation is in `dejax.rgnn.zoo.gat`.

    Args:
      num_heads: heads H.
      edge_features: width of the edge features that scores read; None: the layer has none.
      negative_slope: of the leaky ReLU on scores.
      concat_heads: whether heads are concatenated, [nodes, H * d], or averaged, [nodes, d].
      use_residual, use_bias: adds `x @ residual`, and `bias`.
      attention_dropout: share of the attention coefficients dropped after the softmax while training.
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
    """GATv2 (arXiv 2105.14491); the equation is in `dejax.rgnn.zoo.gatv2`.

    Args:
      num_heads, edge_features, negative_slope, concat_heads, use_residual, attention_dropout: as in `GATConv`.
      share_weights: whether sources and destinations have one weight.
      use_bias: biases of both projections and of the result.
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
            raise ValueError(f"GATv2Conv: share_weights needs sources and destinations of one width, got {k} and {m}")
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
    """Graph transformer (arXiv 2009.03509); see `dejax.rgnn.zoo.graph_transformer`.

    Args:
      num_heads, edge_features, concat_heads, attention_dropout: as in `GATConv`.
      use_root: adds `x @ root`.
      use_gate: weighs result and root by a learned gate.
      use_bias: biases of query, key, value and root.
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
            raise ValueError("TransformerConv: use_gate needs use_root: the gate weighs result and root")
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
