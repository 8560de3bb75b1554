"""The neighbours of nodes, in either direction, for partitioning: from edge lists in memory or a topology on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dejax.minibatch import HeteroTopology
from dejax.minibatch._checks import EdgeType, check_range, checked_counts, checked_relations, pieces
from dejax.rgnn import RelGraph

CHUNK = 1 << 22
"""Edges that are looked at together."""


class NeighbourLists(Protocol):
    """A graph as its partitioner sees it: nodes numbered type after type."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of nodes of each type."""

    def chunks(self) -> Iterator[tuple[EdgeType, np.ndarray, np.ndarray]]:
        """Relation, senders and receivers of some edges at a time; int64, numbered over all types."""

    def neighbours(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """For nodes first to last - 1, each neighbour: (node - first, neighbour), int64 each."""


def first_nodes(counts: Mapping[str, int]) -> dict[str, int]:
    """The number of the first node of each type."""
    ends = np.cumsum([0, *counts.values()])
    return dict(zip(counts, ends[:-1].tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class EdgesInMemory:
    """Edge lists by relation, with a symmetric CSR: 16 bytes an edge and 8 a node besides the lists."""

    counts: dict[str, int]
    lists: dict[EdgeType, tuple[np.ndarray, np.ndarray]]
    starts: np.ndarray
    others: np.ndarray

    @classmethod
    def of(cls, lists: Mapping[EdgeType, tuple[np.ndarray, np.ndarray]], counts: dict[str, int]) -> EdgesInMemory:
        first, total = first_nodes(counts), sum(counts.values())
        ends = [
            (np.asarray(senders, np.int64) + first[key[0]], np.asarray(receivers, np.int64) + first[key[2]])
            for key, (senders, receivers) in lists.items()
        ]
        none = np.zeros(0, np.int64)
        senders, receivers = (np.concatenate([none, *(pair[side] for pair in ends)]) for side in (0, 1))
        one, other = np.concatenate([senders, receivers]), np.concatenate([receivers, senders])
        order = np.argsort(one, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(one, minlength=total))])
        return cls(dict(counts), dict(lists), starts, other[order])

    def chunks(self) -> Iterator[tuple[EdgeType, np.ndarray, np.ndarray]]:
        first = first_nodes(self.counts)
        for key, (senders, receivers) in self.lists.items():
            for some in pieces(len(senders), CHUNK):
                yield (
                    key,
                    np.asarray(senders[some], np.int64) + first[key[0]],
                    np.asarray(receivers[some], np.int64) + first[key[2]],
                )

    def neighbours(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.diff(self.starts[first : last + 1])
        return np.repeat(np.arange(last - first), lengths), self.others[self.starts[first] : self.starts[last]]


@dataclass(frozen=True, slots=True, eq=False)
class EdgesOfTopology:
    """A `HeteroTopology`, whose lists may be mapped from disk: neighbours are the senders of incoming edges."""

    counts: dict[str, int]
    columns: dict[EdgeType, tuple[np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, topology: HeteroTopology) -> EdgesOfTopology:
        return cls(topology.num_nodes, {key: topology.csc(key)[:2] for key in topology.edge_types})

    def chunks(self) -> Iterator[tuple[EdgeType, np.ndarray, np.ndarray]]:
        first = first_nodes(self.counts)
        for key, (starts, senders) in self.columns.items():
            for some in pieces(len(senders), CHUNK):
                positions = np.arange(some.start, some.stop)
                receivers = np.searchsorted(starts, positions, side="right") - 1
                yield key, np.asarray(senders[some], np.int64) + first[key[0]], receivers + first[key[2]]

    def neighbours(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        rows, others = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        begins = first_nodes(self.counts)
        for (source, _, target), (starts, senders) in self.columns.items():
            low = max(first - begins[target], 0)
            high = min(last - begins[target], self.counts[target])
            if low >= high:
                continue
            lengths = np.diff(starts[low : high + 1])
            rows.append(np.repeat(np.arange(low, high) + begins[target] - first, lengths))
            others.append(np.asarray(senders[starts[low] : starts[high]], np.int64) + begins[source])
        return np.concatenate(rows), np.concatenate(others)


def edges_of(graph: Any, num_nodes: Mapping[str, int] | None) -> EdgesInMemory | EdgesOfTopology:
    """The checked edges of a graph that `partition` takes."""
    if isinstance(graph, HeteroTopology | RelGraph) and num_nodes is not None:
        raise TypeError(f"`num_nodes` must be None for a {type(graph).__name__}, which has its counts; leave it out")
    if isinstance(graph, HeteroTopology):
        return EdgesOfTopology.of(graph)
    if isinstance(graph, RelGraph):
        return _of_rel_graph(graph)
    if not isinstance(graph, Mapping):
        raise TypeError(
            "`graph` must be a RelGraph, a HeteroTopology or edge lists by (source type, name, destination type), got "
            f"{type(graph).__name__}"
        )
    if num_nodes is None:
        raise TypeError("`num_nodes` must be the number of nodes of each type where `graph` is edge lists, got None")
    counts = checked_counts(num_nodes)
    lists = checked_relations(graph, counts)
    for relation, (senders, receivers) in lists.items():
        check_range(f"senders of {relation}", senders, counts[relation[0]])
        check_range(f"receivers of {relation}", receivers, counts[relation[2]])
    return EdgesInMemory.of(lists, counts)


def _of_rel_graph(graph: RelGraph) -> EdgesInMemory:
    """The nodes of a RelGraph keep their numbers, so its node types must follow each other."""
    node_type = np.asarray(graph.node_type)
    names = graph.node_type_names or tuple(str(number) for number in range(graph.num_node_types))
    if (np.diff(node_type) < 0).any():  # types are mixed: one type for all, by number of node
        names, node_type = ("node",), np.zeros_like(node_type)
    counts = dict(zip(names, np.bincount(node_type, minlength=len(names)).tolist(), strict=True))
    first = np.array([*first_nodes(counts).values()])
    senders, receivers, edge_type = (np.asarray(column) for column in graph.to_edges())
    edge_names = graph.edge_type_names or tuple(str(number) for number in range(graph.num_edge_types))
    lists = {}
    key = (edge_type.astype(np.int64) * len(names) + node_type[senders]) * len(names) + node_type[receivers]
    for number in np.unique(key).tolist():
        here = key == number
        kind, source, target = number // len(names) ** 2, number // len(names) % len(names), number % len(names)
        relation = (names[source], edge_names[kind], names[target])
        lists[relation] = senders[here] - first[source], receivers[here] - first[target]
    return EdgesInMemory.of(lists, counts)
