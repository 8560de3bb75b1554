"""`sample_blocks`: the neighbourhood of seeds in a heterogeneous graph, sampled inside a compiled step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax._compiling import note
from dejax._dtypes import broadcasting
from dejax._jaxprs import traced_as_one
from dejax._pytrees import pytree
from dejax.host_gather._ids import checked_ids, in_range
from dejax.minibatch._checks import EdgeType, of_the_only
from dejax.minibatch.sampling._drawing import Drawn, Hop, Randomness, SampleOptions, draw_hop, draw_keys, excluded, take
from dejax.minibatch.sampling._layout import FanOuts, SampleLayout, make_layout
from dejax.minibatch.sampling._numbering import Nodes, NumberRanges, number_found, number_seeds
from dejax.minibatch.topology.hetero_topology import HeteroTopology
from dejax.rgnn.graphs.building.sorting_traced import joined

__all__ = ["SampleOptions", "SampledBlocks", "edge_ids", "sample_blocks"]

_DEFAULT = SampleOptions()

Excluded = tuple[ArrayLike, ArrayLike] | Array | np.ndarray
"""Edges of a relation to leave out: their senders and receivers, or their places in the list."""
Seeds = Mapping[str, ArrayLike] | tuple[str, ArrayLike] | ArrayLike


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SampledBlocks:
    """A sampled neighbourhood of seeds, from which `make_blocks` makes a graph for each layer. It is a pytree.

    Nodes get local numbers within their type, hop by hop: the seeds in their order, then the new nodes of the first hop
    by ascending id, and so on. The numbers of each hop end with padding, which has no effect on any layer. The edges of
    a node are drawn once, at the hop where the node first appears.

    Edges are drawn into slots: a hop has `fan_out` slots for each node whose edges it draws, in each relation. The
    slots of one relation at one hop form a piece, [receivers, fan_out]; the layout has the list of pieces.

    Attributes:
        node_ids: for each node type int32[nodes], the node of each local number; -1 for padding.
        nodes: int32[nodes], the same for all node types together, in the order of blocks.
        slots: for each hop int32[slots], the sender of the edge in each slot as a number among `nodes`, all pieces of
            the hop in one array; -1 for empty slots. `senders` has an array for each piece.
        positions: for each hop int[slots], the position of each edge among the edges of its relation in the topology;
            -1 for empty slots.
        seed_positions: for each node type int32[seeds], the local number of each seed. Equal seeds have the same
            number.
        trees: in a sample with `seed_times`: for each node type int32[nodes], the seed to whose neighbourhood each node
            belongs. Otherwise None.
        found: int32[hops + 1, node types], number of new nodes of each hop, including those beyond the capacities.
        lost: int32[hops + 1, node types], number of new nodes beyond the capacities; edges from them are padding.
        lost_edges: int32 scalar, number of edges beyond `SampleOptions.max_degree` or beyond `Capacities.edges`.
        edges_found: int32[hops], number of edges of the first hop, of the first two hops, and so on.
        layout: the static sizes.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.minibatch import HeteroTopology, make_blocks, sample_blocks
    >>> topology = HeteroTopology.from_edges({("a", "to", "a"): ([1, 2], [0, 0])}, {"a": 3})
    >>> sample = sample_blocks(jax.random.key(0), topology, ("a", jnp.array([0])), [2])
    >>> sample.node_ids, int(sample.lost.sum()), len(make_blocks(sample))
    ({'a': Array([0, 1, 2], dtype=int32)}, 0, 1)
    """

    node_ids: dict[str, Array]
    nodes: Array
    slots: tuple[Array, ...]
    positions: tuple[Array, ...]
    seed_positions: dict[str, Array]
    trees: dict[str, Array] | None
    found: Array
    lost: Array
    lost_edges: Array
    edges_found: Array
    layout: SampleLayout = dataclasses.field(metadata={"static": True})

    @property
    def num_layers(self) -> int:
        """Number of hops, which is the number of layers."""
        return self.layout.num_hops

    @property
    def senders(self) -> tuple[Array, ...]:
        """For each piece int32[receivers, fan_out], the senders as local numbers within their type; -1 for empty slots.

        The receivers are the new nodes of the previous hop that have the relation's destination type.
        """
        within = jnp.asarray(self.layout.within_type)
        local = [jnp.where(numbers >= 0, within[numbers], -1) for numbers in self.slots]
        return self.layout.by_piece(local)

    @property
    def numbers(self) -> tuple[Array, ...]:
        """For each piece int32[receivers, fan_out], the senders as numbers among `nodes`; -1 for empty slots."""
        return self.layout.by_piece(self.slots)

    @property
    def edges(self) -> tuple[Array, ...]:
        """For each piece int[receivers, fan_out], the positions of the edges in their relation; -1 for empty slots.

        `edge_ids` gives the positions in the edge lists that the topology was made from.
        """
        return self.layout.by_piece(self.positions)

    def check(self, error: bool = False) -> None:
        """Warns if nodes or edges exceeded the capacities, once for each place in the code.

        Call it outside of `jax.jit`.

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
        where += [f"{edges} edges"] if edges else []
        message = f"a sample did not fit: {', '.join(where)}; use larger `capacities` (find_capacities) or `max_degree`"
        if error:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)


@broadcasting
@traced_as_one
def sample_blocks(
    key: Array,
    topology: HeteroTopology,
    seeds: Seeds,
    fan_outs: FanOuts,
    *,
    capacities: Mapping[str, Sequence[int]] | Sequence[int] | None = None,
    exclude: Mapping[EdgeType, Excluded] | Excluded | None = None,
    seed_times: Mapping[str, ArrayLike] | ArrayLike | Literal["required"] | None = "required",
    options: SampleOptions = _DEFAULT,
) -> SampledBlocks:
    """Samples a neighbourhood of seed nodes, for training on mini-batches. It works inside of `jax.jit`.

    The first hop draws edges into the seeds; each further hop draws edges into the new nodes of the hop before. Each of
    these nodes gets up to `fan_out` of its incoming edges from each relation. Without replacement and weights, all
    subsets of `fan_out` edges are equally likely.

    With `seed_times` the sample is temporal: each seed has a neighbourhood of its own, in which no edge is later than
    the seed's time. A node in the neighbourhoods of several seeds then occurs once for each of them. Edges of relations
    without times are used at any time.

    For a graph with one node type or one relation, `seeds`, `capacities` and `exclude` may be the plain value instead
    of a dict with one entry.

    Args:
        key: jax.random key; the same key gives the same sample.
        topology: the graph.
        seeds: for each node type int[seeds], or a pair (node type, int[seeds]). Seeds out of range (-1 for padding)
            have no neighbours; repeated seeds are expanded once.
        fan_outs: a list with an entry for each hop, beginning with the seeds: a number, or a dict by relation. Or a
            dict by relation of lists by hop. -1 takes all edges. A dict uses only the relations that it names. Slots
            that no node can fill are left out: a relation with at most one edge into each node has one slot.
        capacities: by node type, the largest number of new nodes of each hop; a `Capacities` also has the largest
            numbers of edges of blocks (`find_capacities`). By default everything fits.
        exclude: edges that the sample must not contain, by relation, such as the edges to predict: int[pairs] senders
            and int[pairs] receivers, which excludes all edges between these nodes. Or int[edges], positions of edges in
            the edge list that the topology was made from (with `keep_edge_ids=False`, in its own sorted list). If an
            excluded edge is drawn, its slot stays empty.
        seed_times: int[seeds] times, in the form of `seeds`. None: edges of all times are used. By default, a topology
            with times raises an error, so that times are not forgotten.
        options: replacement, most recent edges, bounds on degrees.

    Returns:
        SampledBlocks.

    Raises:
        ValueError: node types or relations are unknown, fan-outs or capacities are not possible, or the topology has
            times and `seed_times` is missing.
        TypeError: ids are not integers.

    >>> cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
    >>> edges = {cites: ([1, 2], [0, 0]), writes: ([0, 1, 1], [0, 1, 2])}
    >>> topology = HeteroTopology.from_edges(edges, {"paper": 3, "author": 2})
    >>> sample = sample_blocks(jax.random.key(0), topology, ("paper", jnp.array([0])), [2, 2])
    >>> sample.node_ids["paper"], sample.node_ids["author"]
    (Array([ 0,  1,  2, -1, -1, -1], dtype=int32), Array([ 0,  1, -1], dtype=int32))
    """
    if not hasattr(key, "dtype"):
        raise TypeError(f"sample_blocks: `key` must be a random key of jax, got {key!r}; use jax.random.key(0)")
    given = _checked_seeds(topology, seeds)
    times = _checked_times(topology, given, seed_times, options)
    pairs = _checked_pairs(topology, exclude)
    counts = {name: ids.shape[0] for name, ids in given.items()}
    bounds = options.replace, options.max_degree
    layout = make_layout(
        topology,
        counts,
        fan_outs,
        of_the_only(topology.node_types, capacities),
        *bounds,
        copies=times is not None,
        together=lambda pieces: draw_keys(topology, pieces, options),
    )
    if isinstance(key, jax.core.Tracer):
        sizes = " and ".join(f"{count} of {name}" for name, count in counts.items() if count)
        note((tuple(topology.num_nodes.items()), str(fan_outs)), sizes)
    nodes = _GrowingNodes(topology, layout, given, times)
    slots: list[Array] = []
    positions: list[Array] = []
    lost_edges = jnp.zeros((), jnp.int32)
    hops = [Hop.of(topology, layout, number, options) for number in range(layout.num_hops)]
    random = Randomness.of(key, hops)
    for number, hop in enumerate(hops):
        receivers, until = nodes.receivers(number, hop)
        drawn, random = draw_hop(random, topology, hop, receivers, until)
        lost_edges = lost_edges + drawn.lost
        found = nodes.add(number, hop, _without(topology, pairs, layout, hop, drawn, receivers))
        slots.append(found)
        positions.append(jnp.where(found >= 0, drawn.edges, -1))
    edges_found = jnp.cumsum(jnp.stack([jnp.sum(own >= 0, dtype=jnp.int32) for own in slots]), dtype=jnp.int32)
    if layout.edges is not None:
        lost_edges = lost_edges + jnp.sum(jnp.maximum(edges_found - jnp.array(layout.edges, jnp.int32), 0))
    return SampledBlocks(
        node_ids=split_nodes(layout, nodes.known.nodes, layout.num_hops),
        nodes=nodes.known.nodes,
        slots=tuple(slots),
        positions=tuple(positions),
        seed_positions=nodes.seed_positions,
        trees=None if nodes.known.trees is None else split_nodes(layout, nodes.known.trees, layout.num_hops),
        found=jnp.stack(nodes.found),
        lost=jnp.stack(nodes.lost),
        lost_edges=lost_edges,
        edges_found=edges_found,
        layout=layout,
    )


@broadcasting
def edge_ids(topology: HeteroTopology, sample: SampledBlocks) -> tuple[Array, ...]:
    """The positions of sampled edges in the edge lists that the topology was made from, to read edge features.

    A topology that was made with `keep_edge_ids=False` gives positions in its own sorted lists.

    Returns an array int[receivers, fan_out] for each entry of `SampledBlocks.edges`; -1 for empty slots.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.minibatch import HeteroTopology, edge_ids, sample_blocks
    >>> topology = HeteroTopology.from_edges({("a", "to", "a"): ([2, 1], [1, 0])}, {"a": 3})
    >>> sample = sample_blocks(jax.random.key(0), topology, ("a", jnp.array([0])), [2])
    >>> edge_ids(topology, sample)  # the second edge of the list, and none
    (Array([[1]], dtype=int32),)
    """
    return tuple(
        ids_of_edges(topology, piece.relation, position)
        for piece, position in zip(sample.layout.pieces, sample.edges, strict=True)
    )


def ids_of_edges(topology: HeteroTopology, number: int, positions: Array) -> Array:
    """The places of a relation's edges in the list that it was made from, by their positions here; -1: none."""
    relation = topology.relations[number]
    table = topology.lists[relation.lists].edge_ids
    if table is None:
        return positions
    there = jnp.where(positions >= 0, positions + relation.first_edge, -1)
    return jnp.where(positions >= 0, take(table, there), -1)


def split_nodes(layout: SampleLayout, x: Array, hops: int) -> dict[str, Array]:
    """Values of all nodes up to a hop, by node type; further rows are left out."""
    return {name: rows_of_type(layout, x, hops, number) for number, name in enumerate(layout.node_types)}


def rows_of_type(layout: SampleLayout, x: Array, hops: int, number: int) -> Array:
    """Values of the nodes of one type up to a hop, out of those of all nodes."""
    parts = []
    for hop in range(hops + 1):
        first = layout.first_of_all(hop, number)
        parts.append(x[first : first + layout.sizes[hop][number]])
    return joined([part for part in parts if part.shape[0]] or parts[:1])


class _GrowingNodes:
    """The nodes of a sample, as they grow hop by hop, in the order of blocks."""

    def __init__(
        self, topology: HeteroTopology, layout: SampleLayout, seeds: dict[str, Array], times: dict[str, Array] | None
    ) -> None:
        self.layout = layout
        self.counts = tuple(topology.num_nodes[name] for name in layout.node_types)
        self.types = layout.node_type
        self.seed_positions: dict[str, Array] = {}
        self.times = None if times is None else jnp.concatenate([times[name] for name in layout.node_types])
        nodes = []
        for name, count in zip(layout.node_types, self.counts, strict=True):
            own = seeds[name]
            if times is None and own.shape[0]:
                some, self.seed_positions[name] = number_seeds(own, count)
            else:  # each seed has a tree of its own, equal ones too
                some = jnp.where(in_range(own, count), own, -1).astype(jnp.int32)
                self.seed_positions[name] = jnp.arange(own.shape[0], dtype=jnp.int32)
            nodes.append(some)
        known = jnp.concatenate(nodes)
        trees = None
        if times is not None:
            trees = jnp.where(known >= 0, jnp.arange(known.shape[0], dtype=jnp.int32), -1)
        self.known = Nodes(known, self.types[: known.shape[0]], trees)
        valid = [jnp.sum(some >= 0, dtype=jnp.int32) for some in nodes]
        self.found, self.lost = [jnp.stack(valid)], [jnp.zeros(len(valid), jnp.int32)]
        self._trees: Array | None = None

    def receivers(self, number: int, hop: Hop) -> tuple[Array, Array | None]:
        """The nodes of a hop's rows, and up to when their edges count."""
        first, last = self.layout.count(number - 1), self.layout.count(number)
        nodes = self.known.nodes[first:last][hop.receiver]
        if self.known.trees is None or self.times is None:
            return nodes, None
        self._trees = self.known.trees[first:last][hop.receiver]
        there = jnp.where(self._trees >= 0, self._trees, self.times.shape[0])
        return nodes, self.times.at[there].get(mode="fill", fill_value=0)

    def add(self, number: int, hop: Hop, senders: Array) -> Array:
        """Numbers what a hop has found; returns the number of each slot's sender."""
        layout, types = self.layout, range(len(self.counts))
        first = tuple(layout.first_of_all(number + 1, node_type) for node_type in types)
        sizes = layout.sizes[number + 1]
        if not hop.pieces:
            self.known = dataclasses.replace(self.known, types=self.types[: layout.count(number + 1)])
            self.found.append(jnp.zeros(len(types), jnp.int32))
            self.lost.append(jnp.zeros(len(types), jnp.int32))
            return jnp.zeros(0, jnp.int32)
        trees = None
        if self._trees is not None:
            trees = jnp.where(senders >= 0, hop.on_slots(self._trees), -1)
        sources = hop.on_slots(hop.rows([piece.source for piece in hop.pieces]))
        places = NumberRanges(self.counts, first, sizes)
        self.known, numbers, new = number_found(self.known, Nodes(senders, sources, trees), places)
        self.found.append(new)
        self.lost.append(jnp.maximum(new - np.array(sizes, np.int32), 0))
        return numbers


def _without(
    topology: HeteroTopology,
    pairs: Mapping[int, tuple[Array, Array] | Array],
    layout: SampleLayout,
    hop: Hop,
    drawn: Drawn,
    receivers: Array,
) -> Array:
    """The senders of drawn edges, -1 for those that are excluded."""
    senders, row, slot = drawn.senders, 0, 0
    for piece in hop.pieces:
        rows = layout.receivers(piece)
        size = rows * piece.fan_out
        if piece.relation in pairs:
            own = senders[slot : slot + size].reshape(rows, piece.fan_out)
            left_out = pairs[piece.relation]
            if isinstance(left_out, tuple):
                wrong = excluded(left_out, own, receivers[row : row + rows])
            else:
                ids = ids_of_edges(topology, piece.relation, drawn.edges[slot : slot + size]).reshape(own.shape)
                wrong = (ids >= 0) & jnp.isin(ids, left_out)
            senders = senders.at[slot : slot + size].set(jnp.where(wrong, -1, own).reshape(-1))
        row, slot = row + rows, slot + size
    return senders


def _checked_seeds(topology: HeteroTopology, seeds: Seeds) -> dict[str, Array]:
    """int[seeds] for every node type."""
    if isinstance(seeds, tuple):
        if len(seeds) != 2 or not isinstance(seeds[0], str):
            raise TypeError(
                "sample_blocks: `seeds` must be a dict by node type, or (node type, int[seeds]), got a tuple of "
                f"{len(seeds)}"
            )
        seeds = {seeds[0]: seeds[1]}
    seeds = of_the_only(topology.node_types, seeds)
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
    if isinstance(seed_times, str):
        if tables or seed_times != "required":
            raise ValueError(
                "sample_blocks: `seed_times` must be given where edges have times, so that a seed sees nothing later; "
                "seed_times=None takes edges of all times"
            )
        seed_times = None
    if (seed_times is not None or options.recent) and not tables:
        raise ValueError(
            "sample_blocks: `topology` must have times for `seed_times` and `recent`, got none; give them to "
            "HeteroTopology.from_edges"
        )
    if seed_times is None:
        return None
    if not isinstance(seed_times, Mapping):
        with_seeds = [name for name, ids in seeds.items() if ids.shape[0]]
        if len(with_seeds) > 1:
            raise TypeError(
                "sample_blocks: `seed_times` must be a dict by node type where `seeds` have several types, got "
                f"{type(seed_times).__name__}"
            )
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
        # Clip first: a cast alone would wrap a time after all edges into the past.
        own, edges = jnp.iinfo(times.dtype), jnp.iinfo(dtype)
        clip = jnp.clip if isinstance(times, jax.Array) else np.clip
        found[name] = jnp.asarray(clip(times, max(own.min, edges.min), min(own.max, edges.max)).astype(dtype))
    return found


def _checked_pairs(topology: HeteroTopology, exclude: Any) -> dict[int, tuple[Array, Array] | Array]:
    """By number of relation, the senders and receivers of excluded edges, or their places in the list."""
    found: dict[int, tuple[Array, Array] | Array] = {}
    for edge_type, given in (of_the_only(topology.edge_types, exclude) or {}).items():
        number = topology.number_of(edge_type)
        if getattr(given, "ndim", None) == 1:
            count = topology.relations[number].num_edges
            found[number] = checked_ids("sample_blocks", given, count, "exclude", "int[edges]")
            continue
        if len(given) != 2:
            raise ValueError(
                f"sample_blocks: `exclude` of {edge_type} must be (senders, receivers), got {len(given)} rows"
            )
        senders, receivers = given
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
