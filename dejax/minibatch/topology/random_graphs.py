"""`random_topology`: a random graph of given counts, drawn in place, to measure speed on graphs of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dejax.datasets.files._work import for_blocks
from dejax.datasets.graphs.igb_shape import random_csc
from dejax.minibatch._checks import EdgeType, checked_counts, checked_edge_type
from dejax.minibatch.topology._building import SHARED_LIMIT, ListArrays, aligned, described
from dejax.minibatch.topology.hetero_topology import HeteroTopology

__all__ = ["random_topology"]
_BLOCK = 1 << 20


def random_topology(
    num_nodes: Mapping[str, int],
    num_edges: Mapping[EdgeType, int],
    *,
    seed: int = 0,
    on_host: bool = True,
    progress: bool | None = None,
) -> HeteroTopology:
    """Makes a random graph with skewed degrees, for speed measurements on graphs of any size.

    The edges are those of `dejax.datasets.random_csc`, drawn on all CPU cores without sorting. Relations are
    independent: a relation and its reverse have different edges.

    Args:
        num_nodes: number of nodes of each type.
        num_edges: number of edges of each relation.
        seed: random seed.
        on_host: whether the edges lie in host memory; otherwise on the device.
        progress: whether to draw progress bars; None draws them if stderr is a terminal.

    Raises:
        ValueError: a node type is unknown, a count is negative, a relation with edges has an end without nodes, or a
            relation has 2**31 edges or more without jax's 64-bit mode.

    >>> topology = random_topology({"a": 5, "b": 3}, {("a", "to", "b"): 7}, on_host=False)
    >>> topology.num_edges
    {('a', 'to', 'b'): 7}
    """
    counts = checked_counts(num_nodes)
    shared: list[list[EdgeType]] = []
    places = []
    for edge_type, edges in num_edges.items():
        checked_edge_type(edge_type, counts)
        if edges < 0:
            raise ValueError(f"random_topology: `num_edges[{edge_type}]` must be at least 0, got {edges}")
        number = next((n for n, some in enumerate(shared) if _fit((*some, edge_type), num_edges, counts)), len(shared))
        if number == len(shared):
            shared.append([])
        places.append((edge_type, number, len(shared[number])))
        shared[number].append(edge_type)
    numbers = {edge_type: number for number, edge_type in enumerate(num_edges)}
    parts = [
        _part({each: (num_edges[each], seed * 1024 + numbers[each]) for each in some}, counts, progress)
        for some in shared
    ]
    relations = list(described(places, parts))
    return HeteroTopology._drawn(parts, relations, counts, on_host)


def _fit(together: Sequence[EdgeType], num_edges: Mapping[EdgeType, int], counts: Mapping[str, int]) -> bool:
    """Whether relations can share lists."""
    groups = sum(counts[target] + 1 for _, _, target in together)
    return max(sum(num_edges[each] for each in together), groups) < SHARED_LIMIT


def _part(wanted: Mapping[EdgeType, tuple[int, int]], counts: Mapping[str, int], progress: bool | None) -> ListArrays:
    """The lists of some relations: for each its edges and its seed."""
    total = sum(edges for edges, _ in wanted.values())
    groups = sum(counts[target] + 1 for _, _, target in wanted)
    part = ListArrays(aligned((groups,), np.int32 if total < 2**31 else np.int64), aligned((total,), np.int32))
    group = begin = 0
    for (source, _, target), (edges, seed) in wanted.items():
        offsets, _ = random_csc(
            counts[source], counts[target], edges, seed, out=part.senders[begin : begin + edges], progress=progress
        )
        longest = _written(part.starts[group : group + len(offsets)], offsets, begin)
        part.places.append((group, begin, edges, longest))
        group, begin = group + len(offsets), begin + edges
    return part


def _written(starts: np.ndarray, offsets: np.ndarray, begin: int) -> int:
    """Writes offsets, from `begin` on, on all cores; the largest difference of two."""
    longest = np.zeros(-(-len(offsets) // _BLOCK), np.int64)

    def write(number: int, start: int, stop: int) -> None:
        starts[start:stop] = offsets[start:stop] + begin
        longest[number] = np.diff(offsets[start : stop + 1]).max(initial=0)

    for_blocks(write, len(offsets), _BLOCK, progress=False)
    return int(longest.max(initial=0))
