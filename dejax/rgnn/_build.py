"""The numpy builder of `RelGraph`: every table of a full graph, made once on the host.

No step loops over edges or types in Python, and none makes a nodes-by-types table. Sorting is by single int64 keys that
carry the position in their low bits: `np.sort` of plain int64 is vectorised (0.25 s for 21 M keys, against 2.8 s for
`np.argsort(kind="stable")`), and the position makes it stable.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from dejax.rgnn._segments import Segments, make_segments
from dejax.rgnn.graph import RelGraph

# Items at once in element-wise steps: temporaries then stay in the cache, where whole arrays would be fresh pages.
_BLOCK = 1 << 17


def stable_argsort(keys: Sequence[np.ndarray], bounds: Sequence[int]) -> np.ndarray:
    """The stable order of items by `keys`, the most significant first.

    Args:
        keys: arrays of one length with non-negative integers.
        bounds: for each key a number that all its values are below, at most 2^31.

    Returns:
        int32[items]: item ids in sorted order.
    """
    size = keys[0].shape[0]
    position_bits = max(size - 1, 0).bit_length()
    mask = (1 << position_bits) - 1
    blocks = [slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)]
    packed = np.empty(size, np.int64)
    order: np.ndarray | None = None
    remaining = list(zip(keys, bounds, strict=True))
    while remaining:
        # Least significant digit first: as many keys at once as fit in 63 bits beside the position. One always does.
        digits = []
        shift = position_bits
        while remaining and shift + max(remaining[-1][1] - 1, 0).bit_length() <= 63:
            key, bound = remaining.pop()
            digits.append((key, shift))
            shift += max(bound - 1, 0).bit_length()
        for block in blocks:
            word = np.arange(block.start, block.stop, dtype=np.int64)
            for key, shift in digits:
                part = key[block] if order is None else key[order[block]]
                word |= part.astype(np.int64) << shift
            packed[block] = word
        packed.sort()
        step = np.empty(size, np.int32)
        for block in blocks:
            step[block] = packed[block] & mask
        order = step if order is None else order[step]
    assert order is not None
    return order


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


def offsets_of(index: np.ndarray, num_rows: int) -> np.ndarray:
    """int32[rows + 1]: where each row begins once the items are sorted by `index`; rows of `num_rows` are padding."""
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(index, minlength=num_rows)[:num_rows], out=offsets[1:])
    return offsets


def runs_of(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of equal `(first, second)`: the run of each item (int32), and where each run starts (int32[runs])."""
    if first.shape[0] == 0:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    new = np.empty(first.shape[0], bool)
    new[0] = True
    np.not_equal(first[1:], first[:-1], out=new[1:])
    new[1:] |= second[1:] != second[:-1]
    run = np.cumsum(new, dtype=np.int32)
    run -= 1
    return run, np.flatnonzero(new).astype(np.int32)


def expand(rows: np.ndarray, offsets: np.ndarray, total: int) -> np.ndarray:
    """The positions of all items of `rows`, row after row: the ranges `offsets[r]..offsets[r + 1]` joined."""
    counts = offsets[rows + 1] - offsets[rows]
    begins = np.cumsum(counts, dtype=np.int32) - counts
    positions = np.repeat(offsets[rows] - begins, counts)
    positions += np.arange(total, dtype=np.int32)
    return positions


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


def _pairs(
    node: np.ndarray, edge_type: np.ndarray, order: np.ndarray | None, *, num_nodes: int, num_edge_types: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Unique `(edge_type, node)` pairs of edges that `order` (None: as they are) sorts by type and node.

    Returns:
        The pair of each edge, the offsets of each pair's edges, each pair's node and type, the pairs sorted by node,
        and the edges sorted by node.
    """
    size = node.shape[0]
    sorted_node, sorted_type = (node, edge_type) if order is None else (node[order], edge_type[order])
    run, starts = runs_of(sorted_type, sorted_node)
    index = run
    if order is not None:
        index = np.empty(size, np.int32)
        index[order] = run
    offsets = np.append(starts, np.int32(size)).astype(np.int32)
    pair_node, pair_type = sorted_node[starts], sorted_type[starts]
    by_node = stable_argsort([pair_node], [num_nodes])
    # Within a node the pairs ascend by type and so do canonical edges: joining the pairs' edges sorts edges by node
    # without a second sort over all of them.
    edges_by_node = expand(by_node, offsets, size)
    if order is not None:
        edges_by_node = order[edges_by_node]
    return index, offsets, pair_node, pair_type, by_node, edges_by_node


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
    s, r = senders[order], receivers[order]
    t = np.repeat(np.arange(num_edge_types, dtype=np.int32), np.bincount(edge_type[order], minlength=num_edge_types))

    source_order = stable_argsort([t, s], [num_edge_types, num_nodes])
    source = _pairs(s, t, source_order, num_nodes=num_nodes, num_edge_types=num_edge_types)
    destination = _pairs(r, t, None, num_nodes=num_nodes, num_edge_types=num_edge_types)
    all_senders = _padded(s, num_edges, num_nodes)
    all_receivers = _padded(r, num_edges, num_nodes)
    all_types = _padded(t, num_edges, num_edge_types)

    def by_pair(pairs: tuple[np.ndarray, ...], edge_order: np.ndarray | None) -> Segments:
        index, offsets = _padded(pairs[0], num_edges, pairs[1].shape[0] - 1), pairs[1]
        padded_order = None if edge_order is None else _padded_order(edge_order, num_edges)
        return make_segments(index, padded_order, offsets, hub_chunk=hub_chunk)

    def edges_by_node(index: np.ndarray, pairs: tuple[np.ndarray, ...]) -> Segments:
        offsets = offsets_of(index[:valid], num_nodes)
        return make_segments(index, _padded_order(pairs[5], num_edges), offsets, hub_chunk=hub_chunk)

    def pairs_by_node(pairs: tuple[np.ndarray, ...]) -> Segments:
        return make_segments(pairs[2], pairs[4], offsets_of(pairs[2], num_nodes), hub_chunk=hub_chunk)

    def pairs_by_type(pairs: tuple[np.ndarray, ...]) -> Segments:
        return make_segments(pairs[3], None, offsets_of(pairs[3], num_edge_types), hub_chunk=hub_chunk, typed=True)

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
        by_sender=edges_by_node(all_senders, source),
        by_receiver=edges_by_node(all_receivers, destination),
        by_source_pair=by_pair(source, source_order),
        by_destination_pair=by_pair(destination, None),
        by_edge_type=make_segments(all_types, None, offsets_of(t, num_edge_types), hub_chunk=hub_chunk, typed=True),
        source_pair_by_node=pairs_by_node(source),
        destination_pair_by_node=pairs_by_node(destination),
        source_pair_by_type=pairs_by_type(source),
        destination_pair_by_type=pairs_by_type(destination),
        by_node_type=make_segments(
            node_type, node_order, offsets_of(node_type, num_node_types), hub_chunk=hub_chunk, typed=True
        ),
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_edge_types=num_edge_types,
        num_node_types=num_node_types,
        num_source_pairs=source[1].shape[0] - 1,
        num_destination_pairs=destination[1].shape[0] - 1,
        edge_type_names=edge_type_names,
        node_type_names=node_type_names,
        node_type_counts=node_type_counts,
    )
    return _to_device(graph)


def _to_device(graph: RelGraph) -> RelGraph:
    """The graph with jax arrays for its numpy ones, all moved at once; one that stands in two tables is moved once."""
    unique = {id(leaf): leaf for leaf in jax.tree.leaves(graph)}
    moved = dict(zip(unique, jax.device_put(list(unique.values())), strict=True))
    return jax.tree.map(lambda leaf: moved[id(leaf)], graph)
