"""Graphs, rows and the model of the benchmarks of mini-batches: random, with the counts of ogbn-mag and AM."""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx

from dejax.host_gather import HostTable
from dejax.minibatch import HeteroTopology

MAG_NODES = {"paper": 736_389, "author": 1_134_649, "field": 59_965, "institution": 8_740}
MAG_EDGES = {
    ("author", "affiliated_with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has_topic", "field"): 7_505_078,
}
AM_NODES, AM_EDGES, AM_RELATIONS, AM_TYPES = 1_885_136, 5_668_682, 54, 7
BUS = 49e9  # bytes a second, pinned host memory to the device


def _ends(rng: np.random.Generator, count: int, edges: int, power: int) -> np.ndarray:
    return (count * rng.random(edges, np.float32) ** power).astype(np.int32).clip(max=count - 1)


def both_directions(edges: dict[Any, int], nodes: dict[str, int], scale: float) -> tuple[Any, dict[str, int]]:
    """Random edge lists with reverses; senders follow a power law."""
    rng = np.random.default_rng(0)
    counts = {name: max(2, int(count * scale)) for name, count in nodes.items()}
    found = {}
    for (source, name, target), size in edges.items():
        size = max(1, int(size * scale))
        ends = _ends(rng, counts[source], size, 3), _ends(rng, counts[target], size, 2)
        found[source, name, target] = ends
        found[target, f"rev_{name}", source] = ends[::-1]
    return found, counts


def am_counts() -> tuple[dict[Any, int], dict[str, int]]:
    """54 relations between seven node types; with reverses they are 108."""
    rng = np.random.default_rng(1)
    shares = rng.dirichlet(np.full(AM_TYPES, 2.0))
    nodes = {f"type{t}": max(1000, int(AM_NODES * share)) for t, share in enumerate(shares)}
    sizes = np.maximum(rng.dirichlet(np.full(AM_RELATIONS, 0.3)) * AM_EDGES, 10).astype(int)
    ends = rng.integers(0, AM_TYPES, (AM_RELATIONS, 2))
    return {(f"type{s}", f"r{n}", f"type{t}"): int(size) for n, ((s, t), size) in enumerate(zip(ends, sizes))}, nodes  # noqa: B905


def shared_fan_outs(topology: HeteroTopology, totals: list[int]) -> list[dict[Any, int]]:
    """Fan-outs that sum to about `totals` over the relations into each type."""
    into: dict[str, list[Any]] = {}
    for edge_type in topology.edge_types:
        into.setdefault(edge_type[2], []).append(edge_type)
    hops = []
    for total in totals:
        hop = {}
        for some in into.values():
            for n, edge_type in enumerate(some):
                hop[edge_type] = total * (n + 1) // len(some) - total * n // len(some)
        hops.append(hop)
    return hops


def _table(rows: int, width: int) -> HostTable:
    table = HostTable.empty((rows, width), np.float32)
    block = np.random.default_rng(5).standard_normal((65_536, width), np.float32)
    for begin in range(0, rows, len(block)):
        table.write(begin, block[: rows - begin])
    return table


class Model(nnx.Module):
    """Layers and a linear map. Rows have one width: no projection, as in the table that this is compared with."""

    def __init__(self, layers: list[Any], head: nnx.Linear) -> None:
        self.num_layers, self.head = len(layers), head
        for number, layer in enumerate(layers):
            setattr(self, f"layer_{number}", layer)

    def __call__(self, blocks: Any, x: Any) -> Any:
        h = blocks[0].join(x)
        for number, block in enumerate(blocks):
            h = nnx.relu(getattr(self, f"layer_{number}")(block.bipartite, h))
        return blocks[-1].split(self.head(h))
