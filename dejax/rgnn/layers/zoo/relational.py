"""Layers that read edge types besides RGCN, RGAT and HGT: gated, CompGCN, SimpleHGN, RGAT with shared vectors, HEAT.

Shapes: N nodes, E edges, R edge types, T node types, k input, n output and c edge features, H heads of width d.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dejax.rgnn.compiler import functional as F
from dejax.rgnn.compiler.frontend import GraphSymbol, ProgramError, Symbol
from dejax.rgnn.compiler.program import program
from dejax.rgnn.layers.arguments import (
    Params,
    add_bias,
    attend,
    check_choice,
    check_edge_features,
    check_params,
    finish,
    merge_heads,
    unit_rows,
)


@program
def rggnn(g: GraphSymbol, x: Any, params: Params, steps: int = 1) -> Symbol:
    """A gated graph network (Li et al., arXiv 1511.05493, equations 2 to 6), with a weight for each edge type.

        repeated `steps` times:
        m_i = sum over edges j -> i of (h_j W_r + w_r)
        r = sigmoid(m_i A_0 + a_0 + h_i B_0 + b_0) ;  z = sigmoid(m_i A_1 + a_1 + h_i B_1 + b_1)
        c = tanh(m_i A_2 + a_2 + r (h_i B_2 + b_2)) ;  h_i = (1 - z) c + z h_i

    Args:
      g: the graph.
      x: [N, k], h of the first step.
      params: `weight` [R, k, k] (or [k, k], shared by all edge types), `input` A and `hidden` B [3, k, k]; optionally
        `edge_bias` w [R, k], `input_bias` a and `hidden_bias` b [3, k].
      steps: how often the layer is applied, with the same parameters.

    Returns:
      New node features [N, k].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [1, 2], [0, 1], num_nodes=3)
    >>> params = {"weight": jnp.ones((2, 4, 4)), "input": jnp.ones((3, 4, 4)), "hidden": jnp.ones((3, 4, 4))}
    >>> rgnn.zoo.rggnn(graph, jnp.ones((3, 4)), params, steps=2).shape
    (3, 4)
    """
    check_params(params, "rggnn", ("weight", "input", "hidden"), ("edge_bias", "input_bias", "hidden_bias"))
    if not isinstance(steps, int) or steps < 1:
        raise ProgramError(f"rggnn: steps must be an int of at least 1, got {steps!r}")
    h = g.node(x)
    weight = params["weight"]
    for _ in range(steps):
        message = g.src(h @ g.shared(weight)) if len(weight.shape) == 2 else g.src(h) @ g.per_edge_type(weight)
        if params.get("edge_bias") is not None:
            message = message + g.per_edge_type(params["edge_bias"])
        into = add_bias(g, g.sum_to_dst(message) @ g.shared(params["input"]), params.get("input_bias"))
        own = add_bias(g, h @ g.shared(params["hidden"]), params.get("hidden_bias"))
        reset, update = F.sigmoid(into[0] + own[0]), F.sigmoid(into[1] + own[1])
        candidate = F.tanh(into[2] + reset * own[2])
        h = candidate + update * (h - candidate)
    return h


@program
def compgcn(
    g: GraphSymbol,
    x: Any,
    params: Params,
    directions: tuple[int, ...] | None = None,
    composition: str = "multiply",
    aggregation: str = "sum",
    return_relation: bool = False,
) -> Any:
    """One CompGCN layer without its activation (Vashishth et al., arXiv 1911.03082, equations 2 to 4).

        y_i = sum over edges j -> i of phi(x_j, z_r) W_direction(r)   (+ phi(x_i, z_loop) W_loop)   + b
        z_r = z_r W_relation

    with phi(x, z) = x - z, x * z, or their circular correlation, sum over m of x_m z_(m + l).

    Args:
      g: the graph; with `add_reverse=True` it has the paper's inverse edges, whose types follow the others.
      x: [N, k] node features.
      params: `relation` z [R, k], `weight` [D, k, n], one matrix for each direction; optionally `loop` z_loop [k] and
        `weight_loop` [k, n]; `bias` [n]; `relation_update` W_relation [k, n].
      directions: the direction of each edge type, an integer below D; all 0 by default. In the paper original edges
        have direction 0 and inverse edges 1: `(0,) * r + (1,) * r`.
      composition: phi: `"subtract"`, `"multiply"` or `"correlate"`.
      aggregation: `"sum"` or `"mean"`.
      return_relation: whether the new relation vectors are returned, too.

    Returns:
      [N, n]; with `return_relation` also z, [R, n].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> params = {"relation": jnp.array([[1.0], [2.0]]), "weight": jnp.ones((1, 1, 1))}
    >>> rgnn.zoo.compgcn(graph, jnp.array([[5.0], [7.0], [0.0]]), params)[2]  # (5 - 1) + (7 - 2)
    Array([19.], dtype=float32)
    """
    optional = ("loop", "weight_loop", "bias", "relation_update")
    check_params(params, "compgcn", ("relation", "weight"), optional)
    check_choice("compgcn", "composition", composition, ("subtract", "multiply", "correlate"))
    check_choice("compgcn", "aggregation", aggregation, ("sum", "mean"))
    types = params["relation"].shape[0]
    count = params["weight"].shape[0]
    directions = (0,) * types if directions is None else tuple(directions)
    if len(directions) != types or not all(isinstance(d, int) and 0 <= d < count for d in directions):
        raise ProgramError(
            f"compgcn: directions must be {types} integers below {count}, one for each edge type, got {directions}"
        )
    z, h = g.per_edge_type(params["relation"]), g.node(x)
    weight = g.shared(params["weight"])
    weight = weight[0] if count == 1 else weight[g.per_edge_type(np.asarray(directions, np.int32))]
    if composition == "correlate":
        message = g.src(h) @ (_circulant(g, z) @ weight)
    else:
        source = g.src(h)
        composed = source - z if composition == "subtract" else source * z
        message = composed @ weight
    y = g.sum_to_dst(message) if aggregation == "sum" else g.mean_to_dst(message)
    if params.get("weight_loop") is not None:
        if params.get("loop") is None:
            raise ProgramError("compgcn: the parameter loop must be given with weight_loop, got none")
        loop = g.shared(params["loop"])
        if composition == "correlate":
            composed = h @ _circulant(g, loop)
        else:
            composed = h - loop if composition == "subtract" else h * loop
        y = y + composed @ g.shared(params["weight_loop"])
    y = add_bias(g, y, params.get("bias"))
    if not return_relation:
        return y
    if params.get("relation_update") is None:
        raise ProgramError("compgcn: the parameter relation_update must be given with return_relation=True, got none")
    return y, z @ g.shared(params["relation_update"])


def _circulant(g: GraphSymbol, z: Symbol) -> Symbol:
    """The matrix [k, k] whose product with x is the circular correlation of x and z."""
    k = z.shape[0]
    return z[g.shared((np.arange(k)[:, None] + np.arange(k)[None, :]).astype(np.int32) % k)]


@program
def simple_hgn(
    g: GraphSymbol,
    x: Any,
    params: Params,
    previous_attention: Any = None,
    beta: float = 0.05,
    negative_slope: float = 0.2,
    normalize: bool = False,
    concat_heads: bool = True,
    return_attention: bool = False,
) -> Any:
    """One SimpleHGN layer without its activation (Lv et al., arXiv 2112.14936, section 5).

        z_i = x_i W
        e_ij = LeakyReLU(a_dst . z_i + a_src . z_j + a_edge . (r_t W_edge))
        p = (1 - beta) softmax(e) + beta p_previous
        y_i = sum over edges j -> i of p_ij z_j   (+ x_i R)   + b ;   with `normalize`, y_i / ||y_i||

    for each head, t the edge type.

    Args:
      g: the graph.
      x: [N, k] node features.
      params: `weight` [H, k, d], `attention_src` and `attention_dst` [H, d], `edge_embedding` r [R, c], `weight_edge`
        [H, c, u], `attention_edge` [H, u]; optionally `residual` R and `bias` as in `gat`, and `edge_scale` [E, H].
      previous_attention: [E, H], the p that the previous layer returned; None: p = softmax(e).
      beta: weight of the previous attention.
      negative_slope: slope of the LeakyReLU for negative inputs.
      normalize: whether rows of the result are divided by their Euclidean norm, as the paper does in its last layer.
      concat_heads: whether heads are concatenated, [N, H * d], or averaged, [N, d].
      return_attention: whether p is returned, too, for the next layer.

    Returns:
      New node features [N, H * d] or [N, d]; with `return_attention` also p, [E, H].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> one, zero = jnp.ones((1, 1, 1)), jnp.zeros((1, 1))
    >>> params = {"weight": one, "attention_src": zero, "attention_dst": zero}
    >>> params |= {"edge_embedding": jnp.ones((2, 1)), "weight_edge": one, "attention_edge": zero}
    >>> rgnn.zoo.simple_hgn(graph, jnp.array([[1.0], [3.0], [5.0]]), params)[2]  # equal shares of 1 and 3
    Array([2.], dtype=float32)
    """
    required = ("weight", "attention_src", "attention_dst", "edge_embedding", "weight_edge", "attention_edge")
    check_params(params, "simple_hgn", required, ("residual", "bias", "edge_scale"))
    h = g.node(x)
    z = h @ g.shared(params["weight"])
    relation = g.per_edge_type(params["edge_embedding"]) @ g.shared(params["weight_edge"])
    score = g.src(F.dot(z, g.shared(params["attention_src"]))) + g.dst(F.dot(z, g.shared(params["attention_dst"])))
    score = score + F.dot(relation, g.shared(params["attention_edge"]))
    attention = F.edge_softmax(F.leaky_relu(score, negative_slope))
    if previous_attention is not None:
        attention = attention * (1.0 - beta) + g.edge(previous_attention) * beta
    scaled = attention if params.get("edge_scale") is None else attention * g.edge(params["edge_scale"])
    y = merge_heads(g.sum_to_dst(scaled[:, None] * g.src(z)), concat_heads)
    y = finish(g, y, h, params)
    if normalize:
        y = unit_rows(y)
    return (y, attention) if return_attention else y


@program
def rgat_shared(
    g: GraphSymbol,
    x: Any,
    params: Params,
    edge_features: Any = None,
    softmax: str = "dst",
    mode: str = "additive",
    negative_slope: float = 0.2,
    concat_heads: bool = True,
) -> Symbol:
    """One RGAT layer whose query and key matrices all relations share (arXiv 1904.05811), as PyTorch Geometric has it.

        z_i^r = x_i W_r ;  q = z_i^r Q ;  k = z_j^r K
        additive:        s_ij = LeakyReLU(q + k)
        multiplicative:  s_ij = q * k
        y_i = sum over edges j -> i of softmax(s)_ij z_j^r   + b

    With edge features e, f = (e_ij W_edge) F is one more term of the sum, or one more factor of the product. Here z has
    the heads concatenated, and the query and key of a head read all heads. The paper's layer is `library.rgat`: it has
    an attention vector for each relation and head, which reads its own head only.

    Args:
      g: the graph.
      x: [N, k] node features.
      params: `weight` [R, k, H * d], `query` and `key` [H * d, H]; optionally `bias` [H * d] ([d] where heads are
        averaged), `edge_scale` [E, H]; with edge features `weight_edge` [c, H * d] and `attention_edge` [H * d, H].
      edge_features: e, [E, c], features of the edges.
      softmax: `"dst"`, over all incoming edges of a node (across relations), or `"relation"`, over those of its type.
      mode: `"additive"` or `"multiplicative"`.
      negative_slope: slope of the LeakyReLU for negative inputs.
      concat_heads: whether heads are concatenated, [N, H * d], or averaged, [N, d].

    Returns:
      New node features [N, H * d] or [N, d].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> params = {"weight": jnp.array([[[1.0]], [[2.0]]]), "query": jnp.zeros((1, 1)), "key": jnp.zeros((1, 1))}
    >>> rgnn.zoo.rgat_shared(graph, jnp.array([[1.0], [3.0], [5.0]]), params)[2]  # equal shares of 1 * 1 and 2 * 3
    Array([3.5], dtype=float32)
    """
    optional = ("bias", "edge_scale", "weight_edge", "attention_edge")
    check_params(params, "rgat_shared", ("weight", "query", "key"), optional)
    check_edge_features("rgat_shared", edge_features, params, ("weight_edge", "attention_edge"))
    check_choice("rgat_shared", "mode", mode, ("additive", "multiplicative"))
    check_choice("rgat_shared", "softmax", softmax, ("dst", "relation"))
    weight = g.per_edge_type(params["weight"])
    width, heads = params["query"].shape
    z_src, z_dst = g.src(x) @ weight, g.dst(x) @ weight
    query, key = z_dst @ g.shared(params["query"]), z_src @ g.shared(params["key"])
    score = query + key if mode == "additive" else query * key
    if edge_features is not None:
        edge = (g.edge(edge_features) @ g.shared(params["weight_edge"])) @ g.shared(params["attention_edge"])
        score = score + edge if mode == "additive" else score * edge
    if mode == "additive":
        score = F.leaky_relu(score, negative_slope)
    value = z_src.reshape(heads, width // heads)
    y = attend(g, score, value, params.get("edge_scale"), within=softmax)
    return add_bias(g, merge_heads(y, concat_heads), params.get("bias"))


@program
def heat(
    g: GraphSymbol,
    x: Any,
    params: Params,
    edge_features: Any,
    negative_slope: float = 0.2,
    concat_heads: bool = True,
    add_root: bool = True,
) -> Symbol:
    """One heterogeneous edge-enhanced attention layer (Mo et al., arXiv 2106.07161, equations 4 to 8).

        z_i = x_i W_t(i) + w_t(i) ;  f_ij = LeakyReLU(e_ij E) ;  u_r = LeakyReLU(t_r)
        s_ij = LeakyReLU(z_i . a_dst + z_j . a_src + u_r . a_type + f_ij . a_edge)
        y_i = sum over edges j -> i of softmax(s)_ij (z_j V + f_ij V_edge + v)   (+ z_i with `add_root`)

    for each head, t(i) the node type and r the edge type; all heads share the value.

    Args:
      g: the graph; `node_type` must be given for more than one type.
      x: [N, k] node features.
      params: `weight` [T, k, n], `edge_embedding` t [R, u], `weight_edge` E [c, p], `attention_dst` and `attention_src`
        [n, H], `attention_type` [u, H], `attention_edge` [p, H], `value` V [n, n], `value_edge` [p, n]; optionally
        `node_bias` w [T, n], `value_bias` v [n], and `edge_scale` [E, H].
      edge_features: e, [E, c], features of the edges.
      negative_slope: slope of the LeakyReLU for negative inputs.
      concat_heads: whether heads are concatenated, [N, H * n], or averaged, [N, n].
      add_root: whether each node's own projection is added.

    Returns:
      New node features [N, H * n] or [N, n].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> square, column = jnp.ones((4, 4)), jnp.ones((4, 1))
    >>> params = {"weight": square[None], "edge_embedding": square[:2], "weight_edge": square[:3], "value": square}
    >>> names = ("attention_dst", "attention_src", "attention_type", "attention_edge")
    >>> params |= dict.fromkeys(names, column)
    >>> rgnn.zoo.heat(graph, jnp.ones((3, 4)), params | {"value_edge": square}, jnp.ones((2, 3))).shape
    (3, 4)
    """
    attention = ("attention_dst", "attention_src", "attention_type", "attention_edge")
    required = ("weight", "edge_embedding", "weight_edge", *attention, "value", "value_edge")
    check_params(params, "heat", required, ("node_bias", "value_bias", "edge_scale"))
    z = g.node(x) @ g.per_node_type(params["weight"])
    if params.get("node_bias") is not None:
        z = z + g.per_node_type(params["node_bias"])
    edge = F.leaky_relu(g.edge(edge_features) @ g.shared(params["weight_edge"]), negative_slope)
    relation = F.leaky_relu(g.per_edge_type(params["edge_embedding"]), negative_slope)
    score = g.dst(z @ g.shared(params["attention_dst"])) + g.src(z @ g.shared(params["attention_src"]))
    score = score + relation @ g.shared(params["attention_type"]) + edge @ g.shared(params["attention_edge"])
    value = g.src(add_bias(g, z @ g.shared(params["value"]), params.get("value_bias")))
    value = value + edge @ g.shared(params["value_edge"])
    y = attend(g, F.leaky_relu(score, negative_slope), value[None], params.get("edge_scale"))
    if add_root:
        y = y + z[None]
    return merge_heads(y, concat_heads)
