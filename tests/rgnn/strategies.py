"""Hypothesis strategies for relational graphs, and a plain reference for every table of `RelGraph`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments

CHUNK = 3
"""A chunk size so small that small graphs have long segments."""


@dataclass(frozen=True)
class EdgeList:
    """The arguments of a graph's constructor, in the user's order."""

    senders: np.ndarray
    receivers: np.ndarray
    edge_type: np.ndarray
    num_nodes: int
    num_edge_types: int
    node_type: np.ndarray | None = None
    num_node_types: int = 1
    edge_mask: np.ndarray | None = None
    node_mask: np.ndarray | None = None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of `RelGraph.from_edges` and `RelGraph.build_traced`."""
        positional = (self.senders, self.receivers, self.edge_type)
        names = ("num_nodes", "num_edge_types", "node_type", "num_node_types", "edge_mask", "node_mask")
        return positional, {name: getattr(self, name) for name in names}

    def build(self, **options: Any) -> RelGraph:
        positional, keywords = self.arguments()
        return RelGraph.from_edges(*positional, **keywords, **options)

    def added(self, add_reverse: bool, add_self_loops: bool) -> EdgeList:
        """The edges with reverses and self loops, one at a time."""
        edges = list(zip(self.senders.tolist(), self.receivers.tolist(), self.edge_type.tolist(), strict=True))
        mask = [True] * len(edges) if self.edge_mask is None else self.edge_mask.tolist()
        types = self.num_edge_types
        if add_reverse:
            edges += [(receiver, sender, kind + types) for sender, receiver, kind in edges]
            mask += mask
            types *= 2
        if add_self_loops:
            edges += [(node, node, types) for node in range(self.num_nodes)]
            mask += [True] * self.num_nodes if self.node_mask is None else self.node_mask.tolist()
            types += 1
        columns = np.array(edges, np.int32).reshape(-1, 3).T
        return replace(
            self,
            senders=columns[0],
            receivers=columns[1],
            edge_type=columns[2],
            num_edge_types=types,
            edge_mask=np.array(mask, bool),
        )

    def padded(self, num_edges: int, num_nodes: int, rng: np.random.Generator) -> EdgeList:
        """The same graph with padding edges of any content at random places, and padding nodes at the end."""
        places = np.sort(rng.permutation(num_edges)[: self.senders.shape[0]])
        edge_mask = np.zeros(num_edges, bool)
        edge_mask[places] = True if self.edge_mask is None else self.edge_mask
        columns = [rng.integers(0, num_nodes, num_edges, dtype=np.int32) for _ in range(2)]
        columns.append(rng.integers(0, max(self.num_edge_types, 1), num_edges, dtype=np.int32))
        for column, values in zip(columns, (self.senders, self.receivers, self.edge_type), strict=True):
            column[places] = values
        node_mask = np.arange(num_nodes) < self.num_nodes
        if self.node_mask is not None:
            node_mask[: self.num_nodes] = self.node_mask
        node_type = rng.integers(0, self.num_node_types, num_nodes, dtype=np.int32)
        node_type[: self.num_nodes] = 0 if self.node_type is None else self.node_type
        return replace(
            self,
            senders=columns[0],
            receivers=columns[1],
            edge_type=columns[2],
            num_nodes=num_nodes,
            edge_mask=edge_mask,
            node_mask=node_mask,
            node_type=node_type,
        )


@st.composite
def edge_lists(
    draw: st.DrawFn,
    *,
    max_nodes: int = 7,
    max_edges: int = 24,
    max_edge_types: int = 4,
    max_node_types: int = 3,
    masks: bool = False,
) -> EdgeList:
    """Small graphs, often with empty types, isolated nodes, long segments, duplicates, self loops or no edges."""
    num_nodes = draw(st.integers(1, max_nodes))
    num_edges = draw(st.integers(0, max_edges))
    num_edge_types = draw(st.integers(1, max_edge_types))
    num_node_types = draw(st.integers(1, max_node_types))
    # Few ends and types give duplicates and long segments; many give isolated nodes and types with one edge.
    ends = st.integers(0, draw(st.integers(0, num_nodes - 1)))
    edge = st.tuples(st.integers(0, num_nodes - 1), ends, st.integers(0, num_edge_types - 1))
    edges = draw(st.lists(edge, min_size=num_edges, max_size=num_edges))
    columns = np.array(edges, np.int32).reshape(-1, 3).T
    if draw(st.booleans()):
        columns = columns[[1, 0, 2]]
    node_type = None
    if draw(st.booleans()):
        kinds = draw(st.lists(st.integers(0, num_node_types - 1), min_size=num_nodes, max_size=num_nodes))
        node_type = np.array(sorted(kinds) if draw(st.booleans()) else kinds, np.int32)
    result = EdgeList(*columns, num_nodes, num_edge_types, node_type, num_node_types)
    if not masks:
        return result
    node_mask = np.array(draw(st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes)), bool)
    edge_mask = np.array(draw(st.lists(st.booleans(), min_size=num_edges, max_size=num_edges)), bool)
    edge_mask &= node_mask[result.senders] & node_mask[result.receivers]
    return replace(result, edge_mask=edge_mask, node_mask=node_mask)


def check_tables(graph: RelGraph, edges: EdgeList, *, exact: bool, chunk: int = CHUNK) -> None:
    """Compares every table of `graph` with a plain reference made from `edges` (added edges included).

    Args:
        graph: the graph under test, concrete.
        edges: its edges in the user's order.
        exact: whether tables have their exact sizes (numpy builder) or static bounds (traced builder).
        chunk: the long segment chunk.
    """
    total = edges.senders.shape[0]
    mask = np.ones(total, bool) if edges.edge_mask is None else edges.edge_mask
    ids = sorted(np.flatnonzero(mask), key=lambda e: (edges.edge_type[e], edges.receivers[e], edges.senders[e], e))
    valid = len(ids)
    ids = [int(e) for e in ids] + [int(e) for e in np.flatnonzero(~mask)]
    nodes, types = edges.num_nodes, edges.num_edge_types
    assert (graph.num_nodes, graph.num_edges, graph.num_edge_types) == (nodes, total, types)
    assert graph.num_node_types == edges.num_node_types

    def canonical(column: np.ndarray, fill: int) -> list[int]:
        return [int(column[e]) if k < valid else fill for k, e in enumerate(ids)]

    senders, receivers = canonical(edges.senders, nodes), canonical(edges.receivers, nodes)
    kinds = canonical(edges.edge_type, types)
    assert_equal(graph.edge_ids, ids)
    assert_equal(graph.edge_positions, np.argsort(ids))
    assert_equal(graph.senders, senders)
    assert_equal(graph.receivers, receivers)
    assert_equal(graph.edge_type, kinds)
    if graph.edge_mask is None:
        assert valid == total
    else:
        assert_equal(graph.edge_mask, [k < valid for k in range(total)])
    check_segments(graph.by_sender, senders, nodes, exact=exact, chunk=chunk)
    check_segments(graph.by_receiver, receivers, nodes, exact=exact, chunk=chunk)
    check_segments(graph.by_edge_type, kinds, types, exact=exact, chunk=chunk, typed=True, ordered=True)

    for ends, by_pair, by_node, by_type, count, ordered in (
        (
            senders,
            graph.by_source_pair,
            graph.source_pair_by_node,
            graph.source_pair_by_type,
            graph.num_source_pairs,
            False,
        ),
        (
            receivers,
            graph.by_destination_pair,
            graph.destination_pair_by_node,
            graph.destination_pair_by_type,
            graph.num_destination_pairs,
            True,
        ),
    ):
        pairs = sorted(set(zip(kinds[:valid], ends[:valid], strict=True)))
        assert count == (len(pairs) if exact else total)
        unused = count - len(pairs)
        index = [pairs.index(pair) for pair in zip(kinds[:valid], ends[:valid], strict=True)] + [count] * (
            total - valid
        )
        check_segments(by_pair, index, count, exact=exact, chunk=chunk, ordered=ordered)
        check_segments(by_node, [node for _, node in pairs] + [nodes] * unused, nodes, exact=exact, chunk=chunk)
        pair_kinds = [kind for kind, _ in pairs] + [types] * unused
        check_segments(by_type, pair_kinds, types, exact=exact, chunk=chunk, typed=True, ordered=True)

    node_mask = np.ones(nodes, bool) if edges.node_mask is None else edges.node_mask
    node_type = np.zeros(nodes, np.int32) if edges.node_type is None else edges.node_type
    node_type = np.where(node_mask, node_type, edges.num_node_types)
    assert_equal(graph.node_type, node_type)
    if graph.node_mask is None:
        assert node_mask.all()
    else:
        assert_equal(graph.node_mask, node_mask)
    ordered = bool((np.diff(node_type) >= 0).all()) if exact else graph.by_node_type.order is None
    check_segments(
        graph.by_node_type,
        node_type.tolist(),
        edges.num_node_types,
        exact=exact,
        chunk=chunk,
        typed=True,
        ordered=ordered,
    )

    of_type = [
        {int(node_type[s]) for s, k in zip(senders[:valid], kinds[:valid], strict=True) if k == t} for t in range(types)
    ]
    if all(len(found) <= 1 for found in of_type) and (exact or edges.num_node_types == 1):
        assert graph.edge_type_by_source is not None
        source_types = [next(iter(found), 0) for found in of_type]
        ordered = edges.num_node_types == 1
        check_segments(
            graph.edge_type_by_source, source_types, edges.num_node_types, exact=exact, chunk=chunk, ordered=ordered
        )
    else:
        assert graph.edge_type_by_source is None


def assert_equal(actual: Any, expected: Any) -> None:
    """Checks that values are equal and that the dtype is bool or int32."""
    actual = np.asarray(actual)
    assert actual.dtype in (np.bool_, np.int32)
    np.testing.assert_array_equal(actual, np.asarray(expected, actual.dtype))


def check_segments(
    segments: Segments,
    index: list[int],
    num_rows: int,
    *,
    exact: bool,
    chunk: int,
    typed: bool = False,
    ordered: bool = False,
) -> None:
    """Compares a grouping and its tables with the row of each entry (`num_rows` for padding)."""
    items = len(index)
    assert (segments.num_rows, segments.num_entries) == (num_rows, items)
    assert_equal(segments.index, index)
    order = sorted(range(items), key=lambda item: (index[item], item))
    if ordered:
        assert segments.order is None
        assert order == list(range(items))
    else:
        assert_equal(segments.order, order)
    counts = [index.count(row) for row in range(num_rows)]
    offsets = [sum(counts[:row]) for row in range(num_rows + 1)]
    assert_equal(segments.offsets, offsets)
    assert_equal(segments.counts(), counts)
    check_long_segments(segments, counts, offsets, exact=exact, chunk=chunk)
    assert [table.block for table in segments.tiles] == ([32, 64, 128] if typed else [])
    for block in (1, 2, 32, 64):
        check_tiles(segments, counts, offsets, block, exact=exact and block >= 32)


def check_long_segments(segments: Segments, counts: list[int], offsets: list[int], *, exact: bool, chunk: int) -> None:
    """Compares the table of long segments, chunk by chunk."""
    num_rows, items = segments.num_rows, segments.num_entries
    chunks: list[tuple[int, ...]] = []
    for row, count in enumerate(counts):
        starts = range(offsets[row], offsets[row + 1], chunk) if count > chunk else ()
        first = len(chunks)
        chunks += [(row, start, min(start + chunk, offsets[row + 1]), first, len(starts)) for start in starts]
    most = min(num_rows, items // (chunk + 1))
    size = len(chunks) if exact or not most else items // chunk + most
    if size == 0:
        assert segments.long_segments is None
        return
    table = segments.long_segments
    assert table is not None and table.chunk == chunk and len(chunks) <= size
    chunks += [(num_rows, offsets[-1], offsets[-1], 0, 0)] * (size - len(chunks))
    for array, column in zip(table.arrays, range(5), strict=True):
        assert_equal(array, [each[column] for each in chunks])


def check_tiles(segments: Segments, counts: list[int], offsets: list[int], block: int, *, exact: bool) -> None:
    """Compares a tile table, tile by tile, unused tiles included."""
    table = segments.tiles_for(block)
    assert table.block == block
    tiles = [(row, start) for row in range(len(counts)) for start in range(offsets[row], offsets[row + 1], block)]
    size = len(table.row_type)
    stored = any(entry.block == block for entry in segments.tiles)
    bound = segments.num_entries // block + len(counts)
    assert size == (len(tiles) if exact or not stored else bound)
    assert len(tiles) <= bound
    tiles += [(0, offsets[-1])] * (size - len(tiles))
    assert_equal(table.row_type, [row for row, _ in tiles])
    assert_equal(table.start, [start for _, start in tiles])


def check_tiles_covered(group: Any) -> None:
    """Checks that the tiles and the splits of a grouping by type cover each valid position once, each in one type."""
    offsets = np.asarray(group.offsets)
    for table in (*group.tiles, *group.near_tiles):
        start, kind = np.asarray(table.start), np.asarray(table.row_type)
        check_covered(start, np.minimum(start + table.block, offsets[kind + 1]), int(offsets[-1]))
    for splits in (some for some in (group.splits, group.near_splits) if some is not None and group.num_entries):
        start, end = np.asarray(splits.start), np.asarray(splits.end)
        check_covered(start, end, int(offsets[-1]))
        number = np.arange(start.shape[0]) if splits.number is None else np.asarray(splits.number)
        np.testing.assert_array_equal(np.sort(number), np.arange(start.shape[0]))
        of_type = np.searchsorted(np.asarray(splits.first), number, side="right") - 1
        some = end > start
        assert (end - start <= splits.rows_per_split).all()
        assert (offsets[of_type[some]] <= start[some]).all() and (end[some] <= offsets[of_type[some] + 1]).all()


def check_covered(start: np.ndarray, end: np.ndarray, size: int) -> None:
    """Checks that ranges, of which some may be empty, hold each of the first `size` positions once, and no other."""
    begins, ends = np.sort(start[end > start]), np.sort(end[end > start])
    np.testing.assert_array_equal(np.append(begins, size), np.insert(ends, 0, 0))
