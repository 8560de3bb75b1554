"""Wrong ends of edges: nodes of the right type, drawn inside a compiled step.

Some edges of a batch share their negatives: they all are seeds, whose neighbourhoods a step must encode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._pytrees import pytree
from dejax.training.links.data import LinkGraph
from dejax.training.links.settings import LinkSettings

SHARING = 64
"""This many consecutive edges of a batch share their negatives."""


@pytree
@dataclass(frozen=True, slots=True)
class Pool:
    """What negatives are drawn from.

    Attributes:
        first: int32[types + 1], the first node of each type.
        ends: int32[2 triples], the ends of the training triples, by type: a node occurs as often as it has edges.
        bounds: int32[types + 1], where the ends of each type begin.
        types: the types that have ends (static).
    """

    first: Array
    ends: Array
    bounds: Array
    types: tuple[int, ...] = field(metadata={"static": True})


def pool_of(graph: LinkGraph) -> Pool:
    """The pool of a graph's training triples."""
    ends = np.sort(graph.train[:, [0, 2]].reshape(-1))  # nodes are numbered type after type
    bounds = np.searchsorted(ends, graph.first).astype(np.int32)
    types = tuple(np.flatnonzero(np.diff(bounds)).tolist())
    return Pool(jnp.asarray(graph.first), jnp.asarray(ends), jnp.asarray(bounds), types)


def draw(key: Array, inputs: Any, true: Array, settings: LinkSettings) -> tuple[Array, Array, Array]:
    """Negatives of each true end.

    Args:
        key: jax.random key.
        inputs: has `pool` and `node_type`.
        true: int32[batch], the true ends; -1 for padding.
        settings: number and kind of the negatives.

    Returns:
        Further seeds, int32[n]; the places of the negatives among the true ends and further seeds, int32[batch, k];
        which of them count, bool[batch, k]: not the true end itself, and of its type.
    """
    count, k, pool = true.shape[0], settings.negatives, inputs.pool
    kind = inputs.node_type[jnp.maximum(true, 0)][:, None]
    if settings.negative_kind == "in_batch":
        others = jax.random.randint(key, (count, k), 1, max(count, 2))
        places = (jnp.arange(count)[:, None] + others) % count
        wrong = true[places]
        right_type = inputs.node_type[jnp.maximum(wrong, 0)] == kind
        there = (wrong >= 0) & (wrong != true[:, None]) & right_type & (true[:, None] >= 0)
        return jnp.zeros(0, jnp.int32), places, there
    chunks = -(-count // SHARING)
    own = jnp.asarray(pool.types, jnp.int32)[:, None, None]
    bounds = pool.first if settings.negative_kind == "uniform" else pool.bounds
    wrong = jax.random.randint(key, (len(pool.types), chunks, k), bounds[own], bounds[own + 1])
    wrong = wrong if settings.negative_kind == "uniform" else pool.ends[wrong]
    of_type = jnp.searchsorted(own.reshape(-1), kind[:, 0])
    sets = of_type * chunks + jnp.arange(count) // SHARING
    places = count + sets[:, None] * k + jnp.arange(k)
    wrong = wrong.reshape(-1)
    own_wrong = wrong[places - count]
    return wrong, places, (true[:, None] >= 0) & (own_wrong != true[:, None])
