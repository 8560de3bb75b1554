"""RGCN, RGAT and HGT, written in the front end as a user would write a layer.

Each is an `rgnn.program`: call it with a `RelGraph`, node features and a dict of parameters. The Flax modules of
`dejax.rgnn.nnx` and `dejax.rgnn.linen` hold such parameters. Shapes below: N nodes, R edge types, T node types, k input
and n output width, H heads of width d.
"""

from __future__ import annotations

from typing import Any

from dejax.rgnn.compiler import functional as F
from dejax.rgnn.compiler.frontend import GraphSymbol, ProgramError, Symbol
from dejax.rgnn.compiler.program import program
from dejax.rgnn.layers.arguments import Params, check_params, merge_heads


@program
def rgcn(g: GraphSymbol, x: Any, params: Params, normalization: str = "mean") -> Symbol:
    """One R-GCN layer without its activation (Schlichtkrull et al., arXiv 1703.06103, equation 2).

        y_i = sum over r, sum over j in N_r(i) of 1/c_ir  x_j W_r   +   x_i W_0   +   b

    Args:
      g: the graph.
      x: [N, k] node features; None for one-hot input (section 4.1 of the paper). W_r then has one row per node, and
        only the rows of (source, edge type) pairs that occur are stored.
      params: one of
        `weight` [R, k, n]: W_r itself;
        `bases` [B, k, n] and `coefficients` [R, B]: W_r = sum over b of a_rb V_b (equation 3);
        `blocks` [R, B, k/B, n/B]: W_r block-diagonal (equation 4);
        and optionally `root` [k, n] (W_0) and `bias` [n] (b); `edge_scale` [edges] and `root_scale` [N], factors of
        each edge's message and of each node's root term, for dropout.
        Without features: `weight` [source pairs, n], or `bases` [N, B, n] and `coefficients`; `root` [N, n].
      normalization: `"mean"`, c_ir = |N_r(i)|; `"sum"` (or `"none"`), c_ir = 1.

    Returns:
      New node features [N, n].
    """
    if normalization not in ("mean", "sum", "none"):
        raise ProgramError(f"rgcn: normalization must be 'mean', 'sum' or 'none', got {normalization!r}")
    kind = next((name for name in ("weight", "bases", "blocks") if params.get(name) is not None), "weight")
    required = (kind, "coefficients") if kind == "bases" else (kind,)
    check_params(params, "rgcn", required, ("root", "bias", "edge_scale", "root_scale"))
    message = _rgcn_messages(g, x, params, kind)
    dtype = message.dtype
    if normalization == "mean":  # 16-bit dtypes hold neither counts nor sums of many messages
        message = message / g.in_degree(within_relation=True, dtype="float64" if dtype == "float64" else "float32")
    if params.get("edge_scale") is not None:
        message = message * g.edge(params["edge_scale"])
    y = g.sum_to_dst(message)
    y = y if y.dtype == dtype else y.astype(dtype)
    if params.get("root") is not None:
        root = g.node(params["root"]) if x is None else g.node(x) @ g.shared(params["root"])
        y = y + (root if params.get("root_scale") is None else root * g.node(params["root_scale"]))
    if params.get("bias") is not None:
        y = y + g.shared(params["bias"])
    return y


def _rgcn_messages(g: GraphSymbol, x: Any, params: Params, kind: str) -> Symbol:
    """x_j W_r on every edge."""
    if x is None:
        if kind == "weight":
            return g.src(g.source_pair(params["weight"]))
        if kind == "bases":
            coefficients = g.per_edge_type(params["coefficients"])
            return (g.src(params["bases"]) * coefficients[:, None]).sum(axis=0)
        raise ProgramError(
            "rgcn: x must be given with block-diagonal weights, got None; use `weight` or `bases` without node features"
        )
    if kind == "weight":
        return g.src(x) @ g.per_edge_type(params["weight"])
    if kind == "bases":
        bases = g.shared(params["bases"])
        count, k, n = bases.shape
        mixed = g.per_edge_type(params["coefficients"])[None, :] @ bases.reshape(count, k * n)
        return g.src(x) @ mixed.reshape(k, n)
    blocks = g.per_edge_type(params["blocks"])
    count, k, n = blocks.shape
    return (g.src(x).reshape(count, k) @ blocks).reshape(count * n)


@program
def rgat(
    g: GraphSymbol,
    x: Any,
    params: Params,
    softmax: str = "dst",
    negative_slope: float = 0.2,
    concat_heads: bool = True,
) -> Symbol:
    """One relational graph attention layer, additive logits (Busbridge et al., arXiv 1904.05811, section 2.2).

        z_i^r = x_i W_r ;   e_ij^r = LeakyReLU(a_dst^r . z_i^r + a_src^r . z_j^r)
        y_i = sum over r, sum over j in N_r(i) of softmax(e)_ij^r  z_j^r

    for each head. The softmax is over all incoming edges of a node (across relations, ARGAT, equation 7) or over those
    of one relation (within relation, WIRGAT, equation 6).

    Args:
      g: the graph.
      x: [N, k] node features.
      params: `weight` [R, H, k, d] (or [R, k, d], one head), `attention_src` and `attention_dst` [R, H, d] (or [R, d]);
        optionally `bias` [H * d], or [d] where heads are averaged; and `edge_scale` [edges, H] (or [edges]), a factor
        of the attention after the softmax, for attention dropout.
      softmax: `"dst"` or `"relation"`.
      negative_slope: slope of the LeakyReLU for negative inputs.
      concat_heads: whether heads are concatenated, [N, H * d], or averaged, [N, d].

    Returns:
      New node features [N, H * d] or [N, d].

    >>> import jax.numpy as jnp
    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
    >>> zero = jnp.zeros((2, 1))
    >>> params = {"weight": jnp.array([[[1.0]], [[2.0]]]), "attention_src": zero, "attention_dst": zero}
    >>> rgnn.library.rgat(graph, jnp.array([[1.0], [3.0], [5.0]]), params)[2]  # equal shares of 1 * 1 and 2 * 3
    Array([3.5], dtype=float32)
    """
    check_params(params, "rgat", ("weight", "attention_src", "attention_dst"), ("bias", "edge_scale"))
    weight = g.per_edge_type(params["weight"])
    z_src, z_dst = g.src(x) @ weight, g.dst(x) @ weight
    score = F.dot(z_src, g.per_edge_type(params["attention_src"])) + F.dot(
        z_dst, g.per_edge_type(params["attention_dst"])
    )
    attention = F.edge_softmax(F.leaky_relu(score, negative_slope), within=softmax)
    if params.get("edge_scale") is not None:
        attention = attention * g.edge(params["edge_scale"])
    y = g.sum_to_dst((attention[..., None] if z_src.shape[:-1] else attention) * z_src)
    y = merge_heads(y, concat_heads)
    return y if params.get("bias") is None else y + g.shared(params["bias"])


@program
def hgt(g: GraphSymbol, x: Any, params: Params) -> Symbol:
    """One heterogeneous graph transformer layer (Hu et al., arXiv 2003.01332, equations 3 to 5).

    For each head, with t(.) the node type and r the edge type of an edge from j to i:

        K_j = x_j Key_t(j) ;  Q_i = x_i Query_t(i) ;  V_j = x_j Value_t(j)
        score = (K_j A_r) . Q_i  mu_r / sqrt(d) ;   attention = softmax over all edges into i
        h_i = sum over edges into i of attention  (V_j M_r)
        y_i = gelu(h_i) Out_t(i)   (+ x_i)

    with the heads of h_i concatenated. With `skip`, y_i = s o_i + (1 - s) x_i, s = sigmoid(skip_t(i)), as in the
    authors' code and PyTorch Geometric; without it no residual is added.

    Args:
      g: the graph; `node_type` must be given for more than one type.
      x: [N, k] node features.
      params: `key`, `query`, `value` [T, H, k, d]; `relation_attention`, `relation_message` [R, H, d, d];
        `prior` [R, H]; `out` [T, H * d, n]; optionally `key_bias`, `query_bias`, `value_bias` [T, H, d],
        `out_bias` [T, n], `skip` [T] (then k = n), and `out_scale` [N, n], a factor of o_i, for dropout.

    Returns:
      New node features [N, n].
    """
    required = ("key", "query", "value", "relation_attention", "relation_message", "prior", "out")
    check_params(params, "hgt", required, ("key_bias", "query_bias", "value_bias", "out_bias", "skip", "out_scale"))
    h = g.node(x)

    def projected(name: str) -> Symbol:
        y = h @ g.per_node_type(params[name])
        bias = params.get(f"{name}_bias")
        return y if bias is None else y + g.per_node_type(bias)

    key, query, value = projected("key"), projected("query"), projected("value")
    width = key.shape[-1]
    keys = g.src(key) @ g.per_edge_type(params["relation_attention"])
    scale = g.per_edge_type(params["prior"]) * (width**-0.5)
    attention = F.edge_softmax(F.dot(keys, g.dst(query)) * scale)
    messages = g.src(value) @ g.per_edge_type(params["relation_message"])
    y = g.sum_to_dst(attention[..., None] * messages)
    y = F.gelu(y.reshape(y.shape[0] * y.shape[1])) @ g.per_node_type(params["out"])
    if params.get("out_bias") is not None:
        y = y + g.per_node_type(params["out_bias"])
    if params.get("out_scale") is not None:
        y = y * g.node(params["out_scale"])
    if params.get("skip") is not None:
        if h.shape != y.shape:
            raise ProgramError(f"hgt: skip needs input and output of the same width, got {h.shape[0]} and {y.shape[0]}")
        gate = F.sigmoid(g.per_node_type(params["skip"]))[None]
        y = y * gate + h * (1.0 - gate)
    return y
