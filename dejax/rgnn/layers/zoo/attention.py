"""Attention over neighbours without edge types: GAT, GATv2, graph transformer.

Shapes: N nodes, E edges, k input and c edge features, H heads of width d. Edge types are not read.
"""

from __future__ import annotations

from typing import Any

from dejax.rgnn.compiler import functional as F
from dejax.rgnn.compiler.frontend import GraphSymbol, ProgramError, Symbol
from dejax.rgnn.compiler.program import program
from dejax.rgnn.layers.arguments import (
    Params,
    add_bias,
    attend,
    check_edge_features,
    check_params,
    ends,
    finish,
    merge_heads,
)


@program
def gat(
    g: GraphSymbol,
    x: Any,
    params: Params,
    edge_features: Any = None,
    negative_slope: float = 0.2,
    concat_heads: bool = True,
) -> Symbol:
    """One graph attention layer (Velickovic et al., arXiv 1710.10903, equations 3 to 6).

        z_i = x_i W
        e_ij = LeakyReLU(a_dst . z_i + a_src . z_j + a_edge . (f_ij W_edge))
        y_i = sum over edges j -> i of softmax(e)_ij z_j   (+ x_i R)   + b

    for each head. The paper's neighbourhood holds the node itself: make the graph with `add_self_loops=True`.

    Args:
      g: the graph.
      x: [N, k] node features, or a pair (sources [N, k], destinations [N, l]).
      params: `weight` [H, k, d], `attention_src` and `attention_dst` [H, d]; `weight_dst` [H, l, d] where x is a pair
        (without it the destinations are multiplied by `weight`, too);
        with edge features `weight_edge` [H, c, d] and `attention_edge` [H, d]; optionally `residual` R [l, H * d] and
        `bias` [H * d] ([l, d] and [d] where heads are averaged), and `edge_scale` [E, H], a factor of the attention
        after the softmax, for attention dropout.
      edge_features: f, [E, c], features of the edges.
      negative_slope: slope of the LeakyReLU for negative inputs.
      concat_heads: whether heads are concatenated, [N, H * d], or averaged, [N, d].

    Returns:
      New node features [N, H * d] or [N, d].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], num_nodes=3)
    >>> zero = jnp.zeros((1, 1))
    >>> params = {"weight": jnp.ones((1, 1, 1)), "attention_src": zero, "attention_dst": zero}
    >>> rgnn.zoo.gat(graph, jnp.array([[1.0], [3.0], [5.0]]), params)[2]  # equal shares of 1 and 3
    Array([2.], dtype=float32)
    """
    required = ("weight", "attention_src", "attention_dst")
    optional = ("weight_dst", "weight_edge", "attention_edge", "residual", "bias", "edge_scale")
    check_params(params, "gat", required, optional)
    check_edge_features("gat", edge_features, params, ("weight_edge", "attention_edge"))
    x_src, x_dst = ends(g, x)
    z = x_src @ g.shared(params["weight"])
    z_dst = z
    if params.get("weight_dst") is not None or x_dst is not x_src:
        z_dst = x_dst @ _weight_of_destinations(g, params, "weight", x_dst)
    score = g.src(F.dot(z, g.shared(params["attention_src"]))) + g.dst(F.dot(z_dst, g.shared(params["attention_dst"])))
    if edge_features is not None:
        edge = g.edge(edge_features) @ g.shared(params["weight_edge"])
        score = score + F.dot(edge, g.shared(params["attention_edge"]))
    y = attend(g, F.leaky_relu(score, negative_slope), g.src(z), params.get("edge_scale"))
    return finish(g, merge_heads(y, concat_heads), x_dst, params)


@program
def gatv2(
    g: GraphSymbol,
    x: Any,
    params: Params,
    edge_features: Any = None,
    negative_slope: float = 0.2,
    concat_heads: bool = True,
) -> Symbol:
    """One GATv2 layer (Brody et al., arXiv 2105.14491, equation 7).

        e_ij = a . LeakyReLU(x_i W_dst + x_j W_src + f_ij W_edge)
        y_i = sum over edges j -> i of softmax(e)_ij (x_j W_src)   (+ x_i R)   + b

    for each head. Without `weight_dst`, W_dst = W_src, also where x is a pair; without `weight_dst` and `bias_dst` both
    projections add `bias_src`. The paper's neighbourhood holds the node itself: make the graph with
    `add_self_loops=True`.

    Args:
      g: the graph.
      x: [N, k] node features, or a pair (sources [N, k], destinations [N, l]).
      params: `weight_src` [H, k, d], `attention` [H, d]; optionally `weight_dst` [H, l, d], `bias_src` and `bias_dst`
        [H, d], added to the projections; with edge features `weight_edge` [H, c, d]; and `residual`, `bias`,
        `edge_scale` as in `gat`.
      edge_features, negative_slope, concat_heads: as in `gat`.

    Returns:
      New node features [N, H * d] or [N, d].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], num_nodes=3)
    >>> params = {"weight_src": jnp.ones((1, 1, 1)), "attention": jnp.zeros((1, 1))}
    >>> rgnn.zoo.gatv2(graph, jnp.array([[1.0], [3.0], [5.0]]), params)[2]  # equal shares of 1 and 3
    Array([2.], dtype=float32)
    """
    optional = ("weight_dst", "bias_src", "bias_dst", "weight_edge", "residual", "bias", "edge_scale")
    check_params(params, "gatv2", ("weight_src", "attention"), optional)
    check_edge_features("gatv2", edge_features, params, ("weight_edge",))
    x_src, x_dst = ends(g, x)
    z_src = add_bias(g, x_src @ g.shared(params["weight_src"]), params.get("bias_src"))
    z_dst = z_src
    own = any(params.get(name) is not None for name in ("weight_dst", "bias_dst"))
    if own or x_dst is not x_src:
        bias = params.get("bias_dst" if own else "bias_src")
        z_dst = add_bias(g, x_dst @ _weight_of_destinations(g, params, "weight_src", x_dst), bias)
    hidden = g.src(z_src) + g.dst(z_dst)
    if edge_features is not None:
        hidden = hidden + g.edge(edge_features) @ g.shared(params["weight_edge"])
    score = F.dot(F.leaky_relu(hidden, negative_slope), g.shared(params["attention"]))
    y = attend(g, score, g.src(z_src), params.get("edge_scale"))
    return finish(g, merge_heads(y, concat_heads), x_dst, params)


def _weight_of_destinations(g: GraphSymbol, params: Params, source: str, x: Symbol) -> Symbol:
    """`weight_dst`, or without it the weight of the sources, which destinations of the same width meet, too."""
    if params.get("weight_dst") is not None:
        return g.shared(params["weight_dst"])
    weight = g.shared(params[source])
    if weight.shape[-2] != x.shape[-1]:
        raise ProgramError(
            f"the parameter weight_dst must be given for a pair of widths {weight.shape[-2]} and {x.shape[-1]}, got "
            "none"
        )
    return weight


@program
def graph_transformer(
    g: GraphSymbol, x: Any, params: Params, edge_features: Any = None, concat_heads: bool = True
) -> Symbol:
    """One graph transformer layer (Shi et al., arXiv 2009.03509, equations 3 to 5).

        q_i = x_i Q ;  k_ij = x_j K + f_ij E ;  v_ij = x_j V + f_ij E
        o_i = sum over edges j -> i of softmax(q_i . k_ij / sqrt(d)) v_ij
        y_i = o_i + r_i ,  r_i = x_i R + r
        with `gate`:  y_i = beta r_i + (1 - beta) o_i ,  beta = sigmoid([o_i, r_i, o_i - r_i] . gate)

    for each head, with the heads of o concatenated or averaged.

    Args:
      g: the graph.
      x: [N, k] node features, or a pair (sources [N, k], destinations [N, l]).
      params: `query` [H, l, d], `key` and `value` [H, k, d]; optionally `query_bias`, `key_bias`, `value_bias` [H, d];
        `root` R [l, n], `root_bias` [n] and `gate` [3, n], with n = H * d or d; with edge features `edge` [H, c, d];
        and `edge_scale` as in `gat`.
      edge_features: f, [E, c], features of the edges.
      concat_heads: whether heads are concatenated or averaged.

    Returns:
      New node features [N, n].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], num_nodes=3)
    >>> params = {"query": jnp.zeros((1, 1, 1)), "key": jnp.ones((1, 1, 1)), "value": jnp.ones((1, 1, 1))}
    >>> rgnn.zoo.graph_transformer(graph, jnp.array([[1.0], [3.0], [5.0]]), params)[2]  # equal shares of 1 and 3
    Array([2.], dtype=float32)
    """
    optional = ("query_bias", "key_bias", "value_bias", "root", "root_bias", "gate", "edge", "edge_scale")
    check_params(params, "graph_transformer", ("query", "key", "value"), optional)
    check_edge_features("graph_transformer", edge_features, params, ("edge",))
    x_src, x_dst = ends(g, x)

    def projected(name: str, h: Symbol) -> Symbol:
        return add_bias(g, h @ g.shared(params[name]), params.get(f"{name}_bias"))

    query, key, value = g.dst(projected("query", x_dst)), *(g.src(projected(name, x_src)) for name in ("key", "value"))
    if edge_features is not None:
        edge = g.edge(edge_features) @ g.shared(params["edge"])
        key, value = key + edge, value + edge
    score = F.dot(query, key) * query.shape[-1] ** -0.5
    y = merge_heads(attend(g, score, value, params.get("edge_scale")), concat_heads)
    if params.get("root") is None:
        return y
    root = projected("root", x_dst)
    if params.get("gate") is None:
        return y + root
    gate = g.shared(params["gate"])
    # [o, r, o - r] . (a, b, c) without the concatenation.
    beta = F.sigmoid(F.dot(y, gate[0] + gate[2]) + F.dot(root, gate[1] - gate[2]))[None]
    return root * beta + y * (1.0 - beta)
