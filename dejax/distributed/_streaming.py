"""Partitioning by streams: nodes go to parts a block at a time, several times over, within bounds for each type.

A node goes to the part with the best score: the neighbours that it has there, less a price that grows with the part's
size (Tsourakakis et al., Fennel, WSDM 2014). Later passes place each node again, when its neighbours have parts
(Nishimura and Ugander, Restreaming graph partitioning, KDD 2013). No part gets more nodes of a type than its bound.
"""

from __future__ import annotations

import numpy as np

from dejax.distributed._neighbours import NeighbourLists, first_nodes

BLOCK = 1 << 15
"""Nodes that are placed together."""
_UNPLACED = -1


class Parts:
    """Nodes by part while they are placed.

    Attributes:
        part: int32[nodes], the part of each node, or -1.
        sizes: int64[types, parts], placed nodes.
        bounds: int64[types], the most nodes of each type in a part.
    """

    def __init__(self, edges: NeighbourLists, parts: int, imbalance: float) -> None:
        self.edges, self.parts = edges, parts
        counts = np.array([*edges.counts.values()], np.int64)
        self.first = np.array([*first_nodes(edges.counts).values(), counts.sum()], np.int64)
        self.part = np.full(int(counts.sum()), _UNPLACED, np.int32)
        self.sizes = np.zeros((len(counts), parts), np.int64)
        # At least one more than the mean leaves room to move nodes between parts.
        self.bounds = np.maximum(-(-counts // parts), np.floor(counts / parts * imbalance).astype(np.int64))

    @property
    def num_nodes(self) -> int:
        return self.part.shape[0]

    def kind(self, nodes: np.ndarray) -> np.ndarray:
        """The type of each node."""
        return np.searchsorted(self.first, nodes, side="right") - 1

    def votes(self, first: int, last: int) -> np.ndarray:
        """float32[nodes, parts]: neighbours in each part."""
        rows, others = self.edges.neighbours(first, last)
        there = self.part[others]
        placed = there != _UNPLACED
        key = rows[placed] * self.parts + there[placed]
        found = np.bincount(key, minlength=(last - first) * self.parts)
        return found.reshape(last - first, self.parts).astype(np.float32)

    def place(self, nodes: np.ndarray, score: np.ndarray) -> None:
        """Puts each node into the part with its best score among parts with room. Nodes with the best scores go first.

        Args:
            nodes: ascending. Nodes that have a part leave it first.
            score: float[nodes, parts].
        """
        kinds = self.kind(nodes)
        before = self.part[nodes]
        had = before != _UNPLACED
        np.subtract.at(self.sizes, (kinds[had], before[had]), 1)
        rest = np.arange(nodes.shape[0])
        while rest.size:
            room = self.bounds[kinds[rest], None] - self.sizes[kinds[rest]]
            allowed = np.where(room > 0, score[rest], -np.inf)
            best = allowed.argmax(axis=1)
            value = allowed[np.arange(rest.shape[0]), best]
            # Each (type, part) takes the best scores, as many as it has room for.
            group = kinds[rest] * self.parts + best
            order = np.lexsort((-value, group))
            sorted_group = group[order]
            begins = np.concatenate([[True], sorted_group[1:] != sorted_group[:-1]])
            start = np.maximum.accumulate(np.where(begins, np.arange(order.shape[0]), 0))
            rank = np.arange(order.shape[0]) - start
            fits = rank < room[order, best[order]]
            taken = order[fits]
            self.part[nodes[rest[taken]]] = best[taken]
            np.add.at(self.sizes, (kinds[rest[taken]], best[taken]), 1)
            rest = np.sort(rest[order[~fits]])


def stream(edges: NeighbourLists, parts: int, imbalance: float, passes: int, seed: int) -> np.ndarray:
    """int32[nodes], the part of each node, by several passes over blocks of nodes.

    Args:
        edges: the graph.
        parts: number of parts.
        imbalance: nodes of a type in a part over the mean; at least 1.
        passes: how often each node is placed.
        seed: decides between equal scores.
    """
    state = Parts(edges, parts, imbalance)
    rng = np.random.default_rng(seed)
    block = max(1, min(BLOCK, state.num_nodes // (8 * parts)))
    degree = _mean_degree(edges, state.num_nodes)
    for number in range(passes):
        # A low price at first gives whole neighbourhoods to one part; a higher one later evens parts out.
        price = degree * min(1.0, (number + 1) / max(passes - 1, 1))
        starts = np.arange(0, state.num_nodes, block)
        for first in rng.permutation(starts) if number else starts:
            last = min(int(first) + block, state.num_nodes)
            _place_block(state, int(first), last, price, rng)
    return state.part


def refine(edges: NeighbourLists, part: np.ndarray, parts: int, imbalance: float, passes: int, seed: int) -> np.ndarray:
    """A partition brought within the bounds and then improved: fewer edges lead from part to part."""
    state = Parts(edges, parts, imbalance)
    rng = np.random.default_rng(seed)
    block = max(1, min(BLOCK, state.num_nodes // (8 * parts)))
    state.part = part.astype(np.int32)
    kinds = state.kind(np.arange(state.num_nodes))
    np.add.at(state.sizes, (kinds, state.part), 1)
    for _ in range(passes):
        for first in rng.permutation(np.arange(0, state.num_nodes, block)):
            last = min(int(first) + block, state.num_nodes)
            _place_block(state, int(first), last, 0.0, rng, stay=0.5)
    return state.part


def _place_block(
    state: Parts, first: int, last: int, price: float, rng: np.random.Generator, stay: float = 0.0
) -> None:
    nodes = np.arange(first, last)
    score = state.votes(first, last)
    kinds = state.kind(nodes)
    filled = state.sizes / np.maximum(state.bounds[:, None], 1)
    score -= (price * filled**1.5)[kinds].astype(np.float32)
    score += rng.random(score.shape, np.float32) * 1e-3
    here = state.part[nodes]
    placed = here != _UNPLACED
    score[placed, here[placed]] += stay
    state.place(nodes, score)


def _mean_degree(edges: NeighbourLists, num_nodes: int) -> float:
    """Neighbours of a node on average, from a sample of blocks."""
    seen = found = 0
    for first in np.linspace(0, max(num_nodes - 1, 0), 16).astype(int):
        last = min(int(first) + 256, num_nodes)
        found += edges.neighbours(int(first), last)[0].shape[0]
        seen += last - int(first)
    return found / max(seen, 1)
