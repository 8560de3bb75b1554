"""Specifications of the layers in `convolutions.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dejax.rgnn.layers.parameters import ParamSpecs
from dejax.rgnn.layers.spec import LayerSpec, matrix, zeros_of
from dejax.rgnn.layers.zoo import convolutions


@dataclass(frozen=True, kw_only=True, slots=True)
class GCNSpec(LayerSpec):
    """Graph convolution, GCN (arXiv 1609.02907, equation 2). The `edge_features` of a call are edge weights w [edges].

        y = D^-1/2 (A + I) D^-1/2 x W + b ,    D_ii = 1 + sum over edges into i of w_ij

    `dejax.rgnn.zoo.gcn` is the layer as a function of its parameters.

    Args:
      add_self_loops: whether the identity I is added to the adjacency matrix A.
      use_bias: whether to add b, the parameter `bias`.
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
    """GraphSAGE (arXiv 1706.02216, algorithm 1), without its activation.

        y_i = aggregation over edges j -> i of m_j  W_neighbour + x_i W_root + b ,    m_j = x_j  or  relu(x_j P + p)

    `dejax.rgnn.zoo.graphsage` is the layer as a function of its parameters.

    Args:
      aggregation: `"mean"`, `"max"` or `"sum"`.
      pool_features: width of the pooling perceptron relu(x_j P + p) that is applied to neighbours before the
        aggregation; None: no perceptron.
      normalize: whether each row of the result is divided by its Euclidean norm.
      use_root, use_bias: whether to add the node's own term x_i W_root, and b. `use_root` must be True if
        sources and destinations have features of their own.
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
            raise ValueError(
                "SAGEConv: use_root must be True with a pair of widths, because only the root term reads the "
                "destinations, got False"
            )
        specs = {} if p is None else {"pool": matrix(k, p), "pool_bias": zeros_of(p)}
        specs["neighbour"] = matrix(k if p is None else p, n)
        if self.use_root:
            specs["root"] = matrix(m, n)
        return specs | ({"bias": zeros_of(n)} if self.use_bias else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class GINSpec(LayerSpec):
    """Graph isomorphism network, GIN (arXiv 1810.00826, equation 4.1); with edge features GINE (arXiv 1905.12265).

        y_i = relu(((1 + eps) x_i + sum over edges j -> i of m_ij) W_1 + b_1) W_2 + b_2
        m_ij = x_j ;   with edge features  m_ij = relu(x_j + e_ij E)

    `dejax.rgnn.zoo.gin` is the layer as a function of its parameters.

    Args:
      hidden_features: width of the hidden layer between W_1 and W_2; None means out_features.
      edge_features: width of the edge features e; None: the layer has none.
      train_epsilon: whether eps is a parameter, which begins at 0, instead of always 0.
      use_bias: whether to add b_1 and b_2.
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
            raise ValueError(
                f"GINConv: sources and destinations must have one width, because they are added, got {k} and {m}"
            )
        h = n if self.hidden_features is None else self.hidden_features
        specs = {"weight_1": matrix(k, h), "weight_2": matrix(h, n)}
        if self.use_bias:
            specs |= {"bias_1": zeros_of(h), "bias_2": zeros_of(n)}
        if self.train_epsilon:
            specs["epsilon"] = zeros_of()
        return specs if self.edge_features is None else specs | {"edge": matrix(self.edge_features, k)}


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedGCNSpec(LayerSpec):
    """Residual gated graph convolution (arXiv 1711.07553, equations 11 and 12).

        gate_ij = sigmoid(x_i A + x_j B + e_ij C + a)
        y_i = sum over edges j -> i of gate_ij * (x_j V + v) + x_i R + b

    `dejax.rgnn.zoo.gated_gcn` is the layer as a function of its parameters.

    Args:
      edge_features: width of the edge features e that the gates read; None: the layer has none.
      use_root, use_bias: whether to add the node's own term x_i R, and the biases a, v and b.
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
    """Principal neighbourhood aggregation, PNA (arXiv 2004.05718, equations 5, 7 and 8).

        m_ij = x_i M_dst + x_j M_src + e_ij M_edge + b
        a_i = [mean, maximum, minimum, standard deviation over edges j -> i of m_ij]
        y_i = (x_i U + sum over scalers s of s(d_i) a_i A_s + u) O + o

    d_i is the number of incoming edges; the scalers are 1, log(d + 1) / delta and delta / log(d + 1).
    `dejax.rgnn.zoo.pna` is the layer as a function of its parameters.

    Args:
      mean_log_degree: delta, the mean of log(d + 1) over the nodes of the training graphs.
      num_towers: number T of towers. Each computes messages of width in_features and a result of width out_features /
        T; the results are concatenated before O.
      edge_features: width of the edge features e; None: the layer has none.
      use_bias: whether to add the biases b, u and o.
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
