"""What the builders of a graph get: the checked edges, and the counts, names and additions that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from dejax.rgnn.graphs import checks
from dejax.rgnn.graphs.tables import LONG_SEGMENT_CHUNK

SELF_LOOP = "self_loop"
"""The name of the edge type that `add_self_loops` adds."""


def reverse_name(name: str) -> str:
    """The name of the reverse of edge type `name`."""
    return f"rev_{name}"


class Edges(NamedTuple):
    """Edge lists, one entry for each edge; `mask` is None where all edges are valid."""

    senders: Any
    receivers: Any
    edge_type: Any
    mask: Any


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """What a graph is built with, apart from arrays.

    Attributes:
        num_nodes: number of nodes, padding included.
        num_edge_types: number of edge types before any is added.
        num_node_types: number of node types.
        add_reverse: whether each edge gets a reverse.
        add_self_loops: whether each node gets a self loop.
        edge_type_names: a name for each edge type, added types included, or None.
        node_type_names: a name for each node type, or None.
        node_type_counts: nodes of each type where nodes are numbered type after type, otherwise None.
        long_segment_chunk: segments with more entries than this are split in chunks of this many.
        typical_source_pairs: see `RelGraph`.
    """

    num_nodes: int
    num_edge_types: int
    num_node_types: int
    add_reverse: bool = False
    add_self_loops: bool = False
    edge_type_names: tuple[str, ...] | None = None
    node_type_names: tuple[str, ...] | None = None
    node_type_counts: tuple[int, ...] | None = None
    long_segment_chunk: int = LONG_SEGMENT_CHUNK
    typical_source_pairs: int | None = None

    @property
    def all_edge_types(self) -> int:
        """Number of edge types, added ones included."""
        return self.num_edge_types * (1 + self.add_reverse) + self.add_self_loops

    def check_edge_count(self, num_edges: int) -> None:
        """Raises ValueError where `num_edges` edges and those that are added are more than int32 can number."""
        checks.check_edge_count(num_edges * (1 + self.add_reverse) + self.num_nodes * self.add_self_loops)


def all_names(names: Sequence[str] | None, add_reverse: bool, add_self_loops: bool) -> tuple[str, ...] | None:
    """The names of all edge types: `names`, then those of added types."""
    if names is None:
        return None
    added = tuple(map(reverse_name, names)) if add_reverse else ()
    added += (SELF_LOOP,) if add_self_loops else ()
    taken = sorted(set(names) & set(added))
    if taken:
        raise ValueError(f"edge_type_names must not have the names of added edge types, got {', '.join(taken)}; rename")
    return (*names, *added)


def add_relations(xp: ModuleType, edges: Edges, node_mask: Any, spec: GraphSpec) -> Edges:
    """Appends the reverse of each edge, then a self loop for each node.

    A reverse is padding where its edge is, a self loop where its node is.

    Args:
        xp: numpy or jax.numpy.
        edges: the user's edges.
        node_mask: bool[nodes], False for padding nodes, or None.
        spec: says what is added.
    """
    parts = [edges]
    if spec.add_reverse:
        parts.append(Edges(edges.receivers, edges.senders, edges.edge_type + spec.num_edge_types, edges.mask))
    if spec.add_self_loops:
        nodes = xp.arange(spec.num_nodes, dtype=np.int32)
        loop_type = xp.full(spec.num_nodes, spec.all_edge_types - 1, np.int32)
        parts.append(Edges(nodes, nodes, loop_type, node_mask))
    if len(parts) == 1:
        return edges
    senders, receivers, edge_type = (xp.concatenate([part[field] for part in parts]) for field in range(3))
    mask = None
    if any(part.mask is not None for part in parts):
        mask = xp.concatenate([xp.ones(p.senders.shape[0], bool) if p.mask is None else p.mask for p in parts])
    return Edges(senders, receivers, edge_type, mask)


def count_types(types: np.ndarray | None, names: Sequence[str] | None, mask: np.ndarray | None) -> int:
    """The number of types: as many as there are names, or else the largest valid type plus one."""
    if names is not None:
        return len(names)
    if types is None:
        return 1
    return int(np.max(types, initial=0, where=True if mask is None else mask)) + 1


def checked_edges(checked: Callable[[Any, str], Any], senders: Any, receivers: Any, edge_type: Any) -> Edges:
    """Edges of one length, each column checked and converted; without a mask."""
    given = {"senders": senders, "receivers": receivers, "edge_type": edge_type}
    ids = {name: checked(value, name) for name, value in given.items() if value is not None}
    checks.check_lengths(ids)
    if edge_type is None:
        ids["edge_type"] = np.zeros_like(ids["senders"])
    return Edges(ids["senders"], ids["receivers"], ids["edge_type"], None)


def edge_names(
    names: Sequence[str] | None, count: int, add_reverse: bool, add_self_loops: bool
) -> tuple[str, ...] | None:
    """The checked names of all edge types."""
    checked = checks.check_names(names, "edge_type_names", count, "num_edge_types")
    return all_names(checked, add_reverse, add_self_loops)


def node_names(names: Sequence[str] | None, count: int) -> tuple[str, ...] | None:
    """The checked names of all node types."""
    return checks.check_names(names, "node_type_names", count, "num_node_types")


def check_ids(edges: Edges, node_type: np.ndarray | None, node_mask: np.ndarray | None, spec: GraphSpec) -> None:
    """Raises IndexError for valid ids out of range, ValueError for a valid edge at a padding node."""
    for name in ("senders", "receivers"):
        ids = getattr(edges, name)
        checks.check_range(ids, name, spec.num_nodes, "num_nodes", edges.mask)
        if node_mask is not None:
            checks.check_edges_avoid_padding(ids, name, node_mask, edges.mask)
    checks.check_range(edges.edge_type, "edge_type", spec.num_edge_types, "num_edge_types", edges.mask)
    if node_type is not None:
        checks.check_range(node_type, "node_type", spec.num_node_types, "num_node_types", node_mask)
