"""`sample_blocks`: the neighbourhood of seeds in a heterogeneous graph, sampled inside a compiled step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax.host_gather._ids import checked_ids, in_range
from dejax.host_gather._numbering import number_nodes
from dejax.minibatch._checks import EdgeType
from dejax.minibatch._drawing import Drawn, Request, SampleOptions, draw_hop, excluded, take
from dejax.minibatch._layout import Capacities, FanOuts, Layout, make_layout
from dejax.minibatch._numbering import Numbers, number_copies, number_seeds, number_together
from dejax.minibatch.topology import HeteroTopology

__all__ = ["SampleOptions", "SampledBlocks", "edge_ids", "sample_blocks"]

_DEFAULT = SampleOptions()

Seeds = Mapping[str, ArrayLike] | tuple[str, ArrayLike]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SampledBlocks:
    """A sampled neighbourhood, from which `dejax.minibatch.blocks` makes a graph for each layer. A pytree.

    The nodes of a type are numbered hop by hop: the seeds, in order, then the nodes first found by the seeds' edges, by
    ascending node, and so on. Each hop has its own range of numbers, with padding at its end. Each node is expanded
    once, at the hop where it first appears. Padding has no effect on any layer.

    Attributes:
        node_ids: int32[nodes] by node type, the graph's node of each local number; -1 for padding.
        senders: for each piece of the layout int32[receivers, fan_out], local numbers within the source type; -1 for
            none. The receivers are the nodes of the destination type that the hop before found.
        numbers: the senders as numbers among all nodes, in the order of blocks; -1 for none.
        edges: for each piece int[receivers, fan_out], positions among the relation's edges in the topology; -1 for
            none. `edge_ids` gives the positions in the lists that the topology was made from.
        seed_positions: int32[seeds] by node type, the local number of each seed: equal seeds have one.
        trees: int32[nodes] by node type, in a temporal sample: the seed whose neighbourhood each node belongs to.
        found: int32[hops + 1, node types], how many nodes were first found at each hop, those that did not fit
            included.
        lost: int32[hops + 1, node types], how many of them did not fit in `capacities`; their edges are padding.
        lost_edges: int32 scalar, edges beyond `SampleOptions.max_degree`.
        layout: the static sizes.
    """

    node_ids: dict[str, Array]
    senders: tuple[Array, ...]
    numbers: tuple[Array, ...]
    edges: tuple[Array, ...]
    seed_positions: dict[str, Array]
    trees: dict[str, Array] | None
    found: Array
    lost: Array
    lost_edges: Array
    layout: Layout = dataclasses.field(metadata={"static": True})

    @property
    def num_layers(self) -> int:
        """The number of hops, and so of layers."""
        return self.layout.num_hops

    def check(self, error: bool = False) -> None:
        """Warns, once for each place in the code, if nodes or edges did not fit. Call it outside of jit.

        Args:
            error: whether to raise a ValueError instead.
        """
        lost, edges = np.asarray(self.lost), int(self.lost_edges)
        if not lost.any() and not edges:
            return
        where = [
            f"{lost[hop, at]} of {name} at hop {hop}"
            for hop in range(lost.shape[0])
            for at, name in enumerate(self.layout.node_types)
            if lost[hop, at]
        ]
        where += [f"{edges} edges beyond max_degree"] if edges else []
        message = f"a sample did not fit: {', '.join(where)}; use larger `capacities` (find_capacities) or `max_degree`"
        if error:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)


def sample_blocks(
    key: Array,
    topology: HeteroTopology,
    seeds: Seeds,
    fan_outs: FanOuts,
    *,
    capacities: Capacities | None = None,
    exclude: Mapping[EdgeType, tuple[ArrayLike, ArrayLike]] | None = None,
    seed_times: Mapping[str, ArrayLike] | ArrayLike | None = None,
    options: SampleOptions = _DEFAULT,
) -> SampledBlocks:
    """Samples neighbours of the seeds, then of the nodes that were found, and so on. It runs inside `jax.jit`.

    The first hop expands the seeds. Each further hop expands the nodes that the previous hop found for the first time.
    An expanded node gets up to `fan_out` of its incoming edges from each relation into its type. Without replacement
    and weights, all subsets of `fan_out` edges are equally likely.

    In a temporal sample (`seed_times`) each seed has a neighbourhood of its own, in which no edge is later than the
    seed's time. A node that several seeds find occurs once for each of them. Edges of relations without times are used
    at any time.

    Args:
        key: jax.random key; the same key gives the same sample.
        topology: the graph.
        seeds: int[seeds] by node type, or (node type, int[seeds]). Seeds out of range (-1 for padding) have no
            neighbours, repeated seeds are expanded once.
        fan_outs: a list with an entry for each hop, the seeds' hop first: a number, or a dict by relation. Or a dict
            by relation of lists by hop. -1: all edges. A dict uses only the relations that it names. Slots that no
            receiver can fill are left out: a relation with at most one edge per receiver has one slot.
        capacities: the most new nodes of each hop, by node type (`find_capacities`). By default all fit.
        exclude: by relation, int[pairs] senders and receivers of edges that the sample must not have: the edges to
            predict, and their reverses under the reverse relation. If an excluded edge is drawn, its slot stays
            empty.
        seed_times: int[seeds], as `seeds` by node type.
        options: replacement, most recent edges, bounds on degrees.

    Returns:
        SampledBlocks.

    Raises:
        ValueError: unknown node types or relations, impossible fan-outs or capacities.
        TypeError: ids that are no integers.

    >>> cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
    >>> edges = {cites: ([1, 2], [0, 0]), writes: ([0, 1, 1], [0, 1, 2])}
    >>> topology = HeteroTopology.from_edges(edges, {"paper": 3, "author": 2})
    >>> sample = sample_blocks(jax.random.key(0), topology, ("paper", jnp.array([0])), [2, 2])
    >>> sample.node_ids["paper"], sample.node_ids["author"]
    (Array([ 0,  1,  2, -1, -1, -1], dtype=int32), Array([ 0,  1, -1], dtype=int32))
    """
    given = _checked_seeds(topology, seeds)
    times = _checked_times(topology, given, seed_times, options)
    pairs = _checked_pairs(topology, exclude)
    counts = {name: ids.shape[0] for name, ids in given.items()}
    bounds = options.replace, options.max_degree
    layout = make_layout(topology, counts, fan_outs, capacities, *bounds, copies=times is not None)
    nodes = _Nodes(topology, layout, given, times)
    senders: list[Array] = []
    numbers: list[Array] = []
    edges: list[Array] = []
    lost_edges = jnp.zeros((), jnp.int32)
    for hop in range(layout.num_hops):
        requests = nodes.requests(hop)
        drawn, lost = draw_hop(jax.random.fold_in(key, hop), topology, requests, options)
        lost_edges = lost_edges + lost
        drawn = [_without(pairs, request, some) for request, some in zip(requests, drawn, strict=True)]
        local, among_all = nodes.add(hop, requests, drawn)
        senders += local
        numbers += among_all
        edges += [jnp.where(own >= 0, some.edges, -1) for own, some in zip(local, drawn, strict=True)]
    return SampledBlocks(
        node_ids=nodes.known,
        senders=tuple(senders),
        numbers=tuple(numbers),
        edges=tuple(edges),
        seed_positions=nodes.seed_positions,
        trees=nodes.trees,
        found=jnp.stack(nodes.found),
        lost=jnp.stack(nodes.lost),
        lost_edges=lost_edges,
        layout=layout,
    )


def edge_ids(topology: HeteroTopology, sample: SampledBlocks) -> tuple[Array, ...]:
    """For each piece of a sample int[receivers, fan_out], the edges' positions in the lists that were given; -1: none.

    Features of edges are in that order: `features[edge_type][ids]`.
    """
    found = []
    for piece, position in zip(sample.layout.pieces, sample.edges, strict=True):
        relation = topology.relations[piece.relation]
        table = topology.lists[relation.lists].edge_ids
        if table is not None:
            there = jnp.where(position >= 0, position + relation.first_edge, -1)
            position = jnp.where(position >= 0, take(table, there), -1)
        found.append(position)
    return tuple(found)


class _Nodes:
    """The local numbers of all types, as they grow hop by hop."""

    def __init__(
        self, topology: HeteroTopology, layout: Layout, seeds: dict[str, Array], times: dict[str, Array] | None
    ) -> None:
        self.topology, self.layout = topology, layout
        self.known: dict[str, Array] = {}
        self.trees: dict[str, Array] | None = None if times is None else {}
        self.seed_positions: dict[str, Array] = {}
        self.times = None if times is None else jnp.concatenate([times[name] for name in layout.node_types])
        tree = 0
        for name in layout.node_types:
            own, count = seeds[name], topology.num_nodes[name]
            if self.trees is None:
                self.known[name], self.seed_positions[name] = number_seeds(own, count)
            else:  # each seed has a tree of its own, equal ones too
                self.known[name] = jnp.where(in_range(own, count), own, -1).astype(jnp.int32)
                self.seed_positions[name] = jnp.arange(own.shape[0], dtype=jnp.int32)
                self.trees[name] = jnp.where(self.known[name] >= 0, tree + self.seed_positions[name], -1)
                tree += own.shape[0]
        valid = [jnp.sum(self.known[name] >= 0, dtype=jnp.int32) for name in layout.node_types]
        self.found, self.lost = [jnp.stack(valid)], [jnp.zeros(len(valid), jnp.int32)]

    def _own(self, arrays: Mapping[str, Array], hop: int, node_type: int) -> Array:
        """The part of an array by node type that belongs to the nodes that a hop found."""
        first = self.layout.first(hop, node_type)
        return arrays[self.layout.node_types[node_type]][first : first + self.layout.sizes[hop][node_type]]

    def requests(self, hop: int) -> list[Request]:
        found = []
        for piece in self.layout.pieces:
            if piece.hop == hop:
                times = None
                if self.trees is not None and self.times is not None:
                    times = self.times.at[self._own(self.trees, hop, piece.target)].get(mode="fill", fill_value=0)
                found.append(Request(piece, self._own(self.known, hop, piece.target), times))
        return found

    def add(self, hop: int, requests: list[Request], drawn: list[Drawn]) -> tuple[list[Array], list[Array]]:
        """Numbers what a hop has found; returns the senders of each request, within their type and among all nodes."""
        layout = self.layout
        by_type = [
            [n for n, request in enumerate(requests) if request.piece.source == node_type]
            for node_type in range(len(layout.node_types))
        ]
        found = {
            name: jnp.concatenate([drawn[n].senders.reshape(-1) for n in here])
            for name, here in zip(layout.node_types, by_type, strict=True)
            if here
        }
        limits = {name: layout.first(hop + 2, number) for number, name in enumerate(layout.node_types)}
        if self.trees is None:
            numbers = self._number(found, limits)
        else:
            trees = {
                name: jnp.concatenate([self._trees_of(requests[n], drawn[n]) for n in here])
                for name, here in zip(layout.node_types, by_type, strict=True)
                if here
            }
            numbers = self._number_copies(found, trees, limits)
        local: dict[int, Array] = {}
        among_all: dict[int, Array] = {}
        counts, losses = [], []
        for node_type, (name, here) in enumerate(zip(layout.node_types, by_type, strict=True)):
            own, lost = numbers.get(name, (jnp.zeros(0, jnp.int32), jnp.zeros((), jnp.int32)))
            every = layout.among_all(own, hop + 1, node_type)
            at = 0
            for n in here:
                shape, some = drawn[n].senders.shape, slice(at, at + drawn[n].senders.size)
                local[n], among_all[n] = own[some].reshape(shape), every[some].reshape(shape)
                at = some.stop
            before = layout.first(hop + 1, node_type)
            counts.append(lost + jnp.sum(self.known[name][before:] >= 0, dtype=jnp.int32))
            losses.append(lost)
        self.found.append(jnp.stack(counts))
        self.lost.append(jnp.stack(losses))
        return [local[n] for n in range(len(requests))], [among_all[n] for n in range(len(requests))]

    def _number(self, found: dict[str, Array], limits: dict[str, int]) -> dict[str, tuple[Array, Array]]:
        """Numbers nodes by type; returns local numbers, and how many nodes did not fit."""
        counts = self.topology.num_nodes
        types = [Numbers(self.known[name], nodes, limits[name], counts[name]) for name, nodes in found.items()]
        if sum(some.count for some in types) < 2**31 - 1:
            done = number_together(types) if types else []
        else:
            done = [number_nodes(some.known, some.found, some.limit, some.count) for some in types]
        for name, (known, _, _) in zip(found, done, strict=True):
            self.known[name] = known
        return {name: (local, lost) for name, (_, local, lost) in zip(found, done, strict=True)}

    def _trees_of(self, request: Request, drawn: Drawn) -> Array:
        assert self.trees is not None
        own = self._own(self.trees, request.piece.hop, request.piece.target)
        return jnp.broadcast_to(own[:, None], drawn.senders.shape).reshape(-1)

    def _number_copies(
        self, found: dict[str, Array], trees: dict[str, Array], limits: dict[str, int]
    ) -> dict[str, tuple[Array, Array]]:
        """As `_number`, for pairs of node and tree."""
        assert self.trees is not None
        numbers = {}
        for name, nodes in found.items():
            pairs = nodes, jnp.where(nodes >= 0, trees[name], -1)
            known = self.known[name], self.trees[name]
            (self.known[name], self.trees[name]), local, lost = number_copies(known, pairs, limits[name])
            numbers[name] = local, lost
        return numbers


def _without(pairs: Mapping[int, tuple[Array, Array]], request: Request, drawn: Drawn) -> Drawn:
    """The drawn edges without those that are excluded."""
    if request.piece.relation not in pairs:
        return drawn
    wrong = excluded(pairs[request.piece.relation], drawn.senders, request.nodes)
    return Drawn(jnp.where(wrong, -1, drawn.senders), jnp.where(wrong, -1, drawn.edges))


def _checked_seeds(topology: HeteroTopology, seeds: Seeds) -> dict[str, Array]:
    """int[seeds] for every node type."""
    if isinstance(seeds, tuple):
        if len(seeds) != 2 or not isinstance(seeds[0], str):
            raise TypeError("sample_blocks: `seeds` must be a dict by node type, or (node type, int[seeds])")
        seeds = {seeds[0]: seeds[1]}
    if not isinstance(seeds, Mapping):
        raise TypeError(f"sample_blocks: `seeds` must be a dict by node type, got {type(seeds).__name__}")
    found = dict.fromkeys(topology.node_types, jnp.zeros(0, jnp.int32))
    for name, ids in seeds.items():
        if name not in found:
            raise ValueError(
                f"sample_blocks: the node type of seeds must be one of {list(topology.node_types)}, got {name!r}"
            )
        checked = checked_ids("sample_blocks", ids, topology.num_nodes[name], f"seeds[{name!r}]", "int[seeds]")
        if checked.ndim != 1:
            raise TypeError(f"sample_blocks: `seeds[{name!r}]` must be int[seeds], got shape {checked.shape}")
        found[name] = checked
    return found


def _checked_times(
    topology: HeteroTopology, seeds: Mapping[str, Array], seed_times: Any, options: SampleOptions
) -> dict[str, Array] | None:
    """int[seeds] for every node type, of the dtype of the edges' times; None where there are none."""
    tables = [lists.times for lists in topology.lists if lists.times is not None]
    if (seed_times is not None or options.recent) and not tables:
        raise ValueError("sample_blocks: `seed_times` and `recent` need a topology with times, this one has none")
    if seed_times is None:
        return None
    if not isinstance(seed_times, Mapping):
        with_seeds = [name for name, ids in seeds.items() if ids.shape[0]]
        if len(with_seeds) > 1:
            raise TypeError("sample_blocks: `seed_times` must be a dict by node type where `seeds` have several types")
        seed_times = dict.fromkeys(with_seeds, seed_times)
    dtype = max((table.dtype for table in tables), key=lambda dtype: dtype.itemsize)
    found = {}
    for name, ids in seeds.items():
        times = seed_times.get(name, ())
        times = times if isinstance(times, jax.Array) else np.asarray(times)
        if times.shape != ids.shape:
            raise ValueError(
                f"sample_blocks: `seed_times` of {name!r} must have shape {ids.shape}, as its seeds, got {times.shape}"
            )
        if times.size and not jnp.issubdtype(times.dtype, jnp.integer):
            raise TypeError(f"sample_blocks: `seed_times` must be integers, got {times.dtype}")
        if not times.size:
            found[name] = jnp.zeros(0, dtype)
            continue
        # Later than any edge is as good as the latest; a cast would wrap to the past.
        own, edges = jnp.iinfo(times.dtype), jnp.iinfo(dtype)
        clip = jnp.clip if isinstance(times, jax.Array) else np.clip
        found[name] = jnp.asarray(clip(times, max(own.min, edges.min), min(own.max, edges.max)).astype(dtype))
    return found


def _checked_pairs(
    topology: HeteroTopology, exclude: Mapping[EdgeType, tuple[ArrayLike, ArrayLike]] | None
) -> dict[int, tuple[Array, Array]]:
    found = {}
    for edge_type, (senders, receivers) in (exclude or {}).items():
        number = topology.number_of(edge_type)
        ends = []
        for name, ids, end in (("senders", senders, edge_type[0]), ("receivers", receivers, edge_type[2])):
            count = topology.num_nodes[end]
            checked = checked_ids("sample_blocks", ids, count, f"exclude {name}")
            ends.append(jnp.where(in_range(checked, count), checked, -1).astype(jnp.int32))
        if ends[0].ndim != 1 or ends[0].shape != ends[1].shape:
            raise ValueError(
                f"sample_blocks: `exclude` of {edge_type} must be two int[pairs], got shapes {ends[0].shape} and "
                f"{ends[1].shape}"
            )
        found[number] = ends[0], ends[1]
    return found
