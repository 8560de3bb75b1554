"""The edges of nodes that are known by some times: how many, and when the last of them came."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from dejax.minibatch.sampling._drawing import count_up_to, segments, take
from dejax.minibatch.topology.hetero_topology import HeteroTopology


def past_edges(topology: HeteroTopology, relations: Sequence[int], nodes: Array, limits: Array) -> tuple[Array, Array]:
    """Counts the edges that lead to nodes and are known by some times. Of the sampler it has the edges and the order.

    Args:
        topology: edges with times.
        relations: the places of some of its relations, all with edges to the nodes' type.
        nodes: int32[nodes]; -1 for padding, which has no edges.
        limits: int32[times, nodes], up to when edges count, the latest first.

    Returns:
        The number of edges int[relations, times, nodes], and the time of the last one by the first limit
        int32[relations, nodes], the least int32 where there is none.

    >>> import numpy as np
    >>> from dejax.minibatch import HeteroTopology
    >>> likes = ("user", "likes", "film")
    >>> found = HeteroTopology.from_edges(
    ...     {likes: ([0, 1, 0], [1, 1, 0])}, {"user": 2, "film": 3}, times={likes: np.array([5, 9, 7])}
    ... )
    >>> counts, last = past_edges(found, [0], np.array([1, 2]), np.array([[10, 10], [5, 5]]))
    >>> counts.tolist(), last[0, 0].item()
    ([[[2, 0], [1, 0]]], 9)
    """
    counts: dict[int, Array] = {}
    last: dict[int, Array] = {}
    times, width = limits.shape
    for number, lists in enumerate(topology.lists):
        own = [place for place in relations if topology.relations[place].lists == number]
        if not own:
            continue
        assert lists.times is not None
        some = [topology.relations[place] for place in own]
        group = jnp.repeat(jnp.array([relation.first_group for relation in some], jnp.int32), width)
        start, degree = segments(lists, jnp.tile(jnp.asarray(nodes), len(own)), group)
        steps = max(relation.max_degree for relation in some).bit_length()
        until = jnp.tile(jnp.asarray(limits), len(own)).reshape(-1)  # time by time, of all relations
        count = count_up_to(lists.times, jnp.tile(start, times), jnp.tile(degree, times), until, steps)
        count = count.reshape(times, len(own), width)
        first = count[0].reshape(-1)
        latest = take(lists.times, jnp.where(first > 0, start + first - 1, -1))
        latest = jnp.where(first > 0, latest, jnp.iinfo(latest.dtype).min).reshape(len(own), width)
        counts |= {place: count[:, n] for n, place in enumerate(own)}
        last |= {place: latest[n] for n, place in enumerate(own)}
    return jnp.stack([counts[place] for place in relations]), jnp.stack([last[place] for place in relations])
