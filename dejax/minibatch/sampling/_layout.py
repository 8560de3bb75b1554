"""The static shape of a sample: the local numbers of each node type and hop, and the slots of each relation.

Nodes are numbered twice. Within a node type, the nodes of hop 0 (the seeds) come first, then those first found by hop
1, and so on: arrays by node type are in this order. All nodes together are numbered hop by hop, and within a hop type
by type: graphs of blocks are in this order. In both, the nodes that a layer needs are the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jax import Array

from dejax.minibatch._checks import EdgeType
from dejax.minibatch.topology.hetero_topology import HeteroTopology

FanOuts: TypeAlias = Sequence[int | Mapping[EdgeType, int]] | Mapping[EdgeType, Sequence[int]]
"""For each hop a number or numbers by relation, or for each relation a number by hop."""


class Capacities(dict[str, tuple[int, ...]]):
    """Array sizes for samples, as `find_capacities` computes them: bounds on the number of nodes and edges.

    It is a dict from node type to a tuple with the largest number of new nodes of each hop.

    Attributes:
        edges: largest number of edges of each block: the edges of the seeds, then the edges of the seeds and of hop 1,
            and so on. None: a block has room for `fan_out` edges of each node and relation.
        source_pairs: for each of these blocks, about how many distinct pairs of a relation and a sender it has. The
            compiler uses the number to choose between values for each pair and for each edge. None: unknown.

    >>> Capacities({"paper": (64, 128)}, edges=(100, 300)).edges
    (100, 300)
    """

    edges: tuple[int, ...] | None
    source_pairs: tuple[int, ...] | None

    def __init__(
        self,
        nodes: Mapping[str, Sequence[int]],
        *,
        edges: Sequence[int] | None = None,
        source_pairs: Sequence[int] | None = None,
    ) -> None:
        """Bounds from numbers.

        Args:
            nodes: for each node type the most new nodes of hop 1, hop 2 and so on.
            edges, source_pairs: see the attributes.
        """
        super().__init__((name, tuple(int(size) for size in sizes)) for name, sizes in nodes.items())
        self.edges = None if edges is None else tuple(int(number) for number in edges)
        self.source_pairs = None if source_pairs is None else tuple(int(number) for number in source_pairs)

    def __repr__(self) -> str:
        return f"Capacities({super().__repr__()}, edges={self.edges}, source_pairs={self.source_pairs})"


_UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True)
class Piece:
    """The slots of a relation at a hop: `fan_out` for each node of the destination type that the hop before found.

    Attributes:
        hop: 0 for the edges of seeds.
        relation: number of the relation.
        fan_out: slots per receiver.
        source: number of the source type.
        target: number of the destination type.
        all_edges: whether all edges of a receiver are wanted.
    """

    hop: int
    relation: int
    fan_out: int
    source: int
    target: int
    all_edges: bool


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """Sizes of a sample.

    Attributes:
        node_types: the names of the node types.
        edge_types: the relations.
        sizes: for each hop and node type the number of local numbers; hop 0 has the seeds.
        pieces: the slots, by hop. Within a hop, pieces that are drawn together lie side by side.
        edges: the most edges of the block of each number of hops; None: as many as there are slots.
        source_pairs: about how many source pairs each of these blocks has; None: unknown.
    """

    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    sizes: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece, ...]
    edges: tuple[int, ...] | None = None
    source_pairs: tuple[int, ...] | None = None

    @property
    def num_hops(self) -> int:
        return len(self.sizes) - 1

    def first(self, hop: int, node_type: int) -> int:
        """The first number of a hop within a node type."""
        return sum(sizes[node_type] for sizes in self.sizes[:hop])

    def first_of_all(self, hop: int, node_type: int) -> int:
        """The first number of a hop and node type among all nodes."""
        return self.count(hop - 1) + sum(self.sizes[hop][:node_type])

    def count(self, hops: int) -> int:
        """The number of nodes up to a hop."""
        return sum(map(sum, self.sizes[: hops + 1]))

    def counts(self, hops: int) -> dict[str, int]:
        """The number of nodes of each type up to a hop."""
        return {name: self.first(hops + 1, number) for number, name in enumerate(self.node_types)}

    @property
    def node_type(self) -> np.ndarray:
        """int32[nodes], the type of each of all nodes."""
        runs = [(number, size) for sizes in self.sizes for number, size in enumerate(sizes)]
        return np.repeat(*(np.array(some, np.int32) for some in zip(*runs, strict=True)))

    @property
    def within_type(self) -> np.ndarray:
        """int32[nodes], the number within its type of each of all nodes."""
        parts = [
            np.arange(self.first(hop, number), self.first(hop, number) + size, dtype=np.int32)
            for hop, sizes in enumerate(self.sizes)
            for number, size in enumerate(sizes)
        ]
        return np.concatenate(parts)

    def of_hop(self, hop: int) -> list[Piece]:
        """The pieces of a hop, which lie side by side."""
        return [piece for piece in self.pieces if piece.hop == hop]

    def receivers(self, piece: Piece) -> int:
        """The number of receivers of a piece."""
        return self.sizes[piece.hop][piece.target]

    def by_piece(self, flat: Sequence[Array]) -> tuple[Array, ...]:
        """Values of slots, an array for each hop, as [receivers, fan_out] for each piece."""
        found = []
        for hop, values in enumerate(flat):
            at = 0
            for piece in self.of_hop(hop):
                size = self.receivers(piece) * piece.fan_out
                found.append(values[at : at + size].reshape(self.receivers(piece), piece.fan_out))
                at += size
        return tuple(found)


def make_layout(
    topology: HeteroTopology,
    num_seeds: Mapping[str, int],
    fan_outs: FanOuts,
    capacities: Mapping[str, Sequence[int]] | None,
    replace: bool,
    max_degree: int | None,
    copies: bool,
    together: Callable[[Sequence[Piece]], Sequence[Any]],
) -> SampleLayout:
    """The layout of a sample; arguments are those of `sample_blocks`.

    Args:
        topology, num_seeds, fan_outs, capacities, replace, max_degree: as there.
        copies: whether each seed has copies of its own of the nodes.
        together: sort keys of the pieces of a hop: those with equal keys are drawn together.
    """
    by_hop = _by_hop(topology, fan_outs)
    limits = _limits(topology, capacities, len(by_hop))
    names = topology.node_types
    number = {name: at for at, name in enumerate(names)}
    sizes = [tuple(num_seeds.get(name, 0) for name in names)]
    pieces: list[Piece] = []
    for hop, wanted in enumerate(by_hop):
        slots = [0] * len(names)
        own: list[Piece] = []
        for at, relation in enumerate(topology.relations):
            source, target = number[relation.edge_type[0]], number[relation.edge_type[2]]
            fan_out = _slots(wanted[at], relation.max_degree, replace, max_degree)
            if fan_out and sizes[hop][target]:
                own.append(Piece(hop, at, fan_out, source, target, wanted[at] < 0))
                slots[source] += sizes[hop][target] * fan_out
        keys = together(own)
        pieces += [own[n] for n in sorted(range(len(own)), key=lambda n: (keys[n], own[n].relation))]
        if not copies:
            slots = [min(count, topology.num_nodes[name]) for count, name in zip(slots, names, strict=True)]
        sizes.append(tuple(min(count, limit) for count, limit in zip(slots, limits[hop], strict=True)))
    edges, pairs = (_by_block(capacities, name, len(by_hop)) for name in ("edges", "source_pairs"))
    return SampleLayout(names, topology.edge_types, tuple(sizes), tuple(pieces), edges, pairs)


def _slots(fan_out: int, longest: int, replace: bool, max_degree: int | None) -> int:
    """Slots of a receiver: no more than its edges can fill."""
    if fan_out < 0:
        return longest if max_degree is None else min(longest, max_degree)
    if replace:
        return fan_out if longest else 0
    return min(fan_out, longest)


def _by_hop(topology: HeteroTopology, fan_outs: FanOuts) -> list[list[int]]:
    """The fan-out of each hop and relation; 0 for relations that are not named."""
    if isinstance(fan_outs, Mapping):
        lengths = {len(numbers) for numbers in fan_outs.values()}
        if len(lengths) != 1:
            raise ValueError(f"`fan_outs` must have as many hops for each relation, got {sorted(lengths)}")
        hops: Sequence[Any] = [
            {edge_type: numbers[hop] for edge_type, numbers in fan_outs.items()} for hop in range(lengths.pop())
        ]
    elif isinstance(fan_outs, Iterable):
        hops = list(fan_outs)
    else:
        raise TypeError(f"`fan_outs` must be a list with a fan-out for each hop, got {fan_outs!r}; give [{fan_outs!r}]")
    if not hops:
        raise ValueError("`fan_outs` must have at least one hop, got none")
    found = []
    for hop in hops:
        row = [0] * len(topology.relations)
        if isinstance(hop, Mapping):
            for edge_type, fan_out in hop.items():
                row[topology.number_of(edge_type)] = _checked_fan_out(fan_out)
        else:
            row = [_checked_fan_out(hop)] * len(topology.relations)
        found.append(row)
    return found


def _checked_fan_out(fan_out: Any) -> int:
    if isinstance(fan_out, bool) or not hasattr(fan_out, "__index__") or fan_out < -1:
        raise ValueError(f"`fan_outs` must have integers from 0 (none), or -1 (all edges), got {fan_out!r}")
    return int(fan_out)


def _by_block(capacities: Mapping[str, Sequence[int]] | None, name: str, hops: int) -> tuple[int, ...] | None:
    """The numbers by block of that name that `capacities` have, if any."""
    numbers = getattr(capacities, name, None)
    if numbers is None:
        return None
    if len(numbers) != hops or any(number < 1 for number in numbers):
        raise ValueError(f"`capacities.{name}` must have {hops} numbers from 1, one for each hop, got {numbers}")
    return tuple(numbers)


def _limits(topology: HeteroTopology, capacities: Mapping[str, Sequence[int]] | None, hops: int) -> list[list[int]]:
    """The most new nodes of each hop and type."""
    limits = [[_UNBOUNDED] * len(topology.node_types) for _ in range(hops)]
    for name, sizes in (capacities or {}).items():
        if name not in topology.node_types:
            raise ValueError(f"`capacities`: node type must be one of {list(topology.node_types)}, got {name!r}")
        if len(sizes) != hops or any(size < 0 for size in sizes):
            raise ValueError(f"`capacities[{name!r}]` must have {hops} sizes from 0, one for each hop, got {sizes}")
        for hop, size in enumerate(sizes):
            limits[hop][topology.node_types.index(name)] = int(size)
    return limits
