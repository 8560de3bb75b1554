"""Edge lists by (source type, relation, destination type), joined into the edges of one graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dejax.rgnn.graphs import checks
from dejax.rgnn.graphs.spec import SELF_LOOP, Edges, GraphSpec, reverse_name

Relation = tuple[str, str, str]
"""Source type, relation, destination type."""


def join_relations(
    relations: Mapping[Relation, tuple[Any, Any]],
    num_nodes: Mapping[str, int],
    *,
    add_reverse: bool,
    add_self_loops: bool,
    validate: bool,
    long_segment_chunk: int,
) -> tuple[Edges, np.ndarray, GraphSpec]:
    """The arguments of `build` for edge lists by relation; see `RelGraph.from_relations`."""
    counts = {name: checks.check_count(count, f"num_nodes[{name!r}]") for name, count in num_nodes.items()}
    for name in counts:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f'node types must be named by non-empty strings without "/", got {name!r}')
    total_nodes = checks.check_count(sum(counts.values()), "the sum of num_nodes")
    sizes = np.fromiter(counts.values(), np.int64, len(counts))
    first_node = dict(zip(counts, (np.cumsum(sizes) - sizes).tolist(), strict=True))
    columns: dict[str, list[np.ndarray]] = {"senders": [], "receivers": []}
    for key, edges in relations.items():
        ends = _relation_ends(key, edges, counts)
        for (column, ids), node_type in zip(ends.items(), (key[0], key[2]), strict=True):
            if validate:
                checks.check_range(ids, f"{column} of {key}", counts[node_type], f"num_nodes[{node_type!r}]")
            columns[column].append(ids.astype(np.int32) + np.int32(first_node[node_type]))
    names = _edge_type_names(relations, add_reverse, add_self_loops)
    spec = GraphSpec(
        num_nodes=total_nodes,
        num_edge_types=len(relations),
        num_node_types=len(counts),
        add_reverse=add_reverse,
        add_self_loops=add_self_loops,
        edge_type_names=checks.check_names(names, "relations, with what is added,", len(names), "relations"),
        node_type_names=tuple(counts),
        node_type_counts=tuple(counts.values()),
        long_segment_chunk=long_segment_chunk,
    )
    nothing = [np.zeros(0, np.int32)]
    senders, receivers = (np.concatenate(columns[column] or nothing) for column in ("senders", "receivers"))
    spec.check_edge_count(senders.shape[0])
    edge_type = np.repeat(np.arange(len(relations), dtype=np.int32), [ids.shape[0] for ids in columns["senders"]])
    return Edges(senders, receivers, edge_type, None), np.repeat(np.arange(len(counts), dtype=np.int32), sizes), spec


SIDES = ("source", "destination")
"""The node types of a bipartite graph."""


def join_bipartite(
    edges: Edges,
    num_sources: int,
    num_destinations: int,
    num_edge_types: int,
    *,
    validate: bool,
    long_segment_chunk: int,
) -> tuple[Edges, np.ndarray, GraphSpec]:
    """The arguments of `build` for edges between two sets of nodes; see `RelGraph.from_bipartite`."""
    sources = checks.check_count(num_sources, "num_sources")
    destinations = checks.check_count(num_destinations, "num_destinations")
    spec = GraphSpec(
        num_nodes=checks.check_count(sources + destinations, "num_sources + num_destinations"),
        num_edge_types=checks.check_count(num_edge_types, "num_edge_types"),
        num_node_types=2,
        add_reverse=False,
        add_self_loops=False,
        node_type_names=SIDES,
        node_type_counts=(sources, destinations),
        long_segment_chunk=long_segment_chunk,
    )
    spec.check_edge_count(edges.senders.shape[0])
    if validate:
        checks.check_range(edges.senders, "senders", sources, "num_sources")
        checks.check_range(edges.receivers, "receivers", destinations, "num_destinations")
        checks.check_range(edges.edge_type, "edge_type", num_edge_types, "num_edge_types")
    senders, receivers, edge_type = (column.astype(np.int32, copy=False) for column in edges[:3])
    node_type = np.repeat(np.arange(2, dtype=np.int32), [sources, destinations])
    return Edges(senders, receivers + np.int32(sources), edge_type, None), node_type, spec


def _edge_type_names(relations: Mapping[Relation, Any], add_reverse: bool, add_self_loops: bool) -> tuple[str, ...]:
    names = tuple("/".join(key) for key in relations)
    if add_reverse:
        names += tuple(f"{target}/{reverse_name(relation)}/{source}" for source, relation, target in relations)
    return (*names, SELF_LOOP) if add_self_loops else names


def _relation_ends(key: Any, edges: Any, counts: dict[str, int]) -> dict[str, np.ndarray]:
    """The checked senders and receivers of one entry of `relations`."""
    if not (isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key)):
        raise TypeError(f"keys of relations must be (source type, relation, destination type) strings, got {key!r}")
    for node_type in (key[0], key[2]):
        if node_type not in counts:
            raise ValueError(
                f"num_nodes must have the node types of all relations, got {list(counts)} without {node_type!r} of "
                f"{key}"
            )
    if not (isinstance(edges, tuple | list) and len(edges) == 2) and getattr(edges, "shape", ())[:1] != (2,):
        raise ValueError(f"relation {key} must have a pair (senders, receivers), got {type(edges).__name__}")
    senders, receivers = edges
    ends = {"senders": senders, "receivers": receivers}
    checked = {name: checks.as_ids(ids, f"{name} of {key}") for name, ids in ends.items()}
    checks.check_lengths({f"{name} of {key}": ids for name, ids in checked.items()})
    return checked
