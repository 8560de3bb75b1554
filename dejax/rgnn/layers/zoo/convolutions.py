"""Layers that sum or average neighbours: GCN, GraphSAGE, GIN, gated graph convolution, PNA.

Shapes: N nodes, E edges, k input, n output and c edge features. Edge types are not read.
"""

from __future__ import annotations

import math
from typing import Any

from dejax.rgnn.compiler import functional as F
from dejax.rgnn.compiler.frontend import GraphSymbol, ProgramError, Symbol
from dejax.rgnn.compiler.program import program
from dejax.rgnn.layers.arguments import (
    Params,
    add_bias,
    check_choice,
    check_edge_features,
    check_params,
    ends,
    finish,
    incoming,
    narrow_like,
    unit_rows,
    wide,
)


@program
def gcn(g: GraphSymbol, x: Any, params: Params, edge_weight: Any = None, add_self_loops: bool = True) -> Symbol:
    """One graph convolution (Kipf and Welling, arXiv 1609.02907, equation 2).

        y = D^-1/2 (A + I) D^-1/2 x W + b ,    D_ii = 1 + sum over edges into i of w_ij

    Args:
      g: the graph. If it has self loops, they count in addition to the ones that are added.
      x: [N, k] node features.
      params: `weight` [k, n]; optionally `bias` [n].
      edge_weight: [E], the entries w of A; not negative, 1 by default.
      add_self_loops: whether the identity I is added to A. Without it, the result of a node without edges is b.

    Returns:
      New node features [N, n].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [1, 2], num_nodes=3)
    >>> rgnn.zoo.gcn(graph, jnp.array([[1.0], [2.0], [4.0]]), {"weight": jnp.ones((1, 1))}, add_self_loops=False)
    Array([[0.],
           [0.],
           [2.]], dtype=float32)
    """
    check_params(params, "gcn", ("weight",), ("bias",))
    z = g.node(x) @ g.shared(params["weight"])
    degree = incoming(g, z) if edge_weight is None else g.sum_to_dst(wide(g.edge(edge_weight)))
    if add_self_loops:
        norm = F.rsqrt(degree + 1.0)
    else:
        norm = F.where(degree > 0, F.rsqrt(F.where(degree > 0, degree, 1.0)), 0.0)
    norm = norm.astype(z.dtype)
    z = z * norm
    message = g.src(z) if edge_weight is None else g.src(z) * g.edge(edge_weight)
    total = g.sum_to_dst(wide(message))  # the sum of 70,000 neighbours is beyond float16 before it is normalised
    if add_self_loops:
        total = total + z
    return add_bias(g, narrow_like(total * norm, message), params.get("bias"))


@program
def graphsage(g: GraphSymbol, x: Any, params: Params, aggregation: str = "mean", normalize: bool = False) -> Symbol:
    """One GraphSAGE layer without its activation (Hamilton et al., arXiv 1706.02216, algorithm 1 and equation 3).

        m_j = x_j   (with `pool`: m_j = relu(x_j P + p))
        y_i = aggregation over edges j -> i of m_j  W_neighbour + x_i W_root + b   (with `normalize`: y_i / ||y_i||)

    Args:
      g: the graph.
      x: [N, k] node features, or a pair (sources [N, k], destinations [N, l]).
      params: `neighbour` [k, n] (or [p, n] with `pool`); optionally `root` [l, n], `bias` [n], and for the paper's
        pooling aggregator `pool` [k, p] and `pool_bias` [p].
      aggregation: `"mean"`, `"max"` or `"sum"`; nodes without incoming edges aggregate to 0.
      normalize: whether rows of the result are divided by their Euclidean norm; rows of zeros stay zero.

    Returns:
      New node features [N, n].
    """
    check_params(params, "graphsage", ("neighbour",), ("root", "bias", "pool", "pool_bias"))
    check_choice("graphsage", "aggregation", aggregation, ("mean", "max", "sum"))
    x_src, x_dst = ends(g, x)
    if x_dst is not x_src and params.get("root") is None:
        raise ProgramError(
            "graphsage: x must be one array if the parameters have no root, because only the root term reads the "
            "destinations, got a pair"
        )
    if params.get("pool") is not None:
        x_src = F.relu(add_bias(g, x_src @ g.shared(params["pool"]), params.get("pool_bias")))
    weight = g.shared(params["neighbour"])
    if aggregation == "max":
        y = g.max_to_dst(g.src(x_src)) @ weight
    else:  # linear: the product comes first where it makes the rows that edges read narrower
        message = g.src(x_src @ weight) if weight.shape[1] < weight.shape[0] else g.src(x_src)
        total = g.mean_to_dst(message) if aggregation == "mean" else g.sum_to_dst(message)
        y = total if weight.shape[1] < weight.shape[0] else total @ weight
    y = finish(g, y, x_dst, params, "root")
    return unit_rows(y) if normalize else y


@program
def gin(g: GraphSymbol, x: Any, params: Params, edge_features: Any = None) -> Symbol:
    """One graph isomorphism layer (Xu et al., arXiv 1810.00826, equation 4.1), with a perceptron of two products.

        y_i = relu(((1 + eps) x_i + sum over edges j -> i of m_ij) W_1 + b_1) W_2 + b_2
        m_ij = x_j ;   with edge features  m_ij = relu(x_j + e_ij E)   (Hu et al., arXiv 1905.12265)

    Args:
      g: the graph.
      x: [N, k] node features, or a pair (sources [N, k], destinations [N, k]).
      params: `weight_1` [k, h], `weight_2` [h, n]; optionally `bias_1` [h], `bias_2` [n], `epsilon` [] (0 by default),
        and with edge features `edge` [c, k].
      edge_features: e, [E, c], features of the edges.

    Returns:
      New node features [N, n].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], num_nodes=3)
    >>> x, one = jnp.array([[1.0], [2.0], [4.0]]), jnp.ones((1, 1))
    >>> rgnn.zoo.gin(graph, x, {"weight_1": one, "weight_2": one})[2]  # 4 + (1 + 2)
    Array([7.], dtype=float32)
    """
    check_params(params, "gin", ("weight_1", "weight_2"), ("bias_1", "bias_2", "epsilon", "edge"))
    check_edge_features("gin", edge_features, params, ("edge",))
    x_src, x_dst = ends(g, x)
    message = g.src(x_src)
    if edge_features is not None:
        message = F.relu(message + g.edge(edge_features) @ g.shared(params["edge"]))
    own = x_dst if params.get("epsilon") is None else x_dst * (1.0 + g.shared(params["epsilon"]))
    hidden = (own + g.sum_to_dst(message)) @ g.shared(params["weight_1"])
    hidden = F.relu(add_bias(g, hidden, params.get("bias_1")))
    return add_bias(g, hidden @ g.shared(params["weight_2"]), params.get("bias_2"))


@program
def gated_gcn(g: GraphSymbol, x: Any, params: Params, edge_features: Any = None) -> Symbol:
    """One residual gated graph convolution (Bresson and Laurent, arXiv 1711.07553, equations 11 and 12).

        gate_ij = sigmoid(x_i A + x_j B + e_ij C + a)
        y_i = sum over edges j -> i of gate_ij * (x_j V + v) + x_i R + b

    Args:
      g: the graph.
      x: [N, k] node features, or a pair (sources [N, k], destinations [N, l]).
      params: `gate_dst` [l, n], `gate_src` [k, n], `value` [k, n]; optionally `gate_bias` [n], `value_bias` [n],
        `root` [l, n], `bias` [n], and with edge features `gate_edge` [c, n].
      edge_features: e, [E, c], features of the edges.

    Returns:
      New node features [N, n].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], num_nodes=3)
    >>> x, zero, one = jnp.array([[1.0], [2.0], [4.0]]), jnp.zeros((1, 1)), jnp.ones((1, 1))
    >>> rgnn.zoo.gated_gcn(graph, x, {"gate_dst": zero, "gate_src": zero, "value": one})[2]  # gates of a half
    Array([1.5], dtype=float32)
    """
    optional = ("gate_bias", "value_bias", "root", "bias", "gate_edge")
    check_params(params, "gated_gcn", ("gate_dst", "gate_src", "value"), optional)
    check_edge_features("gated_gcn", edge_features, params, ("gate_edge",))
    x_src, x_dst = ends(g, x)
    gate = g.dst(add_bias(g, x_dst @ g.shared(params["gate_dst"]), params.get("gate_bias")))
    gate = gate + g.src(x_src @ g.shared(params["gate_src"]))
    if edge_features is not None:
        gate = gate + g.edge(edge_features) @ g.shared(params["gate_edge"])
    value = g.src(add_bias(g, x_src @ g.shared(params["value"]), params.get("value_bias")))
    return finish(g, g.sum_to_dst(F.sigmoid(gate) * value), x_dst, params, "root")


SMALLEST_VARIANCE = 1e-5  # below, a standard deviation counts as 0: the difference of two means has no correct digit


@program
def pna(g: GraphSymbol, x: Any, params: Params, edge_features: Any = None, mean_log_degree: float = 1.0) -> Symbol:
    """One principal neighbourhood aggregation layer (Corso et al., arXiv 2004.05718, equations 5, 7 and 8).

        m_ij = x_i M_dst + x_j M_src + e_ij M_edge + b
        a_i = [mean, maximum, minimum, standard deviation over edges j -> i of m_ij]
        y_i = (x_i U + sum over scalers s of s(d_i) a_i A_s + u) O + o

    This holds for each tower; the towers are concatenated before O. d_i is the number of incoming edges. The scalers
    are 1, log(d + 1) / delta and delta / log(d + 1), with d at least 1. Nodes without incoming edges aggregate to 0.

    Args:
      g: the graph.
      x: [N, k] node features.
      params: `message_dst` and `message_src` [T, k, f], `update` [T, k, n], `aggregate` [3, T, 4 f, n] (scalers in the
        order above), `out` [T n, m]; optionally `message_bias` [T, f], `update_bias` [T, n], `bias` [m], and with edge
        features `message_edge` [T, c, f].
      edge_features: e, [E, c], features of the edges.
      mean_log_degree: delta, the mean of log(d + 1) over the nodes of the training graphs.

    Returns:
      New node features [N, m].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], num_nodes=3)
    >>> one = jnp.ones((1, 4, 4))
    >>> params = {"message_dst": one, "message_src": one, "update": one, "aggregate": jnp.ones((3, 1, 16, 4))}
    >>> params["out"] = jnp.ones((4, 8))
    >>> rgnn.zoo.pna(graph, jnp.ones((3, 4)), params).shape
    (3, 8)
    """
    required = ("message_dst", "message_src", "update", "aggregate", "out")
    check_params(params, "pna", required, ("message_bias", "update_bias", "bias", "message_edge"))
    check_edge_features("pna", edge_features, params, ("message_edge",))
    if not (mean_log_degree > 0 and math.isfinite(mean_log_degree)):
        raise ProgramError(f"pna: mean_log_degree must be positive and finite, got {mean_log_degree}")
    h = g.node(x)
    message = g.src(h @ g.shared(params["message_src"]))
    if edge_features is not None:
        message = message + g.edge(edge_features) @ g.shared(params["message_edge"])
    # The destination's part is equal on all edges of a node, so it is added behind the reductions; a standard deviation
    # does not change with it.
    own = add_bias(g, h @ g.shared(params["message_dst"]), params.get("message_bias"))
    degree = incoming(g, h)
    has_edges = (degree > 0)[None, None]
    row = wide(message)
    mean, square = g.mean_to_dst(row), g.mean_to_dst(row * row)
    variance = square - mean * mean
    spread = variance > SMALLEST_VARIANCE
    deviation = narrow_like(F.where(spread, F.sqrt(F.where(spread, variance, 1.0)), 0.0), message)
    reduced = (narrow_like(mean, message), g.max_to_dst(message), g.min_to_dst(message))
    level = [F.where(has_edges, part + own, 0.0) for part in reduced]
    gathered = F.concatenate([*level, deviation])
    scale = (F.log(F.maximum(degree, 1.0) + 1.0) * (1.0 / mean_log_degree)).astype(h.dtype)[None, None]
    weight = g.shared(params["aggregate"])
    y = add_bias(g, h @ g.shared(params["update"]), params.get("update_bias"))
    y = y + gathered @ weight[0] + (gathered @ weight[1]) * scale + (gathered @ weight[2]) / scale
    y = y.reshape(y.shape[0] * y.shape[1]) @ g.shared(params["out"])
    return add_bias(g, y, params.get("bias"))
