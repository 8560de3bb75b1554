"""R-GCN and HGT with dropout where their papers have it: pure functions that `library_specs` calls while training.

Masks are parameters of the programs, factors of values of edges or nodes, so that kernels generate no random numbers.

- R-GCN (arXiv 1703.06103, section 5.2): edges are dropped before normalisation, self loops at their own rate.
- HGT (arXiv 2003.01332, the authors' code): the result of the output transform is dropped, before the skip connection.

Layers with attention drop its coefficients after the softmax (`LayerSpec.run_with_dropout`).
"""

from __future__ import annotations

import math
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
    # Along one axis, which XLA compiles in a tenth of the time; the numbers are the same.
    kept = jax.random.bernoulli(key, 1.0 - rate, (math.prod(shape),)).reshape(shape)
    return kept.astype(dtype) / jnp.asarray(1.0 - rate, dtype)


@program
def _kept_shares(g: Any, kept: Any) -> Any:
    """kept / (number of kept edges of the destination and type), 0 where none is kept."""
    score = F.where_positive(g.edge(kept), 0.0, -float("inf"))
    return F.edge_softmax(score, within="relation")


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
        params = {**params, "edge_scale": edge_scale(graph, edge_key, edge_rate, normalization, dtype)}
        normalization = "none"  # the factors divide by the number of the edges that are kept
    if self_loop_rate:
        params = {**params, "root_scale": inverted(loop_key, self_loop_rate, (graph.num_nodes,), dtype)}
    return library.rgcn(graph, x, params, normalization=normalization, options=options)


def hgt(graph: RelGraph, x: Array, params: dict[str, Array], key: Array, rate: float, *, options: Options) -> Array:
    """`library.hgt` with elements of its transformed result dropped before the skip connection."""
    shape = (graph.num_nodes, params["out"].shape[-1])
    scale = inverted(key, rate, shape, params["out"].dtype)
    return library.hgt(graph, x, {**params, "out_scale": scale}, options=options)
