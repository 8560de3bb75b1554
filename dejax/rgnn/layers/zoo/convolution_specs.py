"""Specifications of the layers in `convolutions.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dejax.rgnn.layers.parameters import ParamSpecs
from dejax.rgnn.layers.spec import LayerSpec, matrix, zeros_of
from dejax.rgnn.layers.zoo import convolutions


@dataclass(frozen=True, kw_only=True, slots=True)
class GCNSpec(LayerSpec):
    """GCN (arXiv 1609.02907); the equation is in `dejax.rgnn.zoo.gcn`. `edge_features` of a call are weights [edges].

    Args:
      add_self_loops: whether the identity is added to the adjacency matrix.
      use_bias: adds `bias` [n].
    """

    name = "GCNConv"
    program = convolutions.gcn
    passed = ("add_self_loops",)
    edge_argument = "edge_weight"
    in_features: int
    add_self_loops: bool = True
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        k, n = self.in_features, self.out_features
        return {"weight": matrix(k, n)} | ({"bias": zeros_of(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class SAGESpec(LayerSpec):
    """GraphSAGE (arXiv 1706.02216); the equation is in `dejax.rgnn.zoo.graphsage`.

    Args:
      aggregation: `"mean"`, `"max"` or `"sum"`.
      pool_features: width of the paper's pooling perceptron before the aggregation; None: neighbours as they are.
      normalize: whether rows of the result get norm 1.
      use_root, use_bias: adds `x @ root`, and `bias` [n]. A pair of features needs `use_root`.
    """

    name = "SAGEConv"
    program = convolutions.graphsage
    passed = ("aggregation", "normalize")
    in_features: int | tuple[int, int]
    aggregation: Literal["mean", "max", "sum"] = "mean"
    pool_features: int | None = None
    normalize: bool = False
    use_root: bool = True
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        (k, m), n, p = self.widths, self.out_features, self.pool_features
        if isinstance(self.in_features, tuple) and not self.use_root:
            raise ValueError("SAGEConv: a pair of features needs use_root: without it nothing reads the destinations")
        specs = {} if p is None else {"pool": matrix(k, p), "pool_bias": zeros_of(p)}
        specs["neighbour"] = matrix(k if p is None else p, n)
        if self.use_root:
            specs["root"] = matrix(m, n)
        return specs | ({"bias": zeros_of(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class GINSpec(LayerSpec):
    """GIN (arXiv 1810.00826) and, with edge features, GINE (arXiv 1905.12265); see `dejax.rgnn.zoo.gin`.

    Args:
      hidden_features: width of the perceptron's hidden layer; None for out_features.
      edge_features: width of the edge features; None: the layer has none.
      train_epsilon: whether epsilon is a parameter, 0 at first.
      use_bias: biases of the perceptron.
    """

    name = "GINConv"
    program = convolutions.gin
    edge_argument = "edge_features"
    in_features: int | tuple[int, int]
    hidden_features: int | None = None
    edge_features: int | None = None
    train_epsilon: bool = False
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        (k, m), n = self.widths, self.out_features
        if k != m:
            raise ValueError(f"GINConv: sources and destinations are added and must be equally wide, got {k} and {m}")
        h = n if self.hidden_features is None else self.hidden_features
        specs = {"weight_1": matrix(k, h), "weight_2": matrix(h, n)}
        if self.use_bias:
            specs |= {"bias_1": zeros_of(h), "bias_2": zeros_of(n)}
        if self.train_epsilon:
            specs["epsilon"] = zeros_of()
        return specs if self.edge_features is None else specs | {"edge": matrix(self.edge_features, k)}


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedGCNSpec(LayerSpec):
    """Residual gated graph convolution (arXiv 1711.07553); the equation is in `dejax.rgnn.zoo.gated_gcn`.

    Args:
      edge_features: width of the edge features that the gates read; None: the layer has none.
      use_root, use_bias: adds `x @ root`, and the biases of gate, value and result.
    """

    name = "GatedGCNConv"
    program = convolutions.gated_gcn
    edge_argument = "edge_features"
    in_features: int | tuple[int, int]
    edge_features: int | None = None
    use_root: bool = True
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        (k, m), n = self.widths, self.out_features
        specs = {"gate_dst": matrix(m, n), "gate_src": matrix(k, n), "value": matrix(k, n)}
        if self.edge_features is not None:
            specs["gate_edge"] = matrix(self.edge_features, n)
        if self.use_root:
            specs["root"] = matrix(m, n)
        if self.use_bias:
            specs |= {name: zeros_of(n) for name in ("gate_bias", "value_bias", "bias")}
        return specs


@dataclass(frozen=True, kw_only=True, slots=True)
class PNASpec(LayerSpec):
    """PNA (arXiv 2004.05718); the equation is in `dejax.rgnn.zoo.pna`.

    Args:
      mean_log_degree: delta, the mean of log(d + 1) over the nodes of the training graphs.
      num_towers: towers T, each with messages as wide as x and a result of out_features / T.
      edge_features: width of the edge features; None: the layer has none.
      use_bias: biases of messages, towers and result.
    """

    name = "PNAConv"
    program = convolutions.pna
    passed = ("mean_log_degree",)
    edge_argument = "edge_features"
    in_features: int
    mean_log_degree: float
    num_towers: int = 1
    edge_features: int | None = None
    use_bias: bool = True

    def params(self) -> ParamSpecs:
        k, n, t = self.in_features, self.out_features, self.num_towers
        if n % t:
            raise ValueError(f"PNAConv: num_towers must divide out_features, got {t} and {n}")
        specs = {
            "message_dst": matrix(t, k, k),
            "message_src": matrix(t, k, k),
            "update": matrix(t, k, n // t),
            "aggregate": matrix(3, t, 4 * k, n // t),
            "out": matrix(n, n),
        }
        if self.edge_features is not None:
            specs["message_edge"] = matrix(t, self.edge_features, k)
        if self.use_bias:
            specs |= {"message_bias": zeros_of(t, k), "update_bias": zeros_of(t, n // t), "bias": zeros_of(n)}
        return specs
