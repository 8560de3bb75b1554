"""R-GCN and HGT with dropout where their papers have it: pure functions that `library_specs` calls while training.

A mask is an ordinary edge value of a program, or a factor of node values outside of the program, so that kernels
generate no random numbers.

- R-GCN (arXiv 1703.06103, section 5.2): edges are dropped before normalisation, self loops at their own rate.
- HGT (arXiv 2003.01332, the authors' code): the result of the output transform is dropped, before the skip connection.

Layers with attention drop its coefficients after the softmax (`LayerSpec.run_with_dropout`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dejax.rgnn.compiler import functional as F
from dejax.rgnn.compiler.program import program
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers import library
from dejax.rgnn.options import Options


def inverted(key: Array, rate: float, shape: tuple[int, ...], dtype: Any) -> Array:
    """A factor of 0 at the given rate, else 1 / (1 - rate), so that the mean is 1."""
    kept = jax.random.bernoulli(key, 1.0 - rate, shape)
    return kept.astype(dtype) / jnp.asarray(1.0 - rate, dtype)


@program
def _kept_shares(g: Any, kept: Any) -> Any:
    """kept / (number of kept edges of the destination and type), 0 where none is kept."""
    score = F.where_positive(g.edge(kept), 0.0, -float("inf"))
    return F.edge_softmax(score, within="relation")


@program
def _rgcn_full(g: Any, x: Any, weight: Any, scale: Any) -> Any:
    return g.sum_to_dst((g.src(x) @ g.per_edge_type(weight)) * g.edge(scale))


@program
def _rgcn_blocks(g: Any, x: Any, blocks: Any, scale: Any) -> Any:
    w = g.per_edge_type(blocks)
    message = g.src(x).reshape(w.shape[0], -1) @ w
    return g.sum_to_dst(message.reshape(-1) * g.edge(scale))


@program
def _rgcn_featureless(g: Any, weight: Any, scale: Any) -> Any:
    return g.sum_to_dst(g.src(g.source_pair(weight)) * g.edge(scale))


def edge_scale(graph: RelGraph, key: Array, rate: float, normalization: str, dtype: Any) -> Array:
    """The factor of each edge's message in R-GCN with edge dropout, [num_edges] in the user's order.

    It is 0 for a dropped edge. For a kept edge it is, with "mean", 1 / (number of kept edges of its destination and
    type), the paper's c_{i,r} after dropping. Otherwise it is 1 / (1 - rate), so that the expected sum is that of
    evaluation.
    """
    if normalization != "mean":
        return inverted(key, rate, (graph.num_edges,), dtype)
    kept = jax.random.bernoulli(key, 1.0 - rate, (graph.num_edges,)).astype(jnp.float32)
    if not isinstance(graph, RelGraph):  # one whose tables lie on several devices
        return _kept_shares(graph, kept).astype(dtype)
    kept = kept[graph.edge_ids]
    pair = graph.by_destination_pair.index
    count = jax.ops.segment_sum(kept, pair, num_segments=graph.num_destination_pairs, indices_are_sorted=True)
    # At least 1, for pairs whose edges are all dropped and for padding edges, whose pair is out of range.
    count = jnp.maximum(count.at[pair].get(mode="fill", fill_value=1.0), 1.0)
    return (kept / count)[graph.edge_positions].astype(dtype)


def rgcn(
    graph: RelGraph,
    x: Array | None,
    params: dict[str, Array],
    key: Array,
    edge_rate: float,
    self_loop_rate: float,
    *,
    normalization: str,
    options: Options,
) -> Array:
    """`library.rgcn` with edges dropped at `edge_rate` and the root term of nodes at `self_loop_rate`."""
    edge_key, loop_key = jax.random.split(key)
    dtype = next(iter(params.values())).dtype
    if edge_rate:
        scale = edge_scale(graph, edge_key, edge_rate, normalization, dtype)
        if "blocks" in params:
            out = _rgcn_blocks(graph, x, params["blocks"], scale, options=options)
        elif x is None:
            weight = params["weight"] if "weight" in params else _pair_weight(graph, params)
            out = _rgcn_featureless(graph, weight, scale, options=options)
        else:
            weight = params["weight"] if "weight" in params else _relation_weight(params)
            out = _rgcn_full(graph, x, weight, scale, options=options)
    else:
        relational = {name: p for name, p in params.items() if name not in ("root", "bias")}
        out = library.rgcn(graph, x, relational, normalization=normalization, options=options)
    if "root" in params:
        # This product is XLA's: at "f32" it must not run in TF32; otherwise XLA's default precision applies.
        precision = jax.lax.Precision.HIGHEST if options.precision == "f32" else None
        root = params["root"] if x is None else jnp.matmul(x, params["root"], precision=precision)
        if self_loop_rate:
            root = root * inverted(loop_key, self_loop_rate, (graph.num_nodes, 1), dtype)
        out = out + root[: out.shape[0]]
    return _valid(graph, out + params["bias"] if "bias" in params else out)


def _relation_weight(params: dict[str, Array]) -> Array:
    return jnp.einsum("rb,bkn->rkn", params["coefficients"], params["bases"], precision=jax.lax.Precision.HIGHEST)


def _pair_weight(graph: RelGraph, params: dict[str, Array]) -> Array:
    """[num_source_pairs, n]: for each (sender, type) pair its row of the relation's combination of bases."""
    if not isinstance(graph, RelGraph):
        raise ValueError("RGCNConv: edge_dropout without features must be 0 for a graph over several devices")
    bases = params["bases"][graph.source_pair_by_node.index]
    coefficients = params["coefficients"][graph.source_pair_by_type.index]
    return jnp.einsum("pb,pbn->pn", coefficients, bases, precision=jax.lax.Precision.HIGHEST)


def hgt(graph: RelGraph, x: Array, params: dict[str, Array], key: Array, rate: float, *, options: Options) -> Array:
    """`library.hgt` with elements of its transformed result dropped before the skip connection."""
    inner = {name: p for name, p in params.items() if name != "skip"}
    out = library.hgt(graph, x, inner, options=options)
    rows = out.shape[0]  # of destinations alone, or of all nodes
    out = out * inverted(key, rate, (graph.num_nodes, *out.shape[1:]), out.dtype)[:rows]
    if "skip" not in params:
        return out
    gate = jax.nn.sigmoid(params["skip"].at[graph.node_type[:rows]].get(mode="fill", fill_value=0.0))[:, None]
    return _valid(graph, gate * out + (1.0 - gate) * x[:rows])


def _valid(graph: RelGraph, x: Array) -> Array:
    """Sets the rows of padding nodes to zero, as programs do, so that no gradient comes from them."""
    if graph.node_mask is None:
        return x
    return jnp.where(graph.node_mask[: x.shape[0], None], x, jnp.zeros((), x.dtype))
