"""Batches of edges for link prediction: their ends as seeds, negatives, and the edges that a sample leaves out."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dejax._dtypes import broadcasting, entering_jit
from dejax._pytrees import pytree
from dejax.host_gather._ids import checked_ids, in_range
from dejax.minibatch._checks import EdgeType
from dejax.minibatch.links.negatives import NegativePool, TrueEdges
from dejax.minibatch.sampling._drawing import take
from dejax.minibatch.sampling._draws import below
from dejax.minibatch.sampling.sample import SampledBlocks
from dejax.minibatch.topology.hetero_topology import HeteroTopology, Rows

Negatives = Literal["uniform", "degree", "in_batch"]


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LinkBatch:
    """A batch of edges to predict, with wrong destinations (negatives), as `link_batch` makes it. It is a pytree.

    Attributes:
        seeds: for each node type int32[seeds], all nodes at the ends of edges and negatives, for `sample_blocks`.
        exclude: for each relation the edges of the batch and their reverses, for the argument `exclude` of
            `sample_blocks`, so that the sample does not contain the answer.
        senders: int32[edges], the place of each edge's sender in `seeds` of its type.
        receivers: int32[edges], the place of each edge's receiver in `seeds` of its type.
        negatives: int32[edges, negatives], the places of the wrong receivers.
        mask: bool[edges], False for padding.
        negative_mask: bool[edges, negatives], False for padding and where a negative is the edge's own receiver.
        edge_type: the relation of the edges (static).
        seed_times: for each node type int[seeds], for `sample_blocks`: each end and each negative has the time of its
            edge. None if the edges have no times.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.minibatch import HeteroTopology, link_batch
    >>> writes = ("author", "writes", "paper")
    >>> topology = HeteroTopology.from_edges({writes: ([0, 1], [0, 2])}, {"author": 2, "paper": 3})
    >>> batch = link_batch(jax.random.key(0), topology, writes, (jnp.array([0, 1]), jnp.array([0, 2])), 4)
    >>> batch.negatives.shape, batch.mask
    ((2, 4), Array([ True,  True], dtype=bool))
    """

    seeds: dict[str, Array]
    exclude: dict[EdgeType, tuple[Array, Array] | Array]
    senders: Array
    receivers: Array
    negatives: Array
    mask: Array
    negative_mask: Array
    edge_type: EdgeType = dataclasses.field(metadata={"static": True})
    seed_times: dict[str, Array] | None = None

    def rows(self, sample: SampledBlocks, outputs: dict[str, Array]) -> tuple[Array, Array, Array]:
        """Picks the model's outputs for senders [edges, n], receivers [edges, n] and negatives [edges, k, n].

        Args:
            sample: the sample of `seeds`.
            outputs: for each node type [seeds, n], the output of the last layer.
        """
        source, _, target = self.edge_type
        at = sample.seed_positions
        return (
            outputs[source][at[source][self.senders]],
            outputs[target][at[target][self.receivers]],
            outputs[target][at[target][self.negatives]],
        )


@broadcasting
def link_batch(
    key: Array,
    topology: HeteroTopology,
    edge_type: EdgeType,
    edges: tuple[ArrayLike, ArrayLike],
    num_negatives: int,
    *,
    negatives: Negatives | NegativePool = "uniform",
    reverse: EdgeType | None = None,
    times: ArrayLike | None = None,
    edge_ids: ArrayLike | None = None,
    true_edges: TrueEdges | None = None,
) -> LinkBatch:
    """Makes a batch for link prediction: the given edges, and `num_negatives` wrong destinations for each.

    It works inside of `jax.jit`.

    Args:
        key: jax.random key.
        topology: the graph.
        edge_type: the relation of the edges.
        edges: int[edges] senders and int[edges] receivers. An edge with an end out of range (-1) is padding.
        num_negatives: number of wrong destinations for each edge.
        negatives: how wrong destinations are drawn. "uniform": among all nodes of the destination type. "degree": in
            proportion to the number of incoming edges of the relation. "in_batch": among the destinations of the other
            edges of the batch, which adds no seeds. By chance a negative may be a true edge of the graph. With `times`,
            a `NegativePool`, which draws only nodes that exist at the time of the edge.
        reverse: the relation that holds the reverse edges, if there is one; `LinkBatch.exclude` then excludes these,
            too.
        times: int[edges], the times of the edges; all seeds of an edge get its time.
        edge_ids: int[edges], the positions of the edges in the list that the topology was made from.
            `LinkBatch.exclude` then excludes these edges by position, so that earlier edges between the same two nodes
            stay. The reverse relation must have its edges in the same order.
        true_edges: edges that must not serve as negatives; a negative that is one of them is masked.

    Raises:
        ValueError: `edge_type` is unknown, `reverse` connects other node types, "degree" is used for a relation without
            edges, or only one of `times` and a `NegativePool` is given.
    """
    _check_choices(topology, edge_type, edges, num_negatives, negatives, reverse, times)
    source, _, target = edge_type
    counts, in_time = topology.num_nodes, times is not None
    senders = checked_ids("link_batch", edges[0], counts[source], "senders")
    receivers = checked_ids("link_batch", edges[1], counts[target], "receivers")
    if senders.ndim != 1 or senders.shape != receivers.shape:
        raise ValueError(f"link_batch: `edges` must be two int[edges], got shapes {senders.shape}, {receivers.shape}")
    mask = in_range(senders, counts[source]) & in_range(receivers, counts[target])
    senders, receivers = (jnp.where(mask, ids, -1).astype(jnp.int32) for ids in (senders, receivers))
    count = senders.shape[0]
    place = jnp.arange(count, dtype=jnp.int32)
    if not in_time and negatives == "in_batch":
        others = jax.random.randint(key, (count, num_negatives), 1, max(count, 2), jnp.int32)
        wrong_places, more = (place[:, None] + others) % max(count, 1), jnp.zeros(0, jnp.int32)
        wrong = receivers[wrong_places] if count else wrong_places
    else:
        if isinstance(negatives, NegativePool) and times is not None:
            times = _checked_times(times, senders.shape)
            wrong = negatives.draw(key, times, num_negatives)
        else:
            wrong = _drawn_receivers(key, topology, edge_type, (count, num_negatives), negatives == "degree")
        wrong = jnp.where(mask[:, None], wrong, -1)
        wrong_places, more = count + jnp.arange(wrong.size, dtype=jnp.int32).reshape(wrong.shape), wrong.reshape(-1)
    there = mask[:, None] & (wrong >= 0) & (wrong != receivers[:, None])
    if true_edges is not None:
        there &= ~true_edges.contain(senders[:, None], wrong)
    ends = jnp.concatenate([receivers, more])
    if source == target:
        seeds = {source: jnp.concatenate([senders, ends])}
        place_of_receiver, wrong_places = place + count, wrong_places + count
    else:
        seeds, place_of_receiver = {source: senders, target: ends}, place
    seed_times = None
    if times is not None:
        of_senders = jnp.asarray(times)
        of_ends = jnp.concatenate([of_senders, jnp.repeat(of_senders, num_negatives)])
        seed_times = {source: of_senders, target: of_ends}
        if source == target:
            seed_times = {source: jnp.concatenate([of_senders, of_ends])}
    exclude: dict[EdgeType, tuple[Array, Array] | Array]
    if edge_ids is not None:
        ids = checked_ids("link_batch", edge_ids, topology.num_edges[edge_type], "edge_ids", "int[edges]")
        if ids.shape != senders.shape:
            raise ValueError(f"link_batch: `edge_ids` must be int[edges], got {ids.shape} for {senders.shape}")
        exclude = dict.fromkeys([edge_type] if reverse is None else [edge_type, reverse], jnp.where(mask, ids, -1))
    else:
        exclude = _pairs_of(edge_type, reverse, senders, receivers)
    return LinkBatch(seeds, exclude, place, place_of_receiver, wrong_places, mask, there, edge_type, seed_times)


def _check_choices(
    topology: HeteroTopology,
    edge_type: EdgeType,
    edges: tuple[ArrayLike, ArrayLike],
    num_negatives: int,
    negatives: Negatives | NegativePool,
    reverse: EdgeType | None,
    times: ArrayLike | None,
) -> None:
    """Raises where the arguments of `link_batch` do not go together."""
    topology.number_of(edge_type)
    source, _, target = edge_type
    if reverse is not None:
        topology.number_of(reverse)
        if (reverse[0], reverse[2]) != (target, source):
            raise ValueError(f"link_batch: `reverse` must lead from {target!r} to {source!r}, got {reverse}")
    in_time = isinstance(negatives, NegativePool)
    if in_time != (times is not None):
        raise ValueError(
            "link_batch: `negatives` must be a NegativePool where `times` are given, and nowhere else, so that each "
            f"negative exists at the time of its edge; got {negatives if not in_time else 'a pool without times'!r}"
        )
    if not in_time and negatives not in ("uniform", "degree", "in_batch"):
        raise ValueError(f"link_batch: `negatives` must be 'uniform', 'degree' or 'in_batch', got {negatives!r}")
    if num_negatives < 0:
        raise ValueError(f"link_batch: `num_negatives` must be at least 0, got {num_negatives}")
    if len(edges) != 2:
        raise ValueError(
            f"link_batch: `edges` must be (senders, receivers), got {len(edges)} rows; transpose an array of [edges, 2]"
        )


def _checked_times(times: ArrayLike, shape: tuple[int, ...]) -> Array:
    """int[edges]."""
    found = jnp.asarray(entering_jit("link_batch", times, ids_or_times=True))
    if found.shape != shape or not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(f"link_batch: `times` must be int[edges], got {found.dtype}{list(found.shape)} for {shape}")
    return found


def _pairs_of(
    edge_type: EdgeType, reverse: EdgeType | None, senders: Array, receivers: Array
) -> dict[EdgeType, tuple[Array, Array] | Array]:
    """The edges and their reverses, by relation."""
    if reverse == edge_type:  # a relation that is its own reverse
        return {edge_type: (jnp.concatenate([senders, receivers]), jnp.concatenate([receivers, senders]))}
    found: dict[EdgeType, tuple[Array, Array] | Array] = {edge_type: (senders, receivers)}
    if reverse is not None:
        found[reverse] = receivers, senders
    return found


def _drawn_receivers(
    key: Array, topology: HeteroTopology, edge_type: EdgeType, shape: tuple[int, ...], by_degree: bool
) -> Array:
    """Nodes of the destination type, drawn uniformly, or as receivers of edges that are drawn uniformly."""
    receivers = topology.num_nodes[edge_type[2]]
    if not by_degree:
        return below(key, shape, jnp.full(shape, receivers, jnp.int32))
    relation = topology.relations[topology.number_of(edge_type)]
    if not relation.num_edges:
        raise ValueError(
            f"link_batch: `negatives` must be 'uniform' or 'in_batch' for {edge_type}, which has no edges, got 'degree'"
        )
    starts = topology.lists[relation.lists].starts
    drawn = below(key, shape, jnp.full(shape, relation.num_edges, starts.dtype)) + relation.first_edge
    return _receiver_of(starts, drawn, relation.first_group, receivers)


@partial(jax.jit, static_argnums=(2, 3))  # outside of jit, too, the loop must not close over the table
def _receiver_of(starts: Rows, edges: Array, first_group: int, receivers: int) -> Array:
    """The receivers of edges, by binary search."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the receiver is from `low` to `high - 1`
        middle = low + (high - low) // 2  # the sum could be beyond int32
        begins = take(starts, first_group + middle) <= edges
        return jnp.where(begins, middle, low), jnp.where(begins, high, middle)

    bounds = jnp.zeros(edges.shape, jnp.int32), jnp.full(edges.shape, receivers, jnp.int32)
    return jax.lax.fori_loop(0, max(receivers.bit_length(), 1), halve, bounds)[0]
