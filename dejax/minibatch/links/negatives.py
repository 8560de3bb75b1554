"""Wrong destinations for link prediction: those that exist at a time, and those that are no true edges."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax._dtypes import INT32_MAX, entering_jit
from dejax._pytrees import pytree
from dejax.datasets import HeteroDataset
from dejax.host_gather._ids import checked_ids
from dejax.minibatch._checks import EdgeType, check_range, ids_of
from dejax.minibatch.sampling._drawing import among_sorted
from dejax.minibatch.sampling._draws import below

_SIDES = ("senders", "receivers")


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NegativePool:
    """The nodes of one type that exist at each time. `link_batch` draws negatives from it. It is a pytree.

    Make one with `from_times` or `from_dataset`.

    Attributes:
        nodes: int32[entries], the nodes, in the order of the times from which they can be drawn. A node that occurs
            several times is drawn more often.
        times: int32[entries], these times, ascending.
        known_from: int32[nodes], the time from which on each node exists.

    >>> import jax
    >>> pool = NegativePool.from_times([5, 1, 3])
    >>> nodes = pool.draw(jax.random.key(0), np.array([0, 1, 4]), 6)
    >>> nodes[:2], set(nodes[2].tolist()) <= {1, 2}
    (Array([[-1, -1, -1, -1, -1, -1],
           [ 1,  1,  1,  1,  1,  1]], dtype=int32), True)
    """

    nodes: Array
    times: Array
    known_from: Array

    @classmethod
    def from_times(
        cls, known_from: ArrayLike, *, receivers: ArrayLike | None = None, edge_times: ArrayLike | None = None
    ) -> NegativePool:
        """Makes a pool of all nodes of a type, drawn uniformly or (with `receivers`) in proportion to their edges.

        Args:
            known_from: int[nodes], the time from which on each node exists.
            receivers: int[edges], the receivers of the edges that are counted for each node.
            edge_times: int[edges], the time from which on each of these edges counts.

        Raises:
            TypeError: times that are no integers.
            ValueError: times need more than 32 bits, or `receivers` come without `edge_times`.
        """
        known = np.asarray(known_from)
        nodes, times = np.arange(len(known)), known
        if receivers is not None:
            if edge_times is None or len(np.asarray(edge_times)) != len(np.asarray(receivers)):
                raise ValueError(
                    f"NegativePool: `edge_times` must have a time for each of {len(np.asarray(receivers))} "
                    f"`receivers`, got {'None' if edge_times is None else len(np.asarray(edge_times))}"
                )
            nodes = ids_of("`receivers` of NegativePool", receivers)
            check_range("`receivers` of NegativePool", nodes, len(known))
            times = np.maximum(np.asarray(edge_times), known[nodes])
        for values in (known, times):
            if values.size and values.dtype.kind not in "iu":
                raise TypeError(f"NegativePool: times must be integers, got {values.dtype}; round them up to a unit")
            if values.size and not (-INT32_MAX - 1 <= values.min() and values.max() <= INT32_MAX):
                raise ValueError(
                    f"NegativePool: times must fit int32, got {values.min()} to {values.max()}; count them in a "
                    "coarser unit"
                )
        order = np.argsort(times, kind="stable")
        return cls(*(jnp.asarray(values.astype(np.int32)) for values in (nodes[order], times[order], known)))

    @classmethod
    def from_dataset(
        cls, data: HeteroDataset, edge_type: EdgeType, by: Literal["uniform", "degree"] = "uniform"
    ) -> NegativePool:
        """Makes a pool of the destination nodes of a relation of a data set.

        Args:
            data: the data set.
            edge_type: the relation.
            by: "uniform" draws all nodes that exist with equal probability; "degree" draws them in proportion to the
                number of edges that are known at the time.

        Raises:
            ValueError: the relation does not exist, or times need more than 32 bits.
        """
        if edge_type not in data.edges:
            raise ValueError(f"NegativePool: `edge_type` must be a relation of the data set, got {edge_type}")
        always = np.iinfo(np.int32).min
        known = data.known_from.get(edge_type[2], np.full(data.num_nodes[edge_type[2]], always))
        if by == "uniform":
            return cls.from_times(known)
        if by != "degree":
            raise ValueError(f"NegativePool: `by` must be 'uniform' or 'degree', got {by!r}")
        receivers = data.edges[edge_type][1]
        times = data.edge_times.get(edge_type, np.full(len(receivers), always))
        return cls.from_times(known, receivers=receivers, edge_times=times)

    def draw(self, key: Array, times: ArrayLike, count: int) -> Array:
        """Draws `count` nodes that exist at each time: int32[times, count]; -1 where no node exists."""
        asked = entering_jit("NegativePool.draw", times, ids_or_times=True)
        there = jnp.searchsorted(self.times, jnp.asarray(asked), side="right").astype(jnp.int32)
        shape = (there.shape[0], count)
        entries = below(key, shape, jnp.broadcast_to(jnp.maximum(there, 1)[:, None], shape))
        if not self.nodes.shape[0]:
            return jnp.full(shape, -1, jnp.int32)
        return jnp.where(there[:, None] > 0, self.nodes[entries], -1)


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TrueEdges:
    """A set of edges of a relation, to test whether pairs of nodes are among them. It is a pytree.

    Attributes:
        receivers: int32[pairs], ascending.
        senders: int32[pairs], ascending for each receiver.

    >>> TrueEdges.from_edges(([0, 2], [1, 1])).contain(np.array([0, 1]), np.array([1, 1]))
    Array([ True, False], dtype=bool)
    """

    receivers: Array
    senders: Array

    @classmethod
    def from_edges(cls, edges: tuple[ArrayLike, ArrayLike]) -> TrueEdges:
        """Makes the set of edges from a pair (senders, receivers), int[edges] each.

        Raises:
            TypeError: the ends are not integers.
            ValueError: an end is below 0 or does not fit int32.
        """
        senders, receivers = (ids_of(f"{side} of TrueEdges", ends) for side, ends in zip(_SIDES, edges, strict=True))
        for side, ids in zip(_SIDES, (senders, receivers), strict=True):
            check_range(f"{side} of TrueEdges", ids, INT32_MAX)
        pairs = np.stack([receivers.astype(np.int32), senders.astype(np.int32)], axis=1)
        pairs = np.unique(pairs, axis=0).reshape(-1, 2)
        return cls(jnp.asarray(pairs[:, 0]), jnp.asarray(pairs[:, 1]))

    def contain(self, senders: ArrayLike, receivers: ArrayLike) -> Array:
        """bool[...], whether each pair of a sender and a receiver is in the set. The two arrays broadcast."""
        given = zip(_SIDES, (senders, receivers), strict=True)
        pair = jnp.broadcast_arrays(*(checked_ids("TrueEdges.contain", ids, INT32_MAX, side) for side, ids in given))
        return among_sorted(self.receivers, self.senders, pair[1], pair[0])
