"""A graph split by the owners of its nodes: the arrays of each part, and what all parts have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dejax.distributed.full_graph._rounds import Round, num_slots, plan_rounds, slots_of_pair


@dataclass(frozen=True, slots=True)
class PartsLayout:
    """What all parts of a graph have in common; static.

    Attributes:
        parts: number of parts.
        num_nodes: nodes of the whole graph.
        num_edges: edges of the whole graph.
        rows: rows of nodes in each part, padding included.
        edges: edges in each part, padding included.
        halo: halo slots in each part.
        rounds: the rounds of the exchange.
        halo_rows: rows that all parts together read of other parts, without padding.
        num_edge_types, num_node_types, edge_type_names, node_type_names: as in `RelGraph`.
        typed_sources: the node type of the sources of each edge type; None where one has sources of several types.
    """

    parts: int
    num_nodes: int
    num_edges: int
    rows: int
    edges: int
    halo: int
    rounds: tuple[Round, ...]
    halo_rows: int
    num_edge_types: int
    num_node_types: int
    edge_type_names: tuple[str, ...] | None = None
    node_type_names: tuple[str, ...] | None = None
    typed_sources: tuple[int, ...] | None = None

    @property
    def rows_sent(self) -> int:
        """Rows that cross links in one exchange, padding included."""
        return sum(some.rows_sent for some in self.rounds)


@dataclass(frozen=True, slots=True, eq=False)
class GraphPart:
    """The arrays of one part, without padding.

    Attributes:
        node_ids: int64[own nodes], the nodes' numbers in the whole graph, ascending.
        node_type: int32[own nodes].
        halo_type: int32[halo slots]; `num_node_types` in unused slots.
        senders: int32[edges], rows of the part: its own nodes, or `PartsLayout.rows` plus a halo slot.
        receivers: int32[edges], own nodes.
        edge_type: int32[edges].
        edge_ids: int64[edges], the edges' numbers in the whole graph, ascending.
        send: int32[halo slots], the own node that leaves in each slot; `PartsLayout.rows` plus the slot where none
            does.
    """

    node_ids: np.ndarray
    node_type: np.ndarray
    halo_type: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    edge_type: np.ndarray
    edge_ids: np.ndarray
    send: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class WholeGraph:
    """A graph before it is split.

    Attributes:
        senders, receivers, edge_type: int[edges].
        node_type: int[nodes].
        num_edge_types, num_node_types, edge_type_names, node_type_names: as in `RelGraph`.
    """

    senders: np.ndarray
    receivers: np.ndarray
    edge_type: np.ndarray
    node_type: np.ndarray
    num_edge_types: int
    num_node_types: int
    edge_type_names: tuple[str, ...] | None = None
    node_type_names: tuple[str, ...] | None = None


def split(graph: WholeGraph, owner: np.ndarray, parts: int) -> tuple[PartsLayout, list[GraphPart]]:
    """Splits a graph: each part has its own nodes, their incoming edges, and slots for the other ends of these.

    Args:
        graph: the graph.
        owner: int[nodes], the part that owns each node.
        parts: number of parts.
    """
    counts = np.bincount(owner, minlength=parts)
    by_owner = np.argsort(owner, kind="stable")
    nodes = np.split(by_owner, np.cumsum(counts)[:-1])
    row_of = np.empty(owner.shape[0], np.int64)
    for some in nodes:
        row_of[some] = np.arange(some.shape[0])
    edge_owner = owner[graph.receivers]
    edge_counts = np.bincount(edge_owner, minlength=parts)
    edges = np.split(np.argsort(edge_owner, kind="stable"), np.cumsum(edge_counts)[:-1])
    halos = [_halo(graph, owner, part, ids) for part, ids in enumerate(edges)]
    needed = np.zeros((parts, parts), np.int64)
    for part, halo in enumerate(halos):
        needed[:, part] = np.bincount(owner[halo], minlength=parts)
    rounds = plan_rounds(needed)
    layout = PartsLayout(
        parts=parts,
        num_nodes=owner.shape[0],
        num_edges=graph.senders.shape[0],
        rows=int(counts.max(initial=0)),
        edges=int(edge_counts.max(initial=0)),
        halo=num_slots(rounds),
        rounds=rounds,
        halo_rows=int(needed.sum()),
        num_edge_types=graph.num_edge_types,
        num_node_types=graph.num_node_types,
        edge_type_names=graph.edge_type_names,
        node_type_names=graph.node_type_names,
        typed_sources=_typed_sources(graph),
    )
    slots = _HaloSlots(layout, owner, row_of, halos)
    return layout, [slots.part(graph, number, nodes[number], edges[number]) for number in range(parts)]


def _halo(graph: WholeGraph, owner: np.ndarray, part: int, edges: np.ndarray) -> np.ndarray:
    """The nodes of other parts that a part reads, by owner and number."""
    read = np.unique(graph.senders[edges])
    read = read[owner[read] != part]
    return read[np.argsort(owner[read], kind="stable")]


def _typed_sources(graph: WholeGraph) -> tuple[int, ...] | None:
    if graph.num_node_types <= 1:
        return (0,) * graph.num_edge_types
    key = graph.edge_type.astype(np.int64) * graph.num_node_types + graph.node_type[graph.senders]
    types, sources = np.divmod(np.unique(key), graph.num_node_types)
    if np.unique(types).shape[0] < types.shape[0]:
        return None
    found = np.zeros(graph.num_edge_types, np.int64)
    found[types] = sources
    return tuple(found.tolist())


class _HaloSlots:
    """Which halo slot has which node."""

    def __init__(self, layout: PartsLayout, owner: np.ndarray, row_of: np.ndarray, halos: list[np.ndarray]) -> None:
        self.layout, self.owner, self.row_of, self.halos = layout, owner, row_of, halos

    def of(self, part: int) -> np.ndarray:
        """The slot of each node of the halo of a part."""
        owners = self.owner[self.halos[part]]
        found = np.empty(owners.shape[0], np.int64)
        for other in np.unique(owners):
            here = owners == other
            found[here] = slots_of_pair(self.layout.rounds, int(other), part)[: int(here.sum())]
        return found

    def part(self, graph: WholeGraph, part: int, nodes: np.ndarray, edges: np.ndarray) -> GraphPart:
        """The arrays of one part, with its nodes numbered by their rows there: first own nodes, then halo slots.

        Args:
            graph: the whole graph.
            part: the number of the part.
            nodes: the part's own nodes.
            edges: the edges into these nodes.
        """
        layout = self.layout
        halo, slots = self.halos[part], self.of(part)
        by_number = np.argsort(halo, kind="stable")
        senders = graph.senders[edges]
        own = self.owner[senders] == part
        local = np.where(own, self.row_of[senders], 0)
        at = np.searchsorted(halo[by_number], senders[~own])
        local[~own] = layout.rows + slots[by_number[at]]
        halo_type = np.full(layout.halo, graph.num_node_types, np.int32)
        halo_type[slots] = graph.node_type[halo]
        send = layout.rows + np.arange(layout.halo, dtype=np.int32)  # an unused slot sends its own row
        for other in range(layout.parts):
            theirs = self.halos[other]
            mine = theirs[self.owner[theirs] == part]
            if other != part and mine.size:
                places = slots_of_pair(layout.rounds, part, other)[: mine.shape[0]]
                send[places] = self.row_of[mine]
        return GraphPart(
            node_ids=nodes.astype(np.int64),
            node_type=graph.node_type[nodes].astype(np.int32),
            halo_type=halo_type,
            senders=local.astype(np.int32),
            receivers=self.row_of[graph.receivers[edges]].astype(np.int32),
            edge_type=graph.edge_type[edges].astype(np.int32),
            edge_ids=edges.astype(np.int64),
            send=send,
        )


def part_fields() -> tuple[str, ...]:
    """The names of the arrays of a `GraphPart`."""
    return tuple(GraphPart.__dataclass_fields__)


def padded(values: Any, size: int, fill: int, dtype: Any = np.int32) -> np.ndarray:
    """`values` followed by `fill`, up to `size` elements."""
    out = np.full(size, fill, dtype)
    out[: values.shape[0]] = values
    return out
