"""Attention of a seed over all rows of its sampled tree, as in the Relational Graph Transformer (arXiv 2505.10960).

Of that paper this has the tokens (features, table, hop, time and local structure) and the local attention. Only seeds
have queries, because only seeds are read, and there is no global attention to centroids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import rgnn
from dejax._optional import optional
from dejax.minibatch import Block
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.nnx import ProgramModule, RGCNConv

with optional("flax", of="dejax.training"):
    from flax import nnx

_SCALES = (1 / 24, 1.0, 7.0, 30.0, 365.0)
AGES = len(_SCALES) + 2
"""Numbers of the encoding of an age."""


@rgnn.program
def tree_attention(
    g: Any, x: Any, ages: Any, query: Any, key: Any, value: Any, age: Any, key_kind: Any, value_kind: Any
) -> Any:
    """Attention of the root of each tree over its nodes, of which each has an edge to the root.

        k_j = x_j Key + a_j Age + c_r ;  v_j = x_j Value + u_r ;  q_i = x_i Query
        y_i = sum over edges j -> i of softmax(k_j . q_i / sqrt(d))  v_j

    for each head, with r the kind of the edge, which is the table and the hop of j, and a_j the encoded time of j
    relative to the cutoff.

    Args:
      g: the graph, one edge type for each kind.
      x: [N, n] tokens.
      ages: [N, a].
      query, key, value: [H, n, d].
      age: [H, a, d].
      key_kind, value_kind: [R, H, d].

    Returns:
      [N, H * d].
    """
    h = g.node(x)
    queries = h @ g.shared(query)
    keys = g.src(h @ g.shared(key) + g.node(ages) @ g.shared(age)) + g.per_edge_type(key_kind)
    values = g.src(h @ g.shared(value)) + g.per_edge_type(value_kind)
    attention = rgnn.edge_softmax(rgnn.dot(keys, g.dst(queries)) * queries.shape[-1] ** -0.5)
    y = g.sum_to_dst(attention[..., None] * values)
    return y.reshape(y.shape[0] * y.shape[1])


def days_between(known: Array, cutoffs: Array) -> Array:
    """float32[rows], the days from the time from which rows are known to their cutoffs, to a minute; -1 without a time.

    Args:
        known, cutoffs: int32[rows], seconds; rows that were always known have the least int32.
    """
    # A difference in minutes fits in int32.
    days = (cutoffs // 64 - known // 64).astype(jnp.float32) * (64 / 86_400)
    return jnp.where(known > jnp.iinfo(known.dtype).min, jnp.maximum(days, 0.0), -1.0)


def encoded_ages(days: Array) -> Array:
    """float32[rows, AGES] of `days_between`."""
    there, days = (days >= 0)[:, None], jnp.maximum(days, 0.0)[:, None]
    found = jnp.concatenate([days / (days + np.array(_SCALES, np.float32)), jnp.log1p(24 * days) / 8], axis=1)
    return jnp.concatenate([jnp.where(there, found, 0.0), (~there).astype(jnp.float32)], axis=1)


def tree_graph(block: Block, trees: Mapping[str, Array]) -> RelGraph:
    """The graph in which each sampled row has an edge to the root of its tree, with a type for its hop and table.

    Args:
        block: the first of a sample, whose sources are all rows; seeds are the first ones.
        trees: int32[rows] by table, the seed that each row was sampled for; -1 for padding.
    """
    roots = block.join({table: tree[:, None] for table, tree in trees.items()})[:, 0]
    layout, count = block.layout, block.num_sources
    kinds = np.concatenate(
        [
            np.full(size, hop * len(layout.node_types) + table, np.int32)
            for hop, sizes in enumerate(layout.sizes[: block.hops + 2])
            for table, size in enumerate(sizes)
        ]
    )
    return RelGraph.build_traced(
        jnp.arange(count, dtype=jnp.int32),
        jnp.maximum(roots, 0),
        jnp.asarray(kinds),
        num_nodes=count,
        num_edge_types=kinds_of(block.hops + 1, len(layout.node_types)),
        edge_mask=roots >= 0,
    )


def kinds_of(hops: int, tables: int) -> int:
    """The number of pairs of a hop, seeds included, and a table."""
    return (hops + 1) * tables


class TreeTransformer(nnx.Module):
    """Local structure, then attention of each seed over its tree, then a dense network; each with a skip connection.

    The local structure of a row is the result of an R-GCN layer on the sampled edges, for rows that have sampled
    edges.

    Args:
        hidden: width of rows.
        heads: the number of heads of the attention; must divide `hidden`.
        hops: the number of hops of the samples.
        tables: their number.
        edge_types: number of relations.
        out_features: width of the result; None for `hidden`, without a last linear map.
        options: options of the compiler.
        rngs: stream `params`.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        hops: int,
        tables: int,
        edge_types: int,
        out_features: int | None,
        *,
        options: Options,
        rngs: nnx.Rngs,
    ) -> None:
        self.structure = RGCNConv(hidden, hidden, edge_types, options=options, rngs=rngs)
        kinds, width = kinds_of(hops, tables), hidden // heads
        glorot, small = jax.nn.initializers.glorot_uniform(in_axis=1, out_axis=(0, 2)), jax.nn.initializers.normal(0.1)
        parameters = {
            **dict.fromkeys(("query", "key", "value"), ((heads, hidden, width), glorot)),
            "age": ((heads, AGES, width), glorot),
            **dict.fromkeys(("key_kind", "value_kind"), ((kinds, heads, width), small)),
        }
        self.attention = ProgramModule(tree_attention, parameters, options=options, rngs=rngs)
        self.before, self.after = nnx.LayerNorm(hidden, rngs=rngs), nnx.LayerNorm(hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(hidden, 2 * hidden, rngs=rngs), nnx.Linear(2 * hidden, hidden, rngs=rngs)
        self.head = nnx.data(None) if out_features is None else nnx.Linear(hidden, out_features, rngs=rngs)

    def __call__(
        self, blocks: Sequence[Block], x: Mapping[str, Array], trees: Mapping[str, Array], days: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The outputs of the seeds by table, [seeds, outputs].

        Args:
            blocks: the blocks of a sample in which each seed has a tree of its own.
            x: float[rows, hidden] by table.
            trees: int32[rows] by table, the seed of each row; -1 for padding.
            days: float32[rows] by table, of `days_between`.
        """
        first, seeds = blocks[0], blocks[-1].num_destinations
        h = first.join(x)
        local = nnx.relu(self.structure(first.bipartite, h))
        h = h.at[: local.shape[0]].add(local)
        encoded = first.join({table: encoded_ages(some) for table, some in days.items()})
        attended = self.attention(tree_graph(first, trees), self.before(h), encoded)[:seeds]
        h = h[:seeds] + self.out(attended)
        h = h + self.narrow(jax.nn.gelu(self.wide(self.after(h))))
        return blocks[-1].split(h if self.head is None else self.head(nnx.relu(h)))
