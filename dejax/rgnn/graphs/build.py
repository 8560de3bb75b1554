"""The numpy builder of `RelGraph`: every table of a full graph, made once on the host.

No step loops over edges or types in Python, and none makes a nodes-by-types table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np

from dejax.rgnn.graphs.rel_graph import RelGraph, on_device
from dejax.rgnn.graphs.segments import Segments, make_segments
from dejax.rgnn.graphs.sorting import expand, offsets_of, offsets_of_sorted, runs_of, stable_argsort


def add_relations(
    xp: ModuleType,
    senders: Any,
    receivers: Any,
    edge_type: Any,
    edge_mask: Any,
    node_mask: Any,
    *,
    num_nodes: int,
    num_edge_types: int,
    add_reverse: bool,
    add_self_loops: bool,
) -> tuple[Any, Any, Any, Any, int]:
    """Appends the reverse edges, then one self loop a node; both keep the mask of what they come from.

    Returns:
        Senders, receivers, edge types, edge mask (or None) and number of edge types, with what was added.
    """
    parts = [(senders, receivers, edge_type)]
    masks = [edge_mask]
    total_types = num_edge_types
    if add_reverse:
        parts.append((receivers, senders, edge_type + num_edge_types))
        masks.append(edge_mask)
        total_types += num_edge_types
    if add_self_loops:
        nodes = xp.arange(num_nodes, dtype=np.int32)
        parts.append((nodes, nodes, xp.full(num_nodes, total_types, np.int32)))
        masks.append(node_mask)
        total_types += 1
    if len(parts) == 1:
        return senders, receivers, edge_type, edge_mask, total_types
    joined = [xp.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    mask = None
    if any(part is not None for part in masks):
        mask = xp.concatenate(
            [xp.ones(part[0].shape[0], bool) if m is None else m for part, m in zip(parts, masks, strict=True)]
        )
    return joined[0], joined[1], joined[2], mask, total_types


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    """`values` followed by `fill` up to `size` items, as int32."""
    if values.shape[0] == size:
        return values.astype(np.int32, copy=False)
    out = np.full(size, fill, np.int32)
    out[: values.shape[0]] = values
    return out


def _padded_order(order: np.ndarray, size: int) -> np.ndarray:
    """`order` of the valid items followed by the padding items, which all come after them."""
    if order.shape[0] == size:
        return order
    return np.concatenate([order, np.arange(order.shape[0], size, dtype=np.int32)])


@dataclass(frozen=True, slots=True)
class _EndTables:
    """The groupings that follow from one end (sender or receiver) of the edges."""

    edges_by_node: Segments
    edges_by_pair: Segments
    pairs_by_node: Segments
    pairs_by_type: Segments


def _end_tables(
    node: np.ndarray,
    edge_type: np.ndarray,
    order: np.ndarray | None,
    *,
    num_nodes: int,
    num_edge_types: int,
    chunk: int,
) -> _EndTables:
    """Groups canonical edges by node and by unique `(edge_type, node)` pair.

    Args:
        node: the end of each edge, `num_nodes` for padding edges, which come last.
        edge_type: the type of each valid edge, ascending.
        order: the valid edges sorted by type and node; None where they are.
        num_nodes: number of nodes.
        num_edge_types: number of edge types.
        chunk: the hub chunk.
    """
    size, valid = node.shape[0], edge_type.shape[0]
    sorted_node = node[:valid] if order is None else node[order]
    run, starts = runs_of(edge_type, sorted_node)  # that order leaves the types as they are
    index = run
    if order is not None:
        index = np.empty(valid, np.int32)
        index[order] = run
    num_pairs = starts.shape[0]
    offsets = np.append(starts, np.int32(valid)).astype(np.int32)
    pair_node, pair_type = sorted_node[starts], edge_type[starts]
    pair_order = stable_argsort([pair_node], [num_nodes])
    pair_offsets = offsets_of(pair_node, num_nodes)
    # Within a node the pairs ascend by type and so do canonical edges: joining the pairs' edges sorts the edges by node
    # without a second sort over all of them.
    edges_by_node, begins = expand(pair_order, offsets)
    if order is not None:
        edges_by_node = order[edges_by_node]
    make = partial(make_segments, hub_chunk=chunk)
    return _EndTables(
        edges_by_node=make(node, _padded_order(edges_by_node, size), begins[pair_offsets]),
        edges_by_pair=make(
            _padded(index, size, num_pairs), None if order is None else _padded_order(order, size), offsets
        ),
        pairs_by_node=make(pair_node, pair_order, pair_offsets),
        pairs_by_type=make(pair_type, None, offsets_of_sorted(pair_type, num_edge_types), typed=True),
    )


def build(
    senders: np.ndarray,
    receivers: np.ndarray,
    edge_type: np.ndarray,
    *,
    num_nodes: int,
    num_edge_types: int,
    node_type: np.ndarray | None,
    num_node_types: int,
    edge_mask: np.ndarray | None,
    node_mask: np.ndarray | None,
    add_reverse: bool,
    add_self_loops: bool,
    edge_type_names: tuple[str, ...] | None,
    node_type_names: tuple[str, ...] | None,
    node_type_counts: tuple[int, ...] | None,
    hub_chunk: int,
) -> RelGraph:
    """Builds the graph from checked int32 arrays; names are those of all edge types, added ones included."""
    senders, receivers, edge_type, edge_mask, num_edge_types = add_relations(
        np,
        senders,
        receivers,
        edge_type,
        edge_mask,
        node_mask,
        num_nodes=num_nodes,
        num_edge_types=num_edge_types,
        add_reverse=add_reverse,
        add_self_loops=add_self_loops,
    )
    num_edges = senders.shape[0]
    if edge_mask is not None and edge_mask.all():
        edge_mask = None
    if node_mask is not None and node_mask.all():
        node_mask = None

    # Canonical order of the valid edges; padding follows.
    if edge_mask is None:
        order = stable_argsort([edge_type, receivers, senders], [num_edge_types, num_nodes, num_nodes])
        edge_ids = order
    else:
        valid_ids = np.flatnonzero(edge_mask).astype(np.int32)
        keys = [edge_type[valid_ids], receivers[valid_ids], senders[valid_ids]]
        order = valid_ids[stable_argsort(keys, [num_edge_types, num_nodes, num_nodes])]
        edge_ids = np.concatenate([order, np.flatnonzero(~edge_mask).astype(np.int32)])
    valid = order.shape[0]
    edge_positions = np.empty(num_edges, np.int32)
    edge_positions[edge_ids] = np.arange(num_edges, dtype=np.int32)
    all_senders, all_receivers = senders[edge_ids], receivers[edge_ids]
    all_senders[valid:] = all_receivers[valid:] = num_nodes
    type_counts = np.bincount(edge_type if edge_mask is None else edge_type[order], minlength=num_edge_types)
    types = np.repeat(np.arange(num_edge_types, dtype=np.int32), type_counts)
    all_types = _padded(types, num_edges, num_edge_types)

    tables = partial(_end_tables, edge_type=types, num_nodes=num_nodes, num_edge_types=num_edge_types, chunk=hub_chunk)
    source_order = stable_argsort([types, all_senders[:valid]], [num_edge_types, num_nodes])
    source = tables(all_senders, order=source_order)
    destination = tables(all_receivers, order=None)

    if node_type is None:
        node_type = np.zeros(num_nodes, np.int32)
    # A copy: jax may alias a numpy array on the CPU, and this one is the caller's.
    node_type = node_type.astype(np.int32, copy=True)
    if node_mask is not None:
        node_type[~node_mask] = num_node_types
    nodes_sorted = bool((node_type[1:] >= node_type[:-1]).all())
    node_order = None if nodes_sorted else stable_argsort([node_type], [num_node_types + 1])

    arrays: dict[str, Any] = {  # numpy until the last line
        "senders": all_senders,
        "receivers": all_receivers,
        "edge_type": all_types,
        "edge_ids": edge_ids,
        "edge_positions": edge_positions,
        "node_type": node_type,
        "node_mask": None if node_mask is None else node_mask.copy(),
        "edge_mask": None if edge_mask is None else np.arange(num_edges) < valid,
    }
    graph = RelGraph(
        **arrays,
        by_sender=source.edges_by_node,
        by_receiver=destination.edges_by_node,
        by_source_pair=source.edges_by_pair,
        by_destination_pair=destination.edges_by_pair,
        by_edge_type=make_segments(
            all_types, None, offsets_of_sorted(types, num_edge_types), hub_chunk=hub_chunk, typed=True
        ),
        source_pair_by_node=source.pairs_by_node,
        destination_pair_by_node=destination.pairs_by_node,
        source_pair_by_type=source.pairs_by_type,
        destination_pair_by_type=destination.pairs_by_type,
        by_node_type=make_segments(
            node_type, node_order, offsets_of(node_type, num_node_types), hub_chunk=hub_chunk, typed=True
        ),
        edge_type_by_source=source_types(
            node_type, source.pairs_by_node, source.pairs_by_type, num_edge_types, num_node_types, hub_chunk
        ),
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_edge_types=num_edge_types,
        num_node_types=num_node_types,
        num_source_pairs=source.edges_by_pair.num_rows,
        num_destination_pairs=destination.edges_by_pair.num_rows,
        edge_type_names=edge_type_names,
        node_type_names=node_type_names,
        node_type_counts=node_type_counts,
    )
    return graph.with_loop_tables(hub_chunk) if jax.default_backend() == "gpu" else on_device(graph)


def source_types(
    node_type: np.ndarray,
    pairs_by_node: Segments,
    pairs_by_type: Segments,
    num_edge_types: int,
    num_node_types: int,
    hub_chunk: int,
) -> Segments | None:
    """Edge types by the node type of their sources; None where some edge type has sources of several."""
    found = np.zeros(num_edge_types, np.int32)  # type 0 for edge types without edges
    if num_node_types > 1:
        offsets = pairs_by_type.offsets
        some = np.flatnonzero(offsets[1:] > offsets[:-1])
        of_pair = node_type[pairs_by_node.index]
        if some.size:
            found[some] = np.minimum.reduceat(of_pair, offsets[some])
            if (np.maximum.reduceat(of_pair, offsets[some]) != found[some]).any():
                return None
    order = stable_argsort([found], [max(num_node_types, 1)])
    return make_segments(found, order, offsets_of(found, num_node_types), hub_chunk=hub_chunk)
