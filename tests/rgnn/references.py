"""Graphs for tests, and reference results of programs on them: one row per edge, without grouping."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.rgnn import RelGraph
from tests.rgnn.strategies import EdgeList

Arrays = dict[str, Any]

# --- graphs ----------------------------------------------------------------------------------------------------------


def edge_list(
    seed: int,
    nodes: int,
    edges: int,
    types: int,
    node_types: int = 1,
    *,
    senders: int = 0,
    receivers: int = 0,
    long_segment: int = 0,
    duplicates: int = 0,
    empty: int = -1,
) -> EdgeList:
    """Random edges.

    Args:
      senders: the first so many nodes have outgoing edges (0: all); receivers: likewise incoming edges.
      long segment: so many edges arrive at node 0, besides its share of the others.
      duplicates: the last so many edges are the first ones again.
      empty: an edge type without edges.
    """
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, types, edges)
    kinds[kinds == empty] = (empty + 1) % types
    node_type = rng.integers(0, node_types, nodes).astype(np.int32) if node_types > 1 else None
    from_nodes, to_nodes = rng.integers(0, senders or nodes, edges), rng.integers(0, receivers or nodes, edges)
    to_nodes[:long_segment] = 0
    for column in (from_nodes, to_nodes, kinds):
        column[edges - duplicates :] = column[:duplicates]
    return EdgeList(
        from_nodes.astype(np.int32),
        to_nodes.astype(np.int32),
        kinds.astype(np.int32),
        nodes,
        types,
        node_type,
        node_types,
    )


def typed_sources(edges: EdgeList) -> EdgeList:
    """The same graph with node types such that all edges of a type come from nodes of one type."""
    node_type = np.arange(edges.num_nodes, dtype=np.int32) % edges.num_node_types
    kind = edges.edge_type % edges.num_node_types
    senders = edges.senders - edges.senders % edges.num_node_types + kind
    assert senders.max() < edges.num_nodes
    return dataclasses.replace(edges, senders=senders.astype(np.int32), node_type=node_type)


GRAPHS: dict[str, EdgeList] = {
    # Two nodes have no incoming edge; type 1 is empty.
    "typical": edge_list(0, nodes=11, edges=40, types=4, node_types=3, receivers=9, duplicates=6, empty=1),
    # Few senders with many edges each, for compaction by source; all edges arrive at two nodes (long segments).
    "long_segments": edge_list(1, nodes=14, edges=90, types=3, node_types=2, senders=5, receivers=2),
    # Many senders and one receiver per type, for aggregation before the GEMM.
    "fan_in": edge_list(2, nodes=40, edges=120, types=2, node_types=2, receivers=3),
    "sparse": edge_list(3, nodes=30, edges=9, types=12, node_types=5),
    "one_type": edge_list(4, nodes=9, edges=37, types=1),
    "typed": typed_sources(edge_list(8, nodes=16, edges=80, types=5, node_types=4, empty=2)),
    "one_node": edge_list(5, nodes=1, edges=3, types=2),
    "no_edges": edge_list(6, nodes=4, edges=0, types=2, node_types=2),
    # For a real GPU: many programs, segments of thousands of edges.
    "large": edge_list(7, nodes=3000, edges=20_000, types=20, node_types=4, senders=2900, long_segment=4000, empty=3),
}
LONG_SEGMENT_CHUNK = 16  # so small that `long_segments` and `fan_in` have long segments


@cache
def graph_of(name: str) -> RelGraph:
    return GRAPHS[name].build(**({} if name == "large" else {"long_segment_chunk": LONG_SEGMENT_CHUNK}))


# --- references ------------------------------------------------------------------------------------------------------


class Reference:
    """A graph as plain index arrays, with the operations of `g` in `jax.numpy`."""

    def __init__(self, edges: EdgeList) -> None:
        self.s, self.d, self.t = edges.senders, edges.receivers, edges.edge_type
        self.nodes, self.types = edges.num_nodes, edges.num_edge_types
        self.nt = np.zeros(self.nodes, np.int32) if edges.node_type is None else edges.node_type
        self.pair = np.unique(self.t * self.nodes + self.s, return_inverse=True)[1]

    def sum(self, x: Any, rows: np.ndarray | None = None) -> Any:
        """Sums over the edges of each row, by default of each destination."""
        rows = self.d if rows is None else rows
        return jnp.zeros((self.nodes, *x.shape[1:]), x.dtype).at[rows].add(x)

    def mean(self, x: Any, rows: np.ndarray) -> Any:
        count = np.maximum(np.bincount(rows, minlength=self.nodes), 1)
        return self.sum(x, rows) / count.reshape(-1, *(1,) * (x.ndim - 1))

    def max(self, x: Any, rows: np.ndarray) -> Any:
        """The maximum over the edges of each row, as a mean over the edges that attain it, which share the gradient."""
        values = jax.lax.stop_gradient(x)
        largest = jnp.full((self.nodes, *x.shape[1:]), -jnp.inf, x.dtype).at[rows].max(values)
        chosen = (values == largest[rows]).astype(x.dtype)
        return self.sum(x * chosen / jnp.maximum(self.sum(chosen, rows), 1)[rows], rows)

    def degree(self, rows: np.ndarray, within_relation: bool = False) -> np.ndarray:
        key = rows * self.types + self.t if within_relation else rows
        return np.bincount(key, minlength=self.nodes * self.types)[key].astype(np.float64)

    def softmax(self, score: Any, within: str = "dst") -> Any:
        key = self.d if within == "dst" else self.d * self.types + self.t
        size = self.nodes * self.types
        if not len(key):
            return score
        values = jax.lax.stop_gradient(score)
        largest = jnp.full((size, *score.shape[1:]), -jnp.inf, score.dtype).at[key].max(values)[key]
        e = jnp.exp(score - largest)
        return e / jnp.zeros((size, *score.shape[1:]), score.dtype).at[key].add(e)[key]


def axis_after(x: Any) -> Any:
    """One more axis of size 1 at the end."""
    return x[..., None]


# --- models ----------------------------------------------------------------------------------------------------------


def rgcn_reference(r: Reference, a: Arrays, normalization: str = "mean") -> Any:
    x = a.get("x")
    if "blocks" in a:
        _, count, k, _ = a["blocks"].shape
        rows = x[r.s].reshape(len(r.s), count, k)
        message = jnp.einsum("ebk,ebkn->ebn", rows, a["blocks"][r.t])
        message = message.reshape(message.shape[0], message.shape[1] * message.shape[2])
    elif "bases" in a and x is None:
        message = jnp.einsum("ebn,eb->en", a["bases"][r.s], a["coefficients"][r.t])
    elif "bases" in a:
        message = jnp.einsum("ek,eb,bkn->en", x[r.s], a["coefficients"][r.t], a["bases"])
    elif x is None:
        message = a["weight"][r.pair]
    else:
        message = jnp.einsum("ek,ekn->en", x[r.s], a["weight"][r.t])
    if normalization == "mean":
        message = message / axis_after(r.degree(r.d, within_relation=True))
    y = r.sum(message)
    if "root" in a:
        y = y + (a["root"] if x is None else x @ a["root"])
    return y + a.get("bias", 0.0)


def rgat_reference(
    r: Reference, a: Arrays, softmax: str = "dst", negative_slope: float = 0.2, concat_heads: bool = True
) -> Any:
    w, a_src, a_dst = a["weight"], a["attention_src"], a["attention_dst"]
    single = w.ndim == 3
    if single:
        w, a_src, a_dst = w[:, None], a_src[:, None], a_dst[:, None]
    z_src, z_dst = (jnp.einsum("ek,ehkd->ehd", a["x"][ends], w[r.t]) for ends in (r.s, r.d))
    score = (z_src * a_src[r.t]).sum(-1) + (z_dst * a_dst[r.t]).sum(-1)
    p = r.softmax(jnp.where(score > 0, score, negative_slope * score), softmax)
    if "edge_scale" in a:
        p = p * (axis_after(a["edge_scale"]) if single else a["edge_scale"])
    y = r.sum(axis_after(p) * z_src)
    y = y.reshape(r.nodes, y.shape[1] * y.shape[2]) if concat_heads or single else y.mean(1)
    return y + a.get("bias", 0.0)


def hgt_reference(r: Reference, a: Arrays) -> Any:
    x = a["x"]

    def projected(name: str) -> Any:
        y = jnp.einsum("nk,nhkd->nhd", x, a[name][r.nt])
        return y + a[f"{name}_bias"][r.nt] if f"{name}_bias" in a else y

    key, query, value = (projected(name) for name in ("key", "query", "value"))
    width = key.shape[-1]
    keys = jnp.einsum("ehd,ehdf->ehf", key[r.s], a["relation_attention"][r.t])
    p = r.softmax((keys * query[r.d]).sum(-1) * a["prior"][r.t] / np.sqrt(width))
    messages = jnp.einsum("ehd,ehdf->ehf", value[r.s], a["relation_message"][r.t])
    y = r.sum(axis_after(p) * messages)
    y = jax.nn.gelu(y.reshape(r.nodes, y.shape[1] * y.shape[2]), approximate=False)
    y = jnp.einsum("nk,nko->no", y, a["out"][r.nt])
    if "out_bias" in a:
        y = y + a["out_bias"][r.nt]
    if "skip" in a:
        gate = jax.nn.sigmoid(a["skip"])[r.nt][:, None]
        y = y * gate + x * (1 - gate)
    return y
