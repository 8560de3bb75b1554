"""Neighbour sampling inside a compiled step: from seeds to a local graph, with static shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax.host_gather._draws import below, draw_subset, draw_weighted, draw_weighted_subset
from dejax.host_gather._ids import checked_ids, in_range
from dejax.host_gather._numbering import number_nodes, unique_seeds
from dejax.host_gather._weights import alias_tables
from dejax.host_gather.cached import CachedTable
from dejax.host_gather.gather import gather
from dejax.host_gather.table import HostTable

Rows = HostTable | CachedTable | Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EdgeWeights:
    """Weights of a topology's edges, in the forms in which edges are drawn by them. A pytree.

    Attributes:
        alias: int32[edges, 2], an alias table for each group: the bits of a share as float32, and another edge.
        logs: float32[edges], log(weight / the group's largest weight).
    """

    alias: Rows
    logs: Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """A graph's incoming edges, grouped by receiver (and relation): compressed sparse columns.

    A pytree. The lists may lie in host memory (`HostTable`s) or on the device.

    Attributes:
        starts: int[groups + 1], where each group's edges begin; group `node * num_relations + relation`.
        senders: int[edges], by group.
        weights: EdgeWeights, or None where edges have no weights.
        num_nodes: number of nodes, below 2**31.
        num_relations: number of relations; 1 for a plain graph.
    """

    starts: Rows
    senders: Rows
    weights: EdgeWeights | None
    num_nodes: int = dataclasses.field(metadata={"static": True})
    num_relations: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def from_edges(
        cls,
        senders: ArrayLike,
        receivers: ArrayLike,
        *,
        num_nodes: int,
        relation: ArrayLike | None = None,
        num_relations: int = 1,
        weights: ArrayLike | None = None,
        on_host: bool = False,
    ) -> Topology:
        """Sorts edges by receiver and relation, with numpy.

        Args:
            senders: int[edges].
            receivers: int[edges]: the nodes that sample.
            num_nodes: number of nodes.
            relation: int[edges], or None for one relation.
            num_relations: number of relations.
            weights: float[edges], not negative: edges are drawn with probabilities in proportion, to seven digits
                however small a weight is beside others. They take 12 bytes an edge.
            on_host: whether the lists lie in host memory.

        Raises:
            ValueError: lengths that differ, ids out of range, weights that are negative or not finite; 2**31 nodes or,
                without jax's 64-bit mode, edges.
        """
        source, target = np.asarray(senders), np.asarray(receivers)
        kind = np.zeros(len(source), np.int64) if relation is None else np.asarray(relation)
        if source.shape != target.shape or source.shape != kind.shape or source.ndim != 1:
            raise ValueError("Topology: `senders`, `receivers` and `relation` must be of one length")
        for name, values, count in (
            ("senders", source, num_nodes), ("receivers", target, num_nodes), ("relation", kind, num_relations)
        ):  # fmt: skip
            if values.size and (values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= count):
                raise ValueError(f"Topology: `{name}` must be integers from 0 to {count - 1}")
        group = target.astype(np.int64) * num_relations + kind.astype(np.int64)
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=num_nodes * num_relations)
        starts = np.concatenate([[0], np.cumsum(counts)])
        given = None if weights is None else np.asarray(weights, np.float64)
        if given is not None and given.shape != source.shape:
            raise ValueError(_BAD_WEIGHTS)
        return cls.from_csc(
            starts, source[order].astype(np.int32), weights=None if given is None else given[order],
            num_nodes=num_nodes, num_relations=num_relations, on_host=on_host,
        )  # fmt: skip

    @classmethod
    def from_csc(
        cls,
        starts: Any,
        senders: Any,
        cumulative: Any = None,
        *,
        num_nodes: int,
        num_relations: int = 1,
        weights: Any = None,
        on_host: bool = False,
    ) -> Topology:
        """From lists that are sorted already; HostTables stay where they are, and arrays of jax are not looked into.

        Args:
            starts: int[num_nodes * num_relations + 1], where each group's edges begin, and the number of edges; group
                `node * num_relations + relation`.
            senders: int[edges], by group.
            cumulative: float[edges], running sums of edge weights within each group, in place of `weights`. Sums in
                float32 have lost small weights, which cannot be had back.
            num_nodes: number of nodes.
            num_relations: number of relations.
            weights: float[edges], by group, as in `from_edges`, or None. Read here, wherever they lie.
            on_host: whether lists that are no HostTables are put in host memory; otherwise they go to the device.

        Raises:
            TypeError: lists that are no integers.
            ValueError: `starts` of another length than its groups need or not ascending from 0 to the number of
                edges, senders out of range, weights that are negative or not finite; 2**31 nodes or, without jax's
                64-bit mode, edges.
        """
        if not 0 <= num_nodes < 2**31:
            raise ValueError(f"Topology: `num_nodes` must be from 0 to 2**31 - 1, {num_nodes} was given")
        starts, senders = _index_list("starts", starts), _index_list("senders", senders)
        if starts.shape != (num_nodes * num_relations + 1,):
            raise ValueError(
                f"Topology: `starts` must have shape ({num_nodes * num_relations + 1},), not {starts.shape}"
            )
        if isinstance(starts, np.ndarray):
            ascends = (starts[1:] >= starts[:-1]).all()
            if not ascends or starts[0] != 0 or starts[-1] != len(senders):
                raise ValueError(f"Topology: `starts` must ascend from 0 to the number of `senders`, {len(senders)}")
        if isinstance(senders, np.ndarray) and senders.size and (senders.min() < 0 or senders.max() >= num_nodes):
            raise ValueError(f"Topology: `senders` must be integers from 0 to {num_nodes - 1}")

        def place(values: Any) -> Rows:
            if isinstance(values, HostTable | CachedTable):
                return values
            return HostTable.from_numpy(np.asarray(values)) if on_host else jnp.asarray(values)

        made = None
        if weights is not None or cumulative is not None:
            if weights is not None and cumulative is not None:
                raise ValueError("Topology: give `weights` or `cumulative`, not both")
            begins = _read("starts", starts).astype(np.int64)
            given = _checked_weights(begins, weights, cumulative)
            made = EdgeWeights(*map(place, alias_tables(begins, given)))
        return cls(place(starts), place(senders), made, num_nodes, num_relations)


_BAD_WEIGHTS = "Topology: `weights` must be finite and not negative, one for each edge"


def _index_list(name: str, values: Any) -> Any:
    """A list of integers: HostTables and arrays of jax as they are, others as numpy's int32, or int64 where needed."""
    if isinstance(values, HostTable | CachedTable | Array):
        wide = values.dtype.itemsize > 4
    else:
        values = np.asarray(values)
        values = values.astype(np.int32) if not values.size else values
        wide = values.dtype.kind in "iu" and values.size and int(values.max()) >= 2**31
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"Topology: `{name}` must be integers, {values.dtype} was given")
    if wide and not jax.config.values["jax_enable_x64"]:
        raise ValueError(
            f"Topology: `{name}` of 2**31 or more, or of int64 in a table, need jax's 64-bit mode: "
            "jax.config.update('jax_enable_x64', True)"
        )
    if isinstance(values, np.ndarray) and values.size and (int(values.min()) >= -(2**31)):
        return values.astype(np.int64 if wide else np.int32, copy=False)
    return values


def _read(name: str, values: Any) -> np.ndarray:
    """A list as numpy's, wherever it lies."""
    if isinstance(values, jax.core.Tracer):
        raise TypeError(f"Topology: with weights `{name}` must be there: make the topology outside of jitted functions")
    return values.numpy() if isinstance(values, HostTable | CachedTable) else np.asarray(values)


def _checked_weights(starts: np.ndarray, weights: Any, cumulative: Any) -> np.ndarray:
    """Weights by group, of their own or as differences of running sums."""
    given = _read("weights", cumulative if weights is None else weights).astype(np.float64)
    if given.shape != (int(starts[-1]),):
        raise ValueError(_BAD_WEIGHTS)
    if weights is None:
        first = np.zeros(len(given), bool)
        first[starts[:-1][np.diff(starts) > 0]] = True
        given = np.maximum(np.where(first, given, np.diff(given, prepend=0.0)), 0.0)
    if not np.isfinite(given).all() or (given < 0).any():
        raise ValueError(_BAD_WEIGHTS)
    return given


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Neighbors:
    """Sampled neighbours.

    Attributes:
        senders: int32[seeds, relations * fan_out]; -1 where there is none.
        edges: int[seeds, relations * fan_out], positions in the topology's lists; -1 where there is none.
        mask: bool[seeds, relations * fan_out].
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

    Without replacement and weights each subset of `fan_out` edges is equally likely (Floyd's algorithm: `fan_out`
    draws, whatever the degree), and a seed with no more edges than that gets all of them. With weights and replacement
    each draw is one read, of an alias table. With weights and without replacement edges are drawn one after the other
    in proportion to their weights among those left (Efraimidis and Spirakis, 2006), which reads all edges of a seed.

    Args:
        key: jax.random key; the same key gives the same sample.
        topology: the graph.
        seeds: int[seeds]; a seed out of range (for padding: -1) has no neighbours.
        fan_out: edges to draw for each seed and relation.
        replace: whether an edge may be drawn twice; then a seed with any edge has `fan_out` of them.
        max_degree: for weights without replacement: no seed has more edges of one relation (others are cut off there).

    Returns:
        Neighbors.

    Raises:
        ValueError: fan_out below 1; weights without replacement without `max_degree`.
        TypeError: seeds that are no integers.
    """
    if fan_out < 1:
        raise ValueError(f"sample_neighbors: `fan_out` must be at least 1, {fan_out} was given")
    seeds = checked_ids("sample_neighbors", seeds, topology.num_nodes, "seeds", "int[seeds]")
    if seeds.ndim != 1:
        raise TypeError(f"sample_neighbors: `seeds` must be int[seeds], {seeds.dtype}{list(seeds.shape)} was given")
    relations = topology.num_relations
    inside = in_range(seeds, topology.num_nodes)
    if topology.num_nodes * relations >= 2**31 and seeds.dtype.itemsize < 8:
        raise ValueError(
            f"sample_neighbors: {topology.num_nodes} nodes of {relations} relations need seeds of int64, in jax's "
            f"64-bit mode; {seeds.dtype} was given"
        )
    groups = seeds[:, None] * relations + jnp.arange(relations, dtype=seeds.dtype)
    # Nothing is read for padding. Were it read as node 0, each warp would ask for one and the same line of host memory,
    # which took 0.12 us each time: 40 ms for five million seeds of padding.
    wanted = jnp.where(inside[:, None, None], jnp.stack([groups, groups + 1], axis=-1), -1).reshape(-1, 2)
    bounds = _signed(_take(topology.starts, wanted))
    start, degree = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    weights = topology.weights
    if weights is None:
        if replace:
            chosen = below(key, (len(start), fan_out), degree[:, None])
            mask = jnp.broadcast_to(degree[:, None] > 0, chosen.shape)
        else:
            chosen, mask = draw_subset(key, degree, fan_out)
    elif replace:
        chosen, mask = draw_weighted(key, functools.partial(_take, weights.alias), start, degree, fan_out)
    elif max_degree is None:
        raise ValueError(
            "sample_neighbors: weights without replacement need `max_degree`, the most edges that a seed has"
        )
    else:
        logs = functools.partial(_take, weights.logs)
        chosen, mask = draw_weighted_subset(key, logs, start, degree, fan_out, max_degree)
    edges = jnp.where(mask, start[:, None] + chosen.astype(start.dtype), -1)
    senders = jnp.where(mask, _take(topology.senders, edges).astype(jnp.int32), -1)
    shape = (len(seeds), relations * fan_out)
    return Neighbors(senders.reshape(shape), edges.reshape(shape), mask.reshape(shape))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LocalGraph:
    """Sampled edges over a dense numbering of the nodes they touch.

    Each hop has its own block of numbers, with padding at its end: the seeds, in order, then what the first hop
    found, by ascending node, and so on. Edges come hop by hop, those of one receiver side by side: those of hop k are
    [nodes of block k, relations * fan_outs[k]]. Padding nodes and edges have no effect in anything that goes by the
    masks; padding edges run from and to `node_ids.shape[0]`.

    Attributes:
        node_ids: int32[nodes], the graph's node of each local one; -1 for padding. `gather(features, node_ids)` gives
            rows of zeros there.
        senders: int32[edges], local.
        receivers: int32[edges], local.
        relation: int32[edges].
        edges: int[edges], positions in the topology's lists; -1 for padding.
        edge_mask: bool[edges].
        node_mask: bool[nodes].
        num_seeds: how many of the first nodes are seeds.
        hop_edges: how many edges each hop has, padding included, the seeds' own first.
        dropped: int32 scalar, nodes that were sampled and did not fit in `max_nodes`; their edges are padding.
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
    """Samples neighbours of the seeds, neighbours of what is new, and so on, and numbers the nodes.

    Each node is expanded once, at the hop where it first appears.

    Args:
        key: jax.random key.
        topology: the graph.
        seeds: int[seeds], distinct (of equal ones the later are padding); -1 for padding.
        fan_outs: edges to draw at each hop, the seeds' own first.
        max_nodes: bounds on the nodes known after each hop, one for each, or one for all; by default what cannot be
            exceeded: seeds * (1 + fan_out * relations) and so on. What does not fit, the highest ids of the hop, is
            counted in `dropped`. Places that a hop leaves empty stay empty, so give each hop what it needs: one bound
            for all lets the hops before fill it with padding.
        replace, max_degree: as in `sample_neighbors`.

    Returns:
        LocalGraph with max_nodes[-1] nodes and the sum over hops of frontier * relations * fan_out edges. Its arrays
        are what `dejax.rgnn.RelGraph.build_traced` takes.

    >>> topology = Topology.from_edges([1, 2, 3], [0, 1, 1], num_nodes=4)
    >>> graph = sample_graph(jax.random.key(0), topology, np.array([0]), [2, 2])
    >>> graph.node_ids, graph.senders[graph.edge_mask], graph.receivers[graph.edge_mask]
    (Array([ 0,  1, -1,  2,  3, -1, -1], dtype=int32), Array([1, 3, 4], dtype=int32), Array([0, 1, 1], dtype=int32))
    """
    if not fan_outs:
        raise ValueError("sample_graph: `fan_outs` must have at least one hop")
    seeds = checked_ids("sample_graph", seeds, topology.num_nodes, "seeds", "int[seeds]")
    if seeds.ndim != 1:
        raise TypeError(f"sample_graph: `seeds` must be int[seeds], {seeds.dtype}{list(seeds.shape)} was given")
    relations, num_seeds = topology.num_relations, seeds.shape[0]
    limits: list[int] = []
    most = num_seeds
    for hop, fan_out in enumerate(fan_outs):
        fresh = most - (limits[-2] if len(limits) > 1 else num_seeds if limits else 0)
        natural = most + min(fresh * relations * fan_out, topology.num_nodes)
        given = max_nodes if max_nodes is None or isinstance(max_nodes, int) else max_nodes[hop]
        most = natural if given is None else max(most, min(natural, int(given)))
        limits.append(most)
    known = unique_seeds(seeds, topology.num_nodes)
    frontier, previous = known, num_seeds
    all_senders, all_receivers, all_edges, all_relations, hop_edges = [], [], [], [], []
    dropped = jnp.zeros((), jnp.int32)
    receivers = jnp.arange(num_seeds, dtype=jnp.int32)
    for hop, fan_out in enumerate(fan_outs):
        key, now = jax.random.split(key)
        found = sample_neighbors(now, topology, frontier, fan_out, replace=replace, max_degree=max_degree)
        wide = found.senders.shape[1]
        known, local, lost = number_nodes(known, found.senders.reshape(-1), limits[hop], topology.num_nodes)
        dropped = dropped + lost
        all_senders.append(local)
        all_receivers.append(jnp.repeat(receivers, wide))
        all_edges.append(found.edges.reshape(-1))
        kinds = jnp.repeat(jnp.arange(relations, dtype=jnp.int32), fan_out)
        all_relations.append(jnp.tile(kinds, frontier.shape[0]))
        hop_edges.append(local.shape[0])
        frontier, receivers = known[previous:], jnp.arange(previous, known.shape[0], dtype=jnp.int32)
        previous = known.shape[0]
    senders, targets = jnp.concatenate(all_senders), jnp.concatenate(all_receivers)
    valid = senders >= 0
    nodes = known.shape[0]
    return LocalGraph(
        node_ids=known,
        senders=jnp.where(valid, senders, nodes),
        receivers=jnp.where(valid, targets, nodes),
        relation=jnp.where(valid, jnp.concatenate(all_relations), 0),
        edges=jnp.where(valid, jnp.concatenate(all_edges), -1),
        edge_mask=valid,
        node_mask=known >= 0,
        dropped=dropped,
        num_seeds=num_seeds,
        hop_edges=tuple(hop_edges),
    )


# Lists are read as they come, which is in order but for the seeds' own. Four bytes an id: more multiprocessors than
# rows of features need.
_LIST_SMS = 64


def _take(values: Rows, ids: Array) -> Array:
    if isinstance(values, HostTable | CachedTable):
        return gather(values, ids, order="given", num_sms=_LIST_SMS)
    if values.shape[0] == 0:
        return jnp.zeros(ids.shape + values.shape[1:], values.dtype)
    return values.at[jnp.where(ids < 0, values.shape[0], ids)].get(mode="fill", fill_value=0)


def _signed(values: Array) -> Array:
    """Places in lists as int32 or int64, whatever the list's dtype: differences of others would wrap."""
    if values.dtype in (jnp.int32, jnp.int64):
        return values
    if values.dtype.itemsize >= 4:
        raise TypeError(f"sample_neighbors: `starts` must be signed integers, {values.dtype} was given")
    return values.astype(jnp.int32)
