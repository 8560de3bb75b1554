"""Neighbour sampling inside a compiled step: from seeds to a local graph, with static shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from dejax._pytrees import pytree
from dejax.host_gather._draws import below, draw_subset, draw_weighted, draw_weighted_subset
from dejax.host_gather._ids import checked_ids, in_range
from dejax.host_gather._numbering import number_nodes, unique_seeds
from dejax.host_gather._operands import ReadableTable
from dejax.host_gather.gather import gather
from dejax.host_gather.topology import EdgeWeights, Rows, Topology

__all__ = ["EdgeWeights", "LocalGraph", "Neighbors", "Topology", "sample_graph", "sample_neighbors"]


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Neighbors:
    """Sampled neighbours.

    Attributes:
        senders: int32[seeds, relations * fan_out]; -1 for none.
        edges: int[seeds, relations * fan_out], positions in the topology's lists; -1 for none.
        mask: bool[seeds, relations * fan_out].

    >>> import jax, jax.numpy as jnp
    >>> from dejax.host_gather import Topology, sample_neighbors
    >>> topology = Topology.from_edges([1, 2], [0, 0], num_nodes=3, on_host=False)
    >>> found = sample_neighbors(jax.random.key(0), topology, jnp.array([0, 2]), 3)
    >>> found.senders, found.mask
    (Array([[ 1,  2, -1],
           [-1, -1, -1]], dtype=int32), Array([[ True,  True, False],
           [False, False, False]], dtype=bool))
    """

    senders: Array
    edges: Array
    mask: Array


def sample_neighbors(
    key: Array,
    topology: Topology,
    seeds: ArrayLike,
    fan_out: int,
    *,
    replace: bool = False,
    max_degree: int | None = None,
) -> Neighbors:
    """Draws up to `fan_out` incoming edges of each seed (and relation), uniformly or by weight.

    Without replacement and weights, each subset of `fan_out` edges is equally likely (Floyd's algorithm: `fan_out`
    draws, whatever the degree), and a seed with at most `fan_out` edges gets all of them. With weights and replacement,
    each draw reads one cell of an alias table. With weights and without replacement, edges are drawn one after the
    other in proportion to their weights among those left (Efraimidis and Spirakis, 2006), which reads all edges of
    a seed.

    Args:
        key: jax.random key; the same key gives the same sample.
        topology: the graph.
        seeds: int[seeds]; a seed out of range (-1 for padding) has no neighbours.
        fan_out: edges to draw for each seed and relation.
        replace: whether an edge may be drawn twice; then a seed with any edge has `fan_out` of them.
        max_degree: for weights without replacement: the most edges of a seed and relation; further edges are ignored.

    Returns:
        Neighbors.

    Raises:
        ValueError: fan_out below 1; weights without replacement without `max_degree`.
        TypeError: seeds that are no integers.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.host_gather import Topology, sample_neighbors
    >>> topology = Topology.from_edges([1, 2, 3], [0, 0, 0], num_nodes=4, on_host=False)
    >>> drawn = jax.jit(sample_neighbors, static_argnums=3)(jax.random.key(0), topology, jnp.array([0]), 2)
    >>> drawn.senders.shape, bool(drawn.mask.all())
    ((1, 2), True)
    """
    if fan_out < 1:
        raise ValueError(f"sample_neighbors: `fan_out` must be at least 1, got {fan_out}")
    seeds = _checked_seeds("sample_neighbors", seeds, topology)
    start, degree = _segments(topology, seeds)
    chosen, mask = _draw(key, topology.weights, start, degree, fan_out, replace, max_degree)
    edges = jnp.where(mask, start[:, None] + chosen.astype(start.dtype), -1)
    senders = jnp.where(mask, _take(topology.senders, edges).astype(jnp.int32), -1)
    shape = (len(seeds), topology.num_relations * fan_out)
    return Neighbors(senders.reshape(shape), edges.reshape(shape), mask.reshape(shape))


def _checked_seeds(what: str, seeds: ArrayLike, topology: Topology) -> Array:
    checked = checked_ids(what, seeds, topology.num_nodes, "seeds", "int[seeds]")
    if checked.ndim != 1:
        raise TypeError(f"{what}: `seeds` must be int[seeds], got {checked.dtype}{list(checked.shape)}")
    return checked


def _segments(topology: Topology, seeds: Array) -> tuple[Array, Array]:
    """int[seeds * relations]: the first edge of each seed and relation, and how many it has."""
    relations = topology.num_relations
    if topology.num_nodes * relations >= 2**31 and seeds.dtype.itemsize < 8:
        raise ValueError(
            f"sample_neighbors: {topology.num_nodes} nodes of {relations} relations need seeds of int64, in jax's "
            f"64-bit mode; got {seeds.dtype}"
        )
    inside = in_range(seeds, topology.num_nodes)
    groups = seeds[:, None] * relations + jnp.arange(relations, dtype=seeds.dtype)
    # Padding reads nothing. If it read node 0, all warps would queue for the same line of host memory.
    wanted = jnp.where(inside[:, None, None], jnp.stack([groups, groups + 1], axis=-1), -1).reshape(-1, 2)
    bounds = _signed(_take(topology.starts, wanted))
    return bounds[:, 0], bounds[:, 1] - bounds[:, 0]


def _draw(
    key: Array,
    weights: EdgeWeights | None,
    start: Array,
    degree: Array,
    fan_out: int,
    replace: bool,
    max_degree: int | None,
) -> tuple[Array, Array]:
    """int[segments, fan_out] positions within each segment, and bool[segments, fan_out] which of them are valid."""
    if weights is None:
        if not replace:
            return draw_subset(key, degree, fan_out)
        chosen = below(key, (len(start), fan_out), degree[:, None])
        return chosen, jnp.broadcast_to(degree[:, None] > 0, chosen.shape)
    if replace:
        return draw_weighted(key, functools.partial(_take, weights.alias), start, degree, fan_out)
    if max_degree is None:
        raise ValueError(
            "sample_neighbors: weights without replacement need `max_degree`, the most edges that a seed has"
        )
    return draw_weighted_subset(key, functools.partial(_take, weights.logs), start, degree, fan_out, max_degree)


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LocalGraph:
    """Sampled edges over a dense numbering of the nodes that they touch.

    Each hop has its own block of local numbers, with padding at its end: first the seeds, in order, then the nodes that
    the first hop found, by ascending node, and so on. Edges are ordered by hop, then by receiver: those of hop k are
    [nodes of block k, relations * fan_outs[k]]. Padding nodes and edges do not affect computations that use the masks.
    Padding edges run from and to `node_ids.shape[0]`.

    Attributes:
        node_ids: int32[nodes], the graph's node of each local number; -1 for padding. `gather(features, node_ids)`
            gives rows of zeros there.
        senders: int32[edges], local.
        receivers: int32[edges], local.
        relation: int32[edges].
        edges: int[edges], positions in the topology's lists; -1 for padding.
        edge_mask: bool[edges].
        node_mask: bool[nodes].
        dropped: int32 scalar, sampled nodes that did not fit in `max_nodes`; their edges are padding.
        num_seeds: how many of the first nodes are seeds.
        hop_edges: the number of edges of each hop, padding included, the seeds' own first.
    """

    node_ids: Array
    senders: Array
    receivers: Array
    relation: Array
    edges: Array
    edge_mask: Array
    node_mask: Array
    dropped: Array
    num_seeds: int = dataclasses.field(metadata={"static": True})
    hop_edges: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def sample_graph(
    key: Array,
    topology: Topology,
    seeds: ArrayLike,
    fan_outs: Sequence[int],
    *,
    max_nodes: Sequence[int] | int | None = None,
    replace: bool = False,
    max_degree: int | None = None,
) -> LocalGraph:
    """Samples neighbours of the seeds, then of the nodes that were found, and so on, and numbers the nodes.

    Each node is expanded once, at the hop where it first appears.

    Args:
        key: jax.random key.
        topology: the graph.
        seeds: int[seeds], distinct (repeated seeds become padding); -1 for padding.
        fan_outs: edges to draw at each hop, the seeds' own first.
        max_nodes: bounds on the nodes known after each hop, one for each, or one for all. The default cannot be
            exceeded: seeds * (1 + fan_out * relations) and so on. Nodes that do not fit, the highest ids of the hop,
            are counted in `dropped`. A later hop does not use local numbers that an earlier one left empty, so give
            each hop its own bound: under one bound for all, earlier hops fill it with padding.
        replace, max_degree: as in `sample_neighbors`.

    Returns:
        LocalGraph with max_nodes[-1] nodes and, summed over hops, frontier * relations * fan_out edges.
        `dejax.rgnn.RelGraph.build_traced` takes its arrays.

    >>> topology = Topology.from_edges([1, 2, 3], [0, 1, 1], num_nodes=4)
    >>> graph = sample_graph(jax.random.key(0), topology, jnp.array([0]), [2, 2])
    >>> graph.node_ids, graph.senders[graph.edge_mask], graph.receivers[graph.edge_mask]
    (Array([ 0,  1, -1,  2,  3, -1, -1], dtype=int32), Array([1, 3, 4], dtype=int32), Array([0, 1, 1], dtype=int32))
    """
    if not fan_outs:
        raise ValueError("sample_graph: `fan_outs` must have at least one hop")
    seeds = _checked_seeds("sample_graph", seeds, topology)
    num_seeds = seeds.shape[0]
    known, first = unique_seeds(seeds, topology.num_nodes), 0
    hops: list[_Hop] = []
    dropped = jnp.zeros((), jnp.int32)
    for fan_out, limit in zip(fan_outs, _node_limits(num_seeds, topology, fan_outs, max_nodes), strict=True):
        key, now = jax.random.split(key)
        frontier = known[first:]
        found = sample_neighbors(now, topology, frontier, fan_out, replace=replace, max_degree=max_degree)
        receivers, first = jnp.arange(first, known.shape[0], dtype=jnp.int32), known.shape[0]
        known, senders, lost = number_nodes(known, found.senders.reshape(-1), limit, topology.num_nodes)
        dropped = dropped + lost
        kinds = jnp.repeat(jnp.arange(topology.num_relations, dtype=jnp.int32), fan_out)
        hops.append(
            _Hop(
                senders=senders,
                receivers=jnp.repeat(receivers, found.senders.shape[1]),
                relation=jnp.tile(kinds, frontier.shape[0]),
                edges=found.edges.reshape(-1),
            )
        )
    return _local_graph(known, hops, dropped, num_seeds)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Hop:
    """The edges of one hop, [edges] each, in local numbers; senders are -1 for padding."""

    senders: Array
    receivers: Array
    relation: Array
    edges: Array


def _node_limits(
    num_seeds: int, topology: Topology, fan_outs: Sequence[int], max_nodes: Sequence[int] | int | None
) -> list[int]:
    """The number of nodes known after each hop, padding included."""
    limits: list[int] = []
    before, known = 0, num_seeds
    for hop, fan_out in enumerate(fan_outs):
        natural = known + min((known - before) * topology.num_relations * fan_out, topology.num_nodes)
        given = max_nodes if max_nodes is None or isinstance(max_nodes, int) else max_nodes[hop]
        before, known = known, natural if given is None else max(known, min(natural, int(given)))
        limits.append(known)
    return limits


def _local_graph(known: Array, hops: list[_Hop], dropped: Array, num_seeds: int) -> LocalGraph:
    senders, nodes = jnp.concatenate([hop.senders for hop in hops]), known.shape[0]
    valid = senders >= 0
    return LocalGraph(
        node_ids=known,
        senders=jnp.where(valid, senders, nodes),
        receivers=jnp.where(valid, jnp.concatenate([hop.receivers for hop in hops]), nodes),
        relation=jnp.where(valid, jnp.concatenate([hop.relation for hop in hops]), 0),
        edges=jnp.where(valid, jnp.concatenate([hop.edges for hop in hops]), -1),
        edge_mask=valid,
        node_mask=known >= 0,
        dropped=dropped,
        num_seeds=num_seeds,
        hop_edges=tuple(hop.senders.shape[0] for hop in hops),
    )


# Lists are read in order, except those of the seeds, four bytes per id: this needs more multiprocessors than rows of
# features do.
_LIST_SMS = 64


def _take(values: Rows, ids: Array) -> Array:
    """Elements of a list by position; 0 out of range."""
    if isinstance(values, ReadableTable):
        return gather(values, ids, order="given", num_sms=_LIST_SMS)
    if values.shape[0] == 0:
        return jnp.zeros(ids.shape + values.shape[1:], values.dtype)
    return values.at[jnp.where(ids < 0, values.shape[0], ids)].get(mode="fill", fill_value=0)


def _signed(values: Array) -> Array:
    """Positions in lists as int32 or int64: differences of narrower or unsigned integers would wrap."""
    if values.dtype in (jnp.int32, jnp.int64):
        return values
    if values.dtype.itemsize >= 4:
        raise TypeError(f"sample_neighbors: `starts` must be signed integers, got {values.dtype}")
    return values.astype(jnp.int32)
